from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reranker.gray.attribution import Attribution, Signer
from reranker.gray.split import Arm, Assignment

SIGNER = Signer(b"k" * 32)
REQUEST = bytes(range(8))
u32 = st.integers(0, 2**32 - 1)


def signed(arm: Arm = "candidate", compared: bool = True, **changed: Any) -> str:
    assigned = Assignment("r", arm, 5, "split", compared, changed.pop("epoch", 7))
    return SIGNER.sign(assigned, **{"generation": 9, "shown_s": 1000, "request": REQUEST, **changed})


@given(st.sampled_from(["stable", "candidate"]), st.booleans(), u32, u32, u32, st.binary(min_size=8, max_size=8))
def test_what_was_signed_is_read(
    arm: Arm, compared: bool, epoch: int, generation: int, shown_s: int, request: bytes
) -> None:
    made = signed(arm, compared, epoch=epoch, generation=generation, shown_s=shown_s, request=request)

    assert len(made) == 40
    assert SIGNER.read(made) == Attribution(epoch, generation, arm, compared, shown_s, request)


def test_the_caller_may_name_the_place() -> None:
    found = SIGNER.read(signed() + ".3")

    assert found is not None
    assert found.rank == 3


@given(st.integers(0, 39), st.characters(max_codepoint=127))
def test_no_change_of_one_character_is_accepted(at: int, character: str) -> None:
    made = signed()
    forged = made[:at] + character + made[at + 1 :]

    assert forged == made or SIGNER.read(forged) is None


@given(st.text(max_size=60))
def test_what_others_made_up_belongs_to_no_arm(text: str) -> None:
    assert SIGNER.read(text) is None


@pytest.mark.parametrize("place", [".", ".0", ".501", ".x", ".1.2", ".-1", ".99999999999"])
def test_a_place_that_cannot_be_is_not_accepted(place: str) -> None:
    found = SIGNER.read(signed() + place)

    assert found is None or (place == "." and found.rank is None)


def test_an_id_signed_with_another_key_belongs_to_no_arm() -> None:
    assert Signer(b"x" * 32).read(signed()) is None
    assert SIGNER.read(None) is None
