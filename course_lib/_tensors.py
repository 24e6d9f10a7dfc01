"""How the mathematics reads its inputs: one set of checks, one dtype rule, one treatment of masked tokens."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

COLDEST = 1e-6


def require(holds: bool, name: str, expected: str, got: object) -> None:
    """Raise the ValueError every check here raises: which argument, what was expected, what came."""
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def require_shape(name: str, tensor: Tensor, shape: Sequence[int], meaning: str) -> None:
    require(tensor.shape == tuple(shape), name, f"shape {tuple(shape)} = {meaning}", tuple(tensor.shape))


def require_count(name: str, values: Sized, count: int, each: str) -> None:
    require(len(values) == count, name, f"{count} values, one for each {each}", len(values))


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    good = isinstance(value, str) and value in choices
    require(good, name, "one of " + ", ".join(f'"{c}"' for c in choices), f"{value!r:.80}")


def require_number(name: str, value: Any, expected: str, holds: Callable[[float], bool]) -> float:
    """The value as a float. `holds` is a chain of comparisons, so NaN fails it; what is no number at all fails too."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    require(holds(number), name, expected, f"{value!r:.80}")
    return number


def require_whole(name: str, value: Any, least: int) -> int:
    """The value as a whole number of at least `least`."""
    require_number(name, value, f"a whole number of at least {least}", lambda n: least <= n < 2**63 and n == int(n))
    return int(value)


def within(dtype: torch.dtype, number: float) -> float:
    """The number, or inf where the dtype does not reach so far: torch refuses 1e300 for float32, and takes inf."""
    return number if abs(number) <= torch.finfo(dtype).max else math.copysign(math.inf, number)


def require_temperature(value: Any) -> float:
    """Of softmax(logits / T), and not so small that logits / T would overflow."""
    temperature = require_number("temperature", value, "a finite number > 0", lambda t: 0 < t < math.inf)
    require(temperature >= COLDEST, "temperature", f"at least {COLDEST:g}", value)
    return temperature


def require_finite(name: str, result: Tensor) -> Tensor:
    """What comes out of finite numbers can be too large for its dtype: then the argument was."""
    require(bool(result.isfinite().all()), name, f"values whose result is finite in {result.dtype}", "larger ones")
    return result


def as_tensor(name: str, value: Any) -> Tensor:
    """A tensor of real numbers; a tensor comes back as it is."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name}: expected numbers or a tensor of numbers, got {value!r:.80}") from error
    require(not tensor.is_complex(), name, "real numbers", tensor.dtype)
    # torch can store these, and compare or sum them it cannot. Token ids are often kept as uint16.
    return tensor.long() if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64) else tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if anything is float64, else float32: half precision cannot hold the sums taken here."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def as_mask(mask: Any, device: torch.device | None = None) -> Tensor:
    """A (B, T) mask of any dtype as bool."""
    mask = as_tensor("mask", mask)
    require(mask.ndim == 2, "mask", "shape (B, T)", tuple(mask.shape))
    active = mask.to(device) != 0
    if mask.dtype != torch.bool:
        odd = mask[(mask != 0) & (mask != 1)]
        require(len(odd) == 0, "mask", "only 0 and 1", odd[:1].tolist())
    return active


def read_tokens(mask: Any, **values: Any) -> tuple[Tensor, ...]:
    """The mask as bool, then every (B, T) value in one dtype on one device: finite if active, 0 if not.

    The zeros go in *before* any exp or product sees the value. Masking a finished loss instead would leave
    0 · inf = NaN in the backward pass.
    """
    tensors = {name: as_tensor(name, value) for name, value in values.items()}
    first = next(iter(tensors.values()))
    active, dtype = as_mask(mask, first.device), compute_dtype(*tensors.values())
    return active, *(_read(name, t.to(first.device, dtype), active) for name, t in tensors.items())


def _read(name: str, value: Tensor, active: Tensor) -> Tensor:
    require_shape(name, value, active.shape, "(B, T), that of mask")
    value = torch.where(active, value, 0)
    if not value.isfinite().all():
        row, column = (~value.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"{name}: expected finite values at active tokens, "
            f"got {value[row, column].item()} in row {row}, column {column}"
        )
    return value


def number_ids(name: str, ids: Any) -> list[int]:
    """0, 1, 2, … for the distinct ids in the order they first appear: [7, "a", 7] gives [0, 1, 0]."""
    numbers: dict[Hashable, int] = {}
    try:
        ids = ids.tolist() if isinstance(ids, Tensor) else ids
        # Tensors hash by identity, so two equal ones in a list would count as two ids: take their values.
        values = (i.item() if isinstance(i, Tensor) else i for i in ids)
        found = [numbers.setdefault(i, len(numbers)) for i in values]
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{name}: expected one integer or hashable for each row, got {ids!r:.80}") from error
    require(not any(i != i for i in numbers), name, "an id for each row", "nan")
    return found
