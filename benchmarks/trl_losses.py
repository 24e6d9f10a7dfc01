"""TRL's own loss on one batch of log-probabilities, in every mode that course_lib has too.

    benchmarks/.venv/bin/python benchmarks/trl_losses.py

writes tests/data/trl_losses.json: the batch, and for each case the loss and its gradient as TRL's own
`GRPOTrainer._compute_loss` gives them, in float64. tests/test_handover.py compares `grpo_loss` with these numbers
everywhere, and calls the functions below where TRL is installed.
"""

import dataclasses
import json
import random
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
OUTPUT = ROOT / "tests" / "data" / "trl_losses.json"

MAX_LENGTH = 7
CASES = [
    {"loss_type": loss_type, "beta": beta, "importance_sampling_level": level, "delta": delta}
    for loss_type, beta, level, delta in product(
        ("dapo", "grpo", "bnpo", "dr_grpo", "luspo"), (0.0, 0.1), ("token", "sequence"), (None, 1.3)
    )
]


def make_batch() -> dict[str, list]:
    """Six responses of one to five tokens: ratios on both sides of the clip, advantages of both signs and 0."""
    draw = random.Random(0)
    rows = [[draw.uniform(-3, -0.1) for _ in range(5)] for _ in range(6)]
    shifted = [[[x + draw.gauss(0, 0.7) for x in row] for row in rows] for _ in range(2)]
    return {
        "log_probs": rows,
        "old_log_probs": shifted[0],
        "ref_log_probs": shifted[1],
        "mask": [[int(k < length) for k in range(5)] for length in (5, 3, 1, 4, 2, 5)],
        "advantages": [1.3, -0.8, 0.5, -1.1, 0.0, 0.4],
    }


def make_trainer(model, output_dir: str, *, beta: float = 0.0, **options):
    """TRL's GRPOTrainer with an accumulation of one step, ready for `_compute_loss`.

    β is set afterwards: with one, the trainer would load a reference model from the hub.
    """
    from datasets import Dataset
    from small_worlds import word_tokenizer
    from trl import GRPOConfig, GRPOTrainer

    settings = {
        "output_dir": output_dir,
        "per_device_train_batch_size": 6,
        "num_generations": 2,
        "max_completion_length": MAX_LENGTH,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "gradient_checkpointing": False,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "use_bias_correction_kl": False,
    }
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**settings | options),
        train_dataset=Dataset.from_list([{"prompt": "a b ?"}]),
        processing_class=word_tokenizer(),
    )
    trainer.beta = beta
    trainer.current_gradient_accumulation_steps = 1  # set by .train() otherwise
    trainer.model.train()
    return trainer


def trl_loss(batch: dict[str, list], options: dict) -> tuple[float, list[list[float]]]:
    """TRL's loss of the batch and its gradient with respect to the log-probabilities."""
    from course_lib.models import tiny_model

    tensors = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in batch.items()}
    log_probs, mask = tensors["log_probs"].requires_grad_(), tensors["mask"]
    ids = torch.ones(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old_log_probs"],
        "ref_per_token_logps": tensors["ref_log_probs"],
        "num_items_in_batch": mask.sum(),
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(tiny_model(), folder, **options)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, torch.zeros_like(mask), None)
        loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), log_probs.grad.tolist()


def record() -> dict:
    """The batch, the cases with TRL's results, and the names of TRL's options."""
    import trl

    batch = make_batch()
    cases = []
    for options in CASES:
        loss, gradient = trl_loss(batch, options)
        cases.append({"options": options, "loss": loss, "gradient": gradient})
    return {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "max_length": MAX_LENGTH,
        "options": sorted(field.name for field in dataclasses.fields(trl.GRPOConfig)),
        "batch": batch,
        "cases": cases,
    }


if __name__ == "__main__":
    OUTPUT.write_text(json.dumps(record()) + "\n", encoding="utf-8")
    print(f"wrote {OUTPUT.relative_to(ROOT)}")
