"""Which exercises are solved: one small JSON file beside the course."""

import contextlib
import json
import os
from pathlib import Path

STATES = ("tried", "solved")


def progress_path() -> Path:
    """The file COURSE_PROGRESS names, else .course_progress.json in the project's root, else here."""
    if named := os.environ.get("COURSE_PROGRESS"):
        return Path(named)
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / "course_lib").is_dir()), here)
    return root / ".course_progress.json"


def read() -> tuple[dict[str, str], str]:
    """Return ({exercise id: "tried" or "solved"}, notice).

    A file that cannot be understood is moved aside, never overwritten; the notice then says where to.
    """
    path = progress_path()
    try:
        states = json.loads(path.read_text(encoding="utf-8"))["exercises"]
        return {key: state for key, state in states.items() if state in STATES}, ""
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"The progress file could not be read ({error.strerror})."
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}, f"The progress file could not be understood. {_set_aside(path)}"


def write(states: dict[str, str]) -> str:
    """Replace the file in one step: a crash leaves the old or the new one. Returns a notice if it failed."""
    path = progress_path()
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    text = json.dumps({"version": 1, "exercises": dict(sorted(states.items()))}, indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
        return ""
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        return f"Your progress could not be saved ({error.strerror})."


def record(exercise_id: str, state: str) -> str:
    """Note that an exercise was tried or solved; once solved it stays solved. Returns a notice or ""."""
    states, notice = read()
    if states.get(exercise_id) in (state, "solved"):
        return notice
    return write({**states, exercise_id: state}) or notice


def _set_aside(path: Path) -> str:
    number = 0
    while (backup := path.with_name(path.name + (f".bak{number}" if number else ".bak"))).exists():
        number += 1
    os.replace(path, backup)
    return f"It was kept as {backup.name}; progress starts afresh."
