"""Checks of every call in debug mode, ``TORCH_CUTE_OPS_CHECK=1``.

Before a call, index tensors and global scales are checked. After the call, four rows of each result are compared with
the reference. The results of GEMMs may differ by the bounds of ``gemm.error_bounds``, and codes of quantised rows by
one step. If ``TORCH_CUTE_OPS_CHECK`` is set, the registry installs a :class:`Verifier` for each op.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from torch_cute_ops.formats import (
    FP8_BLOCK128,
    FP8_BLOCK128_UE8M0,
    MXFP8,
    NVFP4,
    SCALE_LAYOUTS,
    FP4Format,
    FP8Format,
    ScaleLayout,
    resolve_fp4_format,
    resolve_fp8_format,
)
from torch_cute_ops.formats.experts import expert_of_rows
from torch_cute_ops.formats.fp4 import unpack_e2m1
from torch_cute_ops.formats.interleave import deinterleave_k
from torch_cute_ops.formats.scale_layout import DEFAULT_SCALE_LAYOUT, fitting_layouts, from_linear, to_linear
from torch_cute_ops.formats.token_scales import with_alpha
from torch_cute_ops.ops._backend_path import BackendPath, seen_as
from torch_cute_ops.ops._define import OpSpec, as_tuple
from torch_cute_ops.ops._row_quant import gate_arguments
from torch_cute_ops.reference.mm_fp8_block import linear_mx_scales
from torch_cute_ops.runtime.calls import described

SETTING: Final = "TORCH_CUTE_OPS_CHECK"
ROWS: Final = 4
"""Number of rows of each result that are compared with the reference."""
FP8_STEP: Final = 32
FP8_STEP_ERROR: Final = 33 * 2.0**-13
"""Number of products that FP8 tensor cores add in one step, and the error of one step, relative to the sum of all
magnitudes. A step aligns the products and the accumulator to the largest among them, and keeps 14 bits."""
PROMOTED_BLOCK: Final = 128
PROMOTED_K: Final = 512
"""Number of elements of K that FP8 tensor cores add up before promotion: with block scales, and with per-token scales
unless ``fast_accum`` is set. MXFP8 GEMMs on Blackwell do not promote: their bound assumes fp32 accumulators in the
tensor cores (docs/limits.md, "Rounding")."""
RELATIVE: Final = 2.0**-16
"""Allowed relative error of fp32 results: a row may be summed in another order, and exponentials may be rounded
differently."""
CANCELLED: Final = 2.0**-18
"""Error of an element of a norm with a mean or a bias, relative to the largest terms of its row."""
SHARE: Final = 100
"""A sum that is computed in another order may change a code or scale by one step. One code or scale out of this number
may differ."""

_calls = itertools.count()
_compares_all: ContextVar[bool] = ContextVar("compares_all", default=False)


@contextlib.contextmanager
def every_row() -> Iterator[None]:
    """In the ``with`` block, compare all rows of each result instead of four."""
    token = _compares_all.set(True)
    try:
        yield
    finally:
        _compares_all.reset(token)


class Verifier:
    """Checks the calls of one op in debug mode.

    Args:
        spec: the op's entry in the registry.
    """

    def __init__(self, spec: OpSpec) -> None:
        self.spec, self.op = spec, spec.name
        self.compare = _comparison_of(spec)

    def before(self, call: Any) -> dict[str, Tensor]:
        """Check the values of a call before it runs. Return copies of the arguments that the op will update, by name,
        except caches, which are too large to copy and whose old contents affect no result.

        Raises:
            RuntimeError: if a CUDA graph is being captured.
            ValueError: if an index is out of range, or a global scale is not finite and positive.
        """
        if call[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"cute::{self.op}: {SETTING}=1 reads values, and a CUDA graph is being captured; unset {SETTING} "
                "before you capture"
            )
        path = self.spec.path
        path.check_values(call)
        given = path.arguments(call)
        for name in _scales_of(self.spec):
            scale = given[name]
            if scale is None:
                continue
            # Only ``global_scale`` must be positive. Other factors, such as alpha, may be zero or negative.
            is_wrong = ~scale.isfinite() | (scale <= 0) if name == "global_scale" else ~scale.isfinite()
            if bool(is_wrong.any()):
                expected = "positive, finite numbers" if name == "global_scale" else "finite numbers"
                wrong = scale[is_wrong].flatten()[0].item()
                raise ValueError(f"cute::{self.op}: {name} holds {wrong}; expected {expected}")
        return {} if self.compare is _appended else self.spec.copies_of_updated(given)

    @torch.no_grad()
    def after(self, call: Any, old: dict[str, Tensor], outputs: tuple[Tensor, ...]) -> None:
        """Compare rows of the outputs, and of updated arguments, with the reference.

        Raises:
            RuntimeError: if a row is wrong; the message names the output.
        """
        given = self.spec.path.arguments(call)
        if not all(output.numel() for output in outputs):
            return
        found = self.compare(self.spec, call, {**given, **old}, given, outputs)
        if found is not None:
            raise RuntimeError(
                f"cute::{self.op}: {found}; the reference gives another result, so the kernel or its launch is wrong. "
                f"Please report the call: {described(self.op, (), given)}"
            )


def _scales_of(spec: OpSpec) -> tuple[str, ...]:
    """Return the names of the op's arguments that are global scales, or factors that include one."""
    names = [each.name for each in spec.signature.tensors]
    found = ["global_scale"] if "global_scale" in names else []
    if "alpha" in names and getattr(spec.path, "over", "none") != "k":
        found.append("alpha")
    if "scale" in names and "granularity" in spec.signature.names:  # the static scale of a whole tensor
        found.append("scale")
    found += [name for name in ("q_scale", "k_scale", "v_scale") if name in names]
    return tuple(found)


