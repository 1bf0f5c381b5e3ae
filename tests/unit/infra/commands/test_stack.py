"""What `trirank status` prints."""

from __future__ import annotations

from infra.commands.stack import _cell


def test_numbers_by_name_stand_in_the_line_and_texts_are_counted() -> None:
    assert _cell({"0": 12, "1": 3}) == "0:12,1:3"
    assert _cell({"tensorrt": "unavailable: no driver", "torch-cpu": "disagrees"}) == "2 (see --json)"
    assert _cell(["a", "b"]) == "a,b"
    assert (_cell({}), _cell([]), _cell(7)) == ("none", "none", "7")
