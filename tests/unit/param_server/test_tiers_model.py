"""Whatever the order in which reads, writes, failures, crashes and replays happen: a row is never an older one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.contract import Op
from param_server.holding import TierRules
from tests.tables import NUMPY_MAY_OVERFLOW
from tests.unit.param_server.table.test_gpu import neighbours
from tests.unit.param_server.tier_world import KEYS, RULES, Past, World, a_step

ROWS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(0, 9), st.integers(1, 8).map(float)), min_size=1, max_size=4
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), st.sampled_from(list(Op)), ROWS, st.booleans()),
        st.tuples(st.just("lookup"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)),
        st.tuples(
            st.sampled_from(
                ["turn", "turn", "act_read", "fail_read", "act_write", "deliver", "deliver", "settle", "meet", "later",
                 "snapshot", "crash", "fetch"]
            )
        ),
    ),
    max_size=60,
)  # fmt: skip


@settings(deadline=None, max_examples=400)
@given(
    hot=st.integers(1, 4), warm=st.integers(0, 3), rules=RULES, log_versions=st.booleans(), steps=STEPS,
)  # fmt: skip
def test_any_interleaving_shows_only_rows_that_are_current_and_loses_none(
    hot: int, warm: int, rules: TierRules, log_versions: bool, steps: list[tuple[Any, ...]]
) -> None:
    world = World(Past(log_versions=log_versions), hot, warm, rules)
    for step in steps:
        world.do(step)
    world.finish()


@settings(deadline=None, max_examples=300)
@given(
    hot=st.integers(1, 3), warm=st.integers(0, 2), rules=RULES, log_versions=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_a_long_life_with_crashes_shows_only_rows_that_are_current_and_loses_none(
    hot: int, warm: int, rules: TierRules, log_versions: bool, seed: int
) -> None:
    chance = random.Random(seed)
    world = World(Past(log_versions=log_versions), hot, warm, rules)
    world.do(("meet",))
    for _ in range(250):
        world.do(a_step(chance))
    world.finish()


@settings(deadline=None, max_examples=80)
@given(
    hot=st.integers(1, 3), warm=st.integers(0, 2), rules=RULES, log_versions=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_replicas_over_one_cold_tier_show_only_rows_that_are_current_and_lose_none(
    hot: int, warm: int, rules: TierRules, log_versions: bool, seed: int
) -> None:
    chance = random.Random(seed)
    past = Past(log_versions=log_versions)
    replicas = [World(past, hot, warm, rules), World(past, hot, warm, rules, first=False)]
    for world in replicas:
        world.do(("meet",))
    for _ in range(25):
        # One of them has the machine for a while: the other falls behind.
        world = chance.choice(replicas)
        for _ in range(chance.randint(1, 15)):
            for step in steps_of_a_replica(chance):
                world.do(step)
    for world in replicas:
        world.finish()


def steps_of_a_replica(chance: random.Random) -> Iterator[tuple[Any, ...]]:
    """What may happen next, where rows often come and go, and versions often decide. A cold tier is met at the start
    only: from then on a replica knows what others wrote from what it reads."""
    step = a_step(chance)
    if step[0] == "apply" and chance.random() < 0.5:
        step = (step[0], Op.ASSIGN, *step[2:])
    if step[0] != "meet":
        yield step
    if step[0] == "crash":
        yield ("meet",)
    if chance.random() < 0.3:
        yield from (("turn",), ("settle",), ("turn",))


@NUMPY_MAY_OVERFLOW
@settings(deadline=None, max_examples=2)  # each takes seconds in Triton's interpreter
@given(warm=st.sampled_from([0, 2]), rules=RULES, log_versions=st.booleans(), seed=st.integers(0, 2**32))
def test_a_life_with_the_hot_rows_on_a_gpu_shows_only_rows_that_are_current_and_loses_none(
    warm: int, rules: TierRules, log_versions: bool, seed: int
) -> None:
    chance = random.Random(seed)
    # Twelve keys of one bucket of eight: rows have to leave.
    past = Past(log_versions=log_versions, names=neighbours(12).tolist())
    world = World(past, 0, warm, rules, on_gpu=True)
    world.do(("meet",))
    for _ in range(60):
        world.do(a_step(chance, range(12)))
    world.finish()
