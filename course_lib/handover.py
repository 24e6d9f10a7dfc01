"""Handing a task and its settings over to TRL or verl, for what this trainer does not do: an inference engine
beside it, many nodes.

A module of its own, on top of everything: it knows tasks, sampling and `GRPOConfig`, nothing needs it, and it imports
neither TRL nor verl. Both take tasks of one reply; an agent that edits its own context fits into neither.

`SETTINGS` is the table of what maps to what. The options handed over are made from it, so the two cannot differ. A
setting that the other library cannot honour is refused, never dropped in silence.

TRL:

    rows = trl_rows(task, [task.training_problem(i) for i in range(2000)], tokenizer)
    model.generation_config.eos_token_id = reply_end_ids(task, model, tokenizer)
    trl.GRPOTrainer(
        model,
        reward_funcs=trl_reward(task),
        args=trl.GRPOConfig(**trl_options(config)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    ).train()

verl, after `write_verl("handed_over", task, tokenizer, config, model="path/of/the/model")`:

    python -m verl.trainer.main_ppo --config-path "$PWD/handed_over" --config-name grpo
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from course_lib.models import autocast_dtype, choose_device, eos_token_ids
from course_lib.sampling import stop_token_ids
from course_lib.tasks import Problem, SingleTurnTask, Task
from course_lib.training import GRPOConfig

Options = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One field of `GRPOConfig` in the two libraries.

    Attributes:
        name: the field.
        trl: from a config to TRL's options for it; None where TRL has none.
        verl: the same for verl; `actor.`, `rollout.` and `model.` stand below `actor_rollout_ref.`.
        note: what differs.
    """

    name: str
    trl: Callable[[GRPOConfig], Options] | None
    verl: Callable[[GRPOConfig], Options] | None
    note: str = ""


def _same(name: str, trl: str | None, verl: str | None, note: str = "") -> Setting:
    """A setting that is handed on as it is."""

    def as_is(option: str | None) -> Callable[[GRPOConfig], Options] | None:
        return None if option is None else lambda config: {option: getattr(config, name)}

    return Setting(name, as_is(trl), as_is(verl), note)


def _word(config: GRPOConfig, name: str, library: str, **words: Any) -> Any:
    """The library's word for the value of a setting; `words` are by our value, with _ for -."""
    value = getattr(config, name)
    known = {ours.replace("_", "-"): theirs for ours, theirs in words.items()}
    if value not in known:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, known))}, which {library} has, got {value!r}")
    return known[value]


def _bfloat16(config: GRPOConfig) -> bool:
    return config.precision == "bfloat16" or (
        config.precision == "auto" and autocast_dtype(choose_device()) is not None
    )


def _every(name: str, interval: int) -> Options:
    return {f"{name}_strategy": "steps", f"{name}_steps": interval} if interval else {f"{name}_strategy": "no"}


