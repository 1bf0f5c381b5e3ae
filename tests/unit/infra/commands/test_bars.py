from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from infra.commands.bars import Bar, Group, bars

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*groups: Group) -> ElementTree.Element:
    return ElementTree.fromstring(bars("a & b", groups))


def test_every_bar_is_drawn_with_its_name_and_note_longer_where_the_value_is_larger() -> None:
    chart = drawn(
        Group("one", (Bar("a", 0.1, "0.1 ms"), Bar("b <c>", 10.0, "10 ms"))), Group("two", (Bar("a", 1.0, "1 ms"),))
    )

    _, *drawn_bars = chart.iter(f"{SVG}rect")
    small, large, middle = (float(one.attrib["width"]) for one in drawn_bars)
    texts = [text.text for text in chart.iter(f"{SVG}text")]
    assert 0 < small < middle < large
    assert texts == ["a & b, logarithmic", "one", "a", "0.1 ms", "b <c>", "10 ms", "two", "a", "1 ms"]


def test_one_name_has_one_colour() -> None:
    chart = drawn(Group("one", (Bar("a", 1.0, ""), Bar("b", 2.0, ""))), Group("two", (Bar("b", 3.0, ""),)))

    first, second, third = [r.attrib["fill"] for r in chart.iter(f"{SVG}rect")][1:]
    assert first != second == third


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_what_has_no_logarithm_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="above zero"):
        bars("t", [Group("g", (Bar("a", 1.0, ""), Bar("b", value, "")))])


def test_an_empty_chart_is_refused() -> None:
    with pytest.raises(ValueError, match="above zero"):
        bars("t", [])
