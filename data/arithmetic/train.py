"""Records part A of lesson 10 under data/runs: `python data/arithmetic/train.py NAME ...`, or all in this order.

`sums` fine-tunes the small model on sums and differences of numbers 0 to 99. Each other run differs from it in one
thing: `kl` has a KL penalty, `symmetric` the same clip on both sides, `curriculum` begins with numbers up to 20. Two
more begin with `sums` and go on to what is harder: `three-operands` and `products`. A CUDA device takes the settings
GPU, anything else LAPTOP, without the last two. Each run is one `course_lib finetune`.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from course_lib.__main__ import main as course_lib

ROOT = Path(__file__).parents[2]
RUNS = Path("data/runs")
NAMES = {
    "sums": ["--samples", "16"],
    "kl": ["--beta", "0.1"],
    "symmetric": ["--clip-high", "0.2"],
    "curriculum": ["--level", "2,3"],
    "three-operands": ["--level", "3,4"],
    "products": ["--level", "3,5"],
}
LAPTOP = ["--preset", "laptop", "--level", "3", "--updates-per-batch", "2", "--steps", "40", "--eval-every", "8"]
GPU = ["--preset", "gpu", "--level", "3", "--updates-per-batch", "2", "--steps", "60", "--eval-every", "10"]


def record(name: str, settings: Sequence[str], folder: Path) -> int:
    """Makes one run, or goes on with one that was stopped; its exit code."""
    stopped = (folder / "checkpoints").exists() and not (folder / "evaluation_after.json").exists()
    return course_lib(["finetune", *settings, *NAMES[name], "--output", str(folder), *["--resume"] * stopped])


def main(names: Sequence[str]) -> int:
    """Makes the runs asked for, until one fails."""
    if unknown := set(names) - set(NAMES):
        raise SystemExit(f"expected some of {', '.join(NAMES)}, got {', '.join(sorted(unknown))}")
    cuda = torch.cuda.is_available()
    for name in names or list(NAMES)[: None if cuda else 4]:
        settings, kind = (GPU, "gpu") if cuda else (LAPTOP, "arithmetic")
        folder = RUNS / f"{kind}-{name}"
        if code := record(name, settings, folder):
            return code
        if not (folder / "evaluation_after.json").exists():
            raise SystemExit(f"{name}: stopped on its way; the same command goes on")
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
