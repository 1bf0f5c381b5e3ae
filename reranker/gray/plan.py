"""What an operator plans: two releases, steps, gates, who is exempt. Refused when it could not be carried out.

Field types and ranges are checked by the decoder, what depends on several fields by `check_plan`; both name the field.
Invariant: a checked plan's weights grow from step to step and never pass `max_weight_ppm`; every gate can be judged.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from infra.errors import InvalidInput
from infra.release_name import NAME_LENGTH, NAME_PATTERN
from reranker.gray.measures import measure_of
from reranker.gray.split import PPM, Arm

MAX_ID_BYTES = 256
MAX_OVERRIDES = 10_000

Name = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH, pattern=NAME_PATTERN)]
Share = Annotated[int, Meta(ge=0, le=PPM, description="Parts per million.")]
Kind = Literal["limit", "minimum", "ratio", "non_inferiority", "superiority"]


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One weight of the ramp, held for `hold_s` and until each compared sample has `min_samples` requests.

    `shadow_ppm` of the requests that stable answers are scored by the candidate release too, afterwards and for nobody;
    a step of weight 0 shows nothing and counts those.
    """

    weight_ppm: Share
    shadow_ppm: Share = 0
    hold_s: Annotated[float, Meta(ge=0, le=30 * 86_400)] = 60.0
    min_samples: Annotated[int, Meta(ge=1)] = 500


class Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One condition. `limit` means, by kind:

    limit: the worst value the candidate release may have, where less is better; minimum: the same, where more is;
    ratio: the largest candidate/baseline of a latency quantile;
    non_inferiority: the relative drop that must be ruled out (and is looked for); superiority: the relative gain that
    is looked for. `alpha`: the chance of a false verdict over the whole release, however often it is looked at.
    `dry_run`: judged and shown, never acted upon.
    """

    metric: Annotated[str, Meta(min_length=1, max_length=80)]
    kind: Kind = "limit"
    limit: Annotated[float, Meta(ge=0)]
    alpha: Annotated[float, Meta(gt=0, le=0.1)] = 0.005
    min_samples: Annotated[int, Meta(ge=1)] = 100
    dry_run: bool = False


class Override(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Users who have this arm whatever their bucket; their requests count for no gate."""

    user_ids: Annotated[list[str], Meta(min_length=1, max_length=MAX_OVERRIDES)]
    arm: Arm


HARD_GATES = (
    Gate(metric="error_share", limit=0.01),
    Gate(metric="deadline_miss_share", limit=0.05),
    Gate(metric="degraded_share", limit=0.05),
    Gate(metric="latency_p99", kind="ratio", limit=1.5),
    Gate(metric="latency_p50", kind="ratio", limit=1.5),
)
RAMP = tuple(Step(weight_ppm=w) for w in (10_000, 50_000, 250_000, 500_000))


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A gray release as it is asked for. `path` is the candidate's directory on the machine of the stack; `salt`
    defaults to the candidate's name: another release, other users."""

    name: Name
    stable: Name
    candidate: Name
    path: Annotated[str, Meta(max_length=4096, pattern=r"^/")]
    salt: Annotated[str, Meta(max_length=128, pattern=r"^[\x21-\x7e]*$")] = ""
    unit: Annotated[str, Meta(pattern=r"^(user_id|session_id|header:[A-Za-z0-9-]{1,64})$")] = "user_id"
    steps: Annotated[tuple[Step, ...], Meta(min_length=1, max_length=50)] = RAMP
    gates: Annotated[tuple[Gate, ...], Meta(max_length=50)] = HARD_GATES
    overrides: Annotated[tuple[Override, ...], Meta(max_length=100)] = ()
    holdout_ppm: Share = 0
    max_weight_ppm: Share = PPM
    on_fail: Literal["abort", "pause"] = "abort"
    auto_promote: bool = False


