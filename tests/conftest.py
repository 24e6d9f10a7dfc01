"""What holds for every test: no network; property tests ask no clock and are the same in every run. After a failure
the index of the course says which equations it concerns."""

import ast
import os
import re
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import Phase, settings

from course_lib.index import ENTRIES

ROOT = Path(__file__).resolve().parents[1]
# Hypothesis' explanation of a failure names lines of torch, and traces every line to find them.
settings.register_profile("course", deadline=None, derandomize=True, phases=set(Phase) - {Phase.explain})
settings.load_profile("course")


def pytest_terminal_summary(terminalreporter):
    failed = {report.nodeid.partition("[")[0] for report in terminalreporter.stats.get("failed", [])}
    indexed = {f"tests/{test}" for entry in ENTRIES for test in entry.tests}
    code = "\n".join(_code(nodeid) for nodeid in failed - indexed)
    concerned = [
        entry
        for entry in ENTRIES
        if failed & {f"tests/{test}" for test in entry.tests}
        or any(re.search(rf"\b{name.rpartition('.')[2]}\b", code) for name in entry.functions)
    ]
    if concerned:
        terminalreporter.section("where this stands in the course")
    for entry in concerned:
        where = " · ".join([f"lesson {entry.lesson:02}", entry.heading, entry.name, *entry.exercises])
        terminalreporter.write_line(f"{where}: {', '.join(entry.functions)}")


def _code(nodeid: str) -> str:
    """The source of a test, or the name of what a doctest belongs to."""
    file, _, name = nodeid.partition("::")
    if not file.startswith("tests/"):
        return name
    source = (ROOT / file).read_text(encoding="utf-8")
    return "\n".join(ast.unparse(node) for node in ast.parse(source).body if getattr(node, "name", None) == name)
