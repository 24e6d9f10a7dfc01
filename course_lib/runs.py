"""What a run leaves behind: written by the trainer that made it, read by lessons, figures and tests.

A run is a folder. `config.json` holds the settings, `run.json` what made it (code, machine, versions, wall time and
memory of each session), `metrics.jsonl` and `times.jsonl` one line a step, `evaluation_before.json` and
`evaluation_after.json` the exams with every reply, `samples_before.json` and `samples_after.json` those of several
replies a problem, where they were asked for. Nothing else writes these files, so a run that is recorded was run.

Below `training`, which writes through it; apart from `checkpoints`, which are what a run needs to go on and not what
it has to tell.
"""

import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from course_lib._tensors import require, require_number, require_whole
from course_lib.costs import model_flops_utilisation

Metrics = dict[str, float]
GIB = 2**30
PARTS = ("sampling", "scoring", "updating")
PARAMETERS = re.compile(r"(\d[\d,]*) parameters$")


@dataclass(frozen=True)
class Evaluation:
    """Success on held-out problems with its 95 % Wilson interval, and the replies.

    Attributes:
        correct, total: replies that are right, and all of them.
        replies: (prompt, last reply, reward) of each; the replies to one problem stand together.
        samples: n, replies to each problem.
        outputs: of attempts of several calls, the token ids of each call of each attempt, in the order of `replies`;
            `sampling.replay` rebuilds from them what each call saw. Empty where an attempt is its reply.

    Raises:
        ValueError: the numbers do not fit the replies, or a reward is not a finite number.

    Example:
        >>> exam = Evaluation(3, 4, (("a", "", 1.0), ("a", "", 0.0), ("b", "", 1.0), ("b", "", 1.0)), samples=2)
        >>> exam.accuracy, exam.pass_at(1), exam.pass_at(2)
        (0.75, 0.75, 1.0)
    """

    correct: int
    total: int
    replies: tuple[tuple[str, str, float], ...]
    samples: int = 1
    outputs: tuple[tuple[tuple[int, ...], ...], ...] = ()

    def __post_init__(self):
        for *_, reward in self.replies:
            require_number("replies", reward, "finite rewards", lambda value: abs(value) < math.inf)
        right = sum(reward >= 1 for *_, reward in self.replies)
        require(self.correct == right, "correct", f"{right}, the replies with a reward of at least 1", self.correct)
        good = self.total == len(self.replies) >= 1
        require(good, "total", f"at least 1, and as many replies ({len(self.replies)})", self.total)
        good = 1 <= self.samples <= self.total and self.total % self.samples == 0
        require(good, "samples", f"a number that divides total={self.total}", self.samples)

    @property
    def accuracy(self) -> float:
        """Fraction solved."""
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the fraction, for as many trials as there are problems.

        Several replies to one problem succeed and fail together; with each as a trial it would be too narrow.
        """
        return wilson_interval(self.correct / self.samples, self.total // self.samples)

    def pass_at(self, k: int) -> float:
        """pass@k, the chance that at least one of k replies is right: `pass_at_k`, averaged over the problems."""
        right = [reward >= 1 for *_, reward in self.replies]
        counts = [sum(right[start : start + self.samples]) for start in range(0, self.total, self.samples)]
        return sum(pass_at_k(count, self.samples, k) for count in counts) / len(counts)

    def __str__(self) -> str:
        low, high = self.interval
        of = f"{self.total}" if self.samples == 1 else f"{self.total // self.samples} × {self.samples}"
        return f"{self.accuracy:.1%} of {of} (95 % interval {low:.1%} to {high:.1%})"


def wilson_interval(successes: float, total: int, *, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's score interval for a proportion: sensible also near 0 and 1, where p̂ ± z·σ̂ is not.

    (p̂ + z²/2n ± z √(p̂(1−p̂)/n + z²/4n²)) / (1 + z²/n)

    Args:
        successes: k, of `total` n trials; not whole where it is a fraction times n.
        total: n ≥ 1.
        z: normal quantile, 0 to 100; the default gives 95 %.

    Returns:
        (low, high).

    Raises:
        ValueError: no trials, more successes than trials, or no such quantile.

    Source:
        Wilson (1927), Probable inference, the law of succession, and statistical inference.

    Example:
        >>> [round(bound, 3) for bound in wilson_interval(72, 200)]
        [0.297, 0.429]
    """
    total = require_number("total", total, "a number of trials, total at least 1", lambda n: 1 <= n < math.inf)
    successes = require_number("successes", successes, f"0 to total={total:g}", lambda k: 0 <= k <= total)
    z = require_number("z", z, "a number from 0 to 100", lambda z: 0 <= z <= 100)
    p, share = successes / total, z * z / total
    centre, spread = p + share / 2, math.sqrt(share * (p * (1 - p) + share / 4))
    # Rounding may put a bound on the wrong side of p̂, which lies within.
    return min(p, max(0.0, (centre - spread) / (1 + share))), max(p, min(1.0, (centre + spread) / (1 + share)))


