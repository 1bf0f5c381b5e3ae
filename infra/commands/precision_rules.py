"""The settings of precisions as the rules of one training, with the files of scales that `--scales` names.

Refuses two files for the same ranker. Invariant: what no setting and no option changes is as `reranker.precisions` has
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from infra.errors import InvalidInput
from infra.release import ROLES, Role
from infra.settings import Settings

if TYPE_CHECKING:
    from infra.engine.calibrate import Scales
    from reranker.precisions import Rules


def precision_rules(settings: Settings, scales: Iterable[Path] = ()) -> Rules:
    """Raises InvalidInput when a file holds no scales or names no ranker."""
    from infra.engine.quality import Limits
    from reranker.precisions import Rules

    def limits(log_loss_pct: float, logit_rmse: float, overlap_at_20: float) -> Limits:
        return Limits(
            max_auc_loss_pct=settings.precision_max_auc_loss_pct,
            max_log_loss_rise_pct=log_loss_pct,
            max_logit_rmse=logit_rmse,
            min_overlap_at_20=overlap_at_20,
        )

    return Rules(
        fp16=limits(
            settings.precision_max_log_loss_rise_pct_fp16,
            settings.precision_max_logit_rmse_fp16,
            settings.precision_min_overlap_at_20_fp16,
        ),
        int8=limits(
            settings.precision_max_log_loss_rise_pct_int8,
            settings.precision_max_logit_rmse_int8,
            settings.precision_min_overlap_at_20_int8,
        ),
        method=settings.calibration_method,
        calibration_days=settings.calibration_days,
        calibration_requests=settings.calibration_requests,
        compared_requests=settings.precision_requests,
        scales=_scales(scales),
    )


def _scales(files: Iterable[Path]) -> dict[Role, Scales]:
    from infra.engine.calibrate import read_scales

    found: dict[Role, Scales] = {}
    for file in files:
        scales = read_scales(file)
        role: Role | None = next((role for role in ROLES if role == scales.role), None)
        if role is None:
            raise InvalidInput("scales", f"{file} is of {scales.role!r}; there are {', '.join(ROLES)}")
        if role in found:
            raise InvalidInput("scales", f"{file} is the second file of scales of {role}; give one")
        found[role] = scales
    return found
