from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reranker.gray.split import PPM, SplitPlan, assign, bucket_ppm


@given(st.text(max_size=50), st.text(max_size=300))
def test_a_bucket_is_a_whole_number_of_parts_per_million(salt: str, unit: str) -> None:
    bucket = bucket_ppm(salt, unit)

    assert isinstance(bucket, int)
    assert 0 <= bucket < PPM
    assert bucket == bucket_ppm(salt, unit)


def test_the_buckets_of_known_units_never_change() -> None:
    assert [bucket_ppm("salt", unit) for unit in ("196", "", "ü", "a" * 300)] == [
        979052,
        386831,
        241700,
        919368,
    ]


def test_salt_and_unit_cannot_be_confused() -> None:
    assert bucket_ppm("a", "bc") != bucket_ppm("ab", "c")


def test_units_spread_evenly_over_the_buckets() -> None:
    tenths = [0] * 10
    for i in range(100_000):
        tenths[bucket_ppm("s", f"user-{i}") * 10 // PPM] += 1

    # Each tenth holds 10,000 +- 95 (one sigma); five sigma.
    assert all(abs(count - 10_000) < 475 for count in tenths)


def test_two_salts_split_independently() -> None:
    in_both = sum(
        bucket_ppm("one", str(i)) < PPM // 10 and bucket_ppm("two", str(i)) < PPM // 10 for i in range(100_000)
    )

    assert abs(in_both - 1_000) < 160


@given(st.text(max_size=300))
def test_without_a_gray_release_everybody_is_served_by_stable(unit: str) -> None:
    found = assign(SplitPlan(stable="r1", salt="s"), unit)

    assert (found.release, found.arm, found.reason) == ("r1", "stable", "no_gray_release")
    assert found.bucket_ppm == bucket_ppm("s", unit)
