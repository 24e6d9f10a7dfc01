"""Policy gradients for language models, from REINFORCE to stepwise GRPO.

The mathematics is importable from here; each module's docstring says what the module is for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course_lib.advantages import (
        efficiency_advantages,
        generalized_advantages,
        group_relative_advantages,
        informative_groups,
        leave_one_out_advantages,
    )
    from course_lib.logprobs import response_log_probs, response_mask, token_entropy, token_log_probs
    from course_lib.losses import (
        LossReport,
        aggregate,
        clipped_surrogate,
        grpo_loss,
        kl_estimate,
        reinforce_loss,
        token_weights,
        truncated_importance_weights,
    )
    from course_lib.trajectories import (
        Call,
        Segment,
        SegmentBatch,
        Trajectory,
        segments,
        stepwise_batch,
        trajectory_advantages,
    )

__version__ = "0.1.0"

__all__ = [
    "Call",
    "LossReport",
    "Segment",
    "SegmentBatch",
    "Trajectory",
    "aggregate",
    "clipped_surrogate",
    "efficiency_advantages",
    "generalized_advantages",
    "group_relative_advantages",
    "grpo_loss",
    "informative_groups",
    "kl_estimate",
    "leave_one_out_advantages",
    "reinforce_loss",
    "response_log_probs",
    "response_mask",
    "segments",
    "stepwise_batch",
    "token_entropy",
    "token_log_probs",
    "token_weights",
    "trajectory_advantages",
    "truncated_importance_weights",
]


def __getattr__(name: str) -> Any:
    """The mathematics, and with it torch, is loaded when it is first asked for: the command line starts without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = [import_module(f"{__name__}.{part}") for part in ("advantages", "logprobs", "losses", "trajectories")]
    return next(getattr(module, name) for module in modules if hasattr(module, name))
