"""The recorded requests of a release with the logits they were recorded with: what a replica is checked by.

Refuses nothing; what has no row gets the table's default, as in serving.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feature_service.recorded import recorded_features
from feature_service.schema import ModelInputs
from infra.release import Release

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RecordedInputs:
    """One recorded request: inputs and the logits f32[N] that the trained models gave."""

    inputs: ModelInputs
    edge_logits: F32
    rerank_logits: F32


def recorded_inputs(release: Release) -> list[RecordedInputs]:
    """Every recorded request of a release. Raises ReleaseRefused when its schema means something else here."""
    features = recorded_features(release)
    return [
        RecordedInputs(
            features.inputs(request),
            np.asarray(request.edge_logits, np.float32),
            np.asarray(request.rerank_logits, np.float32),
        )
        for request in release.requests()
    ]
