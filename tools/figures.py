"""Draw the README's figure from the recorded runs. Run it after a run was recorded anew."""

from pathlib import Path

import matplotlib

matplotlib.use("agg")

from course_lib import plots
from course_lib.runs import Run, read_run

RUNS = Path(__file__).resolve().parents[1] / "data" / "runs"
SEEDS = ("laptop-0", "laptop-1", "laptop-2")


def exam_curve(run: Run) -> dict[int, float]:
    """Step to accuracy on the exam: before, during and after the run."""
    during = dict(zip(*run.column("held_out"), strict=True))
    return {0: run.before.accuracy, **during, len(run.times): run.after.accuracy}


def draw() -> None:
    """Writes data/runs/laptop.png."""
    curves = [exam_curve(read_run(RUNS / name)) for name in SEEDS]
    ax = plots.learning_curve(
        {"GRPO": [list(curve.values()) for curve in curves]},
        x=list(curves[0]),
        band="range",
        ylabel="share of 200 problems solved",
        title="Sums and differences of 0–20, never trained on",
    )
    ax.set_ylim(0, 1)
    ax.figure.savefig(RUNS / "laptop.png", metadata={"Software": None})


if __name__ == "__main__":
    draw()
