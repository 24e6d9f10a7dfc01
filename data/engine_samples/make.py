"""Records what inference engines sampled, beside the trainer's log-probabilities of the same tokens.

    python data/engine_samples/make.py [llamacpp | bfloat16 | top_k | next_token ...]

Each file is one run of a real sampler of SmolLM2-135M-Instruct: a llama.cpp server that reads the 4-bit GGUF file, or
the trainer's own model in bfloat16. The trainer is `load_small_model()`, the same weights in float32. A second run
gives the same kind of samples and not the same file: what shares a batch changes the last bits of the logits.
"""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from course_lib.engines import Engine, local_engine
from course_lib.logprobs import response_log_probs
from course_lib.models import SMALL_MODEL_SHA256, eos_token_ids, load_small_model
from course_lib.sampling import sample_replies
from course_lib.trajectories import Call

FOLDER = Path(__file__).parent
QUESTIONS = (
    "What is 7 + 8?",
    "What is 12 + 30?",
    "What is 45 - 19?",
    "What is 6 times 7?",
    "Ada has 5 apples and buys 4 more. How many does she have?",
    "A train leaves at 9 and arrives at 12. How long is the trip?",
    "Which number comes next: 2, 4, 6, 8?",
    "Write the number 31 in words.",
    "Name three animals that live in the sea.",
    "Why is the sky blue? One sentence.",
    "Write one sentence about a lighthouse.",
    "What do you need to bake bread?",
    "Give me a word that rhymes with rain.",
    "How do I say good morning in French?",
    "What is a prime number?",
    "Describe the taste of a lemon.",
)
OPENING = "The name of the dog was"
REPLIES, LENGTH = 13, 64
SCORED_AT_ONCE = 52


def prompts(tokenizer) -> list[list[int]]:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]


def score(model, calls: list[Call]) -> list[list[float]]:
    """The trainer's log-probabilities of every output."""
    rows = []
    with torch.inference_mode():
        for start in range(0, len(calls), SCORED_AT_ONCE):
            part = calls[start : start + SCORED_AT_ONCE]
            values = response_log_probs(model, [call.context for call in part], [call.output for call in part])
            rows += [row[: len(call.output)] for call, row in zip(part, values.tolist(), strict=True)]
    return rows


def about(engine: str, **settings) -> dict:
    packages = {name: version(name) for name in ("torch", "transformers", "xllamacpp")}
    return {"engine": engine, **packages, "model_sha256": SMALL_MODEL_SHA256, "temperature": 1.0, **settings}


def write(name: str, head: dict, calls: list[Call], **trainer: list[list[float]]) -> None:
    lines, before = [json.dumps(head)], {}
    for place, call in enumerate(calls):
        shared = {"prompt": call.context, "truncated": call.truncated}
        row = {name: value for name, value in shared.items() if before.get(name) != value}
        before = shared
        row["output"] = call.output
        row["log_probs"] = [round(value, 5) for value in call.log_probs]
        row |= {key: [round(value, 5) for value in rows[place]] for key, rows in trainer.items()}
        lines.append(json.dumps(row, separators=(",", ":")))
    (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{name}: {len(calls)} calls, {sum(len(call.output) for call in calls)} tokens", flush=True)


def repeated(tokenizer, replies: int) -> list[list[int]]:
    return [prompt for prompt in prompts(tokenizer) for _ in range(replies)]


def draw(work: Callable[[Engine], list[Call]], tokenizer) -> list[Call]:
    with local_engine(threads=1, timeout=1800) as engine:
        engine.check_tokenizer(tokenizer)
        return work(engine)


def llamacpp() -> None:
    model, tokenizer = load_small_model(device="cpu")
    ends = eos_token_ids(model, tokenizer)
    sampling = {"max_tokens": LENGTH, "seed": 0, "stop_token_ids": ends}
    calls = draw(lambda engine: engine.sample(repeated(tokenizer, REPLIES), **sampling), tokenizer)
    columns = {"float32": score(model, calls), "bfloat16": score(model.to(torch.bfloat16), calls)}
    write("llamacpp", about("llama.cpp, Q4_1", seed=0, max_tokens=LENGTH, top_k=0), calls, **columns)


def top_k() -> None:
    model, tokenizer = load_small_model(device="cpu")
    sampling = {"max_tokens": 24, "seed": 1, "stop_token_ids": eos_token_ids(model, tokenizer), "top_k": 40}
    calls = draw(lambda engine: engine.sample(repeated(tokenizer, 4), **sampling), tokenizer)
    write("top_k", about("llama.cpp, Q4_1", seed=1, max_tokens=24, top_k=40), calls, float32=score(model, calls))


def next_token() -> None:
    """Draws of one token: 400 and 1,600 from the whole vocabulary, 800 from its 40 likeliest."""
    _, tokenizer = load_small_model(device="cpu")
    prompt = tokenizer.encode(OPENING)

    def work(engine: Engine) -> list[Call]:
        runs = ((400, 0, 2), (1600, 0, 3), (800, 40, 4))
        return [
            call
            for count, k, seed in runs
            for call in engine.sample([prompt] * count, max_tokens=1, seed=seed, top_k=k)
        ]

    write("next_token", about("llama.cpp, Q4_1", runs=[400, 1600, 800], top_k=[0, 0, 40]), draw(work, tokenizer))


def bfloat16() -> None:
    model, tokenizer = load_small_model(device="cpu", dtype=torch.bfloat16)
    contexts, ends = repeated(tokenizer, REPLIES), set(eos_token_ids(model, tokenizer))
    uniforms = np.random.default_rng(5).random((len(contexts), LENGTH))
    settings = {"temperature": 1.0, "stop_ids": [ends] * len(contexts)}
    drawn = sample_replies(model, contexts, uniforms=uniforms, **settings)
    pairs = zip(contexts, drawn, strict=True)
    calls = [Call(x, tokens, values, truncated=tokens[-1] not in ends) for x, (tokens, values) in pairs]
    trainer, _ = load_small_model(device="cpu")
    head = about("transformers, bfloat16", seed=5, max_tokens=LENGTH, top_k=0)
    write("bfloat16", head, calls, float32=score(trainer, calls))


if __name__ == "__main__":
    makers = {maker.__name__: maker for maker in (llamacpp, bfloat16, top_k, next_token)}
    for chosen in sys.argv[1:] or makers:
        makers[chosen]()
