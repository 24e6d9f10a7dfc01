"""Sharing one run among the processes that `accelerate launch` or `torchrun` started.

Work is dealt out like cards, results are collected in order, gradients are summed, so that each process makes the step
that one alone would have made. With a single process nothing here does anything.

Every process holds the whole model, unless `accelerate launch --use_fsdp`, or its configuration, asks for FSDP: then
each keeps its part of the decoder layers, of their gradients and of AdamW's moments, and only the embedding and the
head are whole everywhere.
"""

import atexit
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

Item, Result = TypeVar("Item"), TypeVar("Result")


def join() -> None:
    """Joins the processes of a launcher, if there are any: gloo on CPUs, NCCL on GPUs, one GPU a process."""
    PartialState(cpu=not torch.cuda.is_available())
    wait()  # or a process whose work is short could leave while another still connects to it
    atexit.register(_leave)


def _leave() -> None:
    """Ends the threads of gloo or NCCL before the interpreter that they report to."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """Number of this process, 0 if it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def share(items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Result]]) -> list[Result]:
    """`work(items)`, each process doing every size-th item; all of them get all results, in order.

    `work` is called with an empty list where there are fewer items than processes.

    Example:
        >>> share([1, 2, 3], lambda numbers: [n * n for n in numbers])
        [1, 4, 9]
    """
    mine = list(work(items[rank() :: size()]))
    if size() == 1:
        return mine
    parts: list[Any] = [None] * size()
    dist.all_gather_object(parts, mine)
    results: list[Any] = [None] * len(items)
    for number, part in enumerate(parts):
        results[number :: size()] = part
    return results


def sharded() -> bool:
    """Are the layers of the model shared out as well?"""
    return size() > 1 and parse_flag_from_env("ACCELERATE_USE_FSDP")


def shard(model: Any) -> None:
    """Leaves each process its part of every decoder layer of `model`, if FSDP is asked for.

    A layer is gathered when a pass comes to it, and its gradient is summed over the processes behind the backward pass.
    All processes must therefore make the same number of passes; inside `gathered` each is free.

    Source:
        Rajbhandari et al. (2020), ZeRO, arXiv 1910.02054; Zhao et al. (2023), PyTorch FSDP, arXiv 2304.11277.
    """
    if not sharded():
        return
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    # Both are read outside the passes of the base model: by the head's own product, and by its tied twin.
    whole = {*model.get_input_embeddings().parameters(), *model.get_output_embeddings().parameters()}
    for module in (*layers, model.base_model):
        fully_shard(module, ignored_params=whole)
        module.set_gradient_divide_factor(1.0)


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """Inside, every process has all of `model` and may run it as often as it likes."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(True, recurse=False)


def assembled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors` with the parts of all processes put together, on the CPU of process 0."""
    whole = {}
    for name, tensor in tensors.items():
        if is_part(tensor):
            tensor = tensor.full_tensor()
            tensor = tensor.cpu() if rank() == 0 else tensor.new_empty(0)
        whole[name] = tensor
    return whole


def part_of(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """What this process keeps of a tensor that belongs to `parameter`."""
    if not is_part(parameter):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def is_part(tensor: torch.Tensor) -> bool:
    """Does every process keep a part of it?"""
    return isinstance(tensor, DTensor)


def alike(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The whole ones and the parts in lists of their own: PyTorch's optimizers want no mixture."""
    return [list(kind) for _, kind in groupby(sorted(parameters, key=is_part), key=is_part)]


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replaces every gradient by its sum over the processes; one that a process lacks counts as 0.

    Those of parts are left alone: the backward pass has summed them.
    """
    parameters = [parameter for parameter in parameters if not is_part(parameter)]
    if size() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat)
    start = 0
    for parameter in parameters:
        parameter.grad.copy_(flat[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scales all gradients down to the norm `max_norm` where theirs is larger; returns the norm they had.

    Source:
        Pascanu, Mikolov and Bengio (2013), On the difficulty of training recurrent neural networks, arXiv 1211.5063.
    """
    kinds = alike(parameters)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
    norm = reduce(torch.hypot, (norm.full_tensor() if is_part(norm) else norm for norm in norms))
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, max_norm, norm)
    return float(norm)


def wait() -> None:
    """Returns once every process has come here."""
    if size() > 1:
        dist.barrier()
