"""Write, run, check and look at the lessons. For maintainers; a learner never needs it.

    python tools/notebooks.py build LESSON.py ...        notebooks/LESSON.ipynb from percent-format text
    python tools/notebooks.py exercises NOTEBOOK ...     heading and stub of each exercise, as it is declared now
    python tools/notebooks.py execute notebooks/*.ipynb  run in a fresh kernel, store in one form, check
    python tools/notebooks.py check notebooks/*.ipynb    the rules of tests/test_notebooks.py
    python tools/notebooks.py render notebooks/*.ipynb   HTML and pictures of the whole page, to look at

`exercises` looks for the line `check("05.2", ...)`: that cell becomes the stub of exercise 05.2 with its check, and the
two lines of its heading stand above it. It runs nothing, so `execute` comes after it.

In the text that `build` takes, `# %%` starts a code cell and `# %% [markdown]` one of prose, written as
comments. Words after that become the cell's tags (`# %% raises-exception`: it shows an error).

`render` needs Chromium (CHROMIUM names it if it is not on the path) and writes to build/notebooks/ or --out.
It works without a network, so formulas need MathJax 3 on this machine: `npm pack mathjax@3`, unpack it
outside the repository, and give its package/es5/tex-svg-full.js as --mathjax or in MATHJAX.
"""

import argparse
import os
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"

LONGEST_CELL, LONGEST_MEDIAN_CELL = 40, 12  # lines
LARGEST_FILE = 1_500_000  # bytes
WIDEST_FIGURE = 1000  # pixels; what Jupyter and code-hosting pages show without shrinking
NOT_IN_OUTPUTS = {
    "a path of one machine": re.compile(
        r"(?<![\w.])/(home|root|Users|tmp|work|usr|opt|var|mnt)/\w|\b[A-Z]:\\\w|site-packages"
    ),
    "a warning": re.compile(r"\b\w*Warning\b"),
    "a timing": re.compile(
        r"Wall time|CPU times|per loop|\d ?it/s|s/it\b|\b(took|elapsed:?) [\d.]+ ?(m?s|min)"
    ),
    "a progress bar": re.compile(r"\d%\|"),
    "a memory address": re.compile(r" at 0x[0-9a-f]{6,}"),
}


