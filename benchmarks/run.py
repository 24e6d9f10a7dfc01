"""course_lib against TRL: same model, prompts, lengths, dtype, optimizer and threads, step by step in turn.

    make bench                                    everything, laid out for 40 minutes on two idle cores
    make bench ARGS=--quick                       two minutes, to see that it runs; writes nothing
    make bench ARGS='"4 × 8, 45 + 6 tokens"'      one section anew; `--list` names them

Results go to results.json after every section, then the table and the figure to README.md.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import report
from rates import measure_rates
from sides import (
    THREADS,
    Side,
    agent_updates,
    course_lib_learns,
    course_lib_steps,
    memory_updates,
    profiled_step,
    trl_learns,
    trl_steps,
)
from workloads import GRID, QUICK, Point

RESULTS = Path(__file__).with_name("results.json")
CALLS = (1, 4, 16)
GOAL = 0.6
EVERY = 2
PATIENCE = 150
"""Seconds that TRL is given to reach the goal, exams aside; course_lib has twice that, so that the goal is seen."""


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the measured steps, all their seconds, and the process's peak memory."""
    medians = {
        key: statistics.median(step[key] for step in steps)
        for key in steps[0]
        if key not in ("peak_gib",) and steps[0][key] is not None
    }
    return medians | {"all_seconds": [step["seconds"] for step in steps], "peak_gib": steps[-1]["peak_gib"]}


def in_turn(sides: dict[str, Side], budget: float, rounds: int, *, warm: bool = True) -> dict[str, dict[str, Any]]:
    """A step to warm up, then steps in turn: at least one of each, no more than `rounds` or the budget takes."""
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for side in sides.values() if warm else ():
        side.step()
    spent = slowest = 0.0
    for number in range(rounds):
        if number and spent + slowest > budget:
            break
        began = time.perf_counter()
        for name, side in sides.items():
            steps[name].append(side.step())
        slowest = max(slowest, time.perf_counter() - began)
        spent += time.perf_counter() - began
    for side in sides.values():
        side.end()
    return {name: summary(made) for name, made in steps.items()}


def measure_point(point: Point, rounds: int) -> dict[str, Any]:
    """A point of the grid, by TRL and by course_lib."""
    sides = {"trl": Side(trl_steps, point, True), "course_lib": Side(course_lib_steps, point)}
    if point is GRID[0]:
        sides["trl without recomputation"] = Side(trl_steps, point, False)
    measured = in_turn(sides, point.seconds, rounds)
    expected = point.prompts * point.group * point.reply_tokens
    for name, result in measured.items():
        if result["reply_tokens"] != expected:
            raise RuntimeError(f"{name}: expected {expected} reply tokens a step, got {result['reply_tokens']}")
    return {"point": asdict(point), **measured}


def measure_agents(rounds: int) -> dict[str, Any]:
    """Updates on agents of 1, 4 and 16 calls: as a tree, and a padded row a call."""
    results = {}
    for calls in CALLS:
        sides = {way: Side(agent_updates, calls, way) for way in ("padded", "tree")}
        results[str(calls)] = in_turn(sides, 30, rounds, warm=False)
    return results


def measure_learning(_: int) -> dict[str, Any]:
    """The laptop task until 60 % of the held-out problems are solved, or until patience ends."""
    results = {}
    for name, run, patience in (("course_lib", course_lib_learns, 2 * PATIENCE), ("trl", trl_learns, PATIENCE)):
        side, spent, curve = Side(run, EVERY), 0.0, []
        while True:
            report_ = side.step()
            spent += report_["seconds"]
            curve.append({"seconds": spent, "held_out": report_["held_out"]})
            reached = report_["held_out"] is not None and report_["held_out"] >= GOAL
            if reached or (spent > patience and report_["held_out"] is not None):
                break
        side.end()
        results[name] = {"reached": reached, "steps": len(curve) - 1, "seconds": spent, "curve": curve}
    return results


def measure_memory(_: int) -> list[dict[str, Any]]:
    """Peak memory and time of an update of 1,024 distinct tokens, by the size of its rows."""
    results = []
    for tokens_per_row, checkpointing in ((1024, False), (512, False), (256, False), (128, False), (1024, True)):
        side = Side(memory_updates, tokens_per_row, checkpointing)
        side.step()
        results.append({"tokens_per_row": tokens_per_row, "checkpointing": checkpointing, **side.step()})
        side.end()
    return results


def measure_profile(_: int) -> dict[str, Any]:
    """What a step of ours spends its time on, at a small and at a large point."""
    results = {}
    for point in (GRID[0], GRID[-1]):
        side = Side(profiled_step, point)
        results[point.name] = side.step()
        side.end()
    return results


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "threads": THREADS,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "date": datetime.date.today().isoformat(),
    }


SECTIONS = {
    "rates": lambda _: measure_rates(),
    **{point.name: partial(measure_point, point) for point in GRID},
    "agents": measure_agents,
    "memory": measure_memory,
    "profile": measure_profile,
    "learning": measure_learning,
}


def main() -> None:
    """Measures, section by section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="what to measure anew (default: everything)")
    parser.add_argument("--quick", action="store_true", help="one small point, two minutes, nothing written")
    parser.add_argument("--rounds", type=int, default=3, help="at most so many measured steps a side (default: 3)")
    parser.add_argument("--list", action="store_true", help="name the sections")
    options = parser.parse_args()
    if options.list:
        print("\n".join(SECTIONS))
        return
    if options.quick:
        print(json.dumps(measure_point(QUICK[0], 1), indent=1))
        return
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"expected sections that --list names, got {', '.join(sorted(unknown))}")
    wanted = options.sections or list(SECTIONS)
    results = json.loads(RESULTS.read_text()) if options.sections and RESULTS.exists() else {}
    results["machine"] = machine()
    began = time.perf_counter()
    for number, name in enumerate(wanted, start=1):
        start = time.perf_counter()
        print(f"[{number}/{len(wanted)}] {name} ...", flush=True)
        results[name] = SECTIONS[name](options.rounds)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        now = time.perf_counter()
        print(f"    {now - start:.0f} s, {(now - began) / 60:.1f} minutes in all", flush=True)
    if "rates" in results and GRID[0].name in results:
        report.write(results)


if __name__ == "__main__":
    main()
