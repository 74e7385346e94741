"""Samples and error inputs of the GEMMs of FP8 matrices with block scales."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from samples._epilogue import epilogue_errors
from samples._inputs import ErrorInput, Sample
from samples._rows import short

BLOCK = 128
FP8 = torch.float8_e4m3fn
NAN = 0x7F
"""e4m3 code of NaN."""


def codes(*shape: int, device: torch.device) -> torch.Tensor:
    """Return random e4m3 codes of numbers up to 15 with either sign."""
    magnitude = torch.randint(0, 0x58, shape, device=device)
    return (magnitude + 128 * torch.randint(0, 2, shape, device=device)).to(torch.uint8).view(FP8)


def integers(*shape: int, device: torch.device) -> torch.Tensor:
    """Return random e4m3 codes of integers from -3 to 3, with which sums of products are exact."""
    return torch.randint(-3, 4, shape, device=device).float().to(FP8)


def scales(*shape: int, device: torch.device) -> torch.Tensor:
    """Return random scales of moderate size."""
    return torch.rand(shape, device=device) * 0.02 + 1e-3


def powers(*shape: int, device: torch.device) -> torch.Tensor:
    """Return random powers of two from 1/8 to 8."""
    return torch.randint(-3, 4, shape, device=device).float().exp2()


def matrix(rows: int, k: int, device: torch.device, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random (rows, K) matrix and its column-major scales (rows, ⌈K/128⌉)."""
    numbers, factors = (integers, powers) if exact else (codes, scales)
    return numbers(rows, k, device=device), factors(-(-k // BLOCK), rows, device=device).t()


def weight(
    *shape: int, device: torch.device, exact: bool = False, experts: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random weight of ``shape`` (N, K) and its scales (⌈N/128⌉, ⌈K/128⌉), or stacked weights of experts."""
    n, k = shape
    lead = () if experts is None else (experts,)
    numbers, factors = (integers, powers) if exact else (codes, scales)
    return numbers(*lead, n, k, device=device), factors(*lead, -(-n // BLOCK), -(-k // BLOCK), device=device)


def mx_scales(lead: tuple[int, ...], k: int, exact: bool) -> torch.Tensor:
    """Return random linear MXFP8 scales, uint8 (..., K/32).

    With ``exact``, the scales of a row differ by a factor of two at most. So FP8 tensor cores, which keep 14 bits, add
    up 128 products of integers without rounding, even if a kernel gives these products one scale.
    """
    if not exact:
        return torch.randint(110, 131, (*lead, k // 32), dtype=torch.uint8)
    return (torch.randint(120, 131, (*lead, 1)) + torch.randint(0, 2, (*lead, k // 32))).to(torch.uint8)


def with_row_scales(one: Sample, exact: bool = False) -> Sample:
    """Return a call whose weight has random block scales of each row, (..., N, ⌈K/128⌉), column-major. With ``exact``,
    they are powers of two. The scales of experts without rows are NaN if they were NaN."""
    a, b, a_scale, b_scale, *rest = one.args
    *lead, k, n = b.shape
    own = (powers if exact else scales)(*lead, -(-k // BLOCK), n, device=b.device).mT
    if lead and not own.is_meta:
        own[b_scale.isnan().flatten(1).any(1)] = torch.nan
    return Sample(f"rows-{one.name}", (a, b, a_scale, own, *rest), one.kwargs)


def option_errors(
    bad: Callable[..., ErrorInput],
    n: int,
    device: torch.device,
    gpu_backend: str = "mma_sync",
    experts: int | None = None,
) -> Iterator[ErrorInput]:
    """Yield wrong dtypes for a result with ``n`` columns, wrong values of ``alpha`` and ``bias`` (per expert if
    ``experts`` is given), and wrong backends: an unknown name and, on a CPU, ``gpu_backend``. ``bad`` is as in
    ``tensor_errors``; its fourth argument contains additional arguments of the call."""
    for dtype in (torch.float64, torch.uint8, FP8):
        yield bad(f"out-dtype-{dtype}", TypeError, f"out_dtype is {dtype}; expected", {"out_dtype": dtype})
    for error in epilogue_errors(n, device, experts):
        if error.name != f"alpha-shape-[{experts}]":  # with experts this shape is valid, one factor per expert
            yield bad(error.name, error.error, error.match, error.kwargs)
    text = "backend='deepgemm' is unknown; use 'auto', "
    yield bad("backend-unknown", ValueError, text, {"backend": "deepgemm"})
    if device.type == "cpu":
        text = f"backend '{gpu_backend}': needs a CUDA device"
        yield bad("backend-on-cpu", ValueError, text, {"backend": gpu_backend})


def tensor_errors(
    tensors: dict[str, torch.Tensor | None], bad: Callable[..., ErrorInput], device: torch.device
) -> Iterator[ErrorInput]:
    """Yield wrong dtypes, devices and shapes of a call's tensors, and tensors that require grad. ``bad`` makes an error
    input from a name, an error, a message and the replaced arguments."""
    dtypes = {"a": FP8, "b": FP8, "offsets": torch.int32, "counts": torch.int32}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        dtype = dtypes.get(name, torch.float32)
        for wrong in (torch.bfloat16, torch.float8_e5m2 if dtype == FP8 else torch.int64):
            text = f"got {name} with dtype {short(wrong)}; expected {short(dtype)}"
            yield bad(f"{name}-{short(wrong)}", TypeError, text, **{name: tensor.float().to(wrong)})
        if dtype == torch.int32:
            unsigned = tensor.view(torch.uint32)
            yield bad(f"{name}-uint32", TypeError, f"got {name} with dtype uint32; expected int32", **{name: unsigned})
        yield bad(f"{name}-device", ValueError, f"{name} is on meta|a on meta", **{name: tensor.to("meta")})
        yield bad(f"{name}-flat", ValueError, f"got {name} with shape", **{name: tensor.reshape(-1)[1:]})
        yield bad(f"{name}-dimension", ValueError, f"got {name} with shape", **{name: tensor[None]})
        if tensor.dim() > 1 and name != "b":
            yield bad(f"{name}-short", ValueError, f"got {name}(_scale)? with shape", **{name: tensor[:-1]})
            yield bad(f"{name}-narrow", ValueError, f"got {name} with shape", **{name: tensor[..., :-1]})
    for name in ("a_scale", "b_scale"):
        tensor = tensors.get(name)
        if tensor is not None:
            given: dict[str, Any] = {name: tensor.clone().requires_grad_()}
            yield bad(f"{name}-requires-grad", ValueError, "no gradient", **given)