SETTINGS: tuple[Setting, ...] = (
    _same("steps", "max_steps", "trainer.total_training_steps"),
    Setting(
        "prompts_per_step",
        lambda c: {"per_device_train_batch_size": c.prompts_per_step * c.group_size},
        lambda c: {"data.train_batch_size": c.prompts_per_step, "actor.ppo_mini_batch_size": c.prompts_per_step},
        "TRL counts replies, on each process; verl prompts, on all of them",
    ),
    _same("group_size", "num_generations", "rollout.n"),
    _same("max_new_tokens", "max_completion_length", "data.max_response_length"),
    _same("temperature", "temperature", "rollout.temperature", "TRL also divides by it when scoring, as here"),
    Setting(
        "max_resamples",
        None,
        lambda c: {
            "algorithm.filter_groups.enable": c.max_resamples > 0,
            "algorithm.filter_groups.metric": "score",
            "algorithm.filter_groups.max_num_gen_batches": c.max_resamples + 1,
        },
        "TRL keeps dead groups: they add nothing to the gradient and count in its denominators",
    ),
    Setting(
        "baseline",
        lambda c: _word(c, "baseline", "TRL's GRPOTrainer (RLOOTrainer is another class)", mean={}),
        lambda c: {"algorithm.adv_estimator": _word(c, "baseline", "verl", mean="grpo", leave_one_out="rloo")},
        "TRL: the group's mean; leave-one-out is its RLOOTrainer",
    ),
    Setting(
        "scale",
        lambda c: {"scale_rewards": _word(c, "scale", "TRL", std="group", none="none")},
        lambda c: {"algorithm.norm_adv_by_std_in_grpo": c.scale == "std"},
        "both divide by the sample std, TRL + 1e-4 and verl + 1e-6; here it is the population std",
    ),
    _same("updates_per_batch", "num_iterations", "actor.ppo_epochs"),
    _same("clip_low", "epsilon", "actor.clip_ratio_low"),
    _same("clip_high", "epsilon_high", "actor.clip_ratio_high"),
    Setting(
        "dual_clip",
        lambda c: {"delta": c.dual_clip},
        lambda c: {"actor.clip_ratio_c": 1e9 if c.dual_clip is None else c.dual_clip},
        "verl always has one, 3 unless told otherwise; none is a bound never reached",
    ),
    Setting(
        "ratio_level",
        lambda c: {"importance_sampling_level": c.ratio_level},
        lambda c: {"actor.policy_loss.loss_mode": "gspo" if c.ratio_level == "sequence" else "vanilla"},
        "verl's gspo always averages within a reply first, whatever the mode",
    ),
    Setting(
        "mode",
        lambda c: {
            "loss_type": _word(
                c, "mode", "TRL", token_mean="dapo", sequence_mean="grpo", sequence_sum="luspo", fixed_length="dr_grpo"
            )
        },
        lambda c: {
            "actor.loss_agg_mode": _word(
                c,
                "mode",
                "verl",
                token_mean="token-mean",
                sequence_mean="seq-mean-token-mean",
                sequence_sum="seq-mean-token-sum",
                fixed_length="seq-mean-token-sum-norm",
            ),
            "actor.loss_scale_factor": c.max_new_tokens,
        },
        "of one reply a trajectory, trajectory-mean is sequence-mean; not every version of verl divides fixed-length "
        "by the number of replies as well",
    ),
    Setting(
        "beta",
        lambda c: {"beta": c.beta, "use_bias_correction_kl": False},
        lambda c: {"actor.use_kl_loss": c.beta != 0, "actor.kl_loss_coef": c.beta},
        "TRL multiplies the KL term by the ratio unless told not to",
    ),
    Setting(
        "kl_estimator",
        lambda c: _word(c, "kl_estimator", "TRL", k3={}) if c.beta else {},
        lambda c: {"actor.kl_loss_type": _word(c, "kl_estimator", "verl", k1="kl", k2="mse", k3="low_var_kl")},
        "TRL: k3",
    ),
    _same(
        "importance_cap",
        "vllm_importance_sampling_clip_max",
        "algorithm.rollout_correction.rollout_is_threshold",
        "in TRL of use with vLLM only: otherwise its trainer's model samples itself",
    ),
    Setting(
        "importance_level",
        lambda c: {"vllm_importance_sampling_mode": f"{c.importance_level}_truncate"},
        lambda c: {"algorithm.rollout_correction.rollout_is": c.importance_level},
    ),
    _same("learning_rate", "learning_rate", "actor.optim.lr"),
    _same("adam_beta1", "adam_beta1", None),
    Setting(
        "adam_beta2",
        lambda c: {"adam_beta2": c.adam_beta2},
        lambda c: {"actor.optim.betas": [c.adam_beta1, c.adam_beta2]},
        "verl: one option for both",
    ),
    _same("weight_decay", "weight_decay", "actor.optim.weight_decay"),
    _same("warmup_steps", "warmup_steps", "actor.optim.lr_warmup_steps", "counted from a rate of 0 there"),
    Setting(
        "final_learning_rate",
        lambda c: {
            "lr_scheduler_type": "polynomial",
            "lr_scheduler_kwargs": {"power": 1.0, "lr_end": c.final_learning_rate * c.learning_rate},
        },
        lambda c: {"actor.optim.lr_scheduler_type": "cosine", "actor.optim.min_lr_ratio": c.final_learning_rate},
        "verl decays by a cosine and not by a line",
    ),
    _same("max_grad_norm", "max_grad_norm", "actor.optim.clip_grad"),
    Setting(
        "tokens_per_row",
        None,
        lambda c: {"actor.use_dynamic_bsz": True, "actor.ppo_max_token_len_per_gpu": c.tokens_per_row},
        "verl counts every copy of a shared prefix; TRL's micro-batches are `gradient_accumulation_steps`",
    ),
    Setting(
        "precision",
        lambda c: {"bf16": _bfloat16(c)},
        lambda c: dict.fromkeys(
            ("actor.fsdp_config.dtype", "rollout.dtype"), "bfloat16" if _bfloat16(c) else "float32"
        ),
        "both take bfloat16 where nothing is said",
    ),
    _same("gradient_checkpointing", "gradient_checkpointing", "model.enable_gradient_checkpointing"),
    Setting(
        "eval_every",
        lambda c: _every("eval", c.eval_every),
        lambda c: {"trainer.test_freq": c.eval_every or -1},
        "TRL samples in an evaluation, at the training temperature; here and in verl it is greedy",
    ),
    _same("eval_problems", None, "data.val_max_samples", "TRL: as many rows as are handed over"),
    Setting(
        "checkpoint_every",
        lambda c: _every("save", c.checkpoint_every),
        lambda c: {"trainer.save_freq": c.checkpoint_every or -1},
        "0 is one at the end here, none there",
    ),
    _same("keep_checkpoints", "save_total_limit", "trainer.max_actor_ckpt_to_keep"),
    Setting(
        "output_dir",
        lambda c: {"output_dir": c.output_dir} if c.output_dir else {},
        lambda c: {"trainer.default_local_dir": c.output_dir} if c.output_dir else {},
    ),
    Setting("seed", lambda c: {"seed": c.seed}, lambda c: {"data.seed": c.seed, "actor.data_loader_seed": c.seed}),
)  # fmt: skip
"""What maps to what, in the order of `GRPOConfig`."""