def pass_at_k(correct: int, total: int, k: int) -> float:
    """Chance that k of n replies, drawn without putting back, hold a right one, when c of the n are right.

    1 − C(n−c, k) / C(n, k), the mean of "one of these k is right" over all subsets of size k. Its expectation is
    1 − (1−p)^k for any n ≥ k, while 1 − (1 − c/n)^k is too small on average. Computed in whole numbers up to the last
    division, so exact for any n.

    Args:
        correct: c.
        total: n.
        k: from 1 to n.

    Returns:
        A probability.

    Raises:
        ValueError: not 0 ≤ c ≤ n, or not 1 ≤ k ≤ n.

    Source:
        Chen et al. (2021), Evaluating large language models trained on code, arXiv 2107.03374, section 2.1.

    Example:
        >>> [round(pass_at_k(2, 10, k), 3) for k in (1, 2, 5, 9)]
        [0.2, 0.378, 0.778, 1.0]
    """
    total, correct, k = require_whole("total", total, 1), require_whole("correct", correct, 0), require_whole("k", k, 1)
    require(correct <= total, "correct", f"0 to total={total}", correct)
    require(k <= total, "k", f"1 to total={total}", k)
    subsets = math.comb(total, k)
    return (subsets - math.comb(total - correct, k)) / subsets


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        name: of its folder.
        config: its settings.
        made_by: task, model and the sessions (one, or one more for each resume) as `run.json` has them.
        metrics: one row a step.
        times: seconds of each step: "sampling", "updating", "all", and "scoring" where there is a reference model.
        before, after: the exams.
        samples_before, samples_after: exams of several replies a problem, for pass@k; None where none were taken.
    """

    name: str
    config: dict[str, Any]
    made_by: dict[str, Any]
    metrics: list[Metrics]
    times: list[Metrics]
    before: Evaluation
    after: Evaluation
    samples_before: Evaluation | None = None
    samples_after: Evaluation | None = None

    def column(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps that have the metric, and its values.

        Raises:
            ValueError: no step has it.
        """
        rows = [(int(row["step"]), row[metric]) for row in self.metrics if metric in row]
        if not rows:
            known = sorted({name for row in self.metrics for name in row})
            raise ValueError(f"metric: expected one of {', '.join(known)}, got {metric!r}")
        return [step for step, _ in rows], [value for _, value in rows]

    @property
    def minutes(self) -> float:
        """Minutes of training: sampling, scoring and updating, without the exams."""
        return sum(sum(row.get(part, 0.0) for part in PARTS) for row in self.times) / 60

    def throughput(self, peak_flops: float | None = None) -> dict[str, float]:
        """How fast the run went, exams not counted.

        Sampled are all tokens drawn, dead groups included. Trained are all tokens run forward and backward, each once a
        pass, prompts and observations included.

        Args:
            peak_flops: operations a second of the machine, all devices together; for example
                `costs.PEAK_FLOPS["H200"]`.

        Raises:
            ValueError: the record lacks what this is worked out from.

        Returns:
            "sampled_tokens_per_second" in sampling and "trained_tokens_per_second" in the update; "tokens_per_second",
            sampled in all the time; the shares of time "sampling", "scoring" and "updating"; "peak_memory_gib" of the
            process, "device_memory_gib" on a GPU; and with `peak_flops` "model_flops_utilisation".

        Example:
            ``read_run("data/runs/laptop-0").throughput()["sampling"]``
        """
        groups = self.config["group_size"]
        for row in self.metrics:
            lacks = [name for name in ("reply_tokens", "calls", "groups_sampled") if name not in row]
            require(not lacks, "metrics", f"{', '.join(lacks)} in each step", ", ".join(row))
        sampled = sum(m["reply_tokens"] * m["calls"] * m["groups_sampled"] * groups for m in self.metrics)
        trained = sum(m.get("tokens_run", 0) for m in self.metrics)
        spent = {part: sum(row.get(part, 0.0) for row in self.times) for part in PARTS}
        seconds = sum(spent.values())
        good = spent["sampling"] > 0 and spent["updating"] > 0
        require(good, "times", "more than 0 seconds of sampling and of updating", spent)
        found = {
            "sampled_tokens_per_second": sampled / spent["sampling"],
            "trained_tokens_per_second": trained / spent["updating"],
            "tokens_per_second": sampled / seconds,
            **{part: value / seconds for part, value in spent.items()},
        }
        for name in ("peak_memory_gib", "device_memory_gib"):
            if peaks := [session[name] for session in self.made_by["sessions"] if name in session]:
                found[name] = max(peaks)
        if peak_flops is not None:
            found["model_flops_utilisation"] = model_flops_utilisation(
                self.parameters, sampled=sampled, trained=trained, seconds=seconds, peak_flops=peak_flops
            )
        return found

    @property
    def parameters(self) -> int:
        """P, as the record of the model says."""
        return int(PARAMETERS.search(self.made_by["model"])[1].replace(",", ""))

    @property
    def peak_memory(self) -> float:
        """The most memory the process had, in GiB, in a session that came to its end; 0 if no system kept count."""
        return max((session.get("peak_memory_gib", 0.0) for session in self.made_by["sessions"]), default=0.0)

    @property
    def hardware(self) -> str:
        """One line: what it ran on."""
        session = self.made_by["sessions"][-1]
        return f"{session['device']}, {session['threads']} threads, {session['memory_gib']:.0f} GiB"


