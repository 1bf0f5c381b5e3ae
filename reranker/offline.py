"""The offline scorer: a release ranks a recorded request in one process, the way the stack does over many.

Rows from the release's tables, features from `feature_service.schema`, models in ONNX Runtime. What serving answers
must equal this to rounding; the parity test compares the two. Needs no torch. Refuses a release of another schema.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from feature_service.recorded import RecordedFeatures, recorded_features
from infra.engine.onnx_cpu import OnnxEngine
from infra.release import RecordedRequest, Release

F32 = NDArray[np.float32]


class OfflineScorer:
    """Scores requests from tables and models held in memory."""

    def __init__(self, features: RecordedFeatures, edge: OnnxEngine, rerank: OnnxEngine) -> None:
        self._features = features
        self._edge = edge
        self._rerank = rerank

    def score(self, request: RecordedRequest) -> tuple[F32, F32]:
        """Edge and rerank logits, f32[N] each, of the request's candidates."""
        inputs = self._features.inputs(request)
        arrays = inputs.hist[None], inputs.target[None], inputs.mask[None], inputs.user[None]
        return self._edge.run(*arrays)[0], self._rerank.run(*arrays)[0]


def scorer_of(release: Release) -> OfflineScorer:
    """A scorer over the tables and models of a release. Raises ReleaseRefused."""
    return OfflineScorer(recorded_features(release), OnnxEngine(release.edge_model), OnnxEngine(release.rerank_model))
