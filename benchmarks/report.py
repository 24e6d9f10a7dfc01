"""results.json as a table and a figure in benchmarks/README.md, and the few figures that the course's README quotes.

benchmarks/.venv/bin/python benchmarks/report.py
"""

import json
from pathlib import Path
from typing import Any

from rates import floor_seconds
from workloads import GRID, Point

HERE = Path(__file__).resolve().parent
START, END = "<!-- measured: written by benchmarks/report.py -->", "<!-- end of measured -->"
SUMMARY = HERE.parent / "README.md"


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a point of the grid that was measured, as numbers."""
    table = []
    for point in measured_points(results):
        result = results[point.name]
        ours, trl = result["course_lib"], result["trl"]
        floor = floor_seconds(result["point"], ours, results["rates"])
        table.append(
            {
                "name": point.name,
                "trl": trl,
                "ours": ours,
                "faster": trl["seconds"] / ours["seconds"],
                "memory": ours["peak_gib"] / trl["peak_gib"],
                "floor": floor,
                "over_floor": ours["seconds"] / floor,
            }
        )
    return table


def measured_points(results: dict[str, Any]) -> list[Point]:
    """The points of the grid that have results."""
    return [point for point in GRID if point.name in results]


def linear_fit(results: dict[str, Any]) -> tuple[list[tuple[float, float]], float, float, float]:
    """(distinct tokens, seconds of the update) of every batch; milliseconds a token, seconds at 0, R²."""
    batches = [results[point.name]["course_lib"] for point in measured_points(results)]
    points = [(batch["tokens_run"], batch["updating"]) for batch in batches]
    points += [(way["tree"]["tokens_run"], way["tree"]["seconds"]) for way in agents(results).values()]
    count = len(points)
    mean_x, mean_y = (sum(p[axis] for p in points) / count for axis in (0, 1))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    start = mean_y - slope * mean_x
    rest = sum((y - start - slope * x) ** 2 for x, y in points)
    return sorted(points), 1000 * slope, start, 1 - rest / sum((y - mean_y) ** 2 for _, y in points)


def agents(results: dict[str, Any]) -> dict[str, Any]:
    """The results on agents by number of calls."""
    return {calls: way for calls, way in results.get("agents", {}).items() if calls.isdigit()}


def tables(results: dict[str, Any]) -> str:
    """Everything that was measured, as Markdown."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    lines = [
        f"{machine['date']}, {machine['processor']}, {machine['threads']} threads of {machine['cores']} cores, "
        f"{machine['memory_gib']:g} GiB; Python {machine['python']}, {versions}. Matrix products of the model's "
        f"shapes: {results['rates']['flops'] / 1e9:.0f} GFLOP/s.",
        "",
        "| prompts × G, prompt + reply | TRL, s a step | course_lib, s a step | times faster | samples/s | "
        "tokens a sample | peak memory, GiB | floor, s | over the floor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows(results):
        trl, ours = row["trl"], row["ours"]
        lines.append(
            f"| {row['name']} | {seconds(trl)} | {seconds(ours)} | **{row['faster']:.1f}** | "
            f"{trl['samples'] / trl['seconds']:.2f} → {ours['samples'] / ours['seconds']:.2f} | "
            f"{trl['tokens_run'] / trl['samples']:.0f} → {ours['tokens_run'] / ours['samples']:.1f} | "
            f"{trl['peak_gib']:.1f} → {ours['peak_gib']:.1f} ({row['memory']:.2f}) | {row['floor']:.2f} | "
            f"{row['over_floor']:.2f} |"
        )
    first = results[GRID[0].name]
    plain, ours = first["trl without recomputation"], first["course_lib"]
    lines += [
        "",
        "Medians of the steps; in parentheses the fastest and the slowest of several. TRL recomputes activations in "
        "the backward pass unless told otherwise, and so it does above. Without, which fits this memory on short "
        f"prompts only, the first row is {seconds(plain)} s and {plain['peak_gib']:.1f} GiB: course_lib is "
        f"{plain['seconds'] / ours['seconds']:.1f} times faster with {ours['peak_gib'] / plain['peak_gib']:.2f} of its "
        "memory." + missing(results),
    ]
    if has_line(results):
        _, slope, start, fit = linear_fit(results)
        lines += [
            "",
            "![Seconds a step of both sides and the floor; seconds of an update against distinct tokens](results.png)",
            "",
            f"An update takes {slope:.1f} ms for each distinct token and {start:.2f} s besides (R² = {fit:.3f} over "
            "all batches, agents included).",
        ]
    if agents(results):
        lines += [
            "",
            "| agent: calls | a padded row a call, s | tree, s | times faster | tokens run |",
            "|---|---|---|---|---|",
        ]
    for calls, way in agents(results).items():
        padded, tree = way["padded"], way["tree"]
        lines.append(
            f"| {calls} | {seconds(padded)} | {seconds(tree)} | **{padded['seconds'] / tree['seconds']:.1f}** | "
            f"{padded['tokens_run']:,.0f} → {tree['tokens_run']:,.0f} |"
        )
    lines += memory(results) + profile(results)
    if "learning" in results:
        lines += ["", learning(results)]
    return "\n".join(lines)


