"""What differs between two releases, by section: schema, tables, data, models, quality, versions. Pure.

Compares what the manifests say: contents by their sha256, never by reading them. Invariant: two releases with the same
contents, schema and report differ in nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.release import PRECISIONS, ROLES, Manifest, TableEntry

# section -> what -> (in the first release, in the second), None where one has none of it.
Difference = dict[str, dict[str, tuple[Any, Any]]]
# What of a report says how a release was made, not how it turned out.
_MADE_FROM = ("data", "data_fingerprint", "seed", "split", "recipe", "precision")


def difference(one: Manifest, other: Manifest) -> Difference:
    """Only what differs; a section without a difference is left out."""
    sections = {
        "schema": _pairs(flat(one.schema), flat(other.schema)),
        "tables": _tables(one, other),
        "data": _pairs(_data(one), _data(other)),
        "models": _pairs(_models(one), _models(other)),
        "quality": _pairs(_quality(one), _quality(other)),
        "versions": _pairs(flat(one.made_with), flat(other.made_with)),
    }
    return {name: found for name, found in sections.items() if found}


def in_words(one: Manifest, other: Manifest) -> str:
    """For people: one line for each difference."""
    found = difference(one, other)
    if not found:
        return f"{one.name} and {other.name} hold the same"
    width = max(len(what) for pairs in found.values() for what in pairs)
    lines = [f"{'':<{width + 2}}{one.name} -> {other.name}"]
    for section, pairs in found.items():
        lines += ["", section]
        lines += [f"  {what:<{width}}{_change(before, after)}" for what, (before, after) in pairs.items()]
    return "\n".join(lines)


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names joined by dots."""
    found: dict[str, Any] = {}
    for name, part in value.items():
        found |= flat(part, f"{prefix}{name}.") if isinstance(part, Mapping) else {f"{prefix}{name}": part}
    return found


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys((*one, *other))
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def _tables(one: Manifest, other: Manifest) -> dict[str, tuple[Any, Any]]:
    """Number of rows, width, and whether they are the same rows."""
    before, after = {t.name: t for t in one.tables}, {t.name: t for t in other.tables}
    return _pairs({n: _table(t) for n, t in before.items()}, {n: _table(t) for n, t in after.items()})


def _table(entry: TableEntry) -> dict[str, Any]:
    return {"rows": entry.rows, "dim": entry.dim, "dtype": entry.dtype, "sha256": entry.fingerprint}


def _data(manifest: Manifest) -> dict[str, Any]:
    report = manifest.report
    made_from = {name: report[name] for name in _MADE_FROM if name in report}
    if "passes" in report:
        made_from["passes"] = len(report["passes"])
    of = report.get("precisions")
    return flat(made_from | ({"calibration": of["calibration"]} if isinstance(of, Mapping) else {}))


def _models(manifest: Manifest) -> dict[str, Any]:
    """sha256 of every model file, None for one that is not there."""
    return {
        f"{role} {precision}": manifest.files[manifest.models[role][precision]]
        for role in ROLES
        for precision in PRECISIONS
        if precision in manifest.models[role]
    }


def _quality(manifest: Manifest) -> dict[str, Any]:
    report = manifest.report
    models = flat({name: report.get("models", {}).get(name, {}) for name in report.get("models", {})})
    of = report.get("precisions")
    refused = {
        f"{role} {precision} refused": of[role][precision]["refused"]
        for role in ROLES
        for precision in PRECISIONS
        if isinstance(of, Mapping) and of[role].get(precision, {}).get("refused")
    }
    return {**models, **flat(report.get("recall", {})), **refused}


def _change(before: Any, after: Any) -> str:
    if isinstance(before, int | float) and isinstance(after, int | float) and not isinstance(before, bool):
        return f"  {before:g} -> {after:g} ({after - before:+.4g})"
    return f"  {_word(before)} -> {_word(after)}"


def _word(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return f"{value['rows']:,} x {value['dim']} {value['dtype']} ({value['sha256'][:12]})"
    if isinstance(value, str) and len(value) == 64:
        return value[:12]
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)
