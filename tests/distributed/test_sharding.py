"""DTensor sharding rules on the registry's samples, with one process that simulates two ranks.

``test_rules`` calls each op on tensors placed as a rule says, and compares the assembled shards with independently
computed results of the undivided tensors. torch's own check of rules runs too if expecttest is installed.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expected import assert_same
from samples import Sample, grouped_mm_fp8, grouped_mm_fp8_fp4, mm_fp4_weight_only, mm_fp8_block
from samples._epilogue import exact_epilogue
from samples._fp4_gemm import POWERS, random_matrix
from samples._fp8_gemm import with_row_scales
from samples._moe_fc1 import GatedSamples
from support.cases import (
    arguments,
    copy_updated,
    expected_of,
    get_sample,
    named,
    op_cases,
    overload,
    sample_cases,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import torch_cute_ops
from torch_cute_ops.distributed import full_tensor, reason_unsharded, redistribute
from torch_cute_ops.distributed.rules import WITHOUT, Rule, rules_of
from torch_cute_ops.formats import NVFP4
from torch_cute_ops.ops._define import OpSpec, as_tuple
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops.fp4_dequantize import fp4_dequantize
from torch_cute_ops.registry import OPS

local_tensor = pytest.importorskip("torch.distributed._local_tensor", reason="this torch has no LocalTensorMode")

WORLD = 2
CPU = torch.device("cpu")
by_op = pytest.mark.parametrize("op", op_cases())


@pytest.fixture
def mesh():
    """Return a mesh of two simulated ranks. Create and use DTensors of this mesh only inside ``with ranks():``."""
    yield from mesh_of(WORLD)


@pytest.fixture
def square():
    """Return a mesh of 2 × 2 simulated ranks."""
    yield from mesh_of(2, 2)


def mesh_of(*sizes: int) -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=math.prod(sizes))
    try:
        with ranks(math.prod(sizes)):
            mesh = init_device_mesh("cpu", sizes)
        yield mesh
    finally:
        dist.destroy_process_group()


def ranks(world: int = WORLD) -> Any:
    return local_tensor.LocalTensorMode(world)


def fitting(op: OpSpec, given: dict[str, Any]) -> list[Rule]:
    """Return the rules by which a call can be sharded over two ranks."""
    return [
        rule
        for rule in rules_of(op, given)
        if rule.refusal is None
        and not any(each.reason_unfit(WORLD) for each in rule.multiples)
        and all(
            not isinstance(placement, Shard) or given[name].shape[placement.dim] % WORLD == 0
            for name, placement in rule.inputs.items()
        )
    ]


def tensors_of(op: OpSpec, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {each.name: given[each.name] for each in op.signature.tensors if given[each.name] is not None}


def assert_rule_holds(op: OpSpec, given: dict[str, Any], rule: Rule, mesh: Any) -> None:
    """Check that a call whose tensors are placed as the rule says needs no communication, and that its shards make up
    the whole result."""
    given = private_of(op, given)
    expected = expected_of(op).results(given)
    tensors = tensors_of(op, given)
    with ranks():
        placed = {name: distributed(each, rule.inputs.get(name, Replicate()), mesh) for name, each in tensors.items()}
        before = [each.placements for each in placed.values()]
        with CommDebugMode() as comm:
            found = as_tuple(overload(op)(*{**given, **placed}.values()))
        assert comm.get_total_counts() == 0
        assert [each.placements for each in found] == [(rule.outputs.get(name, Replicate()),) for name in op.outputs]
        assert [each.placements for each in placed.values()] == before
    whole = tuple(map(joined, (*found, *(placed[name] for name in op.updated if name in placed))))
    assert [each.shape for each in found] == [each.shape for each in whole[: len(found)]]
    if op.defined is not None:
        outputs = op.defined(whole[: len(found)], **given)
        whole = (*outputs, *whole[len(found) :])
    expected_of(op).assert_results(whole, expected, given)


def private_of(op: OpSpec, given: dict[str, Any]) -> dict[str, Any]:
    return copy_updated(op, named(op, given)).kwargs


def joined(tensor: DTensor) -> torch.Tensor:
    """Assemble the whole tensor from the shards of all ranks."""
    (placement,) = tensor.placements
    parts = [*tensor._local_tensor._local_tensors.values()]
    if isinstance(placement, Partial):
        return torch.stack(parts).double().sum(0).to(tensor.dtype)
    raw = [part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts]
    if isinstance(placement, Shard):
        return torch.cat(raw, placement.dim).view(tensor.dtype)
    assert_same(raw[1:], raw[:1])
    return parts[0]


def distributed(tensor: torch.Tensor, placement: Placement, mesh: Any) -> DTensor:
    """Return the tensor as a DTensor with this placement."""
    if isinstance(placement, Partial):
        locals_ = {rank: tensor.clone() if rank == 0 else torch.zeros_like(tensor) for rank in range(WORLD)}
    elif isinstance(placement, Shard):
        locals_ = {rank: part.clone() for rank, part in enumerate(tensor.tensor_split(WORLD, placement.dim))}
    else:
        locals_ = {rank: tensor.clone() for rank in range(WORLD)}
    local = local_tensor.LocalTensor(locals_)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=tensor.shape, stride=tensor.stride())


@functools.cache
def cases_of(op: OpSpec) -> list[tuple[dict[str, Any], Rule]]:
    """Return (call, rule) pairs that cover the op's rules: calls from the samples, and large calls for rules that fit
    no sample."""
    found: dict[str, tuple[dict[str, Any], Rule]] = {}
    samples = [get_sample(op, case.values[1], "cpu") for case in sample_cases() if case.values[0] is op]
    # Prefer samples whose sums are exact: sharding changes the order of additions. Large calls cover MXFP8.
    samples = [sample for sample in samples if not sample.name.startswith("mxfp8")]
    samples.sort(key=lambda sample: not sample.name.endswith("exact"))
    calls = [*large_calls(op), *(arguments(op, sample) for sample in samples)]
    for given in calls:
        if any(0 in tensor.shape for tensor in tensors_of(op, given).values()):
            continue
        for rule in fitting(op, given):
            # Use float32 results for partial sums: otherwise each partial sum is rounded.
            is_rounded = "out_dtype" in given and Partial() in rule.outputs.values()
            call = given | {"out_dtype": torch.float32} if is_rounded else given
            forms = [(given[name].dtype, given[name].ndim) for name in SCALES.get(op.name, ())]
            found.setdefault(f"{rule.over} {rule.inputs} {rule.outputs} {forms}", (call, rule))
    return [*found.values()]


SCALES = dict.fromkeys(("mm_fp8_block", "grouped_mm_fp8"), ("a_scale", "b_scale"))
"""Names of the tensors whose dtype and number of dimensions select the format and the layout, by op."""
ROWS = 256
"""Number of rows that gives two shards of whole scale tiles."""
MX_LAYOUTS = (("linear", "linear"), ("128x4", "linear"), ("linear", "8x4"), ("8x4", "128x4"))
"""Layouts of the MXFP8 scales of ``a`` and of ``b``."""
LARGE = {"fp4_dequantize", "mm_fp4", "mm_fp4_weight_only", "mm_fp8_fp4", "moe_fc2_fp4", "moe_fc2_fp4_weight_only"}
LARGE |= {"silu_mul_mm_fp4_weight_only", "fp4quant_mm_fp4", "silu_mul_fp4quant_mm_fp4"}
LARGE |= {name for name in OPS if name.endswith(("fp4quant", "with_norm", "both_layouts")) or name == "fp4_quantize"}


def large_calls(op: OpSpec) -> Iterator[dict[str, Any]]:
    """Yield calls with enough rows, columns and scales for two shards. Calls with experts also get factors and
    biases."""
    if op.name in ("grouped_mm_fp8", "grouped_mm_fp8_fp4"):
        inputs: Any = grouped_mm_fp8
        form: tuple[Any, ...] = ()
        if op.name == "grouped_mm_fp8_fp4":
            inputs, form = grouped_mm_fp8_fp4, (NVFP4, "linear")
        for epilogue in (exact_epilogue(ROWS, CPU, 2), {}):
            yield arguments(op, inputs.contiguous("", *form, [3, 5], ROWS, 128, CPU, exact=True, **epilogue))
            yield arguments(op, inputs.masked("", *form, [3, 5], 6, ROWS, 128, CPU, exact=True, **epilogue))
        if op.name == "grouped_mm_fp8":
            for layouts in MX_LAYOUTS:
                one = inputs.contiguous("", [3, 5], ROWS, 256, CPU, exact=True)
                yield arguments(op, inputs.with_mx_scales(one, *layouts, exact=True))
                one = inputs.masked("", [3, 5], 128, ROWS, 256, CPU, exact=True)
                yield arguments(op, inputs.with_mx_scales(one, *layouts, exact=True))
            one = inputs.contiguous("", [3, 5], 16, 256, CPU, exact=True)
            yield arguments(op, with_row_scales(one, exact=True))
            one = inputs.masked("", [3, 5], 8, 16, 256, CPU, exact=True)
            yield arguments(op, with_row_scales(one, exact=True))
    elif op.name == "mm_fp8_block":
        yield arguments(op, with_row_scales(mm_fp8_block.sample("", 6, 16, 256, CPU, exact=True), exact=True))
        for layout, weight_layout in MX_LAYOUTS:
            layouts = {"layout": layout, "weight_layout": weight_layout}
            yield arguments(op, mm_fp8_block.mx_sample("", ROWS, ROWS, 256, CPU, exact=True, **layouts))
    elif op.name.startswith("moe_fc1"):
        gated = GatedSamples(has_a_scale=op.name == "moe_fc1_fp4")
        own = {"alpha": torch.rand(2, 2) / 64, "bias": torch.randn(2, 128)}
        if gated.has_a_scale:
            own["global_scale"] = torch.rand(2) * 40 + 1
        yield arguments(op, gated.sample("", 6, 128, 64, NVFP4, "linear", CPU, **own))
        yield arguments(op, gated.sample("", ROWS, 128, 64, NVFP4, "128x4", CPU))
    elif op.name == "fp8_quantize_block128x128":
        yield arguments(op, Sample("", (torch.randn(2, ROWS, 2 * 128),)))
    elif op.name in LARGE:
        yield large_call(op)


def large_call(op: OpSpec) -> dict[str, Any]:
    """Return a call with 128x4 scales and enough rows and columns for two shards."""
    codes, scale = random_matrix(ROWS, 128, NVFP4, "128x4", CPU, POWERS["e4m3"])
    given: dict[str, Any] = {
        "input": torch.randn(ROWS, 64),
        "residual": torch.randn(ROWS, 64),
        "weight": torch.rand(64),
        "group": "",
        **{"y": codes, "scale": scale, "b": codes.t(), "b_scale": scale, "w": codes.t(), "w_scale": scale},
        **{"a": codes, "a_scale": scale, "alpha": torch.randint(-1, 3, (ROWS, 2)).float()},
    }
    if op.name == "mm_fp8_fp4":
        given |= {
            "a": torch.randint(-2, 3, (ROWS, 128)).float().to(torch.float8_e4m3fn),
            "a_scale": torch.ones(ROWS, 1),
        }
    elif op.has_backends and op.path.a == "16-bit":
        given["a"] = torch.randint(-2, 3, (ROWS, op.path.a_width(128))).bfloat16()
        if op.path.prologue_quant:
            given["global_scale"] = torch.tensor([3.0])
    if not op.name.startswith("moe"):
        given["alpha"] = torch.tensor([0.5])
    names = [each.name for each in op.signature.parameters]
    return arguments(op, named(op, {name: value for name, value in given.items() if name in names}))


def is_sharded_by_rows(op):
    return isinstance(op.path, RowQuant) and op.name not in WITHOUT


@by_op
def test_rules(op, mesh):
    """Check each rule of the op. If no rule fits a call, its tensors must be replicated."""
    cases = cases_of(op)
    ways = {rule.over for _, rule in cases} - {""}
    assert ways == (EXPECTED.get(op.name) or ({"rows"} if is_sharded_by_rows(op) else ways))
    assert bool(ways) == (reason_unsharded(op.name) is None)
    for given, rule in cases:
        assert_rule_holds(op, given, rule, mesh)


EXPECTED = {
    "fp4_dequantize": {"rows", "columns"},
    "fp4_quantize": {"rows", "columns"},
    "fp4_quantize_four_over_six": {"rows", "columns"},
    "fp4quant_mm_fp4": {"rows", "columns", "k"},
    "fp8_quantize": {"rows", "columns"},
    "fp8_quantize_block128x128": {"rows", "columns"},
    "grouped_mm_fp8": {"columns", "experts", "k"},
    "grouped_mm_fp8_fp4": {"columns", "experts", "k"},
    "mm_fp4": {"rows", "columns", "k"},
    "mm_fp4_weight_only": {"rows", "columns", "k"},
    "mm_fp8": {"rows", "columns", "k"},
    "mm_fp8_block": {"rows", "columns", "k"},
    "mm_fp8_fp4": {"rows", "columns", "k"},
    "moe_fc1_fp4": {"rows", "experts"},
    "moe_fc1_fp4_weight_only": {"rows", "experts"},
    "moe_fc2_fp4": {"rows", "columns", "experts"},
    "moe_fc2_fp4_weight_only": {"rows", "columns", "experts"},
    "moe_finalize": {"rows", "columns", "k"},
    "moe_permute_fp8quant": {"columns"},
    "moe_route_dense": {"rows"},
    "moe_swiglu_fp8quant": {"experts"},
    "silu_mul_fp4quant_mm_fp4": {"rows", "columns"},
    "silu_mul_mm_fp4_weight_only": {"rows", "columns"},
}
"""Dimensions over which each op can be sharded. Ops that are not listed can be sharded only over rows."""


@pytest.mark.parametrize("name", ["fp4quant_mm_fp4", "silu_mul_fp4quant_mm_fp4"])
def test_a_global_scale_is_the_same_on_all_ranks(name, mesh):
    """Check that every rule replicates the global scale, even if each rank quantises different blocks of K, and that no
    rule separates the halves gate and up."""
    op = OPS[name]
    samples = importlib.import_module(f"samples.{name}").SAMPLES
    scale = torch.tensor([3.0])
    sample = samples.sample("", 4, 32, 128, NVFP4, "linear", CPU, global_scale=scale, out_dtype=torch.float32)
    given = arguments(op, sample)
    rules = [rule for rule in fitting(op, given) if rule.over]
    assert {rule.over for rule in rules} == EXPECTED[name]
    for rule in rules:
        assert "global_scale" not in rule.inputs
        assert_rule_holds(op, given, rule, mesh)


def test_reasons():
    for op, reason in WITHOUT.items():
        assert reason_unsharded(op) == reason
    for op in OPS.values():
        assert "functional op" in reason_unsharded(f"{op.name}.out")
    with pytest.raises(ValueError, match="'relu' is not an op"):
        reason_unsharded("relu")


# Refusals and redistribution


def test_a_named_layout_is_sharded(mesh):
    codes, scale = random_matrix(ROWS, 128, NVFP4, "128x4", CPU)
    want = torch.ops.cute.fp4_dequantize(codes, scale)
    with ranks():
        y, s = (distributed(each, Shard(0), mesh) for each in (codes, scale))
        got = torch.ops.cute.fp4_dequantize(y, s, scale_layout="128x4")
        assert got.placements == (Shard(0),)
    assert torch.equal(joined(got), want)


def test_tiles_are_sharded_whole(mesh):
    """Check the multiples of rows and of K in which tiled scales can be sharded. The error for other sizes names the
    multiple."""
    x = torch.randn(192, 128)
    codes, scale = random_matrix(ROWS, 128, NVFP4, "128x4", CPU)
    with ranks():
        rows = distributed(x, Shard(0), mesh)
        text = r"cute::fp4_quantize: 128x4 scales: the number of rows is 192; expected a multiple of 256, 128 for each"
        with pytest.raises(RuntimeError, match=text):
            torch.ops.cute.fp4_quantize(rows)
        y, scales = torch.ops.cute.fp4_quantize(rows, scale_layout="8x4")
        assert [each.placements for each in (y, scales)] == [(Shard(0),)] * 2
        y, scales = torch.ops.cute.fp4_quantize(distributed(x, Shard(1), mesh))
        assert [each.placements for each in (y, scales)] == [(Shard(1),)] * 2 and scales.shape == (2, 2, 32, 4, 4)
        text = (
            "cute::fp4_quantize: the last dimension of input is 96; expected a multiple of 128, 64 for each of 2 shards"
        )
        with pytest.raises(RuntimeError, match=text):
            torch.ops.cute.fp4_quantize(distributed(x[:, :96], Shard(1), mesh))
        with pytest.raises(RuntimeError, match="128x4 scales are over the flattened rows; shard dimension 0"):
            torch.ops.cute.fp4_quantize(distributed(x.view(2, 96, 128), Shard(1), mesh))
        codes, scale = random_matrix(ROWS, 192, NVFP4, "128x4", CPU)
        a, b = (distributed(each, Shard(dim), mesh) for each, dim in ((codes, 1), (codes.t(), 0)))
        a_scale = b_scale = distributed(scale, Replicate(), mesh)
        with pytest.raises(RuntimeError, match="cute::mm_fp4: K is 192; expected a multiple of 128, 64 for each"):
            torch.ops.cute.mm_fp4(a, b, a_scale, b_scale)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_prefetched_tensors_are_not_redistributed(dtype, placement, mesh):
    """Check that each rank prefetches its own shard, including in FP8: no result depends on it, so nothing is sent."""
    sample = mm_fp4_weight_only.SAMPLES.sample("", 4, 32, 128, NVFP4, "linear", CPU, out_dtype=torch.float32)
    given = arguments(OPS["mm_fp4_weight_only"], sample)
    rows = torch.zeros(32, 64, dtype=torch.uint8).view(dtype)
    with ranks():
        tensors = {
            name: distributed(value, Replicate(), mesh) for name, value in given.items() if torch.is_tensor(value)
        }
        others = {name: value for name, value in given.items() if not torch.is_tensor(value)}
        want = joined(torch.ops.cute.mm_fp4_weight_only(**tensors, **others))
        others["prefetch"] = distributed(rows, placement, mesh)
        with CommDebugMode() as moved:
            got = torch.ops.cute.mm_fp4_weight_only(**tensors, **others)
        assert not moved.get_total_counts() and torch.equal(joined(got), want)


def test_a_residual_is_never_redistributed(mesh):
    x, weight = torch.randn(8, 64), torch.ones(64)
    with ranks():
        whole, rows, columns = (distributed(x, each, mesh) for each in (Replicate(), Shard(0), Shard(1)))
        weights = distributed(weight, Replicate(), mesh)
        for given, residual in ((rows, whole), (whole, columns), (rows, columns)):
            before = joined(residual).clone()
            with pytest.raises(RuntimeError, match="cute::add_rmsnorm_fp8quant: residual is updated in place and is "):
                torch.ops.cute.add_rmsnorm_fp8quant(given, residual, weights)
            assert torch.equal(joined(residual), before)
        # Here the input can be redistributed to the residual's placement.
        residual = distributed(x, Shard(0), mesh)
        version = residual._version
        y, _ = torch.ops.cute.add_rmsnorm_fp8quant(whole, residual, weights)
        assert residual._version > version
        assert y.placements == residual.placements == (Shard(0),)
    assert torch.equal(joined(residual), x + x)


def test_a_bias_is_not_added_twice(mesh):
    a, b = torch.randn(4, 64).bfloat16(), torch.randint(0, 256, (24, 32), dtype=torch.uint8)
    scale = torch.ones(24, 4).to(torch.float8_e4m3fn)
    with ranks():
        tensors = (
            distributed(a, Shard(1), mesh),
            distributed(b.t(), Shard(0), mesh),
            distributed(scale, Shard(1), mesh),
        )
        bias = distributed(torch.ones(24), Replicate(), mesh)
        with pytest.raises(RuntimeError, match="bias would be added by every rank; add it to the sum"):
            torch.ops.cute.mm_fp4_weight_only(*tensors, None, bias, scale_layout="linear")


def test_fp8_travels_as_bytes_and_only_when_asked(mesh):
    """Check that an implicit collective of FP8 raises an error that names ``redistribute``, which preserves the
    values."""
    codes, scale = torch.randn(256, 128).to(torch.float8_e4m3fn), torch.rand(256, 1)
    with ranks():
        a, a_scale = distributed(codes, Shard(1), mesh), distributed(scale, Replicate(), mesh)
        b, b_scale = distributed(codes.t(), Shard(1), mesh), distributed(torch.ones(2, 1), Shard(0), mesh)
        text = (
            r"a is torch.float8_e4m3fn and \(Shard\(dim=1\)\); expected \(Replicate\(\)\), .*distributed.redistribute"
        )
        with pytest.raises(RuntimeError, match=text):
            torch.ops.cute.mm_fp8_block(a, b, a_scale, b_scale)
        whole = redistribute(a, [Replicate()])
        assert whole.dtype == torch.float8_e4m3fn and whole.placements == (Replicate(),)
        assert torch.ops.cute.mm_fp8_block(whole, b, a_scale, b_scale).placements == (Shard(1),)
        rows = redistribute(a, [Shard(0)])
        gathered = full_tensor(rows)
        with pytest.raises(ValueError, match="expected no Partial, because FP8 cannot be summed"):
            redistribute(a, [Partial()])
        assert redistribute(distributed(scale, Shard(0), mesh), [Replicate()]).placements == (Replicate(),)
    assert_same([joined(whole), joined(rows)], [codes, codes])
    assert_same([*gathered._local_tensors.values()], [codes, codes])


def test_weights_stay_transposed_views(mesh):
    """Check that a replicated weight is sharded without communication, and that other changes of its placement need
    ``redistribute``."""
    sample = mm_fp4_weight_only.SAMPLES.sample("", 64, 32, 128, NVFP4, "linear", CPU, scales=POWERS["e4m3"])
    a, weight, scale = sample.args
    decoded = fp4_dequantize(weight.mT.contiguous(), scale, scale_layout="linear", out_dtype=torch.float32)
    want = a.double() @ decoded.double().mT
    call = functools.partial(torch.ops.cute.mm_fp4_weight_only, scale_layout="linear", out_dtype=torch.float32)
    with ranks():
        whole, halves, rows, scales = (
            distributed(each, placement, mesh)
            for each, placement in (
                (weight, Replicate()),
                (weight, Shard(0)),
                (a, Replicate()),
                (scale, Replicate()),
            )
        )
        in_parts = call(distributed(a, Shard(1), mesh), whole, distributed(scale, Shard(1), mesh))
        assert in_parts.placements == (Partial(),)
        with pytest.raises(RuntimeError, match=r"b is torch.uint8 and .*distributed.redistribute, which keeps strides"):
            call(distributed(a, Shard(0), mesh), halves, scales)
        gathered = redistribute(halves, [Replicate()])
        columns = redistribute(halves, [Shard(1)])
        assert gathered.stride() == columns.stride() == weight.stride()
        by_columns = call(rows, columns, distributed(scale, Shard(0), mesh))
        assert by_columns.placements == (Shard(1),)
        together = call(rows, gathered, scales)
    assert all(each.stride() == weight.stride() for each in gathered._local_tensor._local_tensors.values())
    assert_same([joined(gathered), joined(columns)], [weight, weight])
    for got in (in_parts, by_columns, together):
        torch.testing.assert_close(joined(got).double(), want, rtol=1e-5, atol=1e-4)


def test_ops_without_rules_say_why(mesh):
    logits = torch.randn(4, 8)
    with ranks():
        rows = distributed(logits, Shard(0), mesh)
        for op, more in (("moe_route", (2,)), ("moe_route_ids", (8,))):
            given = rows if op == "moe_route" else distributed(logits.int(), Shard(0), mesh)
            with pytest.raises(RuntimeError, match=f"cute::{op}: .* is .*Shard.*; expected Replicate.*count the pairs"):
                getattr(torch.ops.cute, op)(given, *more)
        whole = distributed(logits, Replicate(), mesh)
        assert all(each.placements == (Replicate(),) for each in torch.ops.cute.moe_route(whole, 2))
        y, scale = torch.ops.cute.fp8_quantize(rows)
        with pytest.raises(RuntimeError, match="call the functional op"):
            torch.ops.cute.fp8_quantize.out(rows, y=y, scale_out=scale)


@pytest.mark.parametrize("lead", [(6,), (4, 3)])
def test_column_scales_keep_their_strides_through_a_gather(lead, mesh):
    """Check the values and strides of FP8 block scales after a gather, and the product of a GEMM that gathers them
    implicitly."""
    x, weight = torch.randn(*lead, 384), torch.randn(256, 384).to(torch.float8_e4m3fn)
    codes, want = torch_cute_ops.fp8_quantize(x, granularity="block128")
    b_scale = torch.rand(2, 3) + 0.5
    with ranks():
        y, scale = torch.ops.cute.fp8_quantize(distributed(x, Shard(0), mesh), None, "block128")
        assert scale.placements == (Shard(0),) and tuple(scale.shape) == (*lead, 3)
        gathered = full_tensor(scale)
        assert gathered.stride() == want.stride() == torch.empty(3, *lead).movedim(0, -1).stride()
        elements = full_tensor(y)
        if len(lead) == 1:
            given = (distributed(weight.t(), Shard(1), mesh), scale, distributed(b_scale, Shard(0), mesh))
            product = torch.ops.cute.mm_fp8_block(redistribute(y, [Replicate()]), *given, out_dtype=torch.float32)
    for rank in range(WORLD):
        assert torch.equal(gathered._local_tensors[rank], want)
        assert torch.equal(elements._local_tensors[rank].view(torch.uint8), codes.view(torch.uint8))
    if len(lead) == 1:
        left = codes.double() * want.double().repeat_interleave(128, 1)
        factors = b_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        exact = left.view(-1, 384) @ (weight.double() * factors).t()
        torch.testing.assert_close(joined(product).double(), exact, rtol=1e-5, atol=1e-3)


def test_interleaved_codes_are_sharded_by_groups_of_k(mesh):
    """Check that rows can be sharded along K if each shard has a multiple of 256 elements, and along the rows
    always."""
    op, scale = OPS["fp8_quantize"], torch.tensor([0.01])
    static = {"scale": scale, "granularity": "tensor", "interleaved": True}
    for k, ways in ((1024, {"rows", "columns"}), (768, {"rows"})):
        given = arguments(op, Sample("", (torch.randn(2, 3 * 2, k),), static))
        rules = [rule for rule in fitting(op, given) if rule.over]
        assert {rule.over for rule in rules} == ways
        for rule in rules:
            assert_rule_holds(op, given, rule, mesh)
    with ranks():
        columns = distributed(torch.randn(4, 768), Shard(1), mesh)
        with pytest.raises(
            RuntimeError, match="the last dimension of input is 768; expected a multiple of 512, 256 for"
        ):
            torch.ops.cute.fp8_quantize(columns, distributed(scale, Replicate(), mesh), "tensor", None, True)


def test_decisions_depend_on_non_tensor_arguments(mesh):
    """Check that a different non-tensor argument leads to a new sharding decision, although torch caches decisions."""
    x = torch.randn(4, 256)
    with ranks():
        rows = distributed(x, Shard(0), mesh)
        placements = [
            torch.ops.cute.fp8_quantize(rows, None, granularity, layout)[1].placements
            for granularity, layout in (("token", "row"), ("block128", "row"), ("block128", "column"), ("token", None))
        ]
        assert placements == [(Shard(0),)] * 4
        a, b = distributed(torch.randn(4, 64).bfloat16(), Shard(0), mesh), torch.zeros(24, 32, dtype=torch.uint8)
        given = (
            a,
            distributed(b.t(), Replicate(), mesh),
            distributed(torch.ones(24, 4).to(torch.float8_e4m3fn), Replicate(), mesh),
        )
        dtypes = [
            torch.ops.cute.mm_fp4_weight_only(*given, out_dtype=dtype, scale_layout="linear").dtype
            for dtype in (None, torch.float32, torch.float16)
        ]
        assert dtypes == [torch.bfloat16, torch.float32, torch.float16]


def test_two_dimensions(square):
    """Shard rows over one mesh dimension and K over the other. If both mesh dimensions shard the rows, the number of
    rows must be a multiple of 128 for each of the four shards."""
    a = torch.randint(-3, 4, (6, 128)).bfloat16()
    codes, scale = random_matrix(24, 128, NVFP4, "linear", CPU, POWERS["e4m3"])
    (op,) = (op for op in OPS.values() if op.name == "mm_fp4_weight_only")
    given = arguments(op, named(op, {"a": a, "b": codes.t(), "b_scale": scale, "scale_layout": "linear"}))
    whole = torch.randn(256, 128)
    with ranks(4):
        rows, columns = (list(each.tensor_split(2, dim)) for each, dim in ((codes, 1), (scale.view(torch.uint8), 1)))
        tensors = [
            local(
                [part for half in a.tensor_split(2, 0) for part in half.tensor_split(2, 1)],
                square,
                Shard(0),
                Shard(1),
                of=a,
            ),
            local([part.t() for part in rows] * 2, square, Replicate(), Shard(0), of=codes.t()),
            local([part.view(scale.dtype) for part in columns] * 2, square, Replicate(), Shard(1), of=scale),
        ]
        out = torch.ops.cute.mm_fp4_weight_only(*tensors, out_dtype=torch.float32, scale_layout="linear")
        assert out.placements == (Shard(0), Partial())
        parts = [*out._local_tensor._local_tensors.values()]
        input = local([*whole.tensor_split(4)], square, Shard(0), Shard(0), of=whole)
        with pytest.raises(RuntimeError, match="rows is 256; expected a multiple of 512, 128 for each of 4 shards"):
            torch.ops.cute.fp4_quantize(input)
        input = local(
            [part for part in whole.tensor_split(2) for _ in range(2)], square, Shard(0), Replicate(), of=whole
        )
        assert torch.ops.cute.fp4_quantize(input)[1].placements == (Shard(0), Replicate())
    total = torch.cat((parts[0] + parts[1], parts[2] + parts[3]))
    given["out_dtype"] = torch.float32
    expected_of(op).assert_results((total,), expected_of(op).results(given), given)


def local(parts: list[torch.Tensor], mesh: Any, *placements: Placement, of: torch.Tensor) -> DTensor:
    """Return a DTensor made of these shards of the ranks."""
    one = local_tensor.LocalTensor({rank: part.clone() for rank, part in enumerate(parts)})
    return DTensor.from_local(one, mesh, placements, run_check=False, shape=of.shape, stride=of.stride())


def test_by_torchs_own_check(mesh):
    """Run torch's own check: it runs the op on shards and compares the assembled result with the op on the whole."""
    pytest.importorskip("expecttest", reason="torch's check of sharding rules needs expecttest")
    from torch.distributed.tensor._ops.strategy_validation import validate_aten_combination

    for op in OPS.values():
        for given, rule in cases_of(op):
            if Partial() in rule.inputs.values():
                continue  # torch's tolerance is 1e-5, but these partial sums are rounded to 16 bits
            tensors = tensors_of(op, given)
            # torch makes shards contiguous, but a weight must be a transposed view, so pass the underlying tensor.
            place = next((i for i, name in enumerate(given) if name in ("b", "w")), None)

            def outputs_of(*args: Any, op: OpSpec = op, place: int | None = place) -> tuple[torch.Tensor, ...]:
                call = transposed(args, place)
                outputs = as_tuple(overload(op)(*call))
                return tuple(map(comparable, outputs if op.defined is None else op.defined(outputs, *call)))

            truth, arguments = (transposed(tuple(private_of(op, given).values()), place) for _ in range(2))
            inputs = {name: rule.inputs.get(name, Replicate()) for name in tensors}
            name = None if place is None else [*given][place]
            if name is not None and isinstance(inputs[name], Shard):
                last = given[name].dim() - 1
                inputs[name] = Shard({last: last - 1, last - 1: last}.get(inputs[name].dim, inputs[name].dim))
            outputs = tuple(rule.outputs.get(name, Replicate()) for name in op.outputs)
            combination = tuple(inputs.values()), outputs
            with ranks():
                fits, why = validate_aten_combination(
                    outputs_of, arguments, {}, [*outputs_of(*truth)], combination, WORLD, mesh
                )
            assert fits, f"{op.name} over {rule.over}: {why}"


def transposed(args: tuple[Any, ...], place: int | None) -> tuple[Any, ...]:
    """Return the call's arguments with the tensor at ``place`` transposed."""
    return args if place is None else (*args[:place], args[place].mT, *args[place + 1 :])


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """View FP8 as bytes, and replace NaN by numbers, so that tensors can be compared."""
    tensor = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return tensor.nan_to_num(7.0, 8.0, 9.0) if tensor.is_floating_point() else tensor