def read_run(folder: str | os.PathLike) -> Run:
    """Reads a finished run.

    Args:
        folder: as the trainer wrote it, for example data/runs/laptop-0.

    Raises:
        ValueError: a file is missing or broken (with its line), a step is missing, or the run did not end.

    Example:
        ``read_run("data/runs/laptop-0").after.accuracy``
    """
    folder = _as_path("folder", folder)
    config, made_by = _read_json(folder, "config.json"), _read_json(folder, "run.json")
    metrics, times = (_read_lines(folder, f"{name}.jsonl") for name in ("metrics", "times"))
    _require_kinds(f"{folder.name}/config.json", config, steps=int, group_size=int)
    if config["steps"] < 1 or config["group_size"] < 1:
        raise ValueError(f"{folder.name}/config.json: expected steps and group_size of at least 1, got {config!s:.80}")
    _require_kinds(f"{folder.name}/run.json", made_by, task=str, model=str, sessions=list)
    if not PARAMETERS.search(made_by["model"]):
        said = made_by["model"]
        raise ValueError(f'{folder.name}/run.json: expected a model of "... N parameters", got {said!r:.80}')
    for session in made_by["sessions"]:
        _require_kinds(f"{folder.name}/run.json", session, device=str, threads=int, memory_gib=float)
        peaks = {"peak_memory_gib": 0.0, "device_memory_gib": 0.0} | session
        _require_kinds(f"{folder.name}/run.json", peaks, peak_memory_gib=float, device_memory_gib=float)
    if odd := [seconds for row in times for seconds in row.values() if not 0 <= seconds < math.inf]:
        raise ValueError(f"{folder.name}/times.jsonl: expected seconds ≥ 0, got {odd[0]}")
    for name, rows in (("metrics.jsonl", metrics), ("times.jsonl", times)):
        steps = [row.get("step") for row in rows]
        if len(steps) != config["steps"] or steps != list(range(1, len(steps) + 1)):
            found = f"{len(steps)} lines, the last with step {steps[-1] if steps else None}"
            raise ValueError(f"{folder.name}/{name}: expected the steps 1 to {config['steps']}, got {found}")
    if any("seconds" not in session for session in made_by["sessions"][-1:]) or not made_by["sessions"]:
        raise ValueError(f"{folder.name}/run.json: expected a session that came to its end, got {made_by['sessions']}")
    exams = [read_evaluation(folder / f"evaluation_{name}.json") for name in ("before", "after")]
    taken = [folder / f"samples_{name}.json" for name in ("before", "after")]
    samples = [read_evaluation(path) if path.exists() else None for path in taken]
    return Run(folder.name, config, made_by, metrics, times, *exams, *samples)


