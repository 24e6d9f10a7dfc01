"""What a model writes stays text, files from elsewhere cannot run code, and servers listen to this machine only."""

import ast
import json
import re
import runpy
import sys
import tomllib
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from small_worlds import letters_task, word_tokenizer

from course_lib import engines
from course_lib.models import tiny_model
from course_lib.research import Corpus, ResearchTask
from course_lib.rewards import REWARDS, boxed, first_integer, last_number, numbers_in, parse_number
from course_lib.sampling import sample_trajectories
from course_lib.tasks import Problem, SingleTurnTask

ROOT = Path(__file__).resolve().parents[1]
FILES = ("course_lib/**/*.py", "tools/*.py", "benchmarks/*.py", "data/**/*.py")
SOURCES = sorted(path for files in FILES for path in ROOT.glob(files))

# --- the source -----------------------------------------------------------------------------------------------------

NAMES = {"eval", "exec", "compile", "__import__", "breakpoint", "input"}
MODULES = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "pty", "code", "runpy", "subprocess"}
CALLS = re.compile(
    r"os\.(system|popen|startfile|fork|posix_spawn\w*|exec\w+|spawn\w+)|builtins\.(eval|exec)|subprocess\.\w+|importlib\.import_module"
    r"|(yaml|pickle|dill|joblib|marshal|shelve)\.\w+|torch\.(load|hub\.\w+|package\.\w+|jit\.load)|pd\.read_pickle"
    r"|runpy\.\w+|asyncio\.create_subprocess_\w+"
)
KEYWORDS = {"shell", "trust_remote_code", "allow_pickle"}

ALLOWED = {
    # Solutions and known mistakes, which stand as text in course_lib.exercises, become functions to check a checker
    # with. A learner's own function arrives as a function.
    "course_lib/exercises/engine.py: exec",
    "course_lib/exercises/engine.py: compile",
    # The modules of course_lib that __init__ and the lessons' registry name.
    "course_lib/__init__.py: importlib.import_module",
    "course_lib/exercises/__init__.py: importlib.import_module",
    # llama.cpp's server: a fixed script, and its settings as one JSON argument.
    "course_lib/engines.py: subprocess.Popen",
    # git, with fixed words, for the revision in a run's record.
    "course_lib/runs.py: subprocess.run",
    # A maintainer's tool: Chromium draws a notebook.
    "tools/notebooks.py: subprocess.run",
    # Lessons 08 and 10 run a script of this repository each.
    "notebooks/08_stepwise_grpo.ipynb: runpy",
    "notebooks/08_stepwise_grpo.ipynb: runpy.run_path",
    "notebooks/10_the_capstone.ipynb: runpy",
    "notebooks/10_the_capstone.ipynb: runpy.run_path",
}


def dangers(source):
    """What in a piece of Python could run text as code, start a process or unpickle."""
    full, found = {}, set()  # full: what each imported name stands for
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            full |= {a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                     for a in node.names}  # fmt: skip
            found |= {a.name for a in node.names if a.name.partition(".")[0] in MODULES - {"subprocess"}}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            full |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            found |= {node.module} if node.module.partition(".")[0] in MODULES else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in NAMES:
            found.add(node.id)
        if not isinstance(node, ast.Call):
            continue
        words = {word.arg: getattr(word.value, "value", "?") for word in node.keywords}
        head, _, rest = ast.unparse(node.func).partition(".")
        name = full.get(head, head) + "." * bool(rest) + rest
        if CALLS.fullmatch(name) and not (name == "torch.load" and words.get("weights_only") is True):
            found.add(name)
        found |= {word for word in KEYWORDS & set(words) if words[word] is not False}
    return found


