"""Public names of earlier versions, which one more release accepts."""

import warnings
from typing import Any

NAMES = {
    "OrderWarning": "ConstraintWarning",
    "Survey": "StepProfile",
    "SurveyError": "StepProfileError",
    "UnplannedError": "PlanningError",
    "UnplannedWarning": "FallbackWarning",
    "survey": "profile_step",
}
"""New names by old ones."""


def warn_of(old: str, new: str) -> None:
    """Warns the caller of the caller that ``old`` will be removed in the next release."""
    warnings.warn(
        f"autoremat.{old} is deprecated and will be removed in the next release; use autoremat.{new}", DeprecationWarning, 3
    )


def install() -> None:
    """Gives classes the methods that are functions now."""
    from autoremat.planner.plans.plan import Plan

    Plan.as_selective_checkpoint_context = _as_selective_checkpoint_context  # type: ignore[attr-defined]


def _as_selective_checkpoint_context(plan: Any, model: Any = None) -> Any:
    warn_of("Plan.as_selective_checkpoint_context(...)", "selective_checkpoint_context(plan, ...)")
    from autoremat.tools.eager_checkpoint import selective_checkpoint_context

    return selective_checkpoint_context(plan, model)
