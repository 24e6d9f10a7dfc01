"""Sharing one run among the processes that `accelerate launch` or `torchrun` started.

Every process holds the whole model. Work is dealt out like cards, results are collected in order, gradients are summed,
so that each process makes the step that one alone would have made. With a single process nothing here does anything.
"""

import atexit
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState

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


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replaces every gradient by its sum over the processes; one that a process lacks counts as 0."""
    if size() == 1:
        return
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat)
    start = 0
    for parameter in parameters:
        parameter.grad.copy_(flat[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()


def wait() -> None:
    """Returns once every process has come here."""
    if size() > 1:
        dist.barrier()
