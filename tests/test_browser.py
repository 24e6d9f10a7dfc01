"""The course in a real browser: JupyterLab as `make learn` starts it, two notebooks run, one exercise solved.

Set COURSE_SCREENSHOTS to a folder to keep what was seen, in the light and the dark theme.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from course_lib.exercises import registry

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra `browser`")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
ROOT = Path(__file__).parents[1]
LESSON_01 = "notebooks/01_policies_and_objectives.ipynb"
MINUTE = 60_000  # ms

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium, and none is installed")]

# The notebook on the screen, through the application object that --expose-app-in-browser hands out.
CELLS = "[...jupyterapp.shell.currentWidget.content.widgets]"
IS_DONE = f"""() => {CELLS}.every(cell => cell.model.type !== 'code' || cell.model.executionState === 'idle'
                                 || cell.model.sharedModel.source === '')
              && jupyterapp.shell.currentWidget.sessionContext.kernelDisplayStatus === 'idle'"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """JupyterLab with the course's settings on a copy of the notebooks, so that no stored output is written over."""
    home = tmp_path_factory.mktemp("course")
    for name in ("notebooks", "tools", "data"):
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("checkpoints", "__pycache__"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    settings = {
        "JUPYTER_CONFIG_PATH": str(home / "tools" / "jupyter"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "COURSE_PROGRESS": str(home / "progress.json"),
    }
    server = subprocess.Popen(
        [*command, "--expose-app-in-browser"], cwd=home, env=os.environ | settings,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield _announced(server)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def _announced(server):
    """The address with its token, which JupyterLab prints when it is ready."""
    for line in server.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\d+/lab\S*\?token=\w+", line):
            return found.group()
    raise AssertionError("JupyterLab ended without printing its address")


@pytest.fixture(scope="module")
def page(address):
    """A browser with lesson 00 open, and everything its console says in `page.complaints`."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        page.set_default_timeout(3 * MINUTE)
        page.complaints = []
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("console", lambda said: page.complaints.append(said.text) if said.type == "error" else None)
        page.goto(address)
        yield page
        browser.close()


def run_all(page):
    """Everything in the notebook, as the menu does it; returns the names of the errors that cells show."""
    kernel = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
    page.wait_for_function(f"() => {kernel}")
    page.evaluate("() => { jupyterapp.commands.execute('notebook:run-all-cells') }")
    page.wait_for_function(IS_DONE, timeout=5 * MINUTE)
    return page.evaluate(
        f"() => {CELLS}.filter(c => c.model.type === 'code').flatMap(c => c.model.sharedModel.getOutputs())"
        ".filter(o => o.output_type === 'error').map(o => o.ename)"
    )


def find(page, text):
    """Number of the first code cell that holds the text, scrolled into view and made the active one."""
    number = page.evaluate(
        f"text => {CELLS}.findIndex(c => c.model.type === 'code' && c.model.sharedModel.source.includes(text))", text
    )
    assert number >= 0, f"no cell holds {text}"
    page.evaluate(
        "async n => { const notebook = jupyterapp.shell.currentWidget.content; notebook.activeCellIndex = n;"
        " await notebook.scrollToItem(n, 'center'); }",
        number,
    )
    return number


def output_text(page, number):
    return page.evaluate(f"n => JSON.stringify({CELLS}[n].model.sharedModel.getOutputs())", number)


def wait_for_output(page, number, text):
    page.wait_for_function(
        f"([n, text]) => JSON.stringify({CELLS}[n].model.sharedModel.getOutputs()).includes(text)", arg=[number, text]
    )


def screenshots(page, name):
    """Kept where COURSE_SCREENSHOTS says, in both themes."""
    if folder := os.environ.get("COURSE_SCREENSHOTS"):
        for theme in ("JupyterLab Dark", "JupyterLab Light"):
            page.evaluate("theme => { jupyterapp.commands.execute('apputils:change-theme', {theme}) }", theme)
            time.sleep(1)
            page.screenshot(path=Path(folder) / f"{name}-{theme.split()[1].lower()}.png")


def test_lesson_00_opens_and_runs(page):
    page.wait_for_selector(".jp-NotebookPanel")
    assert "00_start_her" in page.title()
    assert run_all(page) == []
    wait_for_output(page, find(page, "doctor.report()"), "The course can run here.")
    find(page, "plots.LiveCurve")
    screenshots(page, "lesson-00")


def test_an_exercise_is_solved_and_counted(page):
    """Unsolved, wrong, right: typed into the notebook, with the check's answer to each."""
    exercise = registry["00.1"]
    number = find(page, 'check("00.1"')
    assert "not solved yet" in output_text(page, number).lower()
    for code, answer in ((exercise.mistakes[0].wrong, exercise.mistakes[0].diagnosis), (exercise.solution, ": solved")):
        type_into(page, number, f'{code.strip()}\n\n\ncheck("00.1", better_than_average)')
        wait_for_output(page, number, answer[:30])
    screenshots(page, "exercise")
    table = find(page, "progress()")
    page.keyboard.press("Shift+Enter")
    wait_for_output(page, table, "1 of")


def type_into(page, number, code):
    """Replace a cell's text by typing and run it."""
    find(page, 'check("00.1"')
    editor = page.locator(f".jp-Notebook .jp-Cell[data-windowed-list-index='{number}'] .cm-content")
    editor.click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(code)
    page.keyboard.press("Control+Enter")


def test_a_slider_redraws_its_picture(page):
    page.evaluate("path => { jupyterapp.commands.execute('docmanager:open', {path}) }", LESSON_01)
    page.wait_for_function("() => jupyterapp.shell.currentWidget?.context?.path.includes('01_policies')")
    assert run_all(page) == []
    number = find(page, "plots.turn")
    cell = page.locator(f".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell[data-windowed-list-index='{number}']")
    slider, picture = cell.locator(".noUi-handle"), cell.locator("img")
    before = picture.get_attribute("src")
    slider.focus()
    page.keyboard.press("PageUp")
    playwright.expect(picture).not_to_have_attribute("src", before, timeout=3 * MINUTE)
    screenshots(page, "slider")
    find(page, 'check("01.1"')
    screenshots(page, "lesson-01")


def test_the_console_had_nothing_to_complain_about(page):
    assert page.complaints == []