def trl_options(config: GRPOConfig) -> Options:
    """Keyword arguments of TRL's GRPOConfig that make it do what `config` says, as far as it can.

    Raises:
        ValueError: a setting has a value that TRL does not have.

    Source:
        TRL 1.16, `GRPOConfig`.

    Example:
        >>> options = trl_options(GRPOConfig(mode="sequence-mean"))
        >>> options["num_generations"], options["loss_type"], options["epsilon_high"]
        (8, 'grpo', 0.28)
    """
    return {key: value for setting in SETTINGS if setting.trl for key, value in setting.trl(config).items()}


def verl_options(config: GRPOConfig) -> Options:
    """verl's configuration keys, dotted and in full, with the values of `config`.

    Raises:
        ValueError: a setting has a value that verl does not have.

    Source:
        verl's PPO trainer configuration, `ppo_trainer.yaml`.

    Example:
        >>> verl_options(GRPOConfig(scale="none"))["algorithm.norm_adv_by_std_in_grpo"]
        False
    """
    return {
        full_name(key): value for setting in SETTINGS if setting.verl for key, value in setting.verl(config).items()
    }


def full_name(key: str) -> str:
    """verl's key in full: `actor.`, `rollout.` and `model.` stand below `actor_rollout_ref.`."""
    return f"actor_rollout_ref.{key}" if key.startswith(("actor.", "rollout.", "model.")) else key


def settings_table() -> str:
    """`SETTINGS` as a Markdown table; the README shows it."""
    config = GRPOConfig(output_dir="runs/mine", eval_every=1, checkpoint_every=1)

    def names(options: Callable[[GRPOConfig], Options] | None) -> str:
        return "<br>".join(f"`{key}`" for key in (options(config) if options else ()))

    rows = [f"| `{s.name}` | {names(s.trl)} | {names(s.verl)} | {s.note} |" for s in SETTINGS]
    head = "| `GRPOConfig` here | TRL's `GRPOConfig` | verl's configuration | |"
    return "\n".join([head, "|---|---|---|---|", *rows])