def check_plan(plan: Plan) -> None:
    """Raises InvalidInput naming the field."""
    if plan.candidate == plan.stable:
        raise InvalidInput("candidate", "is the stable release already")
    if plan.max_weight_ppm > PPM - plan.holdout_ppm:
        raise InvalidInput("max_weight_ppm", f"with a holdout of {plan.holdout_ppm} at most {PPM - plan.holdout_ppm}")
    _check_steps(plan)
    for i, gate in enumerate(plan.gates):
        _check_gate(gate, f"gates[{i}]")
    _check_overrides(plan)


def check_weight(plan: Plan, weight_ppm: int, field: str = "weight_ppm") -> None:
    """Raises InvalidInput when the weight passes the plan's maximum."""
    if not 0 <= weight_ppm <= plan.max_weight_ppm:
        raise InvalidInput(field, f"{weight_ppm} is not between 0 and max_weight_ppm ({plan.max_weight_ppm})")


def overrides_of(plan: Plan) -> dict[str, Arm]:
    """The arm of every user who is named."""
    return {user_id: override.arm for override in plan.overrides for user_id in override.user_ids}


def _check_steps(plan: Plan) -> None:
    before = -1
    for i, step in enumerate(plan.steps):
        check_weight(plan, step.weight_ppm, f"steps[{i}].weight_ppm")
        if step.weight_ppm <= before:
            raise InvalidInput(f"steps[{i}].weight_ppm", f"{step.weight_ppm} is not more than the step before it")
        if step.weight_ppm == 0 and step.shadow_ppm == 0:
            raise InvalidInput(f"steps[{i}].shadow_ppm", "a step of weight 0 needs shadow traffic")
        before = step.weight_ppm
    if plan.steps[-1].weight_ppm == 0:
        raise InvalidInput(
            f"steps[{len(plan.steps) - 1}].weight_ppm", "the last step has to show the candidate release"
        )
    needs_baseline = any(gate.kind != "limit" for gate in plan.gates)
    if needs_baseline and plan.steps[0].weight_ppm >= PPM - plan.holdout_ppm:
        raise InvalidInput("steps[0].weight_ppm", "leaves no baseline, but a gate compares with it")


def _check_gate(gate: Gate, path: str) -> None:
    measure = measure_of(gate.metric)
    if measure is None:
        raise InvalidInput(f"{path}.metric", f"there is no metric {gate.metric!r}")
    if gate.kind not in measure.kinds:
        raise InvalidInput(f"{path}.kind", f"{gate.metric} takes {' or '.join(measure.kinds)}")
    if gate.kind == "ratio" and gate.limit < 1:
        raise InvalidInput(f"{path}.limit", "a ratio below 1 would fail a release that is as good as stable")
    if gate.kind == "non_inferiority" and not 0.001 <= gate.limit < 1:
        raise InvalidInput(f"{path}.limit", "a relative drop is at least 0.001 and less than 1")
    if gate.kind == "superiority" and gate.limit < 0.001:
        raise InvalidInput(f"{path}.limit", "the gain that is looked for is at least 0.001")
    if measure.is_share and not 0 < gate.limit < 1:
        raise InvalidInput(f"{path}.limit", "a share is more than 0 and less than 1")
    if gate.kind == "minimum" and not 0 < gate.limit <= 1:
        raise InvalidInput(f"{path}.limit", "the least value is more than 0 and at most 1")
    if gate.kind == "limit" and gate.limit == 0:
        raise InvalidInput(f"{path}.limit", "is more than 0")


def _check_overrides(plan: Plan) -> None:
    seen: set[str] = set()
    for i, override in enumerate(plan.overrides):
        for j, user_id in enumerate(override.user_ids):
            path = f"overrides[{i}].user_ids[{j}]"
            if not user_id or len(user_id.encode()) > MAX_ID_BYTES:
                raise InvalidInput(path, f"Expected an id of 1 to {MAX_ID_BYTES} bytes")
            if user_id in seen:
                raise InvalidInput(path, "is named twice")
            seen.add(user_id)
