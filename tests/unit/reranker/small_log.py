"""Rankers and training batches of a small log, for the tests of steps and fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from edge_ranker.samples import Samples
from edge_ranker.tables import Tables
from feature_service.schema import FeatureSchema
from feature_service.timeline import Timeline
from reranker.rankers import Rankers
from reranker.recipe import Recipe

SCHEMA = FeatureSchema(n_user_buckets=8, max_history=10)
RECIPE = replace(Recipe(), batch_size=32)


def small_rankers(timeline: Timeline, **more: Any) -> Rankers:
    """The same ones every time; `more` goes to the tables."""
    torch.manual_seed(0)
    return Rankers(Tables(SCHEMA, timeline, **more))


def small_samples(timeline: Timeline) -> Samples:
    """The same batches of 32 every time."""
    return Samples(
        timeline,
        SCHEMA,
        timeline.train,
        rng=np.random.default_rng(0),
        batch_size=RECIPE.batch_size,
        negatives_per_kind=2,
        bucket_share=0.5,
    )
