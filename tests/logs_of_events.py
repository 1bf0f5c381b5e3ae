"""Small logs of interactions with a pattern that can be learnt, for tests of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from feature_service.dataset import Dataset, ItemFacts, make_dataset

DAY_US = 86_400_000_000


def small_dataset(n_users: int = 20, n_items: int = 30, n_events: int = 600, seed: int = 0) -> Dataset:
    """Users like one of three kinds of items; everything happens within 100 days."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, n_users, n_events)
    item = (rng.integers(0, n_items // 3, n_events) * 3 + np.where(rng.random(n_events) < 0.9, user % 3, 0)) % n_items
    ts_us = np.sort(rng.integers(0, 100 * DAY_US // 1_000_000, n_events)) * 1_000_000 + 10_000 * DAY_US
    return make_dataset(
        "small",
        users=[f"u{u}" for u in user],
        items=[f"i{i}" for i in item],
        ts_us=ts_us,
        events=["click"] * n_events,
        facts={f"i{i}": ItemFacts(f"Item {i}", (f"kind {i % 3}", "all")) for i in range(n_items)},
        attributes={f"u{u}": {"likes": str(u % 3), "odd": str(u % 2)} for u in range(n_users)},
        fingerprint="f",
    )


def write_folder(folder: Path, dataset: Dataset) -> Path:
    """The same log as the csv files of a user."""
    folder.mkdir(parents=True, exist_ok=True)
    order = np.argsort(dataset.ts_us, kind="stable")
    rows = [
        f"{dataset.user_ids[dataset.user[k]]},{dataset.item_ids[dataset.item[k]]},click,{dataset.ts_us[k]}"
        for k in order
    ]
    (folder / "interactions.csv").write_text("\n".join(["user_id,item_id,event,ts", *rows]) + "\n")
    items = [
        f"{i},{facts.title},{'|'.join(facts.categories)}"
        for i, facts in zip(dataset.item_ids, dataset.facts, strict=True)
    ]
    (folder / "items.csv").write_text("\n".join(["item_id,title,categories", *items]) + "\n")
    users = [f"{u},{a['likes']},{a['odd']}" for u, a in zip(dataset.user_ids, dataset.attributes, strict=True)]
    (folder / "users.csv").write_text("\n".join(["user_id,likes,odd", *users]) + "\n")
    return folder
