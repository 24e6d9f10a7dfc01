"""Policies small enough to enumerate: exact J(θ), exact ∇J(θ), exact mean and variance of any estimator.

policy = ToyPolicy(("search", "think", "answer"), 3, reward, end="answer")
policy.objective(), policy.gradient()                  # J and ∇J, summed over every outcome

def reinforce(samples):                                # you write the estimator for one group …
    return (samples.rewards[:, None] * samples.scores).mean(dim=0)

moments(policy, reinforce, group_size=4)               # … and see its bias and variance, exactly
"""

from course_lib.toy.agents import ToyAgent, append_only, keep_last, research_agent
from course_lib.toy.estimators import (
    Estimator,
    Loss,
    Moments,
    from_loss,
    moments,
    optimal_baseline,
    several_steps,
)
from course_lib.toy.policy import (
    EnumerablePolicy,
    Outcome,
    Samples,
    ToyPolicy,
    Written,
    deep_research,
    easy_and_hard,
    hasty_research,
)
from course_lib.toy.training import Run, ascend, train

__all__ = [
    "EnumerablePolicy",
    "Estimator",
    "Loss",
    "Moments",
    "Outcome",
    "Run",
    "Samples",
    "ToyAgent",
    "ToyPolicy",
    "Written",
    "append_only",
    "ascend",
    "deep_research",
    "easy_and_hard",
    "from_loss",
    "hasty_research",
    "keep_last",
    "moments",
    "optimal_baseline",
    "research_agent",
    "several_steps",
    "train",
]
