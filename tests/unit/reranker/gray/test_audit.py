from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reranker.gray.audit import GENESIS, ChainBroken, Entry, appended, split_at, verify_chain
from reranker.gray.split import SplitPlan


def chain(n: int = 5) -> list[Entry]:
    entries: list[Entry] = []
    for i in range(n):
        entry = Entry(
            seq=i + 1, at_us=10 * (i + 1), who="ann", action="weight", why="ramp", release="g", version=i + 1,
            state="running", step=0, split=SplitPlan("a", "s", "b", 1000 * (i + 1), version=i + 1), previous="",
        )  # fmt: skip
        entries.append(appended(entries[-1].digest if entries else GENESIS, entry))
    return entries


def test_what_was_written_is_accepted() -> None:
    verify_chain(chain(), chain()[-1].digest)
    verify_chain([], GENESIS)


def test_a_chain_that_went_through_json_is_the_same_chain() -> None:
    entries = msgspec.json.decode(msgspec.json.encode(chain()), type=list[Entry])

    verify_chain(entries, chain()[-1].digest)


CHANGES: dict[str, Any] = {
    "seq": 99, "at_us": 1, "who": "eve", "action": "abort", "why": "", "release": "h", "version": 99,
    "state": "aborted", "step": 3, "split": SplitPlan("a"), "previous": "f" * 64, "digest": "f" * 64,
}  # fmt: skip


@given(st.integers(0, 4), st.sampled_from(sorted(CHANGES)))
def test_any_edit_breaks_the_chain(at: int, field: str) -> None:
    entries = chain()
    entries[at] = msgspec.structs.replace(entries[at], **{field: CHANGES[field]})

    with pytest.raises(ChainBroken):
        verify_chain(entries, chain()[-1].digest)


@given(st.integers(0, 4), st.sampled_from(sorted(set(CHANGES) - {"digest"})))
def test_an_edit_with_a_new_hash_of_its_own_breaks_the_chain_too(at: int, field: str) -> None:
    entries = chain()
    edited = msgspec.structs.replace(entries[at], **{field: CHANGES[field]})
    entries[at] = appended(edited.previous, edited)

    with pytest.raises(ChainBroken):
        verify_chain(entries, chain()[-1].digest)


@given(st.integers(0, 4))
def test_taking_an_entry_out_breaks_the_chain(at: int) -> None:
    entries = chain()
    del entries[at]

    with pytest.raises(ChainBroken):
        verify_chain(entries, chain()[-1].digest)


@given(st.permutations(range(5)).filter(lambda order: list(order) != sorted(order)))
def test_another_order_breaks_the_chain(order: list[int]) -> None:
    entries = chain()

    with pytest.raises(ChainBroken):
        verify_chain([entries[i] for i in order], chain()[-1].digest)


@given(st.integers(0, 80))
def test_the_log_tells_the_split_of_any_past_moment(at_us: int) -> None:
    found = split_at(chain(), at_us, SplitPlan("a"))

    assert found.weight_ppm == 1000 * min(at_us // 10, 5)
