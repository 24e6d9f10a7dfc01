"""Every stored lesson keeps the rules, and the tool that checks them notices what breaks them."""

import base64
import struct
import sys
from pathlib import Path

import nbformat
import pytest

from course_lib.exercises import registry

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))
import notebooks  # noqa: E402

PERCENT = """\
# %% [markdown]
# # Title
# The policy $\\pi_\\theta$.
#
# - one

# %%
x = 1
print(x)

# %% raises-exception
raise ValueError("rewards: expected 8 values")
"""


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_stored_lesson_keeps_the_rules(path):
    assert notebooks.problems(path) == []


def test_build_reads_percent_format(tmp_path):
    source = tmp_path / "01_demo.py"
    source.write_text(PERCENT)
    markdown, code, failing = notebooks.build(source).cells
    assert markdown.cell_type == "markdown"
    assert markdown.source == "# Title\nThe policy $\\pi_\\theta$.\n\n- one"
    assert (code.cell_type, code.source, code.id) == ("code", "x = 1\nprint(x)", "c02")
    assert failing.metadata.tags == ["raises-exception"]


def test_an_exercise_gets_its_heading_and_its_stub():
    exercise = registry["00.1"]
    prose = nbformat.v4.new_markdown_cell("Now you.\n\n### Exercise 00.1 · Old title\n99 minutes\n\nOne line.")
    placed = notebooks.with_exercises(nbformat.v4.new_notebook(cells=[code("x = 1"), code('check("00.1", None)')]))
    changed = notebooks.with_exercises(nbformat.v4.new_notebook(cells=[prose, code(exercise.cell.replace("G", "N"))]))
    assert [cell.source for cell in placed.cells] == ["x = 1", exercise.heading, exercise.cell]
    assert changed.cells[0].source == f"Now you.\n\n{exercise.heading}\n\nOne line."
    assert changed.cells[1].source == exercise.cell
    with pytest.raises(SystemExit, match=r"exercise 99\.9: expected one that"):
        notebooks.with_exercises(nbformat.v4.new_notebook(cells=[code('check("99.9", f)')]))


def stored(tmp_path, *cells, **stray):
    """A notebook as `execute` would store it, unless `stray` metadata is added."""
    notebook = notebooks.normalise(nbformat.v4.new_notebook(cells=list(cells)))
    notebook.metadata.update(stray)
    path = tmp_path / "01_demo.ipynb"
    nbformat.write(notebook, path)
    return path


def code(source="x = 1", *outputs, count=1, tags=()):
    cell = nbformat.v4.new_code_cell(source, outputs=list(outputs), execution_count=count)
    cell.metadata["tags"] = list(tags)
    return cell


def printed(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def shown(**data):
    return nbformat.v4.new_output("display_data", data={key.replace("_", "/"): data[key] for key in data})


def png(width):
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + struct.pack(">II", width, 100)
    return base64.b64encode(header).decode()


def test_a_good_notebook_has_no_problems(tmp_path):
    fine = [
        nbformat.v4.new_markdown_cell("# Title"),
        code("print(1)", printed("J = 0.25, 30 % of 1/2, in 12 steps, https://example.org/home/x\n")),
        code("plot()", shown(image_png=png(900), text_plain="<Figure size 900x100 with 1 Axes>"), count=2),
        code("f()", nbformat.v4.new_output("error", ename="ValueError", evalue="x", traceback=[]), count=3,
             tags=["raises-exception"]),
    ]  # fmt: skip
    assert notebooks.problems(stored(tmp_path, *fine)) == []


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([code("x = 1\n" * 41)], "41 lines, more than 40"),
        ([code("x = 1\n" * 13), code("x = 1\n" * 13, count=2)], "median code cell has 13"),
        ([code(count=None)], "not run in order"),
        ([code(count=2)], "not run in order"),
        ([code("x", printed("x" * 1_600_000))], "bytes, more than"),
        ([code("x", printed("saved to /home/me/runs\n"))], "a path of one machine"),
        ([code("x", printed("C:\\Users\\me\n"))], "a path of one machine"),
        ([code("x", shown(text_html="<p>FutureWarning: use cache=</p>"))], "a warning"),
        ([code("x", printed("Wall time: 3 s"))], "a timing"),
        ([code("x", printed("it took 3.2 s"))], "a timing"),
        ([code("x", printed(" 50%|#####     | 1/2 [00:01<00:01]"))], "a progress bar"),
        ([code("x", shown(text_plain="<object at 0x7f1c2b3d4e5f>"))], "a memory address"),
        ([code("x", printed("careful", name="stderr"))], "wrote to stderr"),
        ([code("x", nbformat.v4.new_output("error", ename="E", evalue="x", traceback=[]))], "failed: E: x"),
        ([code("x", shown(image_png=png(1200)))], "1200 pixels wide"),
        ([code("x", shown(**{"application_vnd.jupyter.widget-view+json": {}}))], "shows a widget"),
    ],
)
def test_each_rule_is_noticed(tmp_path, cells, said):
    found = notebooks.problems(stored(tmp_path, *cells))
    assert any(said in problem for problem in found), found


def test_stray_metadata_is_noticed(tmp_path):
    assert "normal form" in notebooks.problems(stored(tmp_path, code(), widgets={}))[0]


@pytest.mark.slow
def test_executing_twice_stores_the_same_bytes(tmp_path):
    source = tmp_path / "01_demo.py"
    source.write_text(PERCENT + "\n# %%\nfor i in range(50):\n    print(i, flush=True)\n")
    path = tmp_path / "01_demo.ipynb"
    nbformat.write(notebooks.build(source), path)
    results = []
    for _ in range(2):
        nbformat.write(notebooks.execute(path), path)
        results.append(path.read_bytes())
    assert results[0] == results[1]
    assert notebooks.problems(path) == []
