"""Releases made from a trained one in a second: the same tables and models under another name, whole or broken."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import onnx
from onnx import helper

from infra.release import PRECISIONS, ROLES, Item, RecordedRequest, Release, User, write_release


def derived_release(release: Release, out: Path, *, broken: bool = False) -> Release:
    """The release as `out`, named after the folder. `broken`: its reranker scores NaN, which no recorded one tells."""
    models = {
        role: {precision: file for precision in PRECISIONS if (file := release.model(role, precision))}
        for role in ROLES
    }
    if broken:
        reranker = out.parent / f"{out.name}.onnx"
        _write_broken(release.rerank_model, reranker)
        models["rerank"] = {"fp32": reranker}
    manifest = release.manifest
    requests: Iterable[RecordedRequest] = () if broken else release.requests()
    users: list[User] = release.users()
    catalogue: list[Item] = release.catalogue()
    return write_release(
        out,
        name=out.name,
        parent=manifest.name,
        created_us=manifest.created_us,
        schema=manifest.schema,
        schema_fingerprint=manifest.schema_fingerprint,
        tables={table.name: (table.table_id, release.table(table.name)) for table in manifest.tables},
        models=models,
        scales={role: file for role in ROLES if (file := release.scales(role)) and not broken},
        catalogue=catalogue,
        users=users,
        requests=requests,
        report=manifest.report,
        made_with=manifest.made_with,
    )


def _write_broken(model: Path, out: Path) -> None:
    """The same graph with every score times NaN."""
    graph = onnx.load(model)
    name = graph.graph.output[0].name
    for node in graph.graph.node:
        for at, output in enumerate(node.output):
            if output == name:
                node.output[at] = f"{name}_whole"
    graph.graph.initializer.append(helper.make_tensor("broken", onnx.TensorProto.FLOAT, [], [float("nan")]))
    graph.graph.node.append(helper.make_node("Mul", [f"{name}_whole", "broken"], [name]))
    onnx.save(graph, out)
