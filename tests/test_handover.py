"""What is handed to TRL and verl means there what it means here."""

import importlib.util
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import yaml
from small_worlds import NotesTask, letters_task, word_tokenizer

from course_lib.handover import (
    SETTINGS,
    full_name,
    reply_end_ids,
    settings_table,
    trl_options,
    trl_reward,
    trl_rows,
    verl_options,
    verl_rows,
    write_verl,
)
from course_lib.logprobs import score_tokens
from course_lib.losses import grpo_loss
from course_lib.models import tiny_model
from course_lib.rewards import first_integer_reward
from course_lib.tasks import Arithmetic, Problem, SingleTurnTask
from course_lib.training import PRESETS, GRPOConfig

ROOT = Path(__file__).resolve().parents[1]
RECORDED = json.loads((ROOT / "tests" / "data" / "trl_losses.json").read_text(encoding="utf-8"))
VERL_NAMES = set(json.loads((ROOT / "tests" / "data" / "option_names.json").read_text())["verl"]["names"]) | set(
    json.loads((ROOT / "tests" / "data" / "verl_keys.json").read_text())["names"]
)
CONFIGS = [
    *PRESETS.values(),
    GRPOConfig(beta=0.1, dual_clip=3.0, eval_every=5, checkpoint_every=5, output_dir="runs/x"),
]

# --- the loss ----------------------------------------------------------------------------------------------------

MODE = {"dapo": "token-mean", "bnpo": "token-mean", "grpo": "sequence-mean", "dr_grpo": "fixed-length",
        "luspo": "sequence-sum"}  # fmt: skip


def our_loss(options):
    """Loss and gradient of the recorded batch by `grpo_loss`."""
    batch = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in RECORDED["batch"].items()}
    log_probs = batch["log_probs"].requires_grad_()
    report = grpo_loss(
        log_probs,
        batch["old_log_probs"],
        batch["advantages"],
        batch["mask"],
        ref_log_probs=batch["ref_log_probs"],
        beta=options["beta"],
        dual_clip=options["delta"],
        ratio_level=options["importance_sampling_level"],
        mode=MODE[options["loss_type"]],
        max_length=RECORDED["max_length"],
    )
    report.loss.backward()
    return report.loss.item(), log_probs.grad


def of_sequences(case):
    """TRL's luspo sums (B, 1) losses of sequence ratios as they are: a response counts once, not once a token."""
    return case["options"]["loss_type"] == "luspo" and case["options"]["importance_sampling_level"] == "sequence"


SHARED = [case for case in RECORDED["cases"] if not of_sequences(case)]


