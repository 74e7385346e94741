"""Rules that say how a call of an op can be sharded over one dimension of a device mesh. The rules depend only on the
call's shapes and arguments.

A rule says along which dimension each tensor is sharded, and whether a result is a partial sum.
:mod:`torch_cute_ops.distributed.sharding` passes the rules to DTensor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torch_cute_ops.formats import (
    FP8_BLOCK128,
    FP8_TENSOR,
    MXFP8,
    NVFP4,
    SCALE_LAYOUTS,
    resolve_fp4_format,
    resolve_fp8_format,
)
from torch_cute_ops.formats.fp8 import ROW
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.formats.prepared_scales import is_prepared
from torch_cute_ops.formats.scale_layout import (
    TILE_BLOCKS,
    ScaleLayout,
    fitting_layouts,
    layout_of_operand,
    weight_layout,
)
from torch_cute_ops.formats.token_scales import has_token_scales, is_interleaved
from torch_cute_ops.ops._backend_path import EXPERT_MULTIPLE, BackendPath
from torch_cute_ops.ops._define import OpSpec
from torch_cute_ops.ops._fp8_gemm import FP8_K_MULTIPLE, FP8_N_MULTIPLE, TokenFP8Gemm
from torch_cute_ops.ops._row_quant import RowQuant

BLOCK: Final = FP8_BLOCK128.block_size

WITHOUT: Final[dict[str, str]] = {
    "moe_route": "rows of the experts' order count the pairs of all tokens; shard moe_route_dense, or route the tokens "
    "of each rank by themselves, as ExpertParallel does",
    "moe_route_ids": "rows of the experts' order count the pairs of all tokens; route the tokens of each rank by "
    "themselves, as ExpertParallel does",
    **dict.fromkeys(
        ("all_reduce_add_rmsnorm", "all_reduce_add_rmsnorm_fp4quant", "all_reduce_add_rmsnorm_fp8quant"),
        "the op itself sums over the ranks of a group; pass each rank's local tensors",
    ),
    "fp8_quantize_per_tensor": "the scale is computed from all elements of the input; compute a scale per row, or "
    "reduce the largest magnitude over the ranks and pass the scale to fp8_quantize",
    "qkv_norm_rope_append": "a row holds the heads of q, then of k, then of v; call the op on each rank with the heads "
    "of that rank",
}
"""Ops that support only replicated tensors, each with the reason."""
OUT_REASON: Final = (
    "an overload .out writes into its arguments, which DTensor may replace by redistributed copies; call the "
    "functional op"
)


@dataclass(frozen=True)
class Multiple:
    """Condition that every shard's size must be an equal multiple of ``divisor``.

    Attributes:
        name: name of the size, for messages.
        size: size before sharding.
        divisor: number that must divide a shard's size.
    """

    name: str
    size: int
    divisor: int

    def reason_unfit(self, shards: int) -> str | None:
        """Return the reason why the size cannot be divided into ``shards`` equal shards, or None if it can."""
        if self.size % (shards * self.divisor) == 0:
            return None
        expected = f"a multiple of {shards * self.divisor}, {self.divisor} for each of {shards} shards"
        return f"{self.name} is {self.size}; expected {expected}"


@dataclass(frozen=True)
class Rule:
    """One way to shard a call over one mesh dimension.

    Attributes:
        over: sharded dimension of the problem: ``"rows"``, ``"columns"``, ``"k"``, ``"experts"``, or ``""`` for none.
        inputs, outputs: placements of the sharded tensors by name. All other tensors are replicated.
        multiples: conditions on the sizes of the shards.
        refusal: reason why the call cannot be sharded in this way even if the sizes fit; or ``None``.
    """

    over: str
    inputs: Mapping[str, Placement]
    outputs: Mapping[str, Placement]
    multiples: Sequence[Multiple] = ()
    refusal: str | None = None


Call = Mapping[str, Any]
"""Arguments of a call by name, including defaults. Each tensor is represented by an object with its ``shape`` and
``dtype``."""

Path = BackendPath[Any]
REPLICATED: Final = Rule("", {}, {})


def rules_of(spec: OpSpec, call: Call) -> list[Rule]:
    """Return all ways to shard a call. The first rule replicates all tensors."""
    if spec.name in WITHOUT or _has_foreign_tiles(call):
        return [REPLICATED]
    if isinstance(spec.path, RowQuant):
        found = _row_quant(spec.path, spec.outputs, call)
    elif isinstance(spec.path, BackendPath):
        found = _GEMMS[spec.path.over](spec.path, call) if spec.path.over in _GEMMS else iter(())
    else:
        found = _OTHERS.get(spec.name, _nothing)(call)
    return [REPLICATED, *found]


def _has_foreign_tiles(call: Call) -> bool:
    """Return True if tiled FP4 scales are in another library's shape, whose dimensions cannot be sharded like rows or
    blocks."""
    if call.get("scale_layout") not in ("128x4", "8x4"):
        return False
    scales = (call.get(name) for name in ("scale", "a_scale", "b_scale", "w_scale"))
    dims = [len(each.shape) for each in scales if each is not None and each.dtype.itemsize == 1]
    return any(dim not in (4, 5) for dim in dims)


def has_rules(spec: OpSpec) -> bool:
    """Return True if calls of the op can be sharded at all."""
    if isinstance(spec.path, BackendPath):
        return spec.path.over in _GEMMS
    return spec.name not in WITHOUT and (isinstance(spec.path, RowQuant) or spec.name in _OTHERS)


def reason_without(op: str) -> str:
    """Return the reason why calls of an op without rules cannot be sharded."""
    return WITHOUT.get(op, "this op has no sharding rule")


def _nothing(call: Call) -> Iterator[Rule]:
    return iter(())


def _tiles(name: str, rows: int, layout: ScaleLayout) -> list[Multiple]:
    return [] if layout.is_linear else [Multiple(f"{layout.name} scales: {name}", rows, layout.tile_rows)]


def _rows_before(shape: Sequence[int], dim: int) -> int:
    """Return the number of rows: the product of the dimensions from ``dim`` to the last but one."""
    rows = 1
    for extent in shape[dim:-1]:
        rows *= extent
    return rows


# Ops that quantise rows


def _row_quant(path: RowQuant, names: Sequence[str], call: Call) -> Iterator[Rule]:
    shape = call["input"].shape
    last = len(shape) - 1
    has_row_scale = "row_scale" in names
    if has_row_scale or path.four_over_six:
        fmt, layout, block = None, SCALE_LAYOUTS[call["scale_layout"]], NVFP4.block_size
    elif "block_size" in call:
        both = "scale_128x4" in names
        layout = SCALE_LAYOUTS["128x4" if both else call["scale_layout"]]
        block = resolve_fp4_format(call["block_size"], call["scale_format"]).block_size
        fmt = None
    elif path.quantises:
        fmt, layout = resolve_fp8_format(call["granularity"], call["scale_layout"], call["scale_format"])
        block = fmt.block_size
    else:
        fmt, layout, block = None, ROW, 1
    for dim in range(last):
        sharded = Shard(dim)
        inputs = {name: sharded for name in ("input", "residual") if call.get(name) is not None}
        outputs: dict[str, Placement] = dict.fromkeys(("y", "out", "norm", "scale_linear", "scale"), sharded)
        multiples: list[Multiple] = []
        refusal = None
        if fmt == FP8_TENSOR:
            outputs["scale"] = Replicate()
        elif has_row_scale or not layout.is_linear:
            if dim and _rows_before((*shape[:dim], 1), 0) != 1:
                what = "row" if layout.is_linear else layout.name
                refusal = f"{what} scales are over the flattened rows; shard dimension 0, or flatten the input"
            outputs["row_scale"] = Shard(0)
            if not layout.is_linear:
                outputs["scale"] = outputs["scale_128x4"] = Shard(0)
            multiples = _tiles("the number of rows", _rows_before(shape, 0), layout)
            if last > 1:
                multiples.append(Multiple(f"dimension {dim} of input", shape[dim], 1))
        yield Rule("rows", inputs, outputs, multiples, refusal)
    reduces_amax = has_row_scale or (fmt is not None and not fmt.is_static and not block)
    if path.normalises or path.source != "rows" or reduces_amax:
        return  # a row, or its gate and up halves, cannot be divided
    scale: Placement = Replicate() if fmt == FP8_TENSOR else Shard(last)
    if not layout.is_linear:
        scale, block = Shard(1), TILE_BLOCKS * block
    if call.get("interleaved"):
        block = INTERLEAVED_K
    multiples = [Multiple("the last dimension of input", shape[last], block or 1)]
    yield Rule("columns", {"input": Shard(last)}, {"y": Shard(last), "scale": scale}, multiples)


def _square_blocks(call: Call) -> Iterator[Rule]:
    shape = call["input"].shape
    last = len(shape) - 1
    for dim in range(last + 1):
        over = "columns" if dim == last else "rows"
        divisor = BLOCK if dim >= last - 1 else 1
        multiples = [Multiple(f"dimension {dim} of input", shape[dim], divisor)]
        yield Rule(over, {"input": Shard(dim)}, {"y": Shard(dim), "scale": Shard(dim)}, multiples)


def _dequantize(call: Call) -> Iterator[Rule]:
    shape, scale_shape = call["y"].shape, call["scale"].shape
    block = resolve_fp4_format(call["block_size"], call["scale_format"]).block_size
    last = len(shape) - 1
    if call["scale_layout"] is None:
        fitting = fitting_layouts(scale_shape, shape[:-1], 2 * shape[last] // block)
        if len(fitting) != 1:
            return  # the op itself raises an error for this call
        (layout,) = fitting
    else:
        layout = SCALE_LAYOUTS[call["scale_layout"]]
    unnamed = None
    if call["scale_layout"] is None and last > 2:
        unnamed = "the scales of a shard could fit two layouts, as y has over three dimensions; name scale_layout"
    for dim in range(last):
        refusal = unnamed
        if not layout.is_linear and _rows_before((*shape[:dim], 1), 0) != 1:
            refusal = f"{layout.name} scales are over the flattened rows; shard dimension 0, or flatten y"
        multiples = _tiles("the number of rows", _rows_before(shape, 0), layout)
        if multiples and last > 1:
            multiples.append(Multiple(f"dimension {dim} of y", shape[dim], 1))
        scale = Shard(dim if layout.is_linear else 0)
        yield Rule("rows", {"y": Shard(dim), "scale": scale}, {"out": Shard(dim)}, multiples, refusal)
    scale = Shard(last if layout.is_linear else 1)
    multiples = [Multiple("K", 2 * shape[last], block * _blocks_together(layout))]
    yield Rule("columns", {"y": Shard(last), "scale": scale}, {"out": Shard(last)}, multiples, unnamed)


# GEMMs


def _blocks_together(layout: ScaleLayout) -> int:
    """Return the number of neighbouring blocks of a row that must stay on one rank. It is the width of a scale tile, or
    1 for linear scales."""
    return 1 if layout.is_linear else TILE_BLOCKS


def _is_mxfp8(path: Path, call: Call) -> bool:
    """Return True for a GEMM of MXFP8 matrices."""
    return path.b == "fp8" and call["b_scale"].dtype != torch.float32


def _layouts(path: Path, call: Call) -> tuple[ScaleLayout | None, ScaleLayout | None, int]:
    """Return (layout of the scales of ``a``, layout of the scales of ``b``, divisor of K). A layout is None for formats
    other than FP4 and MXFP8."""
    if _is_mxfp8(path, call):
        a_layout, b_layout = (layout_of_operand(call[name]) for name in ("a_scale", "b_scale"))
        together = max(map(_blocks_together, (a_layout, b_layout)))
        return a_layout, b_layout, max(FP8_K_MULTIPLE, MXFP8.block_size * together)
    if path.b == "fp8" or _fp4_tokens(path, call).is_prepared:
        return None, None, BLOCK
    if call["scale_layout"] is None:
        layout = layout_of_operand(call["a_scale"] if path.a == "fp4" else call[f"{path.b_name}_scale"])
    else:
        layout = SCALE_LAYOUTS[call["scale_layout"]]
    block = resolve_fp4_format(call["block_size"], call["scale_format"]).block_size * _blocks_together(layout)
    return (layout if path.a == "fp4" else None), weight_layout(layout), max(block, BLOCK if path.a == "fp8" else 32)


class _FP4Tokens(NamedTuple):
    """Properties of a call with per-token scales and an FP4 weight. All are False for other calls.

    Attributes:
        has_scales: True if ``a`` has per-token scales.
        has_one: True if all rows share one scale.
        is_prepared: True if ``b_scale`` holds prepared scales.
        is_interleaved: True if k of ``a`` is interleaved.
    """

    has_scales: bool = False
    has_one: bool = False
    is_prepared: bool = False
    is_interleaved: bool = False


def _fp4_tokens(path: Path, call: Call) -> _FP4Tokens:
    if (path.a, path.b) != ("fp8", "fp4"):
        return _FP4Tokens()
    a, b, a_scale, b_scale = (call[name] for name in ("a", "b", "a_scale", "b_scale"))
    is_masked = path.over == "rows" and call["offsets"] is None
    if not has_token_scales(a, b, a_scale, b_scale, call["block_size"], is_masked):
        return _FP4Tokens()
    prepared = is_prepared(b, b_scale, call["block_size"])
    return _FP4Tokens(True, len(a_scale.shape) == 1, prepared, is_interleaved(a, is_masked))


_BY_ROW: Final = "the power of two of a weight row depends on all of K"


def _given(call: Call, **placements: Placement) -> dict[str, Placement]:
    """Return the placements whose tensors the call actually passes."""
    return {name: placement for name, placement in placements.items() if call.get(name) is not None}


def _bias_refusal(call: Call, name: str = "bias") -> str | None:
    return f"{name} would be added by every rank; add it to the sum" if call.get(name) is not None else None


def _token_gemm(call: Call) -> Iterator[Rule]:
    (k, n), of_rows, of_columns = call["b"].shape, call["a_scale"].ndim == 2, call["b_scale"].numel() > 1
    rows = {"a": Shard(0), **({"a_scale": Shard(0)} if of_rows else {})}
    yield Rule("rows", rows, {"out": Shard(0)}, ())
    columns = _given(call, b=Shard(1), bias=Shard(0)) | ({"b_scale": Shard(0)} if of_columns else {})
    yield Rule("columns", columns, {"out": Shard(1)}, [Multiple("N", n, FP8_N_MULTIPLE)])
    multiples = [Multiple("K", k, FP8_K_MULTIPLE)]
    yield Rule("k", {"a": Shard(1), "b": Shard(0)}, {"out": Partial()}, multiples, _bias_refusal(call))


def _columns_together(path: Path, call: Call) -> int:
    """Return the divisor of the number of columns of each shard of the weight."""
    has_row_scales = _is_mxfp8(path, call) or call["b_scale"].shape[-2] == call["b"].shape[-1]
    return BLOCK if path.b == "fp8" and not has_row_scales else FP8_N_MULTIPLE


def _gemm(path: Path, call: Call) -> Iterator[Rule]:
    if isinstance(path, TokenFP8Gemm):
        yield from _token_gemm(call)
        return
    m, (held, n) = call["a"].shape[0], call["b"].shape
    a_layout, b_layout, block = _layouts(path, call)
    tokens = _fp4_tokens(path, call)
    k = held * (2 if path.b == "fp4" else 1)
    rows = _given(call, a=Shard(0), a_scale=Shard(0), row_scale=Shard(0))
    if tokens.has_one:
        del rows["a_scale"]
    yield Rule("rows", rows, {"out": Shard(0)}, _tiles("M", m, a_layout) if a_layout is not None else ())
    columns = _given(call, b=Shard(1), b_scale=Shard(1 if tokens.is_prepared else 0), bias=Shard(0))
    alpha = call["alpha"]
    if alpha is not None and alpha.shape == (n,) and n > 1:
        columns["alpha"] = Shard(0)
    multiples = [] if b_layout is None else _tiles("N", n, b_layout)
    if path.a == "fp8":
        multiples.append(Multiple("N", n, _columns_together(path, call)))
    yield Rule("columns", columns, {"out": Shard(1)}, multiples)
    if path.prologue_gate:
        return  # the gate and up halves of a row cannot be divided
    sums = _given(call, a=Shard(1), a_scale=Shard(1), b=Shard(0), b_scale=Shard(1))
    refusal = _bias_refusal(call)
    if tokens.has_scales:
        sums, refusal = {"a": Shard(1), "b": Shard(0)}, _BY_ROW
    yield Rule("k", sums, {"out": Partial()}, [Multiple("K", k, block)], refusal)


def _grouped_gemm(path: Path, call: Call) -> Iterator[Rule]:
    experts, held, n = call["b"].shape
    a_layout, b_layout, block = _layouts(path, call)
    has_tokens = path.b == "fp8" and call["b_scale"].ndim < 3
    tokens = _fp4_tokens(path, call)
    has_one_a_scale, has_columns = call["a_scale"].ndim == 1, call["b_scale"].ndim > 1
    k = held * (2 if path.b == "fp4" else 1)
    is_masked, is_tiled = call["offsets"] is None, b_layout is not None and not b_layout.is_linear
    last = 2 if is_masked else 1
    a_scale = Shard(last if a_layout is None or a_layout.is_linear else 1)
    alpha = call["alpha"]
    refusal: str | None = None
    by_expert = alpha is not None and alpha.numel() > 1
    own = _given(call, b=Shard(0), b_scale=Shard(0), bias=Shard(0))
    if by_expert:
        own["alpha"] = Shard(0)
    inputs = _given(call, a=Shard(0), a_scale=Shard(0), counts=Shard(0)) | own
    if has_one_a_scale:
        del inputs["a_scale"]
    multiples = [Multiple("E", experts, 1)]
    if is_tiled:
        assert b_layout is not None
        multiples += _tiles("E · N", experts * n, b_layout)
    if is_masked:
        if a_layout is not None:
            multiples += _tiles("E · max_rows", _rows_before(call["a"].shape, 0), a_layout)
        yield Rule("experts", inputs, {"out": Shard(0)}, multiples)
    else:
        refusal = (
            "rows of an expert are known on the device alone; shard experts in the masked layout, or by ExpertParallel"
        )
        yield Rule("experts", own, {"out": Partial()}, multiples, refusal)
    columns = _given(call, b=Shard(2), b_scale=Shard(2 if tokens.is_prepared else 1), bias=Shard(1))
    if not has_columns:
        del columns["b_scale"]
    if by_expert and alpha.ndim == 2:
        columns["alpha"] = Shard(1)
    refusal = None
    if is_tiled:
        refusal = "tiled scales are over the rows of all experts, one after the other; use scale_layout='linear'"
    multiples = [Multiple("N", n, FP8_N_MULTIPLE if has_tokens else _columns_together(path, call))]
    yield Rule("columns", columns, {"out": Shard(last)}, multiples, refusal)
    sums = _given(call, a=Shard(last), a_scale=a_scale, b=Shard(1), b_scale=Shard(1 if is_tiled else 2))
    if has_tokens:
        sums, block = {"a": Shard(last), "b": Shard(1)}, FP8_K_MULTIPLE
    refusal = _bias_refusal(call)
    if tokens.has_scales:
        sums, refusal = {"a": Shard(last), "b": Shard(1)}, _BY_ROW
    yield Rule("k", sums, {"out": Partial()}, [Multiple("K", k, block)], refusal)


def _expert_sum(path: Path, call: Call) -> Iterator[Rule]:
    """Yield the rules of ``moe_fc2_*``, in which each expert owns a range of K."""
    (m, _), (held, n), (_, experts) = call["a"].shape, call["w"].shape, call["alpha"].shape
    a_layout, w_layout, block = _layouts(path, call)
    assert w_layout is not None
    rows = _given(call, a=Shard(0), a_scale=Shard(0), alpha=Shard(0))
    yield Rule("rows", rows, {"out": Shard(0)}, _tiles("M", m, a_layout) if a_layout is not None else ())
    columns = _given(call, w=Shard(1), w_scale=Shard(0), bias=Shard(1))
    yield Rule("columns", columns, {"out": Shard(1)}, _tiles("N", n, w_layout))
    own = _given(call, a=Shard(1), a_scale=Shard(1), w=Shard(0), w_scale=Shard(1), alpha=Shard(1), bias=Shard(0))
    multiples = [Multiple("E", experts, 1), Multiple("E · I", 2 * held, max(EXPERT_MULTIPLE, block))]
    yield Rule("experts", own, {"out": Partial()}, multiples)


def _gated_experts(path: Path, call: Call) -> Iterator[Rule]:
    """Yield the rules of ``moe_fc1_*``, in which each expert owns a range of N. Its gate and up columns must stay on
    one rank."""
    m, experts = call["routing"].shape
    a_layout, w_layout, block = _layouts(path, call)
    assert w_layout is not None
    results = ("out",) if a_layout is None else ("y", "scale")
    rows = _given(call, a=Shard(0), a_scale=Shard(0), routing=Shard(0), row_scale=Shard(0))
    outputs: dict[str, Placement] = dict.fromkeys(results, Shard(0))
    yield Rule("rows", rows, outputs, _tiles("M", m, a_layout) if a_layout is not None else ())
    own = _given(call, w=Shard(0), w_scale=Shard(0), routing=Shard(1), alpha=Shard(0), bias=Shard(0))
    global_scale = call.get("global_scale")
    if global_scale is not None and global_scale.numel() > 1:
        own["global_scale"] = Shard(0)
    multiples = [Multiple("E", experts, 1)]
    if a_layout is not None:
        multiples.append(Multiple("E · I", experts * (call["w"].shape[2] // 2), block))
    yield Rule("experts", own, dict.fromkeys(results, Shard(1)), multiples)


# Steps of an expert layer


def _route_dense(call: Call) -> Iterator[Rule]:
    yield Rule("rows", {"logits": Shard(0)}, {"out": Shard(0)})


def _permute(call: Call) -> Iterator[Rule]:
    width = Multiple("the last dimension of input", call["input"].shape[1], BLOCK)
    yield Rule("columns", {"input": Shard(1)}, {"y": Shard(1), "scale": Shard(1)}, [width])


def _swiglu(call: Call) -> Iterator[Rule]:
    if call["offsets"] is None:
        experts = Multiple("E", call["input"].shape[0], 1)
        yield Rule("experts", {"input": Shard(0), "counts": Shard(0)}, {"y": Shard(0), "scale": Shard(0)}, [experts])


def _finalize(call: Call) -> Iterator[Rule]:
    rows = _given(call, expanded_to_permuted=Shard(0), weights=Shard(0), residual=Shard(0))
    yield Rule("rows", rows, {"out": Shard(0)})
    width = Multiple("the last dimension of input", call["input"].shape[1], 8)
    yield Rule("columns", _given(call, input=Shard(1), residual=Shard(1)), {"out": Shard(1)}, [width])
    yield Rule("k", {"input": Partial()}, {"out": Partial()}, (), _bias_refusal(call, "residual"))


_GEMMS: Final[dict[str, Callable[[Path, Call], Iterator[Rule]]]] = {
    "none": _gemm,
    "rows": _grouped_gemm,
    "k": _expert_sum,
    "n": _gated_experts,
}
"""Function that yields the rules of a GEMM op, keyed by the dimension that is divided among experts."""

_OTHERS: Final[dict[str, Callable[[Call], Iterator[Rule]]]] = {
    "fp4_dequantize": _dequantize,
    "fp8_quantize_block128x128": _square_blocks,
    "moe_route_dense": _route_dense,
    "moe_permute_fp8quant": _permute,
    "moe_swiglu_fp8quant": _swiglu,
    "moe_finalize": _finalize,
}


def is_byte_float(dtype: torch.dtype) -> bool:
    """Return True for FP8 and FP4 dtypes, which some collective backends cannot send."""
    return dtype.is_floating_point and dtype.itemsize == 1