def read_evaluation(path: str | os.PathLike) -> Evaluation:
    """An exam that `write_evaluation` kept.

    Raises:
        ValueError: the file is missing or broken, or its numbers do not fit its replies.
    """
    path = _as_path("path", path)
    kept = _read_json(path.parent, path.name)
    _require_kinds(path.name, {"samples": 1} | kept, correct=int, total=int, replies=list, samples=int)
    correct, total, samples = kept["correct"], kept["total"], kept.get("samples", 1)
    for reply in kept["replies"]:
        kinds = [str, str, (int, float)]
        if not isinstance(reply, list) or len(reply) != 3 or not all(map(isinstance, reply, kinds)):
            raise ValueError(f"{path.name}: expected replies of (prompt, reply, reward), got {str(reply)[:80]}")
    outputs = kept.get("outputs", [])
    if not isinstance(outputs, list) or len(outputs) not in (0, total) or not all(map(_is_attempt, outputs)):
        raise ValueError(f"{path.name}: expected outputs as lists of token ids for each attempt, got {outputs!r:.80}")
    attempts = tuple(tuple(map(tuple, calls)) for calls in outputs)
    try:
        return Evaluation(correct, total, tuple(map(tuple, kept["replies"])), samples, attempts)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def _is_attempt(calls: Any) -> bool:
    return isinstance(calls, list) and all(
        isinstance(ids, list) and all(type(token) is int and 0 <= token < 2**63 for token in ids) for ids in calls
    )


def write_evaluation(path: str | os.PathLike, result: Evaluation) -> None:
    """Keeps an exam beside the run's metrics, an attempt a line."""
    path = _as_path("path", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = asdict(result)
    if not result.outputs:
        del kept["outputs"]
    fields = [f' "{name}": {_a_row_a_line(value)}' for name, value in kept.items()]
    write_whole(path, "{\n" + ",\n".join(fields) + "\n}")


def _a_row_a_line(value: Any) -> str:
    rows = value if isinstance(value, tuple) and value else None
    if rows is None:
        return json.dumps(value)
    return "[\n" + ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows) + "\n ]"


