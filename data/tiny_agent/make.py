"""Makes the tiny agent of lesson 08: `python data/tiny_agent/make.py` writes weights and tokenizer beside this file.

A Llama-architecture model of a quarter of a million parameters learns from an expert how to look things up, and then
from the same expert with bad habits: NOISE of its notes hold a random fact of the page, of the right kind, in place of
the right one. What to write down is left to reinforcement learning.
"""

import math
import time
from collections.abc import Iterator
from pathlib import Path

from course_lib.models import save_model, tiny_model, word_level_tokenizer
from course_lib.research import RandomLibraries, ResearchTask, expert_trajectory
from course_lib.trajectories import Trajectory
from course_lib.warm_start import warm_start

FOLDER = Path(__file__).parent
CLEAN, NOISY, BATCH, RATE, NOISE, SEED = 2600, 400, 8, 3e-3, 0.75, 0


def main() -> None:
    """A few minutes on a laptop."""
    tokenizer = word_level_tokenizer(RandomLibraries.vocabulary())
    model = tiny_model(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, initializer_range=0.05, seed=SEED,
    )  # fmt: skip
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} words", flush=True)
    # A stream of its own: no run of the course trains on these questions.
    task = ResearchTask(RandomLibraries(hops=(1, 2), seed=1000 + SEED, held_out=0))
    steps = CLEAN + NOISY

    def batches() -> Iterator[list[Trajectory]]:
        for step in range(steps):
            questions = map(task.training_problem, range(step * BATCH, (step + 1) * BATCH))
            noise = 0.0 if step < CLEAN else NOISE
            yield [expert_trajectory(task, q, tokenizer, noise=noise, seed=SEED) for q in questions]

    began, losses = time.perf_counter(), []

    def report(step: int, loss: float) -> None:
        losses.append(loss)
        if step % 100 == 99:
            print(f"{step + 1} {sum(losses[-100:]) / 100:.4f} {time.perf_counter() - began:.0f} s", flush=True)

    def rate(step: int) -> float:
        return RATE * min(1, step / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))

    warm_start(model, batches(), learning_rate=rate, weight_decay=0.01, on_step=report)
    save_model(model, tokenizer, FOLDER)


if __name__ == "__main__":
    main()
