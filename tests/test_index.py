"""The index names only what exists, and leaves out nothing that the course derives."""

import ast
import importlib
import json
import re
import sys
from pathlib import Path

import nbformat
import pytest

from course_lib import advantages, losses, notation, trajectories
from course_lib.exercises import registry
from course_lib.index import ENTRIES, NOTEBOOKS, index_table

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))
import index as tool  # noqa: E402

entries = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


@entries
def test_every_function_exists(entry):
    assert entry.functions
    for name in entry.functions:
        module, *attributes = name.split(".")
        value = importlib.import_module(f"course_lib.{module}")
        for attribute in attributes:
            assert hasattr(value, attribute), name
            value = getattr(value, attribute)


@entries
def test_every_test_exists(entry):
    assert entry.tests
    for name in entry.tests:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


@entries
def test_every_exercise_exists_in_the_entrys_lesson(entry):
    for exercise in entry.exercises:
        assert exercise in registry and exercise.startswith(f"{entry.lesson:02d}.")


@entries
def test_every_heading_exists(entry):
    """A lesson that is written has a heading for each of its entries; one that is not has none."""
    found = sorted((ROOT / "notebooks").glob(f"{entry.lesson:02d}_*.ipynb"))
    headings = sections(found[0]) if found else [""]
    assert entry.heading in headings, f"heading {entry.heading!r} of {entry.name!r}: expected one of {headings}"
    assert not found or found[0].name == NOTEBOOKS[entry.lesson]


def sections(path: Path) -> list[str]:
    prose = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    return re.findall(r"^## (.+)$", "\n".join(prose), flags=re.MULTILINE)


def test_every_exercise_of_a_lesson_in_the_index_is_there():
    written = {f"{entry.lesson:02d}" for entry in ENTRIES if entry.heading}
    expected = {key for key in registry if key[:2] in written}
    missing = expected - {exercise for entry in ENTRIES for exercise in entry.exercises}
    assert not missing, f"course_lib/index.py: expected {missing} among the `exercises` of an Entry of its lesson"


def test_every_function_of_the_mathematics_is_in_the_index():
    named = {name.split(".")[1] for entry in ENTRIES for name in entry.functions}
    for module in (advantages, losses, trajectories):
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        public = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
        assert public <= named, module.__name__


@pytest.fixture(scope="module")
def option_names():
    return json.loads((ROOT / "tests" / "data" / "option_names.json").read_text(encoding="utf-8"))


@entries
@pytest.mark.parametrize("library", ["trl", "verl"])
def test_option_names_are_those_of_the_libraries(entry, library, option_names):
    """Text in backticks is an option, `name` or `name=value`, or a further value of the one before."""
    known = set(option_names[library]["names"])
    option = None
    for text in re.findall(r"`([^`]+)`", getattr(entry, library)):
        name, _, value = text.partition("=")
        name = f"actor_rollout_ref.{name}" if name.startswith(("actor.", "rollout.")) else name
        if name in known:
            option = name
        else:
            value = text
        values = option_names[library]["values"].get(option, [value])
        assert option and (not value or value.strip('"') in values), f"{text!r} in {entry.name!r}"


@entries
def test_a_row_is_one_row(entry):
    """Neither a bar nor a line break within a cell, which would end it."""
    assert "|" not in "".join((entry.name, entry.formula, entry.trl, entry.verl, entry.heading))
    assert "\n" not in "".join((entry.name, entry.trl, entry.verl))


def test_the_readme_holds_the_present_index():
    text = tool.README.read_text(encoding="utf-8")
    assert tool.with_index(text) == text, "run `python tools/index.py`"


def test_links_of_the_readme_lead_somewhere():
    table = tool.with_index(f"{tool.START}{tool.END}")
    targets = set(re.findall(r"\]\(([^)#]+)", table))
    assert len(targets) > 10 and all((ROOT / target).exists() for target in targets)


def test_a_table_for_one_lesson():
    table = index_table(5)
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + sum(entry.lesson == 5 for entry in ENTRIES)
    assert all(row.count(" | ") == 3 for row in rows)
    assert table._repr_markdown_() == str(table)


def test_names_in_the_notation_are_names_of_the_library():
    trees = [ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for path in (ROOT / "course_lib").rglob("*.py")]
    nodes = [node for tree in trees for node in tree]
    known = {node.arg for node in nodes if isinstance(node, ast.arg)}
    known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    known |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    rows = [line.split(" | ")[1] for line in notation.__doc__.splitlines() if line.startswith("| $")]
    names = {name.removesuffix("()").rpartition(".")[2] for row in rows for name in re.findall(r"`([\w.()]+)`", row)}
    assert {"rewards", "objective", "context", "rollout_log_probs"} <= names <= known


def test_lesson_00_shows_the_present_index_and_every_exercise():
    cells = nbformat.read(ROOT / "notebooks" / "00_start_here.ipynb", as_version=4).cells
    shown = {cell.source: cell.outputs[0].data for cell in cells if cell.source in ("index_table()", "progress()")}
    assert shown["index_table()"]["text/markdown"] == str(index_table()), "execute lesson 00 again"
    table = shown["progress()"]["text/plain"]
    assert table.startswith(f"0 of {len(registry)} exercises")
    assert re.findall(r"^ *(\d\d\.\d+) ", table, flags=re.MULTILINE) == sorted(registry)
