from __future__ import annotations

from typing import Any

import msgspec
import pytest

from infra.errors import InvalidInput
from reranker.gray.plan import Plan, check_plan, overrides_of

GOOD: dict[str, Any] = {"name": "better-head", "stable": "a", "candidate": "b", "path": "/b"}


def plan(**changed: Any) -> Plan:
    return msgspec.json.decode(msgspec.json.encode({**GOOD, **changed}), type=Plan)


def test_a_plan_that_names_two_releases_is_complete() -> None:
    check_plan(plan())

    assert [step.weight_ppm for step in plan().steps] == [10_000, 50_000, 250_000, 500_000]


def test_a_plan_may_begin_in_the_shadow() -> None:
    check_plan(plan(steps=[{"weight_ppm": 0, "shadow_ppm": 100_000}, {"weight_ppm": 10_000, "shadow_ppm": 20_000}]))


def test_users_who_are_named_have_their_arm() -> None:
    found = plan(overrides=[{"user_ids": ["u1", "u2"], "arm": "candidate"}, {"user_ids": ["u3"], "arm": "stable"}])

    check_plan(found)
    assert overrides_of(found) == {"u1": "candidate", "u2": "candidate", "u3": "stable"}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"candidate": "a"}, "candidate"),
        ({"steps": [{"weight_ppm": 5}, {"weight_ppm": 5}]}, "steps[1].weight_ppm"),
        ({"steps": [{"weight_ppm": 50_001}], "max_weight_ppm": 50_000}, "steps[0].weight_ppm"),
        ({"steps": [{"weight_ppm": 0}, {"weight_ppm": 5}]}, "steps[0].shadow_ppm"),
        ({"steps": [{"weight_ppm": 0, "shadow_ppm": 9}]}, "steps[0].weight_ppm"),
        ({"gates": [{"metric": "overlap_at_k", "limit": 0.5}]}, "gates[0].kind"),
        ({"gates": [{"metric": "rank_correlation", "limit": 1.5, "kind": "minimum"}]}, "gates[0].limit"),
        ({"gates": [{"metric": "coverage", "limit": 1.0, "kind": "minimum"}]}, "gates[0].limit"),
        ({"gates": [{"metric": "score_drift", "limit": 0}]}, "gates[0].limit"),
        ({"holdout_ppm": 1}, "max_weight_ppm"),
        ({"steps": [{"weight_ppm": 1_000_000}]}, "steps[0].weight_ppm"),
        ({"gates": [{"metric": "happiness", "limit": 0.1}]}, "gates[0].metric"),
        ({"gates": [{"metric": "rate:", "limit": 0.1, "kind": "non_inferiority"}]}, "gates[0].metric"),
        ({"gates": [{"metric": "click_through", "limit": 0.1}]}, "gates[0].kind"),
        ({"gates": [{"metric": "error_share", "limit": 0.1, "kind": "ratio"}]}, "gates[0].kind"),
        ({"gates": [{"metric": "error_share", "limit": 1.0}]}, "gates[0].limit"),
        ({"gates": [{"metric": "latency_p99", "limit": 0.9, "kind": "ratio"}]}, "gates[0].limit"),
        ({"gates": [{"metric": "click_through", "limit": 1.5, "kind": "non_inferiority"}]}, "gates[0].limit"),
        ({"gates": [{"metric": "click_through", "limit": 0.0, "kind": "superiority"}]}, "gates[0].limit"),
        ({"overrides": [{"user_ids": ["u", "u"], "arm": "stable"}]}, "overrides[0].user_ids[1]"),
        ({"overrides": [{"user_ids": ["u" * 257], "arm": "stable"}]}, "overrides[0].user_ids[0]"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_by_field(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_plan(plan(**changed))

    assert refused.value.field == field


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "no spaces"},
        {"path": "relative"},
        {"salt": "a\u0000b"},
        {"unit": "shoe_size"},
        {"steps": []},
        {"steps": [{"weight_ppm": -1}]},
        {"gates": [{"metric": "error_share", "limit": 0.1, "alpha": 0}]},
        {"holdout_ppm": 1_000_001},
        {"colour": "green"},
    ],
)
def test_a_field_of_the_wrong_form_is_refused_when_it_is_read(changed: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        plan(**changed)
