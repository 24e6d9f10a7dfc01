"""Draw the README's figure from the recorded runs. Run it after a run was recorded anew."""

from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from course_lib import plots
from course_lib.runs import Run, read_run

RUNS = Path(__file__).resolve().parents[1] / "data" / "runs"


def exam_curve(run: Run) -> tuple[list[float], list[float]]:
    """Minutes of training, and the exam at each: before, during, after."""
    minutes = [0.0, *accumulate((row["sampling"] + row["updating"]) / 60 for row in run.times)]
    steps, accuracy = run.column("held_out")
    curve = {0: run.before.accuracy, **dict(zip(steps, accuracy, strict=True)), len(run.times): run.after.accuracy}
    return [minutes[step] for step in curve], list(curve.values())


def draw(names: dict[str, list[str]]) -> plt.Figure:
    """One colour for each kind of run, one line for each run, the last exam with its 95 % interval."""
    plots.use_course_style()
    figure, ax = plt.subplots(figsize=(8, 3.8))
    for (label, folders), colour, dash in zip(names.items(), plots.CYCLE, plots.DASHES, strict=False):
        for run in (read_run(RUNS / folder) for folder in folders):
            minutes, accuracy = exam_curve(run)
            ax.plot(minutes, accuracy, dash, color=colour)
            low, high = run.after.interval
            ax.vlines(minutes[-1], low, high, color=colour, linewidth=1.2)
        end = (minutes[-1], accuracy[-1])
        ax.annotate(label, end, (6, -3), textcoords="offset points", color=colour, weight="bold")
    ax.set(xlabel="minutes of training on two processor cores", ylabel="right on the exam", ylim=(0, 1), xlim=(0, None))
    ax.margins(x=0.2)
    ax.set_title("Held-out sums and differences of 0–20: 200 problems, greedy, bar: 95 % interval")
    return figure


if __name__ == "__main__":
    shown = {"three seeds": ["laptop-0", "laptop-1", "laptop-2"], "longer": ["laptop-long"]}
    draw(shown).savefig(RUNS / "laptop.png", metadata={"Software": None})