@pytest.mark.parametrize("case", SHARED, ids=lambda case: "-".join(map(str, case["options"].values())))
def test_loss_and_gradient_are_those_of_trl(case):
    loss, gradient = our_loss(case["options"])
    assert loss == pytest.approx(case["loss"], rel=1e-12, abs=1e-14)
    assert torch.allclose(gradient, torch.tensor(case["gradient"], dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_recorded_cases_differ_where_they_should():
    """A comparison of numbers that are all alike would show nothing."""
    losses = {json.dumps(case["options"]): round(case["loss"], 9) for case in SHARED}
    same_here = ("dapo", "bnpo")  # one accumulation step, one process
    assert len(losses) == 36
    assert len(set(losses.values())) == 36 - sum(f'"{same_here[1]}"' in key for key in losses)


def load_recorder():
    spec = importlib.util.spec_from_file_location("trl_losses", ROOT / "benchmarks" / "trl_losses.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recording_is_what_the_installed_trl_says():
    pytest.importorskip("trl")
    recorder = load_recorder()
    for case in RECORDED["cases"][::7]:
        loss, gradient = recorder.trl_loss(RECORDED["batch"], case["options"])
        assert loss == pytest.approx(case["loss"], rel=1e-12)
        assert torch.allclose(torch.tensor(gradient), torch.tensor(case["gradient"]))


@pytest.mark.parametrize("options", [{}, {"loss_type": "grpo", "beta": 0.1}, {"loss_type": "dr_grpo"}])
def test_one_update_of_trl_is_ours(options, tmp_path):
    """From token ids to the gradient of every parameter: padding, shifts, temperature and loss of both."""
    pytest.importorskip("trl")
    trainer = load_recorder().make_trainer(tiny_model(), str(tmp_path), temperature=0.7, **options)
    prompts, replies = [[2, 3, 4]] * 3 + [[5, 6]] * 3, [[7, 8], [7], [9, 4, 3], [2, 2, 2, 2], [6], [3, 5]]
    advantages = torch.tensor([1.0, -0.5, 0.3, -1.2, 0.4, 0.8])
    side = lambda rows, left: torch.tensor(  # noqa: E731
        [[0] * (4 - len(r)) * left + r + [0] * (4 - len(r)) * (not left) for r in rows]
    )
    ones = lambda rows: [[1] * len(row) for row in rows]  # noqa: E731
    reference = torch.full((6, 4), -3.0)
    inputs = {
        "prompt_ids": side(prompts, True), "prompt_mask": side(ones(prompts), True),
        "completion_ids": side(replies, False), "completion_mask": side(ones(replies), False),
        "advantages": advantages, "ref_per_token_logps": reference, "num_items_in_batch": torch.tensor(13.0),
    }  # fmt: skip
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    theirs = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])

    model = tiny_model()
    rows = [x + y for x, y in zip(prompts, replies, strict=True)]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    present = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor(
        [[0] * len(x) + [1] * len(y) + [0] * (width - len(x) - len(y)) for x, y in zip(prompts, replies, strict=True)]
    )
    log_probs = score_tokens(model, tokens, present, mask, temperature=0.7).log_probs
    report = grpo_loss(
        log_probs,
        log_probs.detach(),
        advantages,
        mask,
        ref_log_probs=torch.full_like(log_probs, -3.0),
        beta=options.get("beta", 0.0),
        mode=MODE[options.get("loss_type", "dapo")],
        max_length=RECORDED["max_length"],
    )
    report.loss.backward()
    ours = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert report.loss.item() == pytest.approx(loss.item(), abs=2e-6)
    assert torch.allclose(ours, theirs, atol=2e-6) and ours.abs().max() > 1e-3


# --- the settings -------------------------------------------------------------------------------------------------


def test_every_setting_has_a_row():
    assert [setting.name for setting in SETTINGS] == [field.name for field in fields(GRPOConfig)]


@pytest.mark.parametrize("config", CONFIGS)
def test_options_exist_in_the_libraries(config):
    assert set(trl_options(config)) <= set(RECORDED["options"])
    assert {key.removeprefix("actor_rollout_ref.") for key in verl_options(config)} <= {
        name.removeprefix("actor_rollout_ref.") for name in VERL_NAMES
    }


def test_trl_takes_the_options(tmp_path):
    trl = pytest.importorskip("trl")
    for config in CONFIGS:
        given = trl.GRPOConfig(**trl_options(replace(config, output_dir=str(tmp_path))), use_cpu=True)
        assert given.num_generations == config.group_size and given.temperature == config.temperature
        assert given.steps_per_generation == 1 and given.epsilon_high == config.clip_high


def test_trl_decays_the_rate_to_the_same_end():
    transformers = pytest.importorskip("transformers")
    config = GRPOConfig(steps=20, warmup_steps=4)
    options = trl_options(config)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=options["learning_rate"])
    schedule = transformers.get_scheduler(
        options["lr_scheduler_type"],
        optimizer,
        num_warmup_steps=options["warmup_steps"],
        num_training_steps=options["max_steps"],
        scheduler_specific_kwargs=options["lr_scheduler_kwargs"],
    )
    rates = []
    for _ in range(config.steps + 1):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[4] == config.learning_rate
    assert rates[-1] == pytest.approx(config.learning_rate * config.final_learning_rate)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"baseline": "leave-one-out"}, trl_options, "baseline: expected 'mean', .*RLOOTrainer.*got 'leave-one-out'"),
        ({"mode": "trajectory-mean"}, trl_options, "mode: expected .* which TRL has, got 'trajectory-mean'"),
        ({"mode": "trajectory-mean"}, verl_options, "mode: expected .* which verl has"),
        ({"kl_estimator": "k2", "beta": 0.1}, trl_options, "kl_estimator: expected 'k3'"),
    ],
)
def test_what_a_library_cannot_do_is_refused(change, options, message):
    with pytest.raises(ValueError, match=message):
        options(replace(GRPOConfig(), **change))


