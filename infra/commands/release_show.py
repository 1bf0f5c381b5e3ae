"""A release for people: what it is, what it was made from, how good it is, and its precisions. Pure.

Shows what the manifest says and nothing else; a release made by an older version shows less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from infra.engine.quality import refused_in
from infra.release import PRECISIONS, ROLES, Manifest

_KINDS = ("uniform", "popularity")


def describe(manifest: Manifest) -> str:
    """Several paragraphs."""
    report = manifest.report
    parts = [
        _head(manifest),
        table(
            ["table", "rows", "dim", "sha256"],
            [[t.name, f"{t.rows:,}", t.dim, t.fingerprint[:12]] for t in manifest.tables],
        ),
        _quality(report),
        precision_table(manifest),
        "\n".join(refused(manifest)),
    ]
    return "\n\n".join(part for part in parts if part)


def precision_table(manifest: Manifest) -> str:
    """Every precision of both rankers, released or not; empty when the release says nothing of them."""
    of = manifest.report.get("precisions")
    if not isinstance(of, Mapping):
        return ""
    head = [
        "model",
        "precision",
        "released",
        "bytes",
        "of FP32",
        "AUC loss % (chance)",
        "",
        "log-loss %",
        "logit rms",
        "top 20",
    ]
    lines: list[list[object]] = [["", "", "", "", "", *_KINDS, "", "", ""]]
    for role in ROLES:
        whole = of[role]["fp32"]["bytes"]
        for precision in PRECISIONS:
            entry = of[role].get(precision, {})
            size = entry.get("bytes")
            lines.append(
                [
                    role,
                    precision,
                    "yes" if entry.get("released") else "no",
                    "-" if size is None else f"{size:,}",
                    "-" if size is None else f"{size / whole:.2f}",
                    *(_auc_loss(entry, kind) for kind in _KINDS),
                    _log_loss(entry),
                    _number(entry.get("logit_rmse"), ".4f"),
                    _number(entry.get("overlap_at_20"), ".4f"),
                ]
            )
    requests = next((e["requests"] for r in ROLES for e in of[r].values() if "requests" in e), 0)
    note = f"Beside FP32, on {requests:,} held-out requests; in brackets what chance reaches (2 standard errors)."
    return f"{note}\n{table(head, lines)}"


def refused(manifest: Manifest) -> list[str]:
    """One sentence for each precision that is not released."""
    of = manifest.report.get("precisions")
    return refused_in(of) if isinstance(of, Mapping) else []


def table(head: Sequence[object], lines: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they need, numbers to the right."""
    rows = [[str(cell) for cell in line] for line in (head, *lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _head(manifest: Manifest) -> str:
    report, made = manifest.report, datetime.fromtimestamp(manifest.created_us / 1e6, UTC)
    lines = [
        f"release {manifest.name}, made {made.isoformat(timespec='seconds')}, generation {manifest.generation}, "
        f"schema {manifest.schema_fingerprint}" + (f", after {manifest.parent}" if manifest.parent else "")
    ]
    if "data" in report:
        lines.append(
            f"from {report['data']} (sha256 {str(report.get('data_fingerprint', '?'))[:12]}), seed {report.get('seed')}"
        )
    split = report.get("split", {})
    if {"train_events", "test_events", "test_from"} <= split.keys():
        train, test = f"{split['train_events']:,} events", f"{split['test_events']:,} from {split['test_from']} on"
        lines.append(f"trained on {train}, tested on {test}")
    if isinstance(report.get("precisions"), Mapping) and (c := report["precisions"].get("calibration")):
        methods = ", ".join(dict.fromkeys(c.get("methods", {}).values()))
        lines.append(f"INT8 by {methods} of {c['requests']} requests, {c.get('from', '-')} to {c.get('until', '-')}")
    architectures = manifest.made_with.get("architectures", {})
    named = [f"{role} {' '.join(str(v) for v in of.values() if v is not None)}" for role, of in architectures.items()]
    lines.append(f"models {', '.join(named)}" if named else "")
    versions = [f"{name} {version}" for name, version in manifest.made_with.items() if isinstance(version, str)]
    lines.append(f"made with {', '.join(versions)}" if versions else "")
    return "\n".join(line for line in lines if line)


def _quality(report: Mapping[str, Any]) -> str:
    measured = {
        (model, kind): values
        for model, kinds in report.get("models", {}).items()
        for kind, values in kinds.items()
        if isinstance(values, Mapping)
    }
    names = list(dict.fromkeys(name for values in measured.values() for name in values))
    if not names:
        return ""
    lines = [
        [model, kind, *(_number(values.get(name), ".4f") for name in names)]
        for (model, kind), values in measured.items()
    ]
    return table(["model", "negatives", *names], lines)


def _auc_loss(entry: Mapping[str, Any], kind: str) -> str:
    found = entry.get("by_negatives", {}).get(kind)
    if not found:
        return "-"
    return f"{found['auc_loss_pct']:+.3f} ({_number(found['auc_noise_pct'], '.3f')})"


def _log_loss(entry: Mapping[str, Any]) -> str:
    rises = [found["log_loss_rise_pct"] for found in entry.get("by_negatives", {}).values()]
    return f"{max(rises):+.3f}" if rises else "-"


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"