def test_nothing_runs_text_as_code_starts_a_process_or_unpickles_but_what_is_listed():
    """Cells of the lessons included; one that calls a shell with ! would be no Python."""
    sources = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources[path] = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    found = {f"{path.relative_to(ROOT).as_posix()}: {what}" for path in sources for what in dangers(sources[path])}
    assert found == ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        *("eval(x)", "run = exec", "__import__('os')", "import os\nos.system(x)", "import os as o\no.popen(x)"),
        *("from os import system\nsystem(x)", "from os import execv as f\nf(x)", "import builtins\nbuiltins.eval(x)"),
        *("import subprocess\nsubprocess.run(x)", "from subprocess import run\nrun(x)", "import pickle"),
        *("import torch\ntorch.load(x)", "import torch\ntorch.load(x, weights_only=False)", "import shelve, json"),
        *("import yaml\nyaml.load(x)", "f(x, shell=True)", "np.load(x, allow_pickle=flag)", "from pickle import loads"),
        *("model.from_pretrained(x, trust_remote_code=True)", "from runpy import run_path", "import marshal as m"),
    ],
)
def test_each_danger_is_noticed(source):
    assert dangers(source)


def test_what_only_looks_like_one_is_not():
    source = "import re, torch\nre.compile(x)\nmodel.eval()\ntorch.load(x, weights_only=True)\nf(x, shell=False)\n"
    assert dangers(source + "text = 'eval(x)'\ntrainer.evaluate()") == set()


# --- hostile replies ------------------------------------------------------------------------------------------------

HOSTILE = [
    "__import__('os').system('touch owned')", "exec(open('/etc/passwd').read())", "$(touch owned) `id` ; id | sh",
    "../../../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "~/.ssh/id_rsa", "C:\\Windows\\win.ini",
    "\\\\host\\share", "{0.__class__.__init__.__globals__}", "{question.library}", "%s%n%x", "{", "}{", "${HOME}",
    "{{7*7}}", "\0", "passwd\0.txt", "\x1b]0;owned\x07", "\ud800", "\u202etxt.exe", "<script>alert(1)</script>",
    "!!python/object:os", "cos\nsystem\n(S'id'\ntR.", "\\boxed{__import__('os')}", "9" * 5000, "1e999999999", "3/0",
    "[" * 5000, "(" * 5000, "",
]  # fmt: skip
HARMLESS = ["72", "ada lee"]
ACTIONS = ("", "open ", "search ", "answer ", "OPEN\t")

EVENTS = ("open", "exec", "compile", "import", "os.", "subprocess", "socket", "ctypes")
watched: list[str] | None = None


def _audit(event, args):
    """Python reports here whatever opens a file, runs code or starts a process, by whichever function."""
    if watched is not None and event.startswith(EVENTS):
        watched.append(f"{event} {args[:1]!r:.100}")


@pytest.fixture(scope="module")
def watch():
    """Calls a function with harmless replies, then tells what it opened, ran and started with hostile ones."""
    sys.addaudithook(_audit)

    def run(function):
        global watched
        for replies in (HARMLESS, HOSTILE):
            watched = []
            try:
                function(replies)
            finally:
                events, watched = watched, None
        return events

    return run


def test_the_watch_sees_what_opens_runs_and_starts(watch):
    for action in (lambda: open(__file__).close(), lambda: Path(__file__).read_text(), lambda: eval("1")):
        assert watch(lambda replies, action=action: action())
    import os

    assert watch(lambda replies: os.system("true"))
    assert watch(lambda replies: sum(map(len, replies))) == []


def test_rewards_only_read(watch):
    def read(replies):
        for text in replies:
            for function in (numbers_in, parse_number, first_integer, last_number, boxed):
                function(text)
            for reward in REWARDS.values():
                assert reward(text, "72") == float(text == "72")

    assert watch(read) == []


@pytest.mark.parametrize("mode", ["edit_context", "append_only"])
def test_an_agent_opens_pages_and_no_files(watch, mode):
    task = ResearchTask(Corpus(ROOT / "data" / "research"), mode=mode, context_budget=100_000, max_calls=1000)

    class Letters:
        def encode(self, text, add_special_tokens=True):
            return [ord(letter) for letter in text]

    letters = Letters()

    def play(replies):
        for text in replies:
            for verb in ACTIONS:
                episode = task.open(task.training_problem(0), letters)
                episode.step(letters.encode(verb + text), verb + text)
                assert episode.reward == 0 and episode.done == (verb == "answer ")
                if not episode.done:
                    assert episode.page is None or verb == "search " or replies is HARMLESS
                    episode.step(letters.encode(text), text)
                    assert episode.notes == " ".join(text.split())

    assert watch(play) == []


