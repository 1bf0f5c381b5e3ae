"""What training computes in bulk is what serving assembles one request at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from edge_ranker.model import EdgeMLP
from edge_ranker.samples import Batch, Samples, make_batch
from edge_ranker.tables import Tables
from edge_ranker.train import edge_logits, encode, ranking_loss, recall_loss
from feature_service.recorded import RecordedFeatures
from feature_service.schema import FeatureSchema, recall_query
from feature_service.timeline import Timeline, cut
from infra.release import RecordedRequest
from tests.logs_of_events import small_dataset

SCHEMA = FeatureSchema(n_user_buckets=8, max_history=10)


@pytest.fixture
def timeline() -> Timeline:
    return cut(small_dataset())


@pytest.fixture
def tables(timeline: Timeline) -> Tables:
    torch.manual_seed(0)
    return Tables(SCHEMA, timeline)


def _request(timeline: Timeline, event: int, items: list[int]) -> RecordedRequest:
    data = timeline.dataset
    user = int(data.user[event])
    past = slice(max(int(data.first[user]), event - SCHEMA.max_history), event)
    return RecordedRequest(
        user_id=data.user_ids[user],
        attributes=data.attributes[user],
        history_items=[data.item_ids[i] for i in data.item[past]],
        history_ts_us=data.ts_us[past].tolist(),
        candidates=[data.item_ids[i] for i in items],
        edge_logits=[],
        rerank_logits=[],
    )


@torch.no_grad()
def test_encoded_batches_equal_assembled_requests(timeline: Timeline, tables: Tables) -> None:
    tables.eval()
    tables.finish()
    data = timeline.dataset
    features = RecordedFeatures(
        SCHEMA,
        {name: rows for name, (_, rows) in tables.release_tables().items()},
        {i: f.categories for i, f in zip(data.item_ids, data.facts, strict=True)},
    )
    model = EdgeMLP(SCHEMA.token_dim, SCHEMA.user_dim).eval()
    candidates = list(range(0, 30, 4))
    first_events = data.first[:-1]
    events = np.concatenate((timeline.test, first_events))
    without_row = ~tables.trained_users[data.user[events]]
    batch = make_batch(timeline, SCHEMA, events, np.tile(candidates, (events.size, 1)), without_row)
    encoded = encode(tables, batch)
    logits = edge_logits(model, encoded)
    for row, event in enumerate(events.tolist()):
        inputs = features.inputs(_request(timeline, event, candidates))
        served = model(*(torch.from_numpy(x)[None] for x in (inputs.hist, inputs.target, inputs.mask, inputs.user)))
        torch.testing.assert_close(logits[row], served[0], rtol=0, atol=1e-5)
        real = inputs.hist[inputs.mask > 0][:, : SCHEMA.item_dim]
        np.testing.assert_allclose(encoded.query[row].numpy(), recall_query(inputs.user, real), atol=1e-5)


def test_what_did_not_occur_in_training_has_no_row(timeline: Timeline, tables: Tables) -> None:
    shipped = tables.release_tables()
    counts = timeline.item_counts()
    item = shipped["item"][1]
    assert item.keys.size == (counts > 0).sum()
    assert shipped["user"][1].keys.size == np.unique(timeline.dataset.user[timeline.train]).size
    for name, (_, rows) in shipped.items():
        assert (rows.versions == 1).all()
        assert rows.rows.shape == (rows.keys.size, SCHEMA.table_dim(name))
        if name in ("item", "user_bucket"):
            np.testing.assert_allclose(rows.default_row, rows.rows.mean(axis=0), atol=1e-6)
        else:
            assert not rows.default_row.any()


@torch.no_grad()
def test_buckets_without_training_users_get_the_mean_bucket_row(timeline: Timeline) -> None:
    tables = Tables(FeatureSchema(n_user_buckets=64), timeline)
    met = np.unique(tables.buckets[tables.trained_users])
    tables.finish()
    others = np.setdiff1d(np.arange(64), met)
    rows = tables.user_bucket.numpy()
    assert others.size > 0
    np.testing.assert_allclose(rows[others], np.tile(rows[met].mean(axis=0), (others.size, 1)), atol=1e-6)


def _batches(timeline: Timeline, bucket_share: float) -> list[Batch]:
    samples = Samples(
        timeline,
        SCHEMA,
        timeline.train,
        rng=np.random.default_rng(0),
        batch_size=64,
        negatives_per_kind=2,
        bucket_share=bucket_share,
    )
    return list(samples.one_pass())


def test_one_pass_sees_each_event_at_most_once_with_untouched_items_as_negatives(timeline: Timeline) -> None:
    data = timeline.dataset
    touched = set(zip(data.user[timeline.train].tolist(), data.item[timeline.train].tolist(), strict=True))
    batches = _batches(timeline, 0.5)
    assert len(batches) == timeline.train.size // 64
    for batch in batches:
        items = batch.items[batch.candidates]
        for user, row, weight in zip(batch.users.tolist(), items.tolist(), batch.weight.tolist(), strict=True):
            assert (user, row[0]) in touched
            assert not any((user, i) in touched for i, w in zip(row[1:], weight[1:], strict=True) if w)


def test_the_share_of_samples_that_see_the_bucket_is_as_asked(timeline: Timeline) -> None:
    for share in (0.0, 0.5, 1.0):
        seen = torch.cat([batch.as_bucket for batch in _batches(timeline, share)]).float().mean()
        assert abs(float(seen) - share) < 0.1


def test_void_candidates_weigh_nothing(timeline: Timeline) -> None:
    batch = make_batch(
        timeline,
        SCHEMA,
        timeline.train[:4],
        np.zeros((4, 3), np.int64),
        np.zeros(4, np.bool_),
        np.array([[True, True, False]] * 4),
    )
    logits = torch.tensor([[2.0, -1.0, 50.0]] * 4)
    assert ranking_loss(logits, batch) == pytest.approx(
        float(torch.nn.functional.softplus(torch.tensor([-2.0, -1.0])).mean())
    )


def test_large_tables_learn_through_sparse_gradients_alike(timeline: Timeline) -> None:
    gradients = []
    for sparse_from_rows in (1, 10**9):
        torch.manual_seed(0)
        tables = Tables(SCHEMA, timeline, sparse_from_rows=sparse_from_rows).train()
        batch = _batches(timeline, 0.5)[0]
        encoded = encode(tables, batch)
        encoded.target.square().sum().add(encoded.query.sum()).backward()
        assert len(tables.sparse) == (2 if sparse_from_rows == 1 else 0)
        assert tables.item.grad is not None
        assert tables.user.grad is not None
        gradients.append([g.to_dense() for g in (tables.item.grad, tables.user.grad)])
    for some, other in zip(*gradients, strict=True):
        torch.testing.assert_close(some, other)


@torch.no_grad()
def test_the_sampled_recall_loss_estimates_the_exact_one(
    timeline: Timeline, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = _batches(timeline, 0.5)[0]
    encoded = encode(tables, batch)
    exact = float(recall_loss(tables, batch, encoded))
    monkeypatch.setattr("edge_ranker.samples.RECALL_SAMPLE", 20)
    samples = [other.recall_sample for _ in range(10) for other in _batches(timeline, 0.5)]
    sampled = np.mean([float(recall_loss(tables, replace(batch, recall_sample=s), encoded)) for s in samples])
    assert all(s is not None and s.shape == (20,) for s in samples)
    assert sampled == pytest.approx(exact, abs=0.05)


def test_histories_pooled_either_way_give_the_same_vectors_and_gradients(timeline: Timeline) -> None:
    found = []
    batch = _batches(timeline, 0.5)[0]
    for pooling in ("bag", "mean"):
        torch.manual_seed(0)
        tables = Tables(SCHEMA, timeline).train()
        encoded = encode(tables, batch, pooling)  # type: ignore[arg-type]
        encoded.pooled.square().sum().add(encoded.query.sum()).backward()
        assert tables.item.grad is not None
        assert tables.gap.grad is not None
        found.append((encoded.pooled.detach(), tables.item.grad, tables.gap.grad))
    for some, other in zip(*found, strict=True):
        torch.testing.assert_close(some, other)
