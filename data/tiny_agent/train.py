"""Records the runs of lesson 08 under data/runs: `python data/tiny_agent/train.py NAME ...`, or all of them.

`agent-long` is one long run of stepwise GRPO. `agent-METHOD-SEED` compares three ways of turning the same kind of
trajectories into a batch; everything else is the same trainer with the same settings.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from course_lib.gallery import BaselineOverSteps
from course_lib.models import load_tiny_agent
from course_lib.research import RandomLibraries, ResearchTask
from course_lib.runs import write_evaluation
from course_lib.training import GRPOConfig, GRPOTrainer
from course_lib.trajectories import Call, SegmentBatch, Trajectory, stepwise_batch, trajectory_advantages

RUNS = Path(__file__).parents[1].relative_to(Path(__file__).parents[2]) / "runs"  # records name no place of a machine
LIVE = GRPOConfig(
    steps=24, prompts_per_step=24, group_size=8, max_new_tokens=6, temperature=1.0, max_resamples=0, learning_rate=1e-3,
    warmup_steps=0, tokens_per_row=512, eval_problems=1000,
)  # fmt: skip
LONG = replace(LIVE, steps=100, prompts_per_step=32)
COMPARED = replace(LIVE, steps=30, prompts_per_step=16, eval_problems=300)


class FinalTranscriptTrainer(GRPOTrainer):
    """The shortcut of the append-only agent, wrong here: one row a trajectory, what its last call saw and wrote.

    Trained on is all in it that the policy wrote: the answer, and the last notes, which stand there without the page
    they were taken from. Earlier calls are in no row.
    """

    def make_batch(self, trajectories: Sequence[Trajectory]) -> SegmentBatch:
        config = self.config
        advantages = trajectory_advantages(trajectories, baseline=config.baseline, scale=config.scale)
        finals = [Trajectory(final_transcript(t), t.reward, t.group_id) for t in trajectories]
        return stepwise_batch(finals, pad_token_id=0, advantages=advantages).to(self.model.device)


def final_transcript(trajectory: Trajectory) -> list[Call]:
    """The last call, and before it the last notes as if they had been written where they stand in its context."""
    *earlier, last = trajectory.calls
    for call in reversed(earlier):
        size = len(call.output)
        for place in range(len(last.context) - size, 0, -1):
            if last.context[place : place + size] == call.output:
                return [Call(last.context[:place], call.output, call.log_probs), last]
    return [last]


METHODS = {"stepwise": GRPOTrainer, "final-transcript": FinalTranscriptTrainer, "step-mixed": BaselineOverSteps}
NAMES = ["agent-long", *(f"agent-{method}-{seed}" for seed in range(5) for method in METHODS)]


def record(name: str) -> None:
    """Makes one run and what it leaves behind."""
    method, seed = ("stepwise", 0) if name == "agent-long" else name.removeprefix("agent-").rsplit("-", 1)
    config = replace(LONG if name == "agent-long" else COMPARED, seed=int(seed), output_dir=str(RUNS / name))
    model, tokenizer = load_tiny_agent()
    task = ResearchTask(RandomLibraries(hops=2, seed=int(seed), held_out=config.eval_problems))
    trainer = METHODS[method](model, tokenizer, task, config)
    before = trainer.evaluate(temperature=1.0)
    trainer.train()
    after = trainer.evaluate(temperature=1.0)
    write_evaluation(RUNS / name / "evaluation_before.json", before)
    write_evaluation(RUNS / name / "evaluation_after.json", after)
    shutil.rmtree(RUNS / name / "checkpoints")
    print(f"{name}: {before} -> {after}", flush=True)


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    for wanted in sys.argv[1:] or NAMES:
        record(wanted)
