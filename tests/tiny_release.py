"""A release small enough for a test to make: 60 items, 8 users, rankers that are a dot product."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np

from feature_service.hashing import ATTRIBUTE, CATEGORY, ITEM, USER, bucket_of, key_of, keys_of
from feature_service.schema import TABLE_IDS, FeatureSchema, gap_indices, gap_keys
from infra.release import Item, Precision, RecordedRequest, Release, Role, TableRows, User, write_release
from tests.onnx_models import write_ranker

SCHEMA = FeatureSchema(n_user_buckets=4, max_history=10)
N_ITEMS, N_USERS = 60, 8
CATEGORIES = ("action", "comedy", "drama")
HISTORY = [("i3", 1_000_000), ("i5", 61_000_000), ("i8", 100_000_000)]
ATTRIBUTES = {"sex": "F"}


def rows(keys: np.ndarray, dim: int, seed: int, *, default: float = 0.0) -> TableRows:
    """Random rows, of length about 1."""
    values = np.random.default_rng(seed).standard_normal((keys.size, dim)).astype(np.float32) / np.sqrt(dim)
    default_row = np.full(dim, default, np.float32)
    return TableRows(keys, values.astype(np.float32), np.ones(keys.size, np.uint64), default_row)


def items() -> list[Item]:
    """`i0` is the most popular."""
    return [
        Item(f"i{n}", key_of(ITEM, f"i{n}"), f"Title {n}", [CATEGORIES[n % 3]][: n % 4], N_ITEMS - n)
        for n in range(N_ITEMS)
    ]


def tables() -> dict[str, TableRows]:
    """Every table of the schema."""
    return {
        "user": rows(keys_of(USER, [f"u{n}" for n in range(N_USERS)]), SCHEMA.user_dim, 1),
        "user_bucket": rows(np.arange(SCHEMA.n_user_buckets, dtype=np.int64), SCHEMA.user_dim, 2, default=0.01),
        "user_attribute": rows(keys_of(ATTRIBUTE, ["sex=F", "sex=M"]), SCHEMA.user_dim, 3),
        "item": rows(np.array([item.key for item in items()], np.int64), SCHEMA.item_dim, 4, default=0.02),
        "category": rows(keys_of(CATEGORY, CATEGORIES), SCHEMA.category_dim, 5),
        "gap": rows(gap_keys(SCHEMA), SCHEMA.gap_dim, 6),
    }


def write_tiny_release(
    path: Path,
    *,
    name: str = "tiny",
    wrong_by: float = 0.0,
    poison: bool = False,
    int8: bool = False,
    fp16: bool = False,
) -> Release:
    """Write it; the recorded logits are off by `wrong_by`. With `poison`, a candidate whose item row begins with a
    number above 100 scores NaN; with `int8` it has a second model for the CPU, with `fp16` one for GPUs: the same
    under another name."""
    models: dict[Role, dict[Precision, Path]] = {}
    scales: tuple[tuple[Role, float], ...] = (("edge", 1.0), ("rerank", 3.0))
    for stage, scale in scales:
        file = path.parent / f"{stage}.onnx"
        models[stage] = {"fp32": write_ranker(file, SCHEMA.token_dim, SCHEMA.user_dim, scale=scale, poison=poison)}
        if int8:
            models[stage]["int8-cpu"] = models[stage]["fp32"]
        if fp16:
            models[stage]["fp16"] = models[stage]["fp32"]
    return write_release(
        path,
        name=name,
        parent=None,
        created_us=1,
        schema=asdict(SCHEMA),
        schema_fingerprint=SCHEMA.fingerprint(),
        tables={table: (TABLE_IDS[table], values) for table, values in tables().items()},
        models=models,
        catalogue=items(),
        users=[User("u1", ATTRIBUTES, [i for i, _ in HISTORY], [ts for _, ts in HISTORY])],
        requests=recorded(wrong_by),
        report={"models": {"edge": {"uniform": {"auc": 0.9}}}},
        made_with={},
    )


def recorded(wrong_by: float) -> list[RecordedRequest]:
    """Recorded requests of a known and an unknown user, scored by the formula of the models in plain numpy."""
    found = []
    for user_id, history in (("u1", HISTORY), ("stranger", [])):
        request = RecordedRequest(
            user_id=user_id,
            attributes=ATTRIBUTES,
            history_items=[i for i, _ in history],
            history_ts_us=[ts for _, ts in history],
            candidates=["i1", "i2", "i9", "no such item"],
            edge_logits=[],
            rerank_logits=[],
        )
        logits = expected_logits(request)
        found.append(
            msgspec.structs.replace(
                request, edge_logits=(logits + wrong_by).tolist(), rerank_logits=(3 * logits + wrong_by).tolist()
            )
        )
    return found


def expected_logits(request: RecordedRequest) -> np.ndarray:
    """The edge model's logits, written out the long way."""
    by_name = tables()
    category_of = {item.item_id: item.categories for item in items()}

    def row(table: str, key: int) -> np.ndarray:
        at = np.flatnonzero(by_name[table].keys == key)
        return by_name[table].rows[at[0]] if at.size else by_name[table].default_row

    def token(item_id: str, gap: int) -> np.ndarray:
        names = category_of.get(item_id, [])
        category = sum((row("category", key_of(CATEGORY, c)) for c in names), np.zeros(SCHEMA.category_dim))
        return np.concatenate((row("item", key_of(ITEM, item_id)), category / max(len(names), 1), row("gap", gap)))

    own = key_of(USER, request.user_id)
    bucket = bucket_of(request.user_id, SCHEMA.n_user_buckets)
    user = row("user", own) if own in by_name["user"].keys else row("user_bucket", bucket)
    attributes = [row("user_attribute", key_of(ATTRIBUTE, f"{k}={v}")) for k, v in request.attributes.items()]
    user = user + np.mean(attributes, axis=0)
    gaps = gap_indices(SCHEMA, np.array(request.history_ts_us, np.int64)).tolist()
    history = [token(i, g) for i, g in zip(request.history_items, gaps, strict=True)]
    mean = sum(history, np.zeros(SCHEMA.token_dim)) / (len(history) + 1)
    return np.array([token(c, 0) @ mean + user.sum() for c in request.candidates], np.float32)
