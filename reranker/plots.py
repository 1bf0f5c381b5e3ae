"""The report of a training as pictures: one SVG file each, without a plotting library.

Refuses nothing. Invariant: a picture shows numbers of the report and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 640, 400
_LEFT, _TOP, _RIGHT, _BOTTOM = 60, 40, 150, 50
_COLOURS = ("#0b62a4", "#d35400", "#2e8b57", "#8e44ad", "#7f8c8d", "#c0392b")
_TICKS = 5
Points = Sequence[tuple[float, float]]


def write_plots(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the plots of one report into `folder`, which is made; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = {"calibration": _calibration(report), "passes": _passes(report), "segments": _segments(report)}
    if "compared_with" in report:
        plots["differences"] = _differences(report["compared_with"])
    files = []
    for name, svg in plots.items():
        files.append(folder / f"{name}.svg")
        files[-1].write_text(svg)
    return files


def _calibration(report: Mapping[str, Any]) -> str:
    lines: dict[str, Points] = {"perfect": [(0.0, 0.0), (1.0, 1.0)]}
    for model, found in report["calibration"].items():
        lines[f"{model} (error {found['error']:.3f})"] = list(zip(found["predicted"], found["observed"], strict=True))
    return _chart("Calibration on the test period", "predicted share", "observed share", lines, (0, 1), (0, 1))


def _passes(report: Mapping[str, Any]) -> str:
    fields = ("edge_loss", "rerank_loss", "validation_auc")
    lines = {
        name: [(entry["pass"], entry[name]) for entry in report["passes"] if _is_number(entry.get(name))]
        for name in fields
    }
    return _chart("Loss and validation AUC by pass", "pass", "value", lines, None, (0, 1))


def _segments(report: Mapping[str, Any]) -> str:
    """AUC of each segment, one line per model, segments from left to right."""
    names = [f"{of} {name}" for of, segments in report["segments"].items() for name in segments]
    lines: dict[str, list[tuple[float, float]]] = {}
    for at, segment in enumerate(s for segments in report["segments"].values() for s in segments.values()):
        for model, kinds in segment["models"].items():
            for kind, measures in kinds.items():
                lines.setdefault(f"{model} {kind}", []).append((at, measures["auc"]))
    return _chart("AUC by segment", "", "AUC", lines, (0, max(len(names) - 1, 1)), (0.4, 1), names)


def _differences(compared: Mapping[str, Any]) -> str:
    """Intervals of the differences in AUC, as a line from low to high each."""
    lines: dict[str, Points] = {"no difference": [(0.0, -0.5), (0.0, 3.5)]}
    row, most = 0, 0.001
    for model, kinds in compared["differences"].items():
        for kind, measures in kinds.items():
            d = measures["auc"]
            lines[f"{model} {kind}"] = [(d["low"], row), (d["high"], row)]
            most, row = max(most, abs(d["low"]), abs(d["high"])), row + 1
    title = f"AUC against release {compared['release']}: interval of the difference"
    return _chart(title, "difference", "", lines, (-most, most), (-0.5, row - 0.5))


def _chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, Points],
    x_range: tuple[float, float] | None,
    y_range: tuple[float, float],
    x_names: Sequence[str] = (),
) -> str:
    """Lines with points, axes with ticks, and a legend."""
    xs = [x for points in lines.values() for x, _ in points] or [0.0, 1.0]
    x_low, x_high = x_range or (min(xs), max(max(xs), min(xs) + 1))
    y_low, y_high = y_range
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x_low) / (x_high - x_low) * (right - _LEFT)
        down = bottom - (y - y_low) / (y_high - y_low) * (bottom - _TOP)
        return round(across, 1), round(down, 1)

    parts = [_text(_LEFT, 22, title, size=14), _text((_LEFT + right) / 2, HEIGHT - 8, x_label, "middle")]
    parts.append(_text(8, _TOP - 8, y_label))
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#333"/>')
    for tick in range(_TICKS + 1):
        x, y = x_low + (x_high - x_low) * tick / _TICKS, y_low + (y_high - y_low) * tick / _TICKS
        parts.append(_text(_LEFT - 6, place(x_low, y)[1] + 4, f"{y:.3g}", "end"))
        if not x_names:
            parts.append(_text(place(x, y_low)[0], bottom + 16, f"{x:.3g}", "middle"))
    parts += [_text(place(at, y_low)[0], bottom + 16, name, "middle") for at, name in enumerate(x_names)]
    for number, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        placed = [place(x, y) for x, y in points]
        path = " ".join(f"{x},{y}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in placed]
        parts.append(_text(right + 8, _TOP + 16 * number, name, colour=colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
    return head + "\n" + "\n".join(parts) + "\n</svg>\n"


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11, colour: str = "#333") -> str:
    where = f'x="{x}" y="{y}" text-anchor="{anchor}"'
    return f'<text {where} font-size="{size}" fill="{colour}">{escape(text)}</text>'


def _is_number(value: object) -> bool:
    return isinstance(value, float) and value == value