# ------------------------------------------------------------------------- tasks and rewards


def reply_end_ids(task: SingleTurnTask, model: Any, tokenizer: Any) -> list[int]:
    """Ids of all tokens that end a reply: the model's end of sequence, and tokens that hold a stop text of the task.

    Set `model.generation_config.eos_token_id` to it before TRL's trainer is made, or before the model's folder is
    saved for verl: neither has an option for what ends a reply.
    """
    return sorted({*eos_token_ids(model, tokenizer), *stop_token_ids(tokenizer, task.stop)})


def trl_rows(task: SingleTurnTask, problems: Iterable[Problem], tokenizer: Any) -> list[dict[str, str]]:
    """Rows of a dataset for TRL, for `datasets.Dataset.from_list`.

    A prompt is handed over as text: TRL closes the last message of a list, so the start of a reply has no place in
    one. TRL encodes the text itself; that this gives back the tokens of the task's episode is checked for each row.

    Args:
        task: a task of one reply.
        problems: some of its problems.
        tokenizer: the one TRL will use.

    Returns:
        {"prompt", "answer"} for each problem; `trl_reward` reads the answer.

    Raises:
        ValueError: a task of several replies; a prompt whose text does not encode to what the task shows.
    """
    _require_one_reply(task)
    return [
        {"prompt": _text_of(task.open(problem, tokenizer).context(), tokenizer), "answer": problem.answer}
        for problem in problems
    ]


def trl_reward(task: SingleTurnTask) -> Callable[..., list[float]]:
    """The task's reward as TRL calls it: reward(prompts, completions, answer, **other columns) -> list of floats.

    Example:
        >>> from course_lib.tasks import Arithmetic
        >>> trl_reward(Arithmetic())(prompts=["What is 2 + 2?"] * 2, completions=[" 4.", " 5."], answer=["4", "4"])
        [1.0, 0.0]
    """
    _require_one_reply(task)

    def reward(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
        texts = [reply if isinstance(reply, str) else reply[-1]["content"] for reply in completions]
        triples = zip(prompts, texts, answer, strict=True)
        return [task.score(Problem(str(prompt), right), text) for prompt, text, right in triples]

    reward.__name__ = getattr(task.reward, "__name__", "reward")  # what TRL's logs call it
    return reward


def verl_rows(task: SingleTurnTask, problems: Iterable[Problem], *, split: str) -> list[dict[str, Any]]:
    """Rows of a dataset for verl, in the columns its loader and its reward manager read.

    Example:
        >>> from course_lib.tasks import Arithmetic
        >>> (row,) = verl_rows(Arithmetic(), [Problem("What is 2 + 2?", "4")], split="test")
        >>> row["prompt"], row["reward_model"]["ground_truth"]
        ([{'role': 'user', 'content': 'What is 2 + 2?'}], '4')
    """
    _require_one_reply(task)
    system = [] if task.system is None else [{"role": "system", "content": task.system}]
    return [
        {
            "data_source": task.name,
            "prompt": [*system, {"role": "user", "content": problem.prompt}],
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index, "level": problem.level},
        }
        for index, problem in enumerate(problems)
    ]


def verl_chat_template(task: SingleTurnTask, tokenizer: Any) -> str | None:
    """The tokenizer's chat template with the start of the reply at its end, or None where replies have none.

    verl applies a template to messages and offers no other place for the start of a reply.
    """
    if not task.reply_prefix:
        return None
    start = json.dumps(task.reply_prefix)
    return f"{tokenizer.chat_template}{{% if add_generation_prompt %}}{{{{ {start} }}}}{{% endif %}}"


