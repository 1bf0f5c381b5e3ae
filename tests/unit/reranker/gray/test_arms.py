from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from reranker.gray.arms import LEASE_S, Arms
from reranker.gray.split import Assignment, SplitPlan

HALF = SplitPlan("a", salt="s", candidate="b", weight_ppm=500_000, version=2, epoch=2)
ABORTED = SplitPlan("a", salt="s", idle_reason="aborted", version=3)
PROMOTED = SplitPlan("b", salt="s", idle_reason="promoted", version=3)


@dataclass
class Hand:
    """A clock that is moved by hand."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def serving(clock: Hand, split: SplitPlan = HALF) -> Arms:
    arms = Arms("a", clock)
    assert arms.follow(split)
    arms.renew(clock())
    return arms


def assigned(arms: Arms, forced: str | None = None) -> Assignment:
    """Of somebody who has the candidate release when there is one."""
    user = next(u for u in map(str, range(100)) if Arms.assign(free(), **unit(u)).arm == "candidate")
    return arms.assign(**unit(user), forced="candidate" if forced else None)


def free() -> Arms:
    return serving(Hand())


def unit(user: str) -> dict[str, str | None]:
    return {"user_id": user, "session_id": None, "request_id": ""}


def test_a_gateway_serves_the_candidate_release_while_its_split_is_confirmed() -> None:
    clock = Hand()
    arms = serving(clock)
    for _ in range(10):
        clock.now_s += LEASE_S
        assert assigned(arms).arm == "candidate"
        arms.renew(clock())


def test_a_gateway_that_heard_nothing_for_the_lease_serves_stable_only_even_those_who_ask_for_the_other() -> None:
    clock = Hand()
    arms = serving(clock)
    made = assigned(arms)
    clock.now_s += LEASE_S + 0.001

    found = assigned(arms)
    assert (found.release, found.arm, found.reason, found.epoch) == ("a", "stable", "fenced", 0)
    assert assigned(arms, forced="candidate").arm == "stable"
    assert not arms.stands(made)


def test_a_longer_lease_lasts_as_long_as_it_says() -> None:
    clock = Hand()
    arms = Arms("a", clock, lease_s=35.0)
    arms.follow(HALF)
    arms.renew(clock())
    clock.now_s += 35.0
    assert assigned(arms).arm == "candidate"
    clock.now_s += 0.001
    assert assigned(arms).reason == "fenced"


def test_a_redis_that_refuses_everybody_keeps_the_split_as_long_as_it_does() -> None:
    clock = Hand()
    arms = serving(clock)
    for _ in range(60):
        clock.now_s += 1.0
        arms.hold(clock())
    assert assigned(arms).arm == "candidate"


def test_a_lease_that_has_ended_comes_back_by_a_read_alone() -> None:
    clock = Hand()
    arms = serving(clock)
    clock.now_s += LEASE_S + 1.0
    arms.hold(clock())
    assert assigned(arms).arm == "stable"

    arms.renew(clock())
    assert assigned(arms).arm == "candidate"


@given(st.lists(st.tuples(st.floats(0, 2 * LEASE_S), st.sampled_from(["renew", "hold", "nothing"])), max_size=30))
def test_the_candidate_release_is_served_only_within_the_lease_of_a_chain_that_began_with_a_read(
    steps: list[tuple[float, str]],
) -> None:
    clock = Hand()
    arms = serving(clock)
    good_until = clock() + LEASE_S
    for passed_s, what in steps:
        clock.now_s += passed_s
        if what == "renew":
            arms.renew(clock())
            good_until = clock() + LEASE_S
        elif what == "hold":
            arms.hold(clock())
            good_until = clock() + LEASE_S if clock() <= good_until else good_until
        assert (assigned(arms).arm == "candidate") == (clock() <= good_until)


def test_an_answer_that_was_begun_before_the_abort_does_not_leave_after_it() -> None:
    arms = free()
    made = assigned(arms)
    assert arms.stands(made)
    arms.follow(ABORTED)

    assert not arms.stands(made)
    instead = arms.withdrawn(made)
    assert (instead.release, instead.arm, instead.reason, instead.epoch) == ("a", "stable", "aborted", 0)
    assert arms.stands(instead)


def test_an_answer_that_was_begun_before_the_promotion_leaves() -> None:
    arms = free()
    made = assigned(arms)
    arms.follow(PROMOTED)

    assert arms.stands(made)


def test_without_a_gray_release_nobody_has_to_confirm_anything() -> None:
    clock = Hand()
    arms = Arms("a", clock)
    clock.now_s += 1000.0

    assert assigned(arms).reason == "no_gray_release"
    assert not arms.fenced


def test_an_older_split_is_not_followed() -> None:
    arms = free()

    assert not arms.follow(replace(ABORTED, version=1))
    assert arms.split == HALF
