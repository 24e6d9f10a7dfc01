"""A run that is cut short goes on as if it had not been: killed at any moment, out of room, its checkpoint damaged."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from errno import EDQUOT, EIO, ENOSPC, EROFS
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from small_worlds import NotesTask, letters_task, word_tokenizer

from course_lib import checkpoints, sampling, training
from course_lib.checkpoints import CheckpointError, newest_good_checkpoint
from course_lib.models import tiny_model
from course_lib.runs import read_run, write_evaluation
from course_lib.training import GRPOConfig, GRPOTrainer

# Rows of 12 nodes cut groups apart, which a trainer warns of: here it is what several rows in a step come from.
pytestmark = pytest.mark.filterwarnings("ignore:tokens_per_row")

ROOT = Path(__file__).resolve().parents[1]
TASKS = {"one call": letters_task, "many calls": NotesTask}


def trainer(folder, steps=3, task="one call", **settings):
    """A run that keeps a checkpoint of every step, draws again for dead groups and takes two passes of several rows."""
    tokenizer = word_tokenizer()
    config = dict(
        steps=steps, prompts_per_step=3, group_size=3, max_new_tokens=3, temperature=1.0, max_resamples=2,
        updates_per_batch=2, tokens_per_row=12, learning_rate=1e-2, checkpoint_every=1, output_dir=str(folder), seed=5,
    )  # fmt: skip
    return GRPOTrainer(
        tiny_model(vocab_size=len(tokenizer)), tokenizer, TASKS[task](), GRPOConfig(**config | settings)
    )


# --- killed ---------------------------------------------------------------------------------------------------------

A_STEP = {  # where a process can be killed, and about how often it comes there in a step
    "one call": {"sampling": 5, "backward": 5, "checkpoint": 20, "other files": 4, "anywhere": 7_000},
    "many calls": {"sampling": 12, "backward": 28, "checkpoint": 20, "other files": 4, "anywhere": 22_000},
}
CHANGES_FILES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


def kill_at(place, number, run):
    """This process ends, without a word, when it comes to a place for the `number`-th time."""
    calls = iter(range(1, number))

    def called(*_):
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event, args):
        if event in CHANGES_FILES or (event == "open" and str(args[1])[0] in "wax"):
            # What removes a folder names its files without the folder.
            inside = "checkpoints" in str(args[0]) or event in ("os.remove", "os.rmdir")
            if place == ("checkpoint" if inside else "other files"):
                called()

    def profile(frame, event, argument):
        if event == "call" and frame.f_globals.get("__name__", "").startswith(("course_lib", "torch")):
            called()

    match place:
        case "sampling":
            draw = sampling.draw
            sampling.draw = lambda *args: called() or draw(*args)
        case "backward":
            next(run.model.parameters()).register_hook(called)
        case "anywhere":
            sys.setprofile(profile)
        case _:
            sys.addaudithook(audit)


def life(folder, task, steps, place=None, number=0):
    """Begins the run or goes on with it, as a process of its own; tells what it would sample next."""
    folder, run = Path(folder), trainer(folder, int(steps), task)
    if place:
        kill_at(place, int(number), run)
    seed_everything(1)
    try:
        run.resume()
    except CheckpointError:
        if (folder / "metrics.jsonl").exists():  # a step and no checkpoint: training refuses to write over it
            shutil.rmtree(folder)
        seed_everything(0)
    run.train()
    drawn = [[call.output, call.log_probs] for played in run.sample_groups(4) for call in played.calls]
    folder.with_suffix(".json").write_text(json.dumps(drawn))


def seed_everything(seed):
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(seed)


def environment():
    return os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONHASHSEED": "random",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }  # fmt: skip


def fresh(*arguments):
    """The exit code of a life in a new interpreter, which orders sets of strings in its own way."""
    command = [sys.executable, "-c", "import sys, test_trust; test_trust.life(*sys.argv[1:])"]
    return subprocess.run([*command, *map(str, arguments)], env=environment(), timeout=900).returncode


def serve():
    """Has imported everything and computed nothing, and forks itself for each life that it is told to start."""
    import transformers.models.llama.modeling_llama  # noqa: F401, the tiny model's

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)
            life(*json.loads(line))
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


@pytest.fixture(scope="module")
def forked():
    """What `fresh` does, in a fifth of the time: most of it is importing."""
    command = [sys.executable, "-c", "import test_trust; test_trust.serve()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment(), stdin=pipe, stdout=pipe, text=True) as server:

        def start(*arguments):
            print(json.dumps([*map(str, arguments)]), file=server.stdin, flush=True)
            return int(server.stdout.readline())

        yield start


def contents(folder):
    """Every file of a run, without what tells times, sessions and the name of the folder."""
    found = {}
    for path in filter(Path.is_file, folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name] = None if path.name in ("times.jsonl", "run.json", "checksums.json") else path.read_bytes()
        if path.name == "state.json" or name == "config.json":
            found[name] = json.loads(found[name])
            found[name].pop("times", None)
            found[name].get("config", found[name])["output_dir"] = None
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.parametrize(
    ("task", "places", "start"),
    [
        ("one call", ["sampling", "checkpoint", "backward"], None),
        pytest.param("one call", [*A_STEP["one call"]] * 2, fresh, marks=pytest.mark.slow),
        pytest.param("many calls", [*A_STEP["many calls"]] * 2, fresh, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_again_and_again_is_the_run_that_was_not(tmp_path, forked, task, places, start):
    """Ended by SIGKILL at a random moment in each place, gone on with in a new process each time, it has the weights,
    moments, metrics and next samples of an uninterrupted run in this process, to the last bit."""
    start, steps, draw = start or forked, 2 + len(places), random.Random(task)
    life(tmp_path / "whole", task, steps)
    for place in places:
        code = start(tmp_path / "cut", task, steps, place, draw.randint(1, 2 * A_STEP[task][place]))
        assert code == -signal.SIGKILL, place
    assert start(tmp_path / "cut", task, steps) == 0
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert (tmp_path / "cut.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert len(json.loads((tmp_path / "cut/run.json").read_text())["sessions"]) > 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_write_the_same_metrics(tmp_path, forked):
    life(tmp_path / "here", "many calls", 2)
    assert forked(tmp_path / "there", "many calls", 2) == 0
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


# --- cut short before there is a checkpoint -------------------------------------------------------------------------


class PowerCut(BaseException):
    pass


def power_cut(*args, **kwargs):
    raise PowerCut


def test_a_run_cut_short_in_its_first_step_begins_again_in_its_folder(tmp_path):
    trainer(tmp_path / "whole").train()
    first = trainer(tmp_path / "cut")
    first.sample_batch = power_cut
    with pytest.raises(PowerCut):
        first.train()
    again = trainer(tmp_path / "cut")
    with pytest.raises(CheckpointError, match=r"checkpoints, found no checkpoint: there is nothing to go on from"):
        again.resume()
    again.train()
    names = ("metrics.jsonl", "checkpoints/step-000003/model.safetensors")
    assert all((tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in names)


def test_finished_steps_without_a_checkpoint_are_not_written_over(tmp_path):
    first = trainer(tmp_path)
    first.save = power_cut
    with pytest.raises(PowerCut):
        first.train()
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"^output_dir: .* which holds another run"):
        trainer(tmp_path).train()
    assert contents(tmp_path) == before


def test_metrics_that_did_not_reach_the_disk_come_back_from_the_checkpoint(tmp_path):
    """A checkpoint is synced to the disk and a line is not, so a power cut may keep the one and lose the other."""
    trainer(tmp_path).train()
    paths = [tmp_path / f"{name}.jsonl" for name in ("metrics", "times")]
    lines = [path.read_bytes() for path in paths]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-7])
    assert trainer(tmp_path).resume() == 3
    assert [path.read_bytes() for path in paths] == lines


# --- damaged --------------------------------------------------------------------------------------------------------

DAMAGE = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "gone": Path.unlink,
    "a folder": lambda path: path.unlink() or path.mkdir(),
}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run cut short in its fourth step, with a checkpoint of the three before."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.raises(PowerCut):
        trainer(folder, steps=4, keep_checkpoints=3).train(on_step=lambda row: row["step"] == 4 and power_cut())
    return folder


@pytest.mark.parametrize("how", DAMAGE)
def test_whichever_file_is_damaged_the_checkpoint_before_is_taken(three, tmp_path, how):
    names = [path.name for path in (three / "checkpoints/step-000003").iterdir()]
    assert {"model.safetensors", "optimizer.safetensors", "generators.safetensors", "state.json"} < set(names)
    for name in names:
        root = shutil.copytree(three / "checkpoints", tmp_path / name)
        DAMAGE[how](root / "step-000003" / name)
        said = []
        assert newest_good_checkpoint(root, said.append).name == "step-000002"
        (line,) = said
        assert line.startswith(f"checkpoint step-000003 is damaged ({name}")
        (root / "step-000002/state.json").unlink()
        shutil.rmtree(root / "step-000001")
        with pytest.raises(CheckpointError, match=r"resume: expected a checkpoint .*found none that is whole"):
            newest_good_checkpoint(root, said.append)


def test_half_deleted_folders_and_stray_files_are_passed_over(three, tmp_path):
    folder = shutil.copytree(three, tmp_path / "run")
    root = folder / "checkpoints"
    (root / "step-000004").mkdir()
    (root / "step-000005").write_text("a file")
    (root / ".partial-000004").mkdir()
    shutil.copytree(root / "step-000001", root / "step-best")  # somebody's copy: neither the newest nor in the way
    resumed = trainer(folder, steps=4, keep_checkpoints=2)
    assert resumed.resume() == 3
    (root / "step-000005").unlink()
    resumed.train()
    assert sorted(path.name for path in root.iterdir()) == ["step-000003", "step-000004", "step-best"]


def test_steps_of_seven_digits_come_after_those_of_six(tmp_path):
    for step in (999_998, 999_999, 1_000_000):
        checkpoints.save_checkpoint(tmp_path, step, lambda folder: (folder / "file").write_text("x"), keep=2)
    assert newest_good_checkpoint(tmp_path, pytest.fail).name == "step-1000000"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-999999"]


# --- no room, no permission -----------------------------------------------------------------------------------------


def fails(error):
    def function(*args, **kwargs):
        raise error

    return function


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (training, "save_model", OSError(ENOSPC, "No space left on device")),
        (training, "save_file", SafetensorError("I/O error: Disk quota exceeded (os error 122)")),
        (checkpoints.os, "fsync", OSError(EIO, "Input/output error")),
        (checkpoints.os, "replace", OSError(EROFS, "Read-only file system")),
        (Path, "mkdir", OSError(EDQUOT, "Disk quota exceeded")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_ones(tmp_path, monkeypatch, owner, name, error):
    trainer(tmp_path / "whole").train()
    run = trainer(tmp_path / "cut")
    steps = run.steps()
    next(steps)
    run.save()
    before = contents(tmp_path / "cut/checkpoints")
    next(steps)
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, fails(error))
        said = r"^output_dir: .* step 2 .*; earlier checkpoints are untouched"
        with pytest.raises(CheckpointError, match=said) as raised:
            run.save()
    assert re.search("space|quota|Input|Read-only", str(raised.value))
    assert contents(tmp_path / "cut/checkpoints") == before
    resumed = trainer(tmp_path / "cut")
    assert resumed.resume() == 1
    resumed.train()
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_disk_that_fills_up_within_a_line_of_metrics(tmp_path, monkeypatch):
    class Full:
        """A file that takes half of what is written to it."""

        def __init__(self, path):
            self.file = open(path, "a")  # noqa: SIM115

        def __enter__(self):
            return self

        def write(self, text):
            self.file.write(text[: len(text) // 2])

        def __exit__(self, *error):
            self.file.close()
            raise OSError(ENOSPC, "No space left on device")

    trainer(tmp_path / "whole").train()
    run = trainer(tmp_path / "cut")
    usual = Path.open

    def nearly_full(path, *mode, **options):
        return Full(path) if path.name == "metrics.jsonl" and run.step == 3 else usual(path, *mode, **options)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "open", nearly_full)
        said = r"^output_dir: .*metrics\.jsonl could not be written \(.*No space left.*\); checkpoints are untouched"
        with pytest.raises(OSError, match=said):
            run.train()
    assert len((tmp_path / "cut/metrics.jsonl").read_text().splitlines()) == 2  # no half line
    resumed = trainer(tmp_path / "cut")
    assert resumed.resume() == 2
    resumed.train()
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.parametrize("where", ["run", "file/run", "file"])
def test_a_folder_that_cannot_be_made_is_named_before_anything_is_sampled(tmp_path, monkeypatch, where):
    (tmp_path / "file").touch()
    run = trainer(tmp_path / where)
    run.sample_batch = pytest.fail
    if where == "run":  # root may write everywhere, so a read-only disk is played
        monkeypatch.setattr(os, "mkdir", fails(OSError(EROFS, "Read-only file system", str(tmp_path / where))))
    with pytest.raises((ValueError, OSError), match=re.escape(str(tmp_path / where))):
        run.train()


def test_a_recorded_run_that_was_killed_reads_like_any_other(tmp_path):
    """Two sessions, one of them without an end, and every step once."""
    first = trainer(tmp_path)
    write_evaluation(tmp_path / "evaluation_before.json", first.evaluate())
    with pytest.raises(PowerCut):
        first.train(on_step=lambda metrics: metrics["step"] == 2 and power_cut())
    second = trainer(tmp_path)
    second.resume()
    second.train()
    write_evaluation(tmp_path / "evaluation_after.json", second.evaluate())
    assert [row["step"] for row in read_run(tmp_path).metrics] == [1, 2, 3]
