from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reranker.gray.drift import noise, psi

COUNTS = st.dictionaries(st.integers(-32, 32), st.integers(1, 500), min_size=1)


def drawn(rng: np.random.Generator, n: int, shift: float = 0.0) -> dict[int, int]:
    values, counts = np.unique(np.floor(4 * rng.normal(shift, 1.0, n)).astype(int), return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


@given(COUNTS)
def test_the_same_counts_do_not_drift(counts: dict[int, int]) -> None:
    assert psi(counts, counts) == 0.0


@given(COUNTS, COUNTS)
def test_the_index_is_never_negative(one: dict[int, int], other: dict[int, int]) -> None:
    assert psi(one, other) >= 0.0


def test_a_shift_of_half_a_deviation_is_about_a_quarter() -> None:
    rng = np.random.default_rng(1)

    # For two normal distributions a shift of d deviations makes a PSI of about d * d.
    assert 0.18 < psi(drawn(rng, 100_000, 0.5), drawn(rng, 100_000)) < 0.28


def test_equal_samples_stay_under_the_noise_however_often_one_looks() -> None:
    rng = np.random.default_rng(2)
    over = 0
    for _ in range(100):
        one: dict[int, int] = {}
        other: dict[int, int] = {}
        for look in range(1, 30):
            for counts in (one, other):
                for at, n in drawn(rng, 50).items():
                    counts[at] = counts.get(at, 0) + n
            if psi(one, other) > noise(50 * look, 50 * look, 0.05):
                over += 1
                break
    assert over <= 5


def test_noise_falls_with_the_samples_and_grows_with_caution() -> None:
    assert noise(100, 100, 0.01) > noise(1000, 1000, 0.01) > noise(100_000, 100_000, 0.01)
    assert noise(1000, 1000, 0.001) > noise(1000, 1000, 0.01)
