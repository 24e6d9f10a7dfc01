"""One run shared among processes is the run of one process."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

RUN = """
import json, os, signal, sys, torch
from dataclasses import replace
from small_worlds import NotesTask, float64_model, letters_task, word_tokenizer
from course_lib.processes import join, rank
from course_lib.training import GRPOConfig, GRPOTrainer

join()
folder, kind, kill = sys.argv[1:4]
tokenizer = word_tokenizer()
task = letters_task() if kind == "one-call" else NotesTask()
config = GRPOConfig(steps=3, prompts_per_step=3, group_size=3, max_new_tokens=2, learning_rate=1e-2, seed=5,
                    updates_per_batch=1 if kill == "kill" else 2, max_resamples=1, eval_every=3, precision="float32",
                    output_dir=folder if kill == "kill" else None)
run = GRPOTrainer(float64_model("llama", vocab_size=len(tokenizer)), tokenizer, task, config)

def die(metrics):
    if kill == "kill" and metrics["step"] == 2 and rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

history = run.train(on_step=die)
if rank() == 0:
    weights = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    torch.save(weights, f"{folder}/weights.pt")
    open(f"{folder}/history.json", "w").write(json.dumps(history))
"""


def launch(folder, processes, kind="one-call", kill=""):
    script = folder / "run.py"
    script.write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A static rendezvous has no heartbeats, which a machine that stands still for a quarter of a minute misses.
    options = [f"--nproc-per-node={processes}", "--max-restarts=0", "--master-addr=127.0.0.1", f"--master-port={port}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(folder), kind, kill]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "counts"), [("one-call", (2, 4)), ("many-calls", (2,))])
def test_several_processes_learn_what_one_learns(tmp_path, kind, counts):
    results = {}
    for processes in (1, *counts):
        folder = tmp_path / str(processes)
        folder.mkdir()
        ended = launch(folder, processes, kind)
        assert ended.returncode == 0, ended.stderr
        results[processes] = (
            torch.load(folder / "weights.pt", weights_only=True),
            json.loads((folder / "history.json").read_text()),
        )
    weights, history = results[1]
    for processes in counts:
        assert torch.allclose(results[processes][0], weights, rtol=0, atol=1e-9)
        for one, other in zip(history, results[processes][1], strict=True):
            # Every process repeats the prefixes of its rows, so more tokens are run, to the same end.
            assert other.pop("tokens_run") >= one["tokens_run"]
            assert other == pytest.approx({k: v for k, v in one.items() if k != "tokens_run"}, abs=1e-6)
    assert history[0]["groups_dropped"] + history[1]["groups_dropped"] > 0 or kind == "many-calls"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_process_ends_the_run_with_a_message_and_a_checkpoint(tmp_path):
    ended = launch(tmp_path, 2, kill="kill")
    assert ended.returncode != 0
    assert "another process of this run ended in step 3; the checkpoint of step 2 was written" in ended.stderr
    assert (tmp_path / "checkpoints/step-000002/checksums.json").exists()


def test_accelerate_launch_is_understood(tmp_path):
    script = tmp_path / "run.py"
    # A file each: what two processes print can interleave within a line.
    script.write_text(
        "from pathlib import Path\nfrom course_lib.processes import *\njoin()\n"
        "Path(__file__).with_name(f'rank{rank()}').write_text(f'{rank()} of {size()}')"
    )
    options = ["--multi_gpu", "--num_processes=2", "--main_process_port=0"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.read_text() for path in tmp_path.glob("rank*")) == ["0 of 2", "1 of 2"]
