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
from safetensors.torch import load_file
from small_worlds import float64_model, word_tokenizer

from course_lib.models import load_model

ROOT = Path(__file__).resolve().parents[1]

RUN = """
import json, os, signal, sys, torch
from dataclasses import replace
from small_worlds import NotesTask, float64_model, letters_task, word_tokenizer
from course_lib.processes import assembled, is_part, join, rank, wait
from course_lib.training import GRPOConfig, GRPOTrainer

join()
folder, kind, how = sys.argv[1:4]
tokenizer = word_tokenizer()
task = letters_task() if kind == "one-call" else NotesTask()
config = GRPOConfig(steps=3, prompts_per_step=3, group_size=3, max_new_tokens=2, learning_rate=1e-2, seed=5,
                    updates_per_batch=1 if how == "kill" else 2, max_resamples=1, eval_every=3, precision="float32",
                    beta=0.1 if how in ("penalty", "again") else 0.0, checkpoint_every=2 if how == "again" else 0,
                    output_dir=folder if how in ("kill", "again") else None)
run = GRPOTrainer(float64_model("llama", vocab_size=len(tokenizer)), tokenizer, task, config)

def die(metrics):
    if how == "kill" and metrics["step"] == 2 and rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

if how == "again":
    run.train()
    run = GRPOTrainer(float64_model("llama", vocab_size=len(tokenizer)), tokenizer, task, config)
    if rank() == 0:
        os.rename(f"{folder}/checkpoints/step-000003", f"{folder}/whole-run")
    wait()
    assert run.resume() == 2
history = run.train(on_step=die)
kept = sum(p.to_local().numel() if is_part(p) else p.numel() for p in run.model.parameters())
weights = assembled(dict(run.model.named_parameters()))
if rank() == 0:
    open(f"{folder}/kept", "w").write(str(kept))
    weights = torch.cat([p.detach().flatten() for p in weights.values()])
    torch.save(weights, f"{folder}/weights.pt")
    open(f"{folder}/history.json", "w").write(json.dumps(history))
"""


def launch(folder, processes, kind="one-call", how="", **variables):
    script = folder / "run.py"
    script.write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", **variables}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A static rendezvous has no heartbeats, which a machine that stands still for a quarter of a minute misses.
    options = [f"--nproc-per-node={processes}", "--max-restarts=0", "--master-addr=127.0.0.1", f"--master-port={port}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(folder), kind, how]
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


FSDP = {"ACCELERATE_USE_FSDP": "true"}  # what `accelerate launch --use_fsdp` tells the processes


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how", "processes"), [("one-call", "penalty", 3), ("many-calls", "", 2)])
def test_processes_that_share_the_layers_learn_what_one_learns(tmp_path, kind, how, processes):
    results = {}
    for count in (1, processes):
        folder = tmp_path / str(count)
        folder.mkdir()
        ended = launch(folder, count, kind, how, **FSDP)
        assert ended.returncode == 0, ended.stderr
        results[count] = torch.load(folder / "weights.pt", weights_only=True)
    assert torch.allclose(results[processes], results[1], rtol=0, atol=1e-9)
    model = float64_model("llama", vocab_size=len(word_tokenizer()))
    everything, whole = sum(p.numel() for p in model.parameters()), model.get_input_embeddings().weight.numel()
    kept = int((tmp_path / str(processes) / "kept").read_text())
    assert kept <= whole + (1 / processes + 0.05) * (everything - whole)  # cut along rows, which need not come out even
    assert int((tmp_path / "1/kept").read_text()) == everything


@pytest.mark.slow
def test_a_run_with_shared_layers_resumes_and_its_checkpoint_is_a_whole_model(tmp_path):
    ended = launch(tmp_path, 2, how="again", **FSDP)
    assert ended.returncode == 0, ended.stderr
    folders = tmp_path / "checkpoints/step-000003", tmp_path / "whole-run"
    resumed, whole = (load_file(folder / "model.safetensors") for folder in folders)
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    model, _ = load_model(tmp_path / "whole-run", device="cpu")
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        name: tuple(p.shape) for name, p in float64_model("llama", vocab_size=len(word_tokenizer())).named_parameters()
    }


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_process_ends_the_run_with_a_message_and_a_checkpoint(tmp_path):
    ended = launch(tmp_path, 2, how="kill")
    assert ended.returncode != 0
    assert "another process of this run ended in step 3; the checkpoint of step 2 was written" in ended.stderr
    assert (tmp_path / "checkpoints/step-000002/checksums.json").exists()


@pytest.mark.parametrize(("options", "expected"), [("--multi_gpu", "whole"), ("--use_fsdp", "shared out")])
def test_accelerate_launch_is_understood(tmp_path, options, expected):
    script = tmp_path / "run.py"
    # A file each: what two processes print can interleave within a line.
    script.write_text(
        "from pathlib import Path\nfrom course_lib.processes import *\njoin()\n"
        "layers = 'shared out' if sharded() else 'whole'\n"
        "Path(__file__).with_name(f'rank{rank()}').write_text(f'{rank()} of {size()}, layers {layers}')"
    )
    options = [options, "--num_processes=2", "--main_process_port=0"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    said = sorted(path.read_text() for path in tmp_path.glob("rank*"))
    assert said == [f"{rank} of 2, layers {expected}" for rank in (0, 1)]
