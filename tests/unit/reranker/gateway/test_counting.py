from __future__ import annotations

from reranker.gateway.counting import attribute
from reranker.gateway.schemas import FeedbackItem
from reranker.gray.attribution import Signer
from reranker.gray.split import Assignment
from reranker.gray.tally import Sample, Tally

SIGNER = Signer(b"k" * 32)


def clicked(recommendation_id: str | None) -> FeedbackItem:
    return FeedbackItem(user_id="u", item_id="i", event="click", recommendation_id=recommendation_id)


def shown(arm: str, epoch: int = 3) -> str:
    assigned = Assignment("r", "candidate" if arm == "candidate" else "stable", 1, "split", True, epoch)
    return SIGNER.sign(assigned, generation=1, shown_s=0, request=bytes(8))


def test_only_events_with_a_sound_id_of_this_gray_release_count_for_an_arm() -> None:
    tally = Tally()
    tally.begin(3)
    forged = Signer(b"x" * 32).sign(
        Assignment("r", "candidate", 1, "split", True, 3), generation=1, shown_s=0, request=bytes(8)
    )
    ids = [shown("candidate"), shown("candidate") + ".4", shown("stable"), shown("candidate", 2), forged, "rec-7", None]

    attribute([clicked(one) for one in ids], SIGNER, tally)

    found = {sample: figures.events for sample, figures in tally.figures().items()}
    assert found == {Sample("candidate", True): {"click": 2}, Sample("stable", True): {"click": 1}}