def prepare_folder(folder: str | os.PathLike) -> None:
    """Makes the folder of a new run.

    Raises:
        ValueError: it is a file, or holds finished steps of another run, of which nothing is touched.
        OSError: it cannot be made.
    """
    folder = _as_path("folder", folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir: expected a folder, got the file {folder}")
    # A run that was cut short in its first step left a config and nothing that could be lost.
    metrics, checkpoints = folder / "metrics.jsonl", list((folder / "checkpoints").glob("step-*"))
    if checkpoints or (metrics.exists() and metrics.stat().st_size):
        go_on = "resume that run" if checkpoints else "it has steps but no checkpoint to go on from: move it away"
        raise ValueError(
            f"output_dir: expected a new or empty folder, got {folder}, which holds another run; "
            f"{go_on} or choose another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)


def begin_session(folder: Path, *, task: str, model: str, step: int) -> None:
    """Notes what makes the coming steps: code, machine, versions."""
    path = folder / "run.json"
    record = _read_sessions(folder) if step and path.exists() else {"task": task, "model": model, "sessions": []}
    record["sessions"].append({"from_step": step, **provenance()})
    write_whole(path, json.dumps(record, indent=1))


def end_session(folder: Path, *, step: int, seconds: float) -> None:
    """Notes how far the session came, how long it took with everything, and how much memory it had at most."""
    record = _read_sessions(folder)
    require(bool(record["sessions"]), f"{folder.name}/run.json", "a session that has begun", "none")
    record["sessions"][-1] |= {"to_step": step, "seconds": round(seconds, 1), **peak_memory()}
    write_whole(folder / "run.json", json.dumps(record, indent=1))


def provenance() -> dict[str, Any]:
    """Code, machine and versions, without a path or a name of this machine."""
    import psutil

    cuda = torch.cuda.is_available()
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
    return {
        "date": date.today().isoformat(),
        "revision": _revision(),
        "device": torch.cuda.get_device_name() if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "versions": {"python": platform.python_version()} | packages,
    }


def peak_memory() -> dict[str, float]:
    """The most memory this process had so far, where the operating system keeps count of it, in GiB."""
    peaks = {"device_memory_gib": torch.cuda.max_memory_allocated() / GIB} if torch.cuda.is_available() else {}
    try:
        import resource
    except ImportError:  # Windows
        return peaks
    unit = GIB if sys.platform == "darwin" else 2**20
    return peaks | {"peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 2)}


def write_whole(path: Path, text: str) -> None:
    """Writes beside the file and renames into it: whoever reads finds the old text or the new.

    Half of a surrogate pair, which a model may write and UTF-8 lacks, becomes \\ud800, as JSON spells it.
    """
    beside = path.with_name(path.name + ".new")
    lines = text if not text or text.endswith("\n") else text + "\n"
    try:
        beside.write_text(lines, encoding="utf-8", errors="backslashreplace")
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _revision() -> str | None:
    """Commit of this library's code, with "+changes" where its files differ from it; None outside of a checkout."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        kept = json.loads((folder / name).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder.name}: expected a recorded run, {name} is missing") from None
    except OSError as error:
        raise ValueError(f"{folder.name}/{name}: expected a file to read, got {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder.name}/{name}: expected JSON, got an error ({error})") from error
    if not isinstance(kept, dict):
        raise ValueError(f"{folder.name}/{name}: expected a JSON object, got {str(kept)[:80]}")
    return kept


def _read_sessions(folder: Path) -> dict[str, Any]:
    record = _read_json(folder, "run.json")
    _require_kinds(f"{folder.name}/run.json", record, sessions=list)
    return record


def _read_lines(folder: Path, name: str) -> list[Metrics]:
    if not (folder / name).is_file():
        raise ValueError(f"{folder.name}: expected a recorded run, {name} is missing")
    rows = []
    for number, line in enumerate((folder / name).read_bytes().splitlines(), start=1):
        where = f"{folder.name}/{name}, line {number}"
        try:
            row = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            said = line.decode(errors="replace")[:80]
            raise ValueError(f"{where}: expected a JSON object, got {said!r}") from error
        _require_kinds(where, row, **dict.fromkeys(map(str, row), float))
        rows.append(row)
    return rows


def _as_path(name: str, path: Any) -> Path:
    require(isinstance(path, str | os.PathLike), name, "a path", f"{path!r:.80}")
    return Path(path)


def _require_kinds(where: str, record: Any, **kinds: type) -> None:
    """The record has every name, with a value of the kind; a whole number is also a float, and floats are finite."""
    for name, kind in kinds.items():
        value = record.get(name) if isinstance(record, dict) else None
        huge = isinstance(value, int) and abs(value) >= 2**63
        endless = isinstance(value, float) and not math.isfinite(value)
        if huge or endless or isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise ValueError(f"{where}: expected {name} as {kind.__name__}, got {str(record)[:80]}")
