from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_ranker.recorded import recorded_inputs
from tests.tiny_release import HISTORY, SCHEMA, write_tiny_release


def test_recorded_requests_are_assembled_as_the_schema_says(tmp_path: Path) -> None:
    known, stranger = recorded_inputs(write_tiny_release(tmp_path / "r"))

    assert known.inputs.hist.shape == (len(HISTORY), SCHEMA.token_dim)
    assert stranger.inputs.mask.tolist() == [0.0]
    for one in (known, stranger):
        mean = (one.inputs.hist * one.inputs.mask[:, None]).sum(0) / (one.inputs.mask.sum() + 1)
        logits = one.inputs.target @ mean + one.inputs.user.sum()
        np.testing.assert_allclose(logits, one.edge_logits, atol=1e-5)
        np.testing.assert_allclose(3 * logits, one.rerank_logits, atol=1e-5)
