"""How fast this machine multiplies the model's matrices: what the floor of a step is made of.

The floor of a step is the time of its matrix products alone, each token once, at the rate measured here:

    6 · P_body · N + 6 · P_head · M    training: two products backward for each forward
    + 2 · P_body · C                   reading the distinct context tokens before sampling
    + decoding                         a pass of all matrices for the batch's rows, for each further token of a reply

P_body are the parameters of the layers' matrices, P_head those of the output matrix, N the distinct tokens trained, M
the distinct places that predict one. Attention, norms, softmax, the optimizer and Python cost the floor nothing.
"""

import time
from collections.abc import Callable
from typing import Any

ROWS = 1024
BATCHES = (8, 16, 32, 64, 128)


def measure_rates() -> dict[str, Any]:
    """Parameters of the model's matrices, their rate in training, and the time of one decoding pass by batch size."""
    import torch

    from course_lib.models import load_small_model

    torch.set_num_threads(2)
    model, _ = load_small_model(device="cpu")
    layers = [module.weight.detach() for module in model.base_model.modules() if isinstance(module, torch.nn.Linear)]
    head = model.get_output_embeddings().weight.detach()
    body = sum(weight.numel() for weight in layers)

    def train() -> None:
        for weight in layers:
            out, inner = weight.shape
            x, slope = inputs[inner], inputs[out]
            torch.mm(x, weight.T, out=outputs[out])
            torch.mm(slope, weight, out=outputs[inner])
            torch.mm(slope.T, x, out=gradients[weight.shape])

    widths = {size for weight in layers for size in weight.shape}
    inputs = {width: torch.randn(ROWS, width) for width in widths}
    outputs = {width: torch.empty(ROWS, width) for width in widths}
    gradients = {weight.shape: torch.empty(weight.shape) for weight in layers}
    rate = 6 * body * ROWS / _best(train, 3)

    def decode(rows: int) -> Callable[[], None]:
        states = {width: torch.randn(rows, width) for width in widths}

        def one_pass() -> None:
            for weight in [*layers, head]:
                torch.nn.functional.linear(states[weight.shape[1]], weight)

        return one_pass

    return {
        "body": body,
        "head": head.numel(),
        "flops": rate,
        "decode": {str(rows): _best(decode(rows), 5) for rows in BATCHES},
    }


def floor_seconds(point: dict[str, Any], ours: dict[str, Any], rates: dict[str, Any]) -> float:
    """The floor of a step of ours at a point of the grid."""
    contexts = point["common_tokens"] + point["prompts"] * (point["prompt_tokens"] - point["common_tokens"])
    training = 6 * (rates["body"] * ours["tokens_run"] + rates["head"] * ours["predicting"]) / rates["flops"]
    reading = 2 * rates["body"] * contexts / rates["flops"]
    decoding = (point["reply_tokens"] - 1) * rates["decode"][str(point["prompts"] * point["group"])]
    return training + reading + decoding


def _best(work: Callable[[], None], times: int) -> float:
    """Seconds of the fastest of several runs, after one to warm up."""
    work()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