def missing(results: dict[str, Any]) -> str:
    """Names what has not been measured."""
    names = [point.name for point in GRID if point.name not in results]
    names += [name for name in ("agents", "memory", "profile", "learning") if name not in results]
    return f" Not measured in this run: {'; '.join(names)}." if names else ""


def has_line(results: dict[str, Any]) -> bool:
    """Are there batches of different sizes to lay a line through?"""
    return len(measured_points(results)) + len(agents(results)) > 1


def memory(results: dict[str, Any]) -> list[str]:
    """Rows of a batch against memory and time."""
    if "memory" not in results:
        return []
    lines = [
        "",
        "An update of 1,024 distinct tokens (4 × 4, 40 + 54) by `tokens_per_row`; the gradient is the same in all:",
        "",
        "| `tokens_per_row` | tokens run | peak memory, GiB | seconds | gradient norm |",
        "|---|---|---|---|---|",
    ]
    for way in results["memory"]:
        name = f"{way['tokens_per_row']}{', `gradient_checkpointing`' if way['checkpointing'] else ''}"
        lines.append(
            f"| {name} | {way['tokens_run']:,.0f} | {way['peak_gib']:.2f} | {way['seconds']:.1f} | "
            f"{way['gradient_norm']:.4f} |"
        )
    return lines


def profile(results: dict[str, Any]) -> list[str]:
    """Shares of a step's time."""
    if "profile" not in results:
        return []
    lines = ["", "| share of the time, one thread | sampling | update |", "|---|---|---|"]
    for name, phases in results["profile"].items():
        for kind, share in phases["sampling"].items():
            lines.append(f"| {name}: {kind} | {share:.0%} | {phases['updating'][kind]:.0%} |")
    return lines


def learning(results: dict[str, Any]) -> str:
    """How the two got on with the laptop task."""
    ours, trl = results["learning"]["course_lib"], results["learning"]["trl"]

    def told(name: str, side: dict[str, Any]) -> str:
        last = [place["held_out"] for place in side["curve"] if place["held_out"] is not None][-1]
        verb = "reached 60 %" if side["reached"] else f"had not reached 60 % but {last:.0%}"
        return f"{name} {verb} after {side['steps']} steps and {side['seconds']:.0f} s"

    start = ours["curve"][0]["held_out"]
    return (
        f"The laptop task, 16 × 8, from {start:.0%} of 100 held-out problems; exams off the clock, dead groups kept on "
        f"both sides, task, reward and settings handed over by `course_lib.handover`: {told('course_lib', ours)}; "
        f"{told('TRL', trl)}, where its time was up."
        if not trl["reached"]
        else f"The laptop task, 16 × 8, from {start:.0%}: {told('course_lib', ours)}; {told('TRL', trl)}."
    )


