"""Can the course run here? `python -m course_lib doctor` answers, and names what to do where it cannot."""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

# Nothing that must be installed is imported up here: a broken installation is something to report.

GIB = 2**30
MEMORY_NEEDED = 4 * GIB  # fine-tuning the small model in float32 with AdamW stays below this
DISK_NEEDED = 5 * GIB  # two checkpoints with AdamW's state, beside a third that is being written
SET_UP_AGAIN = "Set up again: make learn, or as in the README."
SHOWN_PACKAGES = ("torch", "transformers", "numpy", "jupyterlab")


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: what was looked at.
        value: what was found; never a path.
        ok: whether the course can run with it.
        advice: what to do, where there is something to do.
        where: a path on this machine, where there is one.
    """

    name: str
    value: str
    ok: bool = True
    advice: str = ""
    where: str = ""


def report() -> list[Finding]:
    """Everything that `python -m course_lib doctor` shows, as data.

    A check that fails to run is itself a finding that is not ok.

    Example:
        >>> [finding.name for finding in report()][:3]
        ['Python', 'Packages', 'Device']
    """
    findings = []
    for name, check in CHECKS.items():
        try:
            findings.append(check(name))
        except Exception as error:  # a broken installation may fail in any way
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            findings.append(Finding(name, reason, ok=False, advice=SET_UP_AGAIN))
    return findings


def show(findings: list[Finding]) -> None:
    """Print findings: a table in a terminal, plain lines elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(show_header=False)
        for finding in findings:
            colour = "green" if finding.ok else "red"
            text = "\n".join(filter(None, (finding.value, finding.where, finding.advice)))
            table.add_row(f"[{colour}]{'ok' if finding.ok else 'NO'}", finding.name, text)
        Console().print(table)
    else:
        for finding in findings:
            print(f"{'ok' if finding.ok else 'NO':3}{finding.name:13}{finding.value}")
            for line in filter(None, (finding.where, *finding.advice.splitlines())):
                print(f"{'':16}{line}")


def run() -> int:
    """Look, show, and return the exit code: 0 if the course can run here, else 1."""
    findings = report()
    show(findings)
    good = all(finding.ok for finding in findings)
    print("The course can run here." if good else "Not all of the course can run here: see NO above.")
    return 0 if good else 1


def _python(name: str) -> Finding:
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    good = sys.version_info >= (3, 11)
    return Finding(name, version, good, "" if good else "The course needs Python 3.11 or newer.")


def _packages(name: str) -> Finding:
    from packaging.requirements import Requirement

    wrong = []
    for text in importlib.metadata.requires("policy-gradient-course") or []:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": "notebooks"}):
            continue
        found = _version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name}: expected {requirement.specifier}, found {found or 'none'}")
    shown = ", ".join(f"{package} {_version(package)}" for package in SHOWN_PACKAGES if _version(package))
    advice = "\n".join([*wrong, SET_UP_AGAIN]) if wrong else ""
    return Finding(name, shown, not wrong, advice)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(name: str) -> Finding:
    import torch

    from course_lib.models import autocast_dtype, choose_device

    device = choose_device()
    label = f"cuda, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
    dtype = autocast_dtype(device)
    return Finding(name, f"{label}, {'float32' if dtype is None else 'float32 with bfloat16 autocast'}")


def _threads(name: str) -> Finding:
    import torch

    return Finding(name, f"{torch.get_num_threads()} for computing, {os.cpu_count()} processors")


def _small_model(name: str) -> Finding:
    from huggingface_hub import try_to_load_from_cache

    from course_lib.models import OTHER_WAYS, SMALL_MODEL_HUB_ID, ModelError, find_small_model

    try:
        source = find_small_model()
    except ModelError as error:
        return Finding(name, "cannot be used", ok=False, advice=str(error))
    if source == SMALL_MODEL_HUB_ID:
        if isinstance(try_to_load_from_cache(source, "model.safetensors"), str):
            return Finding(name, "downloaded from the hub")
        return Finding(name, "not on this machine", ok=False, advice=OTHER_WAYS)
    if os.environ.get("COURSE_MODEL"):
        return Finding(name, "the one COURSE_MODEL names", where=source)
    if source.endswith(".gguf"):
        return Finding(name, "found, converted when it is first loaded", where=source)
    return Finding(name, "ready", where=source)


def _memory(name: str) -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    enough = memory.available >= MEMORY_NEEDED
    advice = "" if enough else f"Fine-tuning takes up to {MEMORY_NEEDED / GIB:.0f} GiB; close other programs."
    return Finding(name, f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free", enough, advice)


def _disk(name: str) -> Finding:
    from course_lib.models import cache_folder

    cache = next(folder for folder in (cache_folder(), *cache_folder().parents) if folder.is_dir())
    free, where = min((shutil.disk_usage(folder).free, str(folder)) for folder in (os.getcwd(), cache))
    enough = free >= DISK_NEEDED
    advice = "" if enough else f"The model and its checkpoints take up to {DISK_NEEDED / GIB:.0f} GiB."
    return Finding(name, f"{free / GIB:.1f} GiB free", enough, advice, where=where)


def _self_test(name: str) -> Finding:
    """One GRPO loss and its gradient on the device, against the values worked out by hand.

    Rewards 1, 0, 0, 0: advantages √3 and three times −1/√3. The first response has two tokens, the others
    one, so each of the five tokens weighs 1/5. Where old and new policy agree the loss is −Σ A/5 =
    −(2√3 − √3)/5 = −√3/5, and its derivative by a token's log-probability is −A/5.
    """
    import torch

    from course_lib.advantages import group_relative_advantages
    from course_lib.losses import grpo_loss
    from course_lib.models import choose_device

    device = choose_device()
    log_probs = torch.full((4, 2), -1.0, device=device, requires_grad=True)
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 0]], device=device)
    advantages = group_relative_advantages([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0]).to(device)
    loss = grpo_loss(log_probs, log_probs.detach(), advantages, mask).loss
    loss.backward()
    right, wrong = -(3**0.5) / 5, 1 / (5 * 3**0.5)
    gradient = torch.tensor([[right, right], [wrong, 0], [wrong, 0], [wrong, 0]])
    good = abs(loss.item() - right) < 1e-5 and torch.allclose(log_probs.grad.cpu(), gradient, atol=1e-5)
    value = f"GRPO loss {loss.item():.4f}, expected {right:.4f}"
    return Finding(name, value, good, "" if good else "PyTorch computes wrong values on this device.")


CHECKS: dict[str, Callable[[str], Finding]] = {
    "Python": _python,
    "Packages": _packages,
    "Device": _device,
    "Threads": _threads,
    "Small model": _small_model,
    "Memory": _memory,
    "Disk": _disk,
    "Self-test": _self_test,
}