def write_verl(
    folder: str | PathLike[str], task: SingleTurnTask, tokenizer: Any, config: GRPOConfig, *, model: str
) -> None:
    """Writes what verl needs to train on `task`: train.json, test.json, reward.py and grpo.yaml.

    The rows are those our trainer would draw, without fresh ones in place of dead groups. Not run here: verl needs a
    GPU. What is tested is that every key exists and every prompt encodes to the tokens the task shows.

    Args:
        folder: made if it is not there; files in it are replaced.
        task: a task of one reply, whose reward function can be imported.
        tokenizer: of the model, with a chat template.
        config: settings.
        model: path or hub id of the model.

    Raises:
        ValueError: a task of several replies, a reward that cannot be imported, a tokenizer without a chat template, a
            setting that verl does not have, a prompt that would encode to other tokens.
    """
    _require_one_reply(task)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("tokenizer: expected one with a chat template, which verl applies to messages, got none")
    count = config.steps * config.prompts_per_step
    problems = {
        "train": [task.training_problem(index) for index in range(count)],
        "test": list(task.held_out_problems()),
    }
    template = verl_chat_template(task, tokenizer)
    longest = 0
    for split in problems:
        for problem, row in zip(problems[split], verl_rows(task, problems[split], split=split), strict=True):
            ids = tokenizer.apply_chat_template(
                row["prompt"], chat_template=template, add_generation_prompt=True, return_dict=False
            )
            if ids != task.open(problem, tokenizer).context():
                raise ValueError(f"prompt: expected messages that encode to what the task shows, got {row['prompt']}")
            longest = max(longest, len(ids))
    place = Path(folder).resolve()
    options = verl_options(config) | {
        "data.train_files": str(place / "train.json"),
        "data.val_files": str(place / "test.json"),
        "data.max_prompt_length": longest,
        "reward.custom_reward_function.path": str(place / "reward.py"),
        "reward.custom_reward_function.name": "compute_score",
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.name": "vllm",
    }
    if template is not None:
        options["actor_rollout_ref.model.custom_chat_template"] = template
    place.mkdir(parents=True, exist_ok=True)
    for split in problems:
        rows = verl_rows(task, problems[split], split=split)
        (place / f"{split}.json").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (place / "reward.py").write_text(_reward_file(task), encoding="utf-8")
    (place / "grpo.yaml").write_text(VERL_DEFAULTS + _yaml(_nested(options)), encoding="utf-8")


VERL_DEFAULTS = """\
hydra:
  searchpath:
    - pkg://verl.trainer.config
defaults:
  - ppo_trainer
  - _self_
"""


def _reward_file(task: SingleTurnTask) -> str:
    module, name = task.reward.__module__, task.reward.__qualname__
    if module == "__main__" or not name.isidentifier():
        raise ValueError(f"reward: expected a function of a module, which verl can import, got {name} of {module}")
    return (
        f'"""The reward of {task.name}, as verl calls it."""\n\n'
        f"from {module} import {name}\n\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **options):\n"
        f"    return {name}(solution_str, ground_truth)\n"
    )


def _nested(options: Options) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in options.items():
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def _yaml(tree: dict[str, Any], indent: str = "") -> str:
    """A tree of scalars and lists as YAML."""

    def scalar(value: Any) -> str:
        written = json.dumps(value)  # but YAML 1.1 reads 2e-05 as a text
        return written.replace("e", ".0e") if isinstance(value, float) and "." not in written else written

    lines = (
        f"{indent}{key}:\n{_yaml(value, indent + '  ')}"
        if isinstance(value, dict)
        else f"{indent}{key}: {scalar(value)}\n"
        for key, value in tree.items()
    )
    return "".join(lines)


def _text_of(ids: list[int], tokenizer: Any) -> str:
    """The text that `tokenizer` encodes to `ids`; it may add the beginning-of-sequence token by itself."""
    text = tokenizer.decode(ids)
    for candidate in (text, text.removeprefix(tokenizer.bos_token or "")):
        if tokenizer(candidate)["input_ids"] == ids:
            return candidate
    raise ValueError(f"prompt: expected a text that encodes to the tokens the task shows, got {text!r:.300}")


def _require_one_reply(task: Task) -> None:
    if not isinstance(task, SingleTurnTask):
        raise ValueError(
            f"task: expected a SingleTurnTask, one reply a problem, got {type(task).__name__}; an agent's calls have "
            "no place in these formats"
        )