def quoted(results: dict[str, Any]) -> str:
    """What the course's README says of all this."""
    by_name = {row["name"]: row for row in rows(results)}
    lines = [
        f"| {name} tokens | {row['trl']['seconds']:.1f} s | {row['ours']['seconds']:.1f} s | {row['faster']:.1f} × | "
        f"{row['trl']['peak_gib']:.1f} → {row['ours']['peak_gib']:.1f} GiB |"
        for name, row in ((key.removesuffix(" tokens"), by_name[key]) for key in QUOTED if key in by_name)
    ]
    machine = results["machine"]
    return "\n".join(
        [
            f"A step of GRPO with SmolLM2-135M, {machine['threads']} threads, float32, "
            f"TRL {machine['versions']['trl']} as it comes:",
            "",
            "| prompts × G, prompt + reply | TRL | course_lib | faster | peak memory |",
            "|---|---|---|---|---|",
            *lines,
        ]
    )


QUOTED = tuple(point.name for point in (GRID[0], GRID[3], GRID[6], GRID[8]))


def seconds(side: dict[str, Any]) -> str:
    """The median, with the extremes where there are several."""
    every = side["all_seconds"]
    spread = f" ({min(every):.1f}–{max(every):.1f})" if len(every) > 1 else ""
    return f"{side['seconds']:.1f}{spread}"


def between_marks(text: str, inner: str) -> str:
    """`text` with `inner` between the two marks."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"expected {START} and {END}")
    return f"{before}{START}\n\n{inner}\n\n{END}{after}"


def draw(results: dict[str, Any], path: Path) -> None:
    """Left: seconds a step. Right: an update's seconds against its distinct tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from course_lib.plots import GREY, NAVY, VERMILION, use_course_style

    use_course_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), width_ratios=(3, 2))
    table = rows(results)
    places = range(len(table))
    for index, row in enumerate(table):
        span = [row["floor"], row["trl"]["seconds"]]
        left.plot(span, [index] * 2, color="#D8D8D4", linestyle="-", linewidth=2, zorder=1)
    for values, colour, marker, label in (
        ([row["floor"] for row in table], GREY, "|", "floor"),
        ([row["ours"]["seconds"] for row in table], NAVY, "o", "course_lib"),
        ([row["trl"]["seconds"] for row in table], VERMILION, "s", "TRL"),
    ):
        left.plot(values, places, marker, color=colour, markersize=9, markeredgewidth=2, label=label, linestyle="none")
    for index, row in enumerate(table):
        left.annotate(
            f"{row['faster']:.0f} ×", (row["trl"]["seconds"], index), (8, 0), textcoords="offset points", va="center"
        )
    left.set_yticks(places, [row["name"].replace(" tokens", "") for row in table])
    left.invert_yaxis()
    left.set(xscale="log", xlabel="seconds a step (log scale)", title="A step, and what it could be at best")
    left.set_xlim(right=3 * max(row["trl"]["seconds"] for row in table))
    left.legend(loc="upper right")
    points, slope, start, _ = linear_fit(results)
    tokens = [x for x, _ in points]
    right.plot([0, max(tokens)], [start, start + slope * max(tokens) / 1000], color=GREY, linestyle="--", linewidth=1.5)
    right.plot(tokens, [y for _, y in points], "o", color=NAVY, markersize=8)
    right.text(0.05, 0.92, f"{slope:.1f} ms a token + {start:.1f} s", transform=right.transAxes, va="top")
    right.set(xlabel="distinct tokens of the batch", ylabel="seconds of the update", title="Linear in distinct tokens")
    right.set_xlim(left=0)
    right.set_ylim(bottom=0)
    figure.savefig(path)
    plt.close(figure)


def write(results: dict[str, Any]) -> None:
    """The table and the figure of benchmarks/README.md, and the quotation in the course's README."""
    if has_line(results):
        draw(results, HERE / "results.png")
    for path, inner in ((HERE / "README.md", tables(results)), (SUMMARY, quoted(results))):
        path.write_text(between_marks(path.read_text(encoding="utf-8"), inner), encoding="utf-8")


if __name__ == "__main__":
    write(json.loads((HERE / "results.json").read_text(encoding="utf-8")))