def test_the_readme_shows_the_table():
    table = settings_table()
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{field.name}` |" in table for field in fields(GRPOConfig))


# --- tasks and rewards --------------------------------------------------------------------------------------------

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat_tokenizer():
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|system|>", "<|assistant|>"]})
    tokenizer.chat_template = CHAT
    return tokenizer


def sums(**options):
    """A task whose reward is a function that can be imported."""
    problems = [Problem(f"{a} {b} ?", str(a)) for a in range(4) for b in range(4)]
    return SingleTurnTask(problems[3:], problems[:3], first_integer_reward, name="sums", **options)


@pytest.mark.parametrize("tokenizer", [word_tokenizer(), chat_tokenizer()], ids=["plain", "chat"])
@pytest.mark.parametrize("options", [{}, {"reply_prefix": "a b"}, {"system": "c d"}])
def test_trl_reads_the_tokens_our_sampler_reads(tokenizer, options):
    task = sums(**options)
    problems = [task.training_problem(index) for index in range(5)]
    rows = trl_rows(task, problems, tokenizer)
    encoded = tokenizer(text=[row["prompt"] for row in rows])["input_ids"]  # what TRL does with texts
    assert encoded == [task.open(problem, tokenizer).context() for problem in problems]
    assert [row["answer"] for row in rows] == [problem.answer for problem in problems]


def test_a_prompt_that_would_encode_otherwise_is_refused():
    tokenizer = word_tokenizer()
    task = letters_task()
    decode = tokenizer.decode
    tokenizer.decode = lambda ids: decode(ids) + " a"
    with pytest.raises(ValueError, match="prompt: expected a text that encodes to the tokens"):
        trl_rows(task, task.held_out_problems(), tokenizer)


def test_trl_reward_scores_texts_and_messages():
    reward = trl_reward(Arithmetic())
    arguments = {"prompts": ["What is 2 + 2?"] * 2, "answer": ["4", "4"], "completion_ids": [[1], [2]]}
    assert reward(completions=[" 4.", " 5."], **arguments) == [1.0, 0.0]
    messages = [[{"role": "assistant", "content": text}] for text in (" 4.", " 5.")]
    assert reward(completions=messages, **arguments) == [1.0, 0.0]
    assert reward.__name__ == "first_integer_reward"


@pytest.mark.parametrize(
    "make", [lambda task: trl_rows(task, [], None), trl_reward, lambda task: verl_rows(task, [], split="")]
)
def test_agents_are_not_handed_over(make):
    with pytest.raises(ValueError, match="task: expected a SingleTurnTask, one reply a problem, got NotesTask"):
        make(NotesTask())


def test_a_reply_ends_where_it_ends_here():
    tokenizer, model = word_tokenizer(), tiny_model()
    ids = reply_end_ids(sums(stop=(".",)), model, tokenizer)
    assert tokenizer.eos_token_id in ids and tokenizer.convert_tokens_to_ids(".") in ids
    assert tokenizer.convert_tokens_to_ids("a") not in ids


def test_files_for_verl(tmp_path):
    tokenizer, config = chat_tokenizer(), GRPOConfig(steps=2, prompts_per_step=3)
    task = sums(reply_prefix="a b", system="c d")
    write_verl(tmp_path / "out", task, tokenizer, config, model="a/model")
    settings = yaml.safe_load((tmp_path / "out" / "grpo.yaml").read_text())
    assert settings["defaults"] == ["ppo_trainer", "_self_"]
    assert settings["actor_rollout_ref"]["actor"]["optim"]["lr"] == config.learning_rate
    assert settings["actor_rollout_ref"]["rollout"]["n"] == config.group_size

    def keys(tree, path=""):
        for key, value in tree.items():
            yield from keys(value, f"{path}{key}.") if isinstance(value, dict) else [path + key]

    assert set(keys({k: v for k, v in settings.items() if k not in ("hydra", "defaults")})) <= VERL_NAMES

    # The rows, rendered as verl renders them, are the tokens our episodes show.
    tokenizer.chat_template = settings["actor_rollout_ref"]["model"]["custom_chat_template"]
    for split, problems in (
        ("train", [task.training_problem(i) for i in range(6)]),
        ("test", task.held_out_problems()),
    ):
        written = settings["data"]["val_files" if split == "test" else "train_files"]
        rows = [json.loads(line) for line in Path(written).read_text().splitlines()]
        rendered = [
            tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False) for row in rows
        ]
        tokenizer.chat_template, template = CHAT, tokenizer.chat_template
        assert rendered == [task.open(problem, tokenizer).context() for problem in problems]
        tokenizer.chat_template = template
        assert max(map(len, rendered)) <= settings["data"]["max_prompt_length"]

    spec = importlib.util.spec_from_file_location("reward", settings["reward"]["custom_reward_function"]["path"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    score = getattr(module, settings["reward"]["custom_reward_function"]["name"])
    assert score(data_source="sums", solution_str=" 3 .", ground_truth="3", extra_info={}) == 1.0
    assert score("sums", " 4 .", "3") == 0.0


def test_what_verl_cannot_import_is_refused(tmp_path):
    task = SingleTurnTask([Problem("a", "b")], [Problem("c", "d")], lambda text, answer: 1.0)
    with pytest.raises(ValueError, match="reward: expected a function of a module, which verl can import"):
        write_verl(tmp_path, task, chat_tokenizer(), GRPOConfig(steps=1), model="m")
    with pytest.raises(ValueError, match="tokenizer: expected one with a chat template"):
        write_verl(tmp_path, sums(), word_tokenizer(), GRPOConfig(steps=1), model="m")


def test_full_names():
    assert full_name("actor.optim.lr") == "actor_rollout_ref.actor.optim.lr"
    assert full_name("data.seed") == "data.seed"
