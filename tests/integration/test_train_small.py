"""A small log becomes a release that is sound, repeatable and better than popularity."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from feature_service.schema import schema_of
from infra.errors import InvalidInput, ReleaseRefused
from infra.release import Release, read_release
from reranker.fit import Recipe
from reranker.offline import scorer_of
from reranker.train import train_release
from tests.logs_of_events import small_dataset, write_folder

QUICK = replace(Recipe(), batch_size=32, max_passes=12)


def _train(data: Path, out: Path, **more: object) -> Release:
    quiet = Console(file=io.StringIO())
    return train_release(str(data), out, cache=out.parent, seed=5, recipe=QUICK, console=quiet, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "small", small_dataset())


@pytest.fixture(scope="module")
def release(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Release:
    return _train(folder, tmp_path_factory.mktemp("releases") / "small")


def test_the_release_is_sound_and_complete(release: Release) -> None:
    again = read_release(release.path)
    schema = schema_of(again.manifest.schema, again.manifest.schema_fingerprint)
    assert again.manifest.name == "small"
    assert schema.n_user_buckets == 8
    sizes = {t.name: t.rows for t in again.manifest.tables}
    assert sizes["user"] == 20
    assert sizes["user_bucket"] == 8
    assert sizes["user_attribute"] == 5
    assert sizes["category"] == 4
    assert sizes["gap"] == schema.n_gaps


def test_the_report_says_what_was_measured_and_learning_beats_popularity(release: Release) -> None:
    report = release.manifest.report
    for kind in ("uniform", "popularity"):
        for model in ("edge", "rerank"):
            measures = report["models"][model][kind]
            assert measures["auc"] > report["models"]["popularity"][kind]["auc"] + 0.1
            assert all(np.isfinite(measures[m]) for m in ("auc", "gauc", "ndcg_at_10", "log_loss"))
    assert report["split"]["test_events"] == 60
    assert 0 < report["n_test_events"] <= 60
    assert report["split"]["validation_from"] < report["split"]["test_from"]
    assert 0 <= report["recall"]["recall@100"] <= report["recall"]["recall@500"] <= 1
    assert report["seed"] == 5


def test_catalogue_and_users_end_where_the_test_period_begins(release: Release) -> None:
    catalogue = release.catalogue()
    assert [i.events for i in catalogue] == sorted((i.events for i in catalogue), reverse=True)
    assert sum(i.events for i in catalogue) == 540
    assert catalogue[0].title.startswith("Item")
    assert set(catalogue[0].categories) <= {"all", "kind 0", "kind 1", "kind 2"}
    test_from_us = datetime.fromisoformat(release.manifest.report["split"]["test_from"]).timestamp() * 1e6
    for user in release.users():
        assert len(user.history_items) == len(user.history_ts_us) <= 50
        assert user.history_ts_us == sorted(user.history_ts_us)
        assert all(ts_us < test_from_us for ts_us in user.history_ts_us)
    assert any(ts_us >= test_from_us for request in release.requests() for ts_us in request.history_ts_us)


def test_recorded_requests_get_the_same_logits_again(release: Release) -> None:
    scorer = scorer_of(release)
    requests = release.requests()
    assert len(requests) == release.manifest.report["n_test_events"]
    for request in requests:
        edge, rerank = scorer.score(request)
        np.testing.assert_allclose(edge, request.edge_logits, atol=1e-6)
        np.testing.assert_allclose(rerank, request.rerank_logits, atol=1e-6)
        assert len(set(request.candidates)) == len(request.candidates)
        assert request.taken in request.candidates
        assert request.history_ts_us == sorted(request.history_ts_us)
    edge, rerank = scorer_of(release).score(requests[0])
    assert edge.tolist() == requests[0].edge_logits
    assert rerank.tolist() == requests[0].rerank_logits


def test_the_same_seed_gives_the_same_quality(release: Release, folder: Path, tmp_path: Path) -> None:
    again = _train(folder, tmp_path / "again")
    assert again.manifest.report["models"] == release.manifest.report["models"]
    assert again.manifest.report["data_fingerprint"] == release.manifest.report["data_fingerprint"]


def test_a_test_period_in_which_nothing_can_be_ranked_is_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Everybody has touched everything.
    rows = [f"u{k // 10 % 12},i{k % 10},click,{1_700_000_000_000_000 + k * 1_000_000}" for k in range(600)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "interactions.csv").write_text("\n".join(["user_id,item_id,event,ts", *rows]) + "\n")
    monkeypatch.delattr("reranker.fitting.Fitting.run")
    with pytest.raises(InvalidInput, match="every user of the test period has touched every item"):
        _train(tmp_path / "data", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_directory_is_refused_before_anything_is_read(release: Release, tmp_path: Path) -> None:
    with pytest.raises(ReleaseRefused, match="exists already"):
        _train(tmp_path / "no such data", release.path)


def test_too_little_data_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "few", small_dataset(n_events=60))
    with pytest.raises(InvalidInput, match="few: too little to train on: 54 of 60 events"):
        _train(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_features_that_serve_other_scores_than_were_trained_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feature_service.recorded.pool_categories", lambda rows, weights: 2 * (weights @ rows))
    with pytest.raises(ReleaseRefused, match="served features give logits that differ by"):
        _train(folder, tmp_path / "out", epochs=1)
    assert not (tmp_path / "out").exists()


def test_no_pass_at_all_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="epochs: 0 passes"):
        _train(folder, tmp_path / "out", epochs=0)


def test_other_event_names_become_part_of_the_schema(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "watched", small_dataset(n_events=300))
    log = folder / "interactions.csv"
    log.write_text(log.read_text().replace(",click,", ",watch,"))
    (folder / "items.csv").unlink()
    (folder / "users.csv").unlink()
    trained = _train(folder, tmp_path / "out", epochs=1, name="w")
    assert "watch" in trained.manifest.schema["history_events"]
    assert trained.manifest.name == "w"
    assert {t.name: t.rows for t in trained.manifest.tables}["category"] == 0
