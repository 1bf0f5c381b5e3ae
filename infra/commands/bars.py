"""A bar chart as one SVG file: groups of bars on a logarithmic scale, each with its name and a note.

Enough for comparing a handful of engines, readable without a browser extension, and no plotting library to install.
Refuses values that are not above zero. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT = 900, 240, 160
BAR, GAP, HEAD = 18, 6, 26
# Distinct for the colour-blind too (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; `value` above zero."""

    name: str
    value: float
    note: str


@dataclass(frozen=True, slots=True)
class Group:
    """Bars under one heading."""

    name: str
    bars: tuple[Bar, ...]


def bars(title: str, groups: Sequence[Group]) -> str:
    """The chart. Raises ValueError for a value that has no logarithm, and when there is nothing to draw."""
    values = [bar.value for group in groups for bar in group.bars]
    if not values or min(values) <= 0 or not all(map(math.isfinite, values)):
        raise ValueError("a logarithmic chart needs values above zero")
    low, high = 10 ** math.floor(math.log10(min(values)) - 0.3), max(values)
    colour_of = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(_names(groups))}
    lines, y = [], HEAD + GAP
    for group in groups:
        y += GAP
        lines.append(f'<text x="8" y="{y + 13}" font-weight="bold">{escape(group.name)}</text>')
        y += HEAD - GAP
        for bar in group.bars:
            length = (WIDTH - LEFT - RIGHT) * math.log(bar.value / low) / max(math.log(high / low), 1e-9)
            lines.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(bar.name)}</text>')
            lines.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour_of[bar.name]}"/>')
            lines.append(f'<text x="{LEFT + length + 6:.1f}" y="{y + 13}">{escape(bar.note)}</text>')
            y += BAR + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + GAP}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="8" y="20" font-size="14">{escape(title)}, logarithmic</text>\n' + "\n".join(lines) + "\n</svg>\n"
    )


def _names(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(bar.name for group in groups for bar in group.bars))