def _chosen(rows: int, device: torch.device, call: int | None = None) -> Tensor:
    """Return the indices of the rows to compare: the first row, the last row, and two others, which vary with the
    number ``call`` (by default, from call to call). In an ``every_row`` block, return all indices."""
    if _compares_all.get():
        return torch.arange(rows, device=device)
    number = (next(_calls) if call is None else 1 + call) * 7919
    return torch.tensor([0, rows - 1, number % rows, number // 3 % rows][:ROWS], device=device)


Comparison = Callable[[OpSpec, Any, dict[str, Any], dict[str, Any], tuple[Tensor, ...]], str | None]
"""Function (op, call, arguments before the call, arguments after the call, outputs) that returns a description of the
first wrong output, or None."""


def _comparison_of(spec: OpSpec) -> Comparison:
    if isinstance(spec.path, BackendPath):
        return _gated if spec.path.over == "n" else _gemm
    by_name = {
        "fp4_dequantize": _dequantized,
        "fp8_quantize_block128x128": _square_blocks,
        "moe_permute_fp8quant": _permuted,
        "moe_swiglu_fp8quant": _gated_rows,
        "moe_finalize": _finalized,
        "moe_route": _routed,
        "moe_route_ids": _ordered,
        "moe_route_dense": _routed_dense,
        "qkv_norm_rope_append": _appended,
    }
    return by_name.get(spec.name, _rows)


# Ops that quantise, normalise or gate rows


def _rows(
    spec: OpSpec, call: Any, before: dict[str, Any], after: dict[str, Any], outputs: tuple[Tensor, ...]
) -> str | None:
    """Compare the results of an op whose outputs contain one row for each row of ``input``."""
    lead, width = before["input"].shape[:-1], before["input"].shape[-1]
    count = lead.numel()
    # If rows are summed over ranks, all ranks must choose the same indices.
    rows = _chosen(count, before["input"].device, 0 if "group" in before else None)
    if spec.name == "fp8_quantize_per_tensor":
        # Compare a row with the largest magnitude too, which determines the scale of the compared rows.
        largest = before["input"].reshape(count, width).abs().amax(-1).argmax()
        rows = torch.cat((rows, largest.reshape(1)))
    own = {name: before[name].reshape(count, width)[rows].contiguous() for name in ("input", *spec.updated)}
    named = {**before, **own}
    fmt: FP4Format | FP8Format | None = None
    if "block_size" in named:
        fmt = resolve_fp4_format(named["block_size"], named["scale_format"])
    elif "scale_layout" in named and "granularity" not in named:
        fmt = NVFP4
    elif "granularity" in named:
        fmt, _ = resolve_fp8_format(*(named[name] for name in ("granularity", "scale_layout", "scale_format")))
        fmt = fmt if fmt.scale_format == "ue8m0" else None
    has_bytes = fmt is not None and fmt.scale_dtype.itemsize == 1
    if "scale_layout" in named:
        named["scale_layout"] = "linear" if has_bytes else "row"
    want = as_tuple(spec.compute(named))
    pairs, every = {}, torch.arange(len(rows), device=rows.device)
    for name, got, expected in zip(spec.outputs, outputs, want, strict=True):
        if fmt is not None and has_bytes and name in ("scale", "scale_128x4"):
            blocks = width // (2 if spec.name.startswith("silu_mul") else 1) // fmt.block_size
            given = None if name == "scale_128x4" else before.get("scale_layout")
            layout = SCALE_LAYOUTS[DEFAULT_SCALE_LAYOUT if given is None else given]
            got = to_linear(got, layout, count, blocks)
            if name == "scale_128x4":
                expected = to_linear(expected, layout, len(rows), blocks)
        pairs[name] = _of_rows(got, expected, count, rows), _of_rows(expected, expected, len(rows), every)
    for name in spec.updated:
        pairs[name] = after[name].reshape(count, width)[rows], own[name]
    return _compared(pairs, fmt, _lost_by_cancelling(named, pairs))


def _lost_by_cancelling(given: dict[str, Any], pairs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the errors to allow in normalised rows, by output, if a mean is subtracted or a bias is added. The error
    of an element is then relative to the largest terms of its row."""
    bias = given.get("bias")
    if bias is None and not given.get("subtract_mean"):
        return {}
    most = 0.0 if bias is None else bias.abs().max().double()
    norms = {name: pairs[name][1].double() for name in ("norm", "out") if name in pairs}
    return {name: CANCELLED * (norm.abs().amax(-1, keepdim=True) + most) for name, norm in norms.items()}


def _of_rows(got: Tensor, want: Tensor, count: int, rows: Tensor) -> Tensor:
    """Select rows of an output. Return the whole output if it has no rows, such as a single scale."""
    if want.numel() == 1 and got.numel() == 1:
        return got.reshape(1, 1).expand(len(rows), 1)
    return got.reshape(count, -1)[rows]


def _compared(
    pairs: dict[str, tuple[Tensor, Tensor]],
    fmt: FP4Format | FP8Format | None,
    allowed: Mapping[str, Tensor] = MappingProxyType({}),
) -> str | None:
    """Compare outputs, by name, with the expected outputs. Return a description of the first wrong output, or None.

    Args:
        pairs: each output and the expected output.
        fmt: format of FP4 codes, or of FP8 codes whose scales are powers of two, or None.
        allowed: errors to allow in addition to rounding errors.
    """
    moved: Tensor | None = None
    for name, (got, want) in sorted(pairs.items(), key=lambda pair: "scale" not in pair[0]):
        want = want.expand(got.shape) if want.numel() == 1 else want
        is_fp8 = isinstance(fmt, FP8Format)
        if got.dtype.itemsize > 1 and not (is_fp8 and name == "scale"):
            found = _difference(got, want, allowed.get(name, 0.0))
        elif fmt is not None:
            if "scale" in name:
                moved = _steps_of_scales(got, want)
                found = _wrong_steps(moved.abs(), 1, ROWS if is_fp8 else fmt.block_size)
            else:
                found = _wrong_steps(_steps_of_codes(got, want, moved, fmt), 1, fmt.block_size)
        else:
            found = _wrong_steps(_steps_of_fp8(got, want), 1, 8)
        if found is not None:
            return f"{name} is wrong: {found}"
    return None


def _difference(got: Tensor, want: Tensor, allowed: Tensor | float = 0.0) -> str | None:
    """Compare numbers. Return a description of those that differ by more than rounding errors and ``allowed``, or
    None."""
    if not got.is_floating_point():
        wrong, error = got != want, (got - want).abs()
    else:
        info = torch.finfo(got.dtype)
        a, b = got.double(), want.double()
        error = (a - b).abs()
        most = b.abs() * max(4 * info.eps, RELATIVE) + info.smallest_normal + allowed
        same = (a == b) | (a.isnan() & b.isnan()) | (a == b.to(got.dtype).double())
        wrong = ~(same | (error <= most))
    if not bool(wrong.any()):
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} compared elements differ; the first, at {list(at)}, is "
        f"{got[at].item():.6g}, expected {want[at].item():.6g}"
    )


def _wrong_steps(steps: Tensor, limit: Tensor | int, whole: int) -> str | None:
    """Return a description if a code differs by more than ``limit`` steps or too many codes differ, else None."""
    wrong, count = steps > limit, int((steps > 0).sum())
    if bool(wrong.any()):
        at, most = wrong.nonzero()[0].tolist(), int(steps.max())
        return (
            f"{int(wrong.sum())} of {steps.numel()} compared codes differ by more than a step, at most by {most}; the "
            f"first at {at}"
        )
    if count > whole + steps.numel() // SHARE:
        return f"{count} of {steps.numel()} compared codes differ by a step"
    return None


def _steps_of_fp4(got: Tensor, want: Tensor) -> Tensor:
    a, b = (unpack_e2m1(each.view(torch.uint8)).reshape(len(got), -1).to(torch.int16) for each in (got, want))
    return torch.where((a ^ b) >= 8, 16 * ((a | b) & 7).sign(), ((a & 7) - (b & 7)).abs())


def _steps_of_fp8(got: Tensor, want: Tensor) -> Tensor:
    a, b = (each.view(torch.uint8).to(torch.int16) for each in (got, want))
    return torch.where((a ^ b) >= 0x80, 256 * ((a | b) & 0x7F).sign(), ((a & 0x7F) - (b & 0x7F)).abs())


def _steps_of_codes(got: Tensor, want: Tensor, moved: Tensor | None, fmt: FP4Format | FP8Format) -> Tensor:
    """Return by how many steps each code differs from the expected code. If scales are also compared, ``moved`` (rows,
    blocks) contains the steps by which they differ. Differences of codes that are explained by the different scale of
    their block do not count."""
    by_element = None if moved is None else moved.repeat_interleave(fmt.block_size, 1)
    if isinstance(fmt, FP8Format):
        if by_element is not None:
            # If a scale is twice the expected scale, the codes are half the expected codes.
            power = torch.exp2(-by_element[:, : want.shape[1]].float())
            want = (want.float() * power).clamp(-448, 448).to(want.dtype)
        return _steps_of_fp8(got, want)
    steps = _steps_of_fp4(got, want)
    return steps if by_element is None else torch.where((by_element != 0) & (steps <= 2), 0, steps)


def _steps_of_scales(got: Tensor, want: Tensor) -> Tensor:
    """Return by how many steps each scale differs. A step is 1 in the scale's byte, or 1 in the exponent of an fp32
    scale that is a power of two."""
    if got.dtype.itemsize == 1:
        a, b = (each.view(torch.uint8).to(torch.int16) for each in (got, want))
        return a - b
    # Compare the exponents of fp32 scales that are powers of two. The scale 2^-127 is subnormal.
    bits, want_bits = (each.contiguous().view(torch.int32) for each in (got, want))
    is_power = (bits & 0x7FFFFF == 0) | (bits == 0x400000) | got.isnan()
    is_power &= (bits == 0) == (want_bits == 0)  # rows that are only padding have the scale 0
    return torch.where(is_power, (bits >> 23) - (want_bits >> 23), 256)


def _square_blocks(
    spec: OpSpec, call: Any, before: dict[str, Any], after: dict[str, Any], outputs: tuple[Tensor, ...]
) -> str | None:
    """Compare some rows of blocks of an op that quantises blocks of 128 × 128 elements."""
    input, (y, scale) = before["input"], outputs
    n, k = input.shape[-2:]
    size = FP8_BLOCK128.block_size
    blocks = -(-n // size)
    chosen = _chosen(input.shape[:-2].numel() * blocks, input.device)
    matrix, block = chosen // blocks, chosen % blocks
    # Repeat the last row of a shorter block, which changes no scale.
    rows = (block[:, None] * size + torch.arange(size, device=input.device)).clamp(max=n - 1)
    at = matrix[:, None], rows
    want = spec.compute({**before, "input": input.reshape(-1, n, k)[at]})
    got = y.view(torch.uint8).view(-1, n, k)[at].view(y.dtype), scale.view(-1, blocks, scale.shape[-1])[matrix, block]
    pairs = zip(spec.outputs, got, want, strict=True)
    return _compared({name: (a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])) for name, a, b in pairs}, None)


# Ops of an expert layer


def _dequantized(
    spec: OpSpec, call: Any, before: dict[str, Any], after: dict[str, Any], outputs: tuple[Tensor, ...]
) -> str | None:
    y, (out,) = seen_as(before["y"], torch.uint8), outputs
    count, k = y.shape[:-1].numel(), 2 * y.shape[-1]
    fmt = resolve_fp4_format(before["block_size"], before["scale_format"])
    blocks, name = k // fmt.block_size, before["scale_layout"]
    if name is None:
        layouts: Sequence[ScaleLayout] = fitting_layouts(before["scale"].shape, y.shape[:-1], blocks)
    else:
        layouts = [SCALE_LAYOUTS[name]]
    rows = _chosen(count, y.device)
    scale = to_linear(before["scale"], layouts[0], count, blocks)[rows]
    own = {"y": y.reshape(count, -1)[rows], "scale": scale, "scale_layout": "linear"}
    return _compared({"out": (out.reshape(count, k)[rows], spec.compute({**before, **own}))}, None)


def _permuted(
    spec: OpSpec, call: Any, before: dict[str, Any], after: dict[str, Any], outputs: tuple[Tensor, ...]
) -> str | None:
    used = (before["permuted_to_expanded"] >= 0).nonzero()[:, 0]
    if not len(used):
        return None
    rows = used[_chosen(len(used), used.device)]
    own = {"permuted_to_expanded": before["permuted_to_expanded"][rows], "expanded_to_permuted": None}
    want = spec.compute({**before, **own})
    return _compared(
        {name: (got[rows], each) for name, got, each in zip(spec.outputs, outputs, want, strict=True)}, None
    )


def _gated_rows(
    spec: OpSpec, call: Any, before: dict[str, Any], after: dict[str, Any], outputs: tuple[Tensor, ...]
) -> str | None:
    x = before["input"]
    count = x.shape[:-1].numel()
    used = (expert_of_rows(count, before["offsets"], before["counts"]) >= 0).nonzero()[:, 0]
    if not len(used):
        return None
    rows = used[_chosen(len(used), used.device)]
    ends = torch.tensor([0, len(rows)], dtype=torch.int32, device=x.device)
    own = {"input": x.reshape(count, -1)[rows], "offsets": ends, "counts": None}
    want = spec.compute({**before, **own})
    pairs = zip(spec.outputs, outputs, want, strict=True)
    fmt = FP8_BLOCK128_UE8M0 if before["scale_format"] == "ue8m0" else None
    return _compared({name: (got.reshape(count, -1)[rows], each) for name, got, each in pairs}, fmt)


def _finalized(
    spec: OpSpec, call: Any, before: dict[str, Any], after: dict[str, Any], outputs: tuple[Tensor, ...]
) -> str | None:
    (out,) = outputs
    if before["residual"] is not None and before["residual"].data_ptr() == out.data_ptr():
        return None  # the result overwrote ``residual``, so the expected result is unknown
    rows = _chosen(len(out), out.device)
    names = ("expanded_to_permuted", "weights", "residual")
    own = {name: None if before[name] is None else before[name][rows] for name in names}
    return _compared({"out": (out[rows], spec.compute({**before, **own}))}, None)


def _routed(
    spec: OpSpec, call: Any, before: dict[str, Any], after: dict[str, Any], outputs: tuple[Tensor, ...]
) -> str | None:
    weights, ids, *order = outputs
    rows = _chosen(len(ids), ids.device)
    want_weights, want_ids, *_ = spec.compute({**before, "logits": before["logits"][rows]})
    scores = _scores(before, rows)
    pairs = {
        "weights": (weights[rows], want_weights),
        # Compare sorted: among experts with equal scores, any may be chosen.
        "ids": (_at(scores, ids[rows]), _at(scores, want_ids)),
    }
    names = ("experts", "alignment", "max_rows")
    values = before["logits"].shape[1], before["alignment"], before["max_rows"]
    return _compared(pairs, None) or _order_difference(
        spec.outputs[2:], order, ids, dict(zip(names, values, strict=True))
    )


def _at(scores: Tensor, ids: Tensor) -> Tensor:
    """Return the scores of the experts ``ids``, or infinity for an id that belongs to no expert."""
    exist = (ids >= 0) & (ids < scores.shape[1])
    return torch.where(exist, scores.gather(1, torch.where(exist, ids, 0).long()), torch.inf)


def _scores(before: dict[str, Any], rows: Tensor) -> Tensor:
    """Compute, in fp32, the scores by which experts are ranked."""
    logits, bias = before["logits"][rows].float(), before["bias"]
    if before["scoring"] == "softmax" and bias is None:
        return logits
    scores = logits.sigmoid() if before["scoring"] == "sigmoid" else logits.softmax(1)
    return scores if bias is None else scores + bias


def _order_difference(names: Sequence[str], order: Sequence[Tensor], ids: Tensor, named: dict[str, Any]) -> str | None:
    from torch_cute_ops.reference.moe_route import places_of

    want = places_of(ids, **named)
    for name, got, each in zip(names, order, want, strict=True):
        if not torch.equal(got, each):
            return f"{name} is wrong: {int((got != each).sum())} of {got.numel()} elements differ"
    return None


def _ordered(
    spec: OpSpec, call: Any, before: dict[str, Any], after: dict[str, Any], outputs: tuple[Tensor, ...]
) -> str | None:
    named = {name: before[name] for name in ("experts", "alignment", "max_rows")}
    return _order_difference(spec.outputs, outputs, before["ids"], named)


def _routed_dense(
    spec: OpSpec, call: Any, before: dict[str, Any], after: dict[str, Any], outputs: tuple[Tensor, ...]
) -> str | None:
    (out,) = outputs
    rows = _chosen(len(out), out.device)
    want = spec.compute({**before, "logits": before["logits"][rows]})
    # Compare sorted: among experts with equal scores, any may be chosen.
    return _compared({"out": (out[rows].sort(1).values, want.sort(1).values)}, None)


def _appended(
    spec: OpSpec, call: Any, before: dict[str, Any], after: dict[str, Any], outputs: tuple[Tensor, ...]
) -> str | None:
    """Compare rows of q, and the slots of the caches that belong to these rows."""
    (q,) = outputs
    rows = _chosen(len(q), q.device)
    all_slots = torch.full((len(q),), -1, dtype=torch.int64, device=q.device)
    all_slots[: len(before["slots"])] = before["slots"]
    slots = all_slots[rows]
    kept = slots >= 0
    count, page = len(rows), before["key_cache"].shape[1]
    own = {name: before[name][rows] for name in ("qkv", "positions")}
    own["slots"] = torch.where(kept, torch.arange(count, device=q.device), -1)
    # Caches of a single block, with a slot for each compared row.
    own |= {
        name: after[name].new_empty(1, count, *after[name].shape[2:])
        for name in spec.updated
        if after[name] is not None
    }
    want = spec.compute({**before, **own})
    found = _compared({"out": (q[rows].reshape(count, -1), want.reshape(count, -1))}, None)
    slots = slots[kept]
    if not len(slots):
        return found
    for kind in ("key", "value"):
        pairs = {}
        for name in (f"{kind}_cache", f"{kind}_block_scale"):
            if name in own:
                got = _raw_rows(after[name])[slots // page, slots % page].reshape(len(slots), -1)
                expected = _raw_rows(own[name])[0][kept].reshape(len(slots), -1)
                pairs[name] = got.view(after[name].dtype), expected.view(after[name].dtype)
        found = found or _compared(pairs, NVFP4 if f"{kind}_block_scale" in own else None)
    return found


def _raw_rows(cache: Tensor) -> Tensor:
    """View a cache of one-byte elements as bytes, because torch before 2.13 cannot index FP8 tensors."""
    return cache.view(torch.uint8) if cache.itemsize == 1 else cache


# GEMMs


def _gemm(
    spec: OpSpec, call: Any, before: dict[str, Any], after: dict[str, Any], outputs: tuple[Tensor, ...]
) -> str | None:
    from torch_cute_ops.gemm import error_bounds
    from torch_cute_ops.gemm.operands import Operands
    from torch_cute_ops.gemm.problem import Grouping

    (out,) = outputs
    path: Any = spec.path
    problem, n = path.problem(call), out.shape[-1]
    count = out.shape[:-1].numel()
    weight, b_scale = _bytes_of_codes(call.b, problem.b.format), call.b_scale
    a = _bytes_of_codes(call.a, problem.a.format)
    if problem.a.is_interleaved:
        a, problem = deinterleave_k(a, problem.k), replace(problem, a=replace(problem.a, is_interleaved=False))
    a = a.reshape(count, -1)
    alpha = call.alpha if call.alpha is None or call.alpha.dim() else call.alpha.reshape(1)
    if problem.grouping.over == "rows":
        owners = expert_of_rows(count, call.offsets, call.counts)
        used = (owners >= 0).nonzero()[:, 0]
        if not len(used):
            return None
        rows = used[_chosen(len(used), used.device)]
    else:
        owners, rows = None, _chosen(count, a.device)
    a_scale = _scale_rows(call.a_scale, problem.a, rows, count, problem.k)
    if problem.a.has_fp8_tokens and not problem.b.is_fp4:
        b_scale, alpha = with_alpha(b_scale, alpha), None
    got = out.reshape(count, n)[rows]
    kept = {"fp8_sums": _fp8_sums_error(problem)}
    if owners is None:
        if problem.grouping.over != "k":
            row_scale = None if call.row_scale is None else call.row_scale[rows]
            given = Operands(a[rows], weight, a_scale, b_scale, alpha, call.bias, row_scale=row_scale)
            return _within(got, *error_bounds.expected(problem, given, len(rows), **kept))
        for i, row in enumerate(rows.tolist()):  # weights of experts that a row does not use may be NaN
            one_scale = _scale_rows(call.a_scale, problem.a, rows[i : i + 1], count, problem.k)
            given = Operands(a[row, None], weight, one_scale, b_scale, call.alpha[row, None], call.bias)
            found = _within(got[i, None], *error_bounds.expected(problem, given, 1, **kept))
            if found is not None:
                return found
        return None
    b_layout = problem.b.scale_layout
    if isinstance(problem.b.format, FP4Format) and not problem.b.is_prepared:
        blocks, b_layout = problem.k // problem.b.format.block_size, SCALE_LAYOUTS["linear"]
        b_scale = to_linear(b_scale, problem.b.scale_layout, problem.experts * n, blocks)
        b_scale = b_scale.view(problem.experts, n, blocks)
    elif problem.b.format == MXFP8:
        b_scale = linear_mx_scales(b_scale, problem.experts * n, problem.k)
        b_scale = b_scale.view(problem.experts, n, problem.k // MXFP8.block_size)
    for i, expert in enumerate(owners[rows].tolist()):
        factor, kind = alpha, problem.epilogue.alpha
        if kind in ("expert", "expert_column"):
            factor = alpha[expert].reshape(-1)
            kind = "one" if kind == "expert" else "column"
        one = replace(
            problem,
            grouping=Grouping(),
            b=replace(problem.b, scale_layout=b_layout),
            epilogue=replace(problem.epilogue, alpha=kind),
        )
        bias = None if call.bias is None else call.bias[expert]
        own = slice(i, i + 1)
        assert a_scale is not None
        scale = a_scale if a_scale.dim() == 1 else a_scale[own]
        given = Operands(a[rows[own]], weight[expert], scale, b_scale[expert], factor, bias)
        found = _within(got[own], *error_bounds.expected(one, given, 1, **kept))
        if found is not None:
            return found
    return None


def _fp8_sums_error(problem: Any) -> float:
    """Return the error bound of a sum in FP8 tensor cores, relative to the sum of all magnitudes."""
    if problem.a.has_fp8_tokens:
        k = problem.k if problem.fast_accum else min(problem.k, PROMOTED_K)
    else:
        k = PROMOTED_BLOCK
    return -(-k // FP8_STEP) * FP8_STEP_ERROR


def _within(got: Tensor, want: Tensor, allowed: Tensor) -> str | None:
    found = _difference(got, want, allowed.double())
    return None if found is None else f"out is wrong: {found}"


def _bytes_of_codes(tensor: Tensor, fmt: Any) -> Tensor:
    return seen_as(tensor, torch.uint8) if isinstance(fmt, FP4Format) else tensor


def _scale_rows(scale: Tensor | None, operand: Any, rows: Tensor, count: int, k: int) -> Tensor | None:
    """Return the block scales of these rows in the same layout. A scale of the whole tensor is returned unchanged."""
    if scale is None or isinstance(operand.format, torch.dtype):
        return scale if scale is None else scale.reshape(1)
    if isinstance(operand.format, FP4Format):
        linear = to_linear(scale, operand.scale_layout, count, k // operand.format.block_size)
        return from_linear(linear[rows], operand.scale_layout)
    if operand.format == MXFP8:
        return linear_mx_scales(scale, count, k)[rows]
    return scale if scale.dim() == 1 else scale.reshape(count, -1)[rows]


def _gated(
    spec: OpSpec, call: Any, before: dict[str, Any], after: dict[str, Any], outputs: tuple[Tensor, ...]
) -> str | None:
    from torch_cute_ops.gemm import error_bounds
    from torch_cute_ops.gemm.operands import GatedOperands
    from torch_cute_ops.reference.moe_fc1_fp4 import quantize_experts, written_parts

    path: Any = spec.path
    problem, count = path.problem(call), len(call.a)
    rows = _chosen(count, call.a.device)
    routing = call.routing[rows]
    gate = gate_arguments(*call.swiglu)
    given = GatedOperands(
        _bytes_of_codes(call.a, problem.a.format)[rows],
        _bytes_of_codes(call.b, problem.b.format),
        _scale_rows(call.a_scale, problem.a, rows, count, problem.k),
        call.b_scale,
        call.alpha,
        call.bias,
        routing,
        call.global_scale,
        *gate,
        None if call.row_scale is None else call.row_scale[rows],
    )
    value, lost = error_bounds.expected_gated(problem, given)
    routed = (routing != 0).repeat_interleave(problem.expert_n, 1)
    if problem.quantised is None:
        return _within(torch.where(routed, outputs[0][rows], 0), value, lost)
    fmt, layout = problem.b.format, problem.quantised.scale_layout
    y, scale = outputs
    scale = from_linear(to_linear(scale, layout, count, problem.n // fmt.block_size)[rows], layout)
    got = y[rows], scale
    want = quantize_experts(value, problem.experts, call.global_scale, fmt, layout)
    found = error_bounds.block_difference(got, want, written_parts(got, routing, fmt, layout), fmt)
    return None if found is None else f"y or scale is wrong: {found}"