def test_sampled_replies_of_both_kinds_of_task(watch):
    """From the sampler on: a tokenizer that reads a hostile reply into whatever the model sampled."""
    model, words = tiny_model(vocab_size=len(word_tokenizer())), word_tokenizer()
    library = ResearchTask(Corpus(ROOT / "data" / "research"), context_budget=120, max_calls=9)
    ask = SingleTurnTask([Problem("a b ?", "72")], [], REWARDS["lenient-number"])

    class Hostile:
        eos_token_id, chat_template, encode = words.eos_token_id, None, words.encode

        def __init__(self, replies):
            self.replies = cycle(verb + text for text in replies for verb in ACTIONS)

        def __len__(self):
            return len(words)

        def decode(self, ids, skip_special_tokens):
            return next(self.replies)

        def batch_decode(self, rows):
            return words.batch_decode(rows)

    def sample(replies):
        tokenizer = Hostile(replies)
        for task in (library, ask):
            episodes = [task.open(task.training_problem(0), tokenizer) for _ in range(len(replies) * len(ACTIONS))]
            played = sample_trajectories(model, tokenizer, episodes, max_new_tokens=2)
            assert replies is HARMLESS or {trajectory.reward for trajectory in played} == {0.0}

    assert watch(sample) == []


def test_a_reward_of_ones_own_gets_text():
    """Nothing is done to a reply before a reward function sees it, and what it is told in an error is quoted."""
    seen = []
    task = letters_task()
    task.reward = lambda text, answer: seen.append(text) or float("nan")
    for text in HOSTILE:
        with pytest.raises(ValueError, match=r"^reward: expected a finite number") as raised:
            task.score(Problem("a ?", "a"), text)
        assert "\0" not in str(raised.value) and "\x1b" not in str(raised.value)
    assert seen == HOSTILE


# --- servers --------------------------------------------------------------------------------------------------------


def test_servers_listen_to_this_machine_only():
    """JupyterLab as the Makefile and the README start it, and the inference engine. (That the engine's port is really
    closed to others is tested with the engine, in test_engines.)"""
    config = SimpleNamespace(**{name: SimpleNamespace() for name in ("ServerApp", "LabApp", "KernelManager")})
    runpy.run_path(str(ROOT / "tools/jupyter/jupyter_lab_config.py"), {"get_config": lambda: config})
    settings = vars(config.ServerApp) | vars(config.LabApp)
    assert settings["ip"] == "127.0.0.1"
    loosened = "allow_root|allow_origin|allow_remote|disable_check_xsrf|token|password|allow_unauthenticated|certfile"
    assert not [name for name in settings if re.match(loosened, name)]
    makefile, readme = (ROOT / "Makefile").read_text(), (ROOT / "README.md").read_text()
    assert "JUPYTER_CONFIG_PATH := $(CURDIR)/tools/jupyter" in makefile
    started = re.findall(r"-m jupyterlab.*", makefile)
    assert started and all("--ip=127.0.0.1" in line for line in started)
    assert "params.hostnames = [\"127.0.0.1\"]" in engines._SERVER
    # In the README's own commands the settings come from the same file.
    commands = re.findall(r"^(?:.*\n)?.*jupyter lab.*$", readme, flags=re.MULTILINE)
    assert commands and all("tools" in command and "jupyter" in command for command in commands)
    everything = [makefile, readme, *(path.read_text() for path in SOURCES)]
    opened = re.compile(r"0\.0\.0\.0|--ip[= ]\*|\.ip = \"\"|token=''|token=\"\"|--no-auth")
    assert not [match[0] for text in everything for match in opened.finditer(text)]


# --- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["constraints.txt", "benchmarks/constraints.txt"])
def test_every_version_is_exact(name):
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith(("#", "-c "))]
    assert all(re.fullmatch(r"[\w.-]+==\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)?", line) for line in lines), lines
    names = [canonicalize_name(line.partition("==")[0]) for line in lines]
    assert len(set(names)) == len(names)


def test_what_builds_the_package_is_pinned_too():
    """What the package needs to run is compared with its pins in test_packaging."""
    pins = dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]:
        assert Requirement(text).specifier.contains(pins[Requirement(text).name])
