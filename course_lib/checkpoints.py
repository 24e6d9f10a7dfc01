"""Checkpoints that are either whole or not there: written beside their place, checksummed, then renamed into it.

Kept apart from `training` because it knows nothing of GRPO: a checkpoint is a folder of files with a list of checksums.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

CHECKSUMS = "checksums.json"


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or cannot be written."""


def checksum(path: Path) -> int:
    """CRC-32 of a file: finds a truncated or bit-flipped file, at about the speed of reading it."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def damage(folder: Path) -> str | None:
    """What is wrong with the checkpoint in `folder`, as one clause; None where every file is as it was written."""
    try:
        expected = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        if not isinstance(expected, dict) or not expected:
            return f"{CHECKSUMS} lists no files"
    except OSError as error:
        return f"{CHECKSUMS} is missing" if isinstance(error, FileNotFoundError) else f"{CHECKSUMS}: {error.strerror}"
    except (ValueError, RecursionError):
        return f"{CHECKSUMS} is not JSON"
    for name, value in expected.items():
        try:
            if checksum(folder / name) != value:
                return f"{name} does not have the checksum it was written with"
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:  # a name that no file has, a disk that does not give it
            return f"{name:.80} cannot be read: {getattr(error, 'strerror', None) or error}"
    return None


def save_checkpoint(root: Path, step: int, write: Callable[[Path], None], *, keep: int, size: int = 0) -> Path:
    """Writes one checkpoint atomically and removes the oldest ones beyond `keep`.

    Args:
        root: folder of the run's checkpoints.
        step: number of finished steps, which names the folder.
        write: puts the files into the folder that it is given.
        keep: how many checkpoints stay, the new one included.
        size: bytes the checkpoint will take, to refuse before writing where the disk is too full.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the disk is full or `root` cannot be written; earlier checkpoints are untouched.
    """
    final = root / f"step-{step:06d}"
    partial = root / f".partial-{step:06d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(root).free) < size:
            raise OSError(f"{size / 2**20:.0f} MiB needed, {free / 2**20:.0f} MiB free")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write(partial)
        sums = {path.name: checksum(path) for path in sorted(partial.iterdir())}
        (partial / CHECKSUMS).write_text(json.dumps(sums, indent=1))
        for path in partial.iterdir():
            _sync(path)
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        if os.name == "posix":
            _sync(root)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError) and "os error" not in str(error):  # as safetensors says what the disk did
            raise
        raise CheckpointError(
            f"output_dir: the checkpoint of step {step} could not be written to {root} ({error}); "
            "earlier checkpoints are untouched"
        ) from error
    for old in _in_order(root)[:-keep]:
        shutil.rmtree(old)
    return final


def newest_good_checkpoint(root: Path, report: Callable[[str], None]) -> Path:
    """The newest checkpoint under `root` that is whole; `report` hears of each damaged one that is passed over.

    Raises:
        CheckpointError: there is none.
    """
    found = _in_order(root)
    for folder in reversed(found):
        problem = damage(folder)
        if problem is None:
            return folder
        report(f"checkpoint {folder.name} is damaged ({problem}); looking for the one before it")
    state = "none that is whole" if found else "no checkpoint: there is nothing to go on from"
    raise CheckpointError(f"resume: expected a checkpoint step-* in {root}, found {state}")


def _in_order(root: Path) -> list[Path]:
    """By step. Whoever keeps a checkpoint under a name of their own, such as step-best, keeps it."""
    steps = {path: path.name.removeprefix("step-") for path in root.glob("step-*")}
    return sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: int(steps[path]))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
