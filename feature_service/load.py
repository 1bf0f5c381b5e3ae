"""Which data a training reads: `movielens-100k` or a folder of the user's own files. Refuses everything else."""

from __future__ import annotations

from pathlib import Path

from feature_service.dataset import Dataset
from feature_service.folder import read_folder
from feature_service.movielens import MOVIELENS_100K, read_movielens
from infra.errors import InvalidInput


def load_dataset(data: str, cache: Path) -> Dataset:
    """Read `movielens-100k` (fetched once into `cache`) or the folder `data`. Raises InvalidInput."""
    if data == MOVIELENS_100K:
        return read_movielens(cache)
    if Path(data).is_dir():
        return read_folder(Path(data))
    raise InvalidInput("data", f"there is no folder {data}; give one, or {MOVIELENS_100K}")