def build(source: Path) -> NotebookNode:
    """The notebook that percent-format text describes, not yet run."""
    notebook = nbformat.v4.new_notebook()
    for part in re.split(r"^# %%", source.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        kind, *tags = head.split() if head.split()[:1] == ["[markdown]"] else ["code", *head.split()]
        if kind == "[markdown]":
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
            cell = nbformat.v4.new_markdown_cell(body.strip())
        else:
            cell = nbformat.v4.new_code_cell(body.strip())
        if tags:
            cell.metadata["tags"] = tags
        notebook.cells.append(cell)
    return normalise(notebook)


def with_exercises(notebook: NotebookNode) -> NotebookNode:
    """The notebook with the heading and the cell of every exercise as they are declared. Changes its argument."""
    from course_lib.exercises import registry

    cells: list[NotebookNode] = []
    for cell in notebook.cells:
        checked = re.search(r'^check\("([^"]+)"', cell.source, flags=re.MULTILINE) if cell.cell_type == "code" else None
        if checked:
            if checked[1] not in registry:
                raise SystemExit(f"exercise {checked[1]}: expected one that course_lib/exercises declares")
            exercise = registry[checked[1]]
            cell.source = exercise.cell
            heading = re.compile(rf"^### Exercise {re.escape(exercise.id)} ·.*\n.*", flags=re.MULTILINE)
            above = cells[-1] if cells and cells[-1].cell_type == "markdown" else None
            if above and heading.search(above.source):
                above.source = heading.sub(lambda _, text=exercise.heading: text, above.source)
            else:
                cells.append(nbformat.v4.new_markdown_cell(exercise.heading))
        cells.append(cell)
    notebook.cells = cells
    return normalise(notebook)


def execute(path: Path) -> NotebookNode:
    """Run a notebook from top to bottom in a fresh kernel, in its own folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=1800,
        coalesce_streams=True,  # as many outputs as cells wrote, however the kernel sent them
        store_widget_state=False,
        config=Config(KernelManager={"transport_encryption": "auto"}),
        resources={"metadata": {"path": str(path.parent)}},
    )
    with tempfile.TemporaryDirectory() as scratch:
        progress = str(Path(scratch) / "progress.json")  # a reader's page shows no maintainer's progress
        client.execute(env=os.environ | {"COURSE_STORED": "1", "COURSE_PROGRESS": progress})  # plots.turn: no sliders
    return normalise(notebook)


def normalise(notebook: NotebookNode) -> NotebookNode:
    """One form for the same content: stable cell ids, no metadata but tags. Changes its argument."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
    )
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"c{number:02}"
        cell.metadata = NotebookNode({"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {})
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = NotebookNode()
    return notebook


def problems(path: Path) -> list[str]:
    """What stands against storing this notebook as it is; empty when it keeps every rule."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = []
    if (size := path.stat().st_size) > LARGEST_FILE:
        found.append(f"{size} bytes, more than {LARGEST_FILE}")
    if nbformat.writes(normalise(nbformat.from_dict(notebook))) != nbformat.writes(notebook):
        found.append("not in the normal form: run it with `python tools/notebooks.py execute`")
    lengths = [len(cell.source.splitlines()) for cell in code]
    if lengths and (median := statistics.median(lengths)) > LONGEST_MEDIAN_CELL:
        found.append(f"the median code cell has {median} lines, more than {LONGEST_MEDIAN_CELL}")
    for number, (cell, length) in enumerate(zip(code, lengths, strict=True), start=1):
        if length > LONGEST_CELL:
            found.append(f"{cell.id}: {length} lines, more than {LONGEST_CELL}")
        if cell.execution_count != number:
            found.append(f"{cell.id}: not run in order from a fresh kernel (count {cell.execution_count})")
        for output in cell.outputs:
            found += [f"{cell.id}: {problem}" for problem in _output_problems(output, cell)]
    return found


def _output_problems(output: NotebookNode, cell: NotebookNode) -> Iterator[str]:
    if output.output_type == "stream" and output.name == "stderr":
        yield f"wrote to stderr: {output.text.strip()[:200]!r}"
    if output.output_type == "error" and "raises-exception" not in cell.metadata.get("tags", []):
        yield f"failed: {output.ename}: {output.evalue}"
    data = output.get("data", {})
    if "application/vnd.jupyter.widget-view+json" in data:
        yield "shows a widget, which a stored notebook cannot (a progress bar?)"
    if "image/png" in data and (width := _png_width(data["image/png"])) > WIDEST_FIGURE:
        yield f"a figure {width} pixels wide, more than {WIDEST_FIGURE}"
    texts = [output.get("text", ""), *(text for kind, text in data.items() if kind.startswith("text/"))]
    for what, pattern in NOT_IN_OUTPUTS.items():
        if match := pattern.search("\n".join(texts)):
            yield f"shows {what}: {match.group()!r}"


def _png_width(base64_text: str) -> int:
    return struct.unpack(">I", b64decode(base64_text[:40])[16:20])[0]


def render(path: Path, out: Path, mathjax: Path | None) -> list[Path]:
    """The notebook as HTML, and pictures of its whole page, each at most `PICTURE` pixels high."""
    from nbconvert import HTMLExporter

    remote = ("mathjax_url", "require_js_url", "mermaid_js_url", "mermaid_layout_elk_js_url")
    html, _ = HTMLExporter(**dict.fromkeys(remote, "")).from_filename(str(path))
    formulas = MATHJAX.format(mathjax.resolve().as_uri()) if mathjax else ""
    page = out / f"{path.stem}.html"
    out.mkdir(parents=True, exist_ok=True)
    page.write_text(html.replace("</head>", formulas + "</head>"))
    return [page, *photograph(page)]


MATHJAX = r"""<script>
MathJax = {{tex: {{inlineMath: [['$', '$'], ['\\(', '\\)']], processEscapes: true, tags: 'ams'}}}};
</script><script src="{}"></script>"""
PICTURE = 2400  # pixels
# Pushes the page up by the number after "#", and says in the title how tall it is once formulas are set.
MEASURE = """<script>addEventListener('load', async () => {
  if (window.MathJax) await MathJax.startup.promise;
  document.title = document.documentElement.scrollHeight;
  document.body.style.marginTop = -Number(location.hash.slice(1)) + 'px';
});</script>"""


def photograph(page: Path, width: int = 1100) -> Iterator[Path]:
    """Pictures of an HTML page from top to bottom, made by headless Chromium without a network."""
    installed = filter(shutil.which, ("chromium", "google-chrome", "chrome"))
    chromium = os.environ.get("CHROMIUM") or next(installed, None)
    if chromium is None:
        raise SystemExit("Chromium is not on the path; name it in CHROMIUM.")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / page.name
        copy.write_text(page.read_text().replace("</head>", MEASURE + "</head>"))

        def chrome(*options: str) -> str:
            command = [chromium, *CHROMIUM_OPTIONS, f"--user-data-dir={scratch}/profile", *options]
            return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout

        dom = chrome(f"--window-size={width},200", "--dump-dom", copy.as_uri())
        height = int(re.search(r"<title>(\d+)</title>", dom).group(1))
        for number, top in enumerate(range(0, height, PICTURE), start=1):
            picture = page.with_name(f"{page.stem}-{number:02}.png")
            size = f"--window-size={width},{min(PICTURE, height - top)}"
            chrome(size, f"--screenshot={picture}", f"{copy.as_uri()}#{top}")
            yield picture


CHROMIUM_OPTIONS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars --disable-sync
    --disable-background-networking --disable-component-update --virtual-time-budget=20000
""".split()  # noqa: SIM905 - easier to read than a list


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("action", choices=("build", "exercises", "execute", "check", "render"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="folder for what build and render write")
    parser.add_argument("--mathjax", type=Path, default=os.environ.get("MATHJAX"))
    options = parser.parse_args()
    found = []
    for path in options.files:
        if options.action == "build":
            written = [(options.out or NOTEBOOKS) / f"{path.stem}.ipynb"]
            nbformat.write(build(path), written[0])
        elif options.action == "exercises":
            nbformat.write(with_exercises(nbformat.read(path, as_version=4)), path)
            written = [path]
        elif options.action == "execute":
            nbformat.write(execute(path), path)
            written = [path]
        elif options.action == "render":
            mathjax = options.mathjax and Path(options.mathjax)
            written = render(path, options.out or NOTEBOOKS.parent / "build" / "notebooks", mathjax)
        else:
            written = [path]
        if options.action in ("execute", "check"):
            found += [f"{path}: {problem}" for problem in problems(path)]
        print(*written, sep="\n")
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
