"""Linear layers divided among real processes: results, traffic, and reads from a checkpoint."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expected import raw
from support.layers import assert_product, assert_same_layer
from support.ranks import run_ranks
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from torch_cute_ops import checkpoint, fp8_quantize, rmsnorm_fp4quant, silu_mul
from torch_cute_ops.distributed import (
    ColumnParallel,
    RowParallel,
    all_gather,
    count_traffic,
    decoder_plan,
    gather_rows,
    load_,
    normed_rows,
)
from torch_cute_ops.distributed.compare import agree_on_rows
from torch_cute_ops.distributed.parallel import WeightShard, _by_shared_scale, shard_range
from torch_cute_ops.nn import (
    FP8BlockLinear,
    FP8ChannelLinear,
    FP8TensorLinear,
    MXFP4Linear,
    MXFP8Linear,
    NVFP4Linear,
    QuantizedRows,
    QuantLinear,
    merge,
    quantize_,
    warmup,
)

pytest.importorskip("safetensors")
from support.checkpoints import note_reads

WORLD = 2
K = 256
PARTS = (256, 256, 128)
"""Rows of the merged layers q, k and v. A head is 128 rows; v is a single head."""
KINDS = [
    (NVFP4Linear, "16bit", False),
    (NVFP4Linear, "fp4", True),
    (MXFP4Linear, "fp4", False),
    (MXFP4Linear, "fp8", False),
    (FP8BlockLinear, "fp8", False),
    (MXFP8Linear, "fp8", False),
    (FP8TensorLinear, "fp8", False),
    (FP8TensorLinear, "fp8", True),
    (FP8ChannelLinear, "fp8", False),
    (NVFP4Linear, "fp4_token", False),
]
"""Layer classes, each with its activations, and whether the activations have a calibrated scale."""


def made(cls: type[QuantLinear], activations: str, is_static: bool, n: int, *, bias: bool = True) -> QuantLinear:
    given = {"input_amax": 4.0} if is_static else {}
    return cls.from_float(nn.Linear(K, n, bias=bias).bfloat16(), activations=activations, **given)


def copied(layer: QuantLinear) -> QuantLinear:
    return layer._build(layer.in_features, layer.tensors(), layer.bias, layer.parts, layer.activations)


def own(tensor: torch.Tensor, rank: int, dim: int = 0) -> torch.Tensor:
    return tensor.tensor_split(WORLD, dim)[rank]


@torch.no_grad()
def columns_and_rows(rank: int) -> None:
    """Check every class of layers, sharded by columns and by rows, with all tokens on every rank or with divided
    tokens."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for cls, activations, is_static in KINDS:
        torch.manual_seed(0)
        x = torch.randn(4, 2, K).bfloat16()
        layer = merge([made(cls, activations, is_static, n) for n in PARTS])
        want = layer(x).split(PARTS, -1)
        # Each rank stores one head of q and one head of k; both ranks store the only head of v.
        mine = torch.cat([own(want[0], rank, -1), own(want[1], rank, -1), want[2]], -1)
        for sequence, gather in ((False, False), (True, False), (True, True)):
            style = ColumnParallel(unit=128, sequence=sequence, gather_output=gather)
            divided = parallelize_module(copied(layer), mesh, style)
            assert isinstance(divided, cls) and divided.parts == (128, 128, 128)
            y = divided(own(x, rank) if sequence else x)
            assert torch.equal(y, torch.cat(want, -1) if gather else mine), (cls, sequence, gather)
            # Gathered columns are in the order of the undivided layer, although both ranks computed v's head.
            assert divided.whole_parts == PARTS and type(divided).__name__ == f"ColumnParallel{cls.__name__}"
            assert [type(part) for part in divided.split()] == [cls] * 3
            assert f"ColumnParallel(unit=128, sequence={sequence}" in repr(divided)
        down = made(cls, activations, is_static, 136)
        for sequence in (False, True):
            divided = parallelize_module(copied(down), mesh, RowParallel(sequence=sequence, sums=torch.float32))
            assert divided.in_features == K // WORLD
            y = divided(own(x, rank, -1))
            if sequence:
                y = all_gather(y, mesh.get_group())
            assert y.dtype == x.dtype
            assert_product(y, down, x)
        # With sums in bfloat16, each rank's partial sum is rounded, and so is the total.
        y = parallelize_module(copied(down), mesh, RowParallel(sums=torch.bfloat16))(own(x, rank, -1))
        assert ((y - down(x)).abs() <= 2.0**-6 * down(x).abs().max()).all()
    down, halves = made(NVFP4Linear, "16bit", False, 136), torch.randn(2, 4, 2, K).bfloat16()
    both = torch.cat([own(half, rank, -1) for half in halves], -1).flatten(0, 1)
    divided = parallelize_module(copied(down), mesh, RowParallel(sums=torch.float32))
    y = divided(QuantizedRows((both,), (4, 2), x.dtype, "silu"))
    assert_product(y, down, silu_mul(torch.cat([*halves], -1)))
    linear = nn.Linear(K, 64).bfloat16()
    dist.broadcast(linear.weight, 0)
    dist.broadcast(linear.bias, 0)
    want, x = linear(x), x[:, 0]
    dist.broadcast(x, 0)
    want = linear(x)
    columns, rows = nn.Linear(K, 64).bfloat16(), nn.Linear(K, 64).bfloat16()
    for each in (columns, rows):
        each.load_state_dict(linear.state_dict())
    parallelize_module(columns, mesh, ColumnParallel(gather_output=True, sequence=True))
    torch.testing.assert_close(columns(own(x, rank)), want)
    parallelize_module(rows, mesh, RowParallel())
    torch.testing.assert_close(rows(own(x, rank, -1)), want, atol=0.02, rtol=0.02)


@torch.no_grad()
def what_travels(rank: int) -> None:
    """Check that only codes and scales of the normalised rows are sent, and count their bytes. They must equal the
    codes and scales that one rank computes for all rows."""
    mesh = init_device_mesh("cpu", (WORLD,))
    group = mesh.get_group()
    torch.manual_seed(1)
    weight = torch.rand(K).bfloat16()
    for rows in (256, 10):  # whole and partial scale tiles on each rank
        x, residual = torch.randn(2, rows, K).bfloat16()
        for cls, activations, is_static in KINDS[1:3] if rows == 256 else KINDS[1:]:
            layer = made(cls, activations, is_static, 64)
            for residuals in (None, residual):
                state = None if residuals is None else residuals.clone()
                want = normed_rows(layer, x, weight, state)
                mine = None if residuals is None else own(residuals, rank).clone()
                local = normed_rows(layer, own(x, rank), weight, mine)
                with count_traffic() as traffic:
                    got = gather_rows(layer, local, group)
                assert got.lead == want.lead == (rows,)
                for actual, expected in zip(got.operands, want.operands, strict=True):
                    # FP8 block scales are column-major.
                    assert actual.shape == expected.shape and actual.stride() == expected.stride()
                    assert torch.equal(raw(actual), raw(expected)), cls
                assert state is None or torch.equal(own(state, rank), mine)
            assert all(sent.dtype in (torch.uint8, torch.float32) for sent in traffic.sent)
            elements = rows // WORLD * K
            scales = {
                "nvfp4": 1 / 16 + (4 / K if activations == "fp4_token" else 0),
                "mxfp4": 1 / 32,
                "fp8_block": 4 / 128,
                "mxfp8": 1 / 32,
            }.get(cls.scheme, 0 if is_static else 4 / K)
            size = 0.5 if activations in ("fp4", "fp4_token") else 1.0
            assert traffic.nbytes() == elements * (size + scales), cls
            assert 2 * elements / traffic.nbytes() > (1.9 if activations == "fp8" else 3.4)
    # The layer gathers the rows itself, whether it gets a tensor or the result of ``normed_rows``.
    layer = made(*KINDS[1], 64)
    y, _ = rmsnorm_fp4quant(x, weight, layer.input_global_scale)
    rows = normed_rows(layer, own(x, rank), weight)
    assert torch.equal(rows.operands[0], own(y, rank))
    y, _ = rmsnorm_fp4quant(x, weight, layer.input_global_scale, weight_plus_one=True)
    assert torch.equal(normed_rows(layer, x, weight, weight_plus_one=True).operands[0], y)
    want = layer(normed_rows(layer, x, weight))
    divided = parallelize_module(copied(layer), mesh, ColumnParallel(sequence=True))
    with count_traffic() as traffic:
        assert torch.equal(divided(rows), own(want, rank, -1))
    assert [each.name for each in traffic.sent] == ["all_gather"] * 2
    assert traffic.nbytes("all_gather") == 5 * K * 9 // 16 and traffic.nbytes("all_reduce") == 0
    with pytest.raises(ValueError, match="activations='16bit'; expected 'fp4' or 'fp8'"):
        normed_rows(made(NVFP4Linear, "16bit", False, 64), x, weight)


class Attention(nn.Module):
    def __init__(self, is_merged: bool) -> None:
        super().__init__()
        for name, n in zip(("q_proj", "k_proj", "v_proj"), PARTS, strict=True):
            if not is_merged:
                self.add_module(name, nn.Linear(K, n))
        if is_merged:
            self.qkv_proj = nn.Linear(K, sum(PARTS))
        self.o_proj = nn.Linear(256, K, bias=False)


class Decoder(nn.Module):
    def __init__(self, is_merged: bool) -> None:
        super().__init__()
        self.self_attn = Attention(is_merged)


class Model(nn.Module):
    def __init__(self, is_merged: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, K)
        self.model = nn.ModuleDict({"layers": nn.ModuleList([Decoder(is_merged)])})
        self.lm_head = nn.Linear(K, 32, bias=False)


SCHEMES = {"nvfp4": "modelopt", "mxfp4": "compressed-tensors", "fp8_block": "compressed-tensors"}
SCHEMES |= {"fp8_tensor": "compressed-tensors", "fp8_channel": "compressed-tensors"}


@torch.no_grad()
def from_a_checkpoint(rank: int, folder: Path) -> None:
    """Check that a model loaded into shards equals a whole model that is divided after loading, and that no rank reads
    a divided tensor whole."""
    mesh = init_device_mesh("cpu", (WORLD,))
    plans = [decoder_plan(128, merged=is_merged) for is_merged in (False, True)]
    read: list[object] = []
    note_reads(read)
    for scheme, style in SCHEMES.items():
        torch.manual_seed(2)
        whole = quantize_(Model().bfloat16(), scheme)
        if rank == 0:
            checkpoint.save(whole, folder / scheme, style)
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model has no MLP
            parallelize_module(whole, mesh, plans[0])
        attention = whole.model.layers[0].self_attn
        for is_merged in (False, True):
            with torch.device("meta"):
                model = Model(is_merged).bfloat16()
            read.clear()
            load_(model, folder / scheme, mesh, plans[is_merged])
            loaded = model.model.layers[0].self_attn
            names = ("q_proj", "k_proj", "v_proj")
            got = loaded.qkv_proj.split() if is_merged else [getattr(loaded, name) for name in names]
            for actual, name in zip([*got, loaded.o_proj], (*names, "o_proj"), strict=True):
                assert_same_layer(actual, getattr(attention, name))
            assert torch.equal(model.lm_head.weight, whole.lm_head.weight)
            assert torch.equal(model.embed.weight, whole.embed.weight)
            # Bytes of 128 rows of q and of k, all rows of v, and half of o's columns, in FP4 and FP8.
            half = 64 if "fp4" in scheme else 128
            weight = "weight_packed" if scheme == "mxfp4" else "weight"
            prefix = "model.layers.0.self_attn"
            assert (f"{prefix}.q_proj.{weight}", 0, rank * 128, rank * 128 + 128) in read
            assert (f"{prefix}.v_proj.{weight}", 0, 0, 128) in read
            assert (f"{prefix}.o_proj.{weight}", 1, rank * half, rank * half + half) in read
            assert f"{prefix}.q_proj.{weight}" not in read


@torch.no_grad()
def rows_under_one_scale(rank: int) -> None:
    """Check that FP8 rows whose columns are divided among ranks get the codes and scales of the undivided rows,
    including NaN and infinity."""
    x = torch.randn(6, 64) * torch.tensor([1.0, 0.0, 1e-30, 1e30, 1.0, 1.0]).unsqueeze(1)
    x[4, 3], x[5, 40] = torch.nan, torch.inf
    dist.broadcast(x, 0)
    elements, scale = _by_shared_scale(own(x, rank, 1), dist.group.WORLD).operands
    want, scales = fp8_quantize(x)
    assert torch.equal(elements.view(torch.uint8), own(want.view(torch.uint8), rank, 1))
    assert torch.equal(scale.nan_to_num(7.0), scales.nan_to_num(7.0))


@torch.no_grad()
def unequal_rows(rank: int) -> None:
    """Check that ranks with unequal numbers of rows raise an error before the collective, and that each error names
    each rank's rows. Equal numbers work afterwards."""
    mesh = init_device_mesh("cpu", (WORLD,))
    layer = parallelize_module(nn.Linear(8, 8), mesh, ColumnParallel(sequence=True))
    for rows in (3, 3, 5):
        assert layer(torch.ones(rows, 8)).shape == (WORLD * rows, 4)
    with pytest.raises(RuntimeError, match="ColumnParallelLinear: rank 0 has 4 rows, rank 1 has 6 rows; expected eq"):
        layer(torch.ones(4 + 2 * rank, 8))
    time.sleep(0.3 * rank)  # rank 1 is late: rank 0 must not read the number that rank 1 sent in an earlier call
    assert layer(torch.ones(7, 8)).shape == (WORLD * 7, 4)
    layer = parallelize_module(nn.Linear(8, 8), mesh, RowParallel(sequence=True))
    with pytest.raises(ValueError, match="7 rows; expected a multiple of the 2 ranks"):
        layer(torch.ones(7, 4))


@torch.no_grad()
def warmed_up(rank: int) -> None:
    """Check that ``warmup`` calls the same collectives on all ranks, and that an error names ranks that warm up other
    numbers of rows."""
    mesh = init_device_mesh("cpu", (WORLD,))
    layer = parallelize_module(made(NVFP4Linear, "16bit", False, 64), mesh, ColumnParallel(sequence=True))
    with count_traffic() as traffic:
        warmup(layer, rows=(3, 64), tune=True, fused=False)
    assert [each.nbytes for each in traffic.sent] == [2 * K * 2, 32 * K * 2]
    with pytest.raises(
        RuntimeError, match="ColumnParallelNVFP4Linear: rank 0 has 4 rows, rank 1 has 16 rows; expected"
    ):
        warmup(layer, rows=(8 + 24 * rank,))


def one_rank_keeps_its_rows(rank: int) -> None:
    """Check a rank whose number of rows changes while the other rank's number stays the same. After the group's
    time-out, its error must name the other rank."""
    group = dist.group.WORLD
    agree_on_rows("layer", (4,), group)
    if rank:
        with pytest.raises(
            RuntimeError, match="rank 1 has 5 rows, had 4 rows before, and waits for rank 0, which did not come within"
        ):
            agree_on_rows("layer", (5,), group)
    else:
        time.sleep(2.5)  # longer than the other rank waits


def test_rows_that_change_on_one_rank():
    run_ranks(WORLD, one_rank_keeps_its_rows, timeout_s=2.0)


def everything(rank: int, folder: Path) -> None:
    unequal_rows(rank)
    warmed_up(rank)
    rows_under_one_scale(rank)
    columns_and_rows(rank)
    what_travels(rank)
    from_a_checkpoint(rank, folder)


def test_divided_layers(tmp_path):
    run_ranks(WORLD, everything, tmp_path)


# Bounds of shards


def test_bounds():
    """Check the bounds of shards in whole heads, including with fewer heads than ranks, and sizes that cannot be
    divided."""
    assert [WeightShard(0, rank, 4).bounds(256) for rank in range(4)] == [(0, 64), (64, 128), (128, 192), (192, 256)]
    assert [WeightShard(0, rank, 4, 64).bounds(128) for rank in range(4)] == [(0, 64), (0, 64), (64, 128), (64, 128)]
    assert WeightShard(0, 1, 2, 64).bounds(384) == (192, 384)
    for size, unit in ((100, 64), (192, 64), (6, 1), (0, 1)):
        with pytest.raises(ValueError, match=rf"q has {size} rows.*, which 4 ranks cannot divide equally"):
            WeightShard(0, 0, 4, unit).bounds(size, "q")


@pytest.mark.parametrize(
    ("suffix", "shape", "rows", "columns"),
    [
        ("weight", (512, 256), (0, 256, 512), (1, 128, 256)),
        ("weight_packed", (512, 128), (0, 256, 512), (1, 64, 128)),
        ("weight_scale", (512, 16), (0, 256, 512), (1, 8, 16)),
        ("weight_scale", (512, 8), (0, 256, 512), (1, 4, 8)),
        ("weight_scale_inv", (4, 2), (0, 2, 4), (1, 1, 2)),
        ("weight_scale", (4, 1, 2, 1), (0, 2, 4), (2, 1, 2)),
        ("weight_scale", (512, 1), (0, 256, 512), None),
        ("weight_scale", (512,), (0, 256, 512), None),
        ("weight_scale", (), None, None),
        ("weight_scale_2", (), None, None),
        ("weight_global_scale", (1,), None, None),
        ("input_scale", (1,), None, None),
        ("input_global_scale", (1,), None, None),
        ("bias", (512,), (0, 256, 512), None),
        ("k_scale", (), None, None),
    ],
)
def test_shard_ranges(suffix, shape, rows, columns):
    """Check which range of each tensor the second of two ranks stores, for a layer (512, 256)."""
    assert shard_range(WeightShard(0, 1, 2), suffix, shape, (512, 256), "name") == rows
    assert shard_range(WeightShard(1, 1, 2), suffix, shape, (512, 256), "name") == columns


def test_blocks_are_not_sharded():
    with pytest.raises(ValueError, match="scale: cut at 96 and 192 of 192; expected multiples of 128"):
        shard_range(WeightShard(0, 1, 2), "weight_scale_inv", (2, 2), (192, 256), "scale")
    with pytest.raises(ValueError, match="cut at 0 and 64 of 128; expected multiples of 128"):
        shard_range(WeightShard(1, 0, 2), "weight_scale_inv", (2, 1), (256, 128), "scale")
    with pytest.raises(ValueError, match="cut at 0 and 24 of 96; expected multiples of 16"):
        shard_range(WeightShard(1, 0, 4), "weight_scale", (8, 6), (8, 96), "scale")


# Errors, on a single rank


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@torch.no_grad()
def test_one_graph(mesh):
    """Check that layers that gather or scatter compile to one graph. The fake process group computes no values."""
    columns, rows = made(*KINDS[1], 64), made(*KINDS[1], 64)
    both = nn.Sequential(
        parallelize_module(columns, mesh, ColumnParallel(sequence=True, gather_output=True)),
        nn.Linear(64, K // WORLD).bfloat16(),
        parallelize_module(rows, mesh, RowParallel(sequence=True)),
    )
    counter = CompileCounterWithBackend("eager")
    y = torch.compile(both, fullgraph=True, backend=counter)(torch.randn(3, K).bfloat16())
    assert y.shape == (3, 64) and y.dtype == torch.bfloat16
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("style", [ColumnParallel, RowParallel])
def test_inputs_that_collectives_refuse(mesh, style):
    """Check that a divided layer refuses an input that requires grad, because the gradient would be lost, and a single
    row without a row dimension, whose columns would be scattered."""
    linear = parallelize_module(nn.Linear(8, 8), mesh, style(sequence=True))
    for x in (torch.randn(2, linear.in_features), torch.randn(2, linear.in_features, requires_grad=True)):
        with pytest.raises(ValueError, match="no gradient"):
            linear(x)
        assert linear.requires_grad_(False) is linear
    with pytest.raises(ValueError, match=r"\(\d+,\); expected this rank's rows"):
        linear(torch.randn(linear.in_features))


@torch.no_grad()
def test_warmup_rows_count_all_ranks(mesh, monkeypatch):
    """Check that ``warmup`` takes the number of rows of all ranks together, if each rank has only some of the rows."""
    multiplied = []
    real = NVFP4Linear._product
    monkeypatch.setattr(
        NVFP4Linear, "_product", lambda layer, rows, *rest: multiplied.append(len(rows[0])) or real(layer, rows, *rest)
    )
    for style in (ColumnParallel(), ColumnParallel(sequence=True), RowParallel(), RowParallel(sequence=True)):
        multiplied.clear()
        layer = parallelize_module(made(NVFP4Linear, "16bit", False, 64), mesh, style)
        warmup(layer, rows=(3, 64), fused=False)
        assert multiplied == ([4, 64] if style.sequence else [3, 64])


@torch.no_grad()
def test_warmup_of_gates_returns_partial_sums(mesh, monkeypatch):
    """Check that ``warmup`` makes layers that return partial sums compute their results in the dtype ``sums``."""
    dtypes = []
    real = NVFP4Linear._gated_product
    monkeypatch.setattr(
        NVFP4Linear, "_gated_product", lambda layer, *given: dtypes.append(given[1]) or real(layer, *given)
    )
    up = parallelize_module(made(NVFP4Linear, "16bit", False, 2 * K), mesh, ColumnParallel())
    down = parallelize_module(made(NVFP4Linear, "16bit", False, 64), mesh, RowParallel(sums=torch.float32))
    warmup(nn.ModuleList([up, down]), rows=(1,))
    assert dtypes == [torch.float32] * 2  # the second call is the call that prefetches


def test_errors(mesh, tmp_path):
    layer = made(NVFP4Linear, "16bit", False, 64)
    divided = parallelize_module(layer, mesh, ColumnParallel())
    with pytest.raises(ValueError, match="ColumnParallel: the module is already parallel"):
        parallelize_module(divided, mesh, ColumnParallel())
    with pytest.raises(TypeError, match="RowParallel is for linear layers; got LayerNorm"):
        parallelize_module(nn.LayerNorm(8), mesh, RowParallel())
    with pytest.raises(ValueError, match=r"MXFP4Linear.weight has 24 rows in units of 16, which 2 ranks"):
        parallelize_module(made(MXFP4Linear, "16bit", False, 24), mesh, ColumnParallel(unit=16))
    with pytest.raises(ValueError, match="out_features is 4; expected a positive multiple of 8"):
        parallelize_module(made(MXFP4Linear, "16bit", False, 8), mesh, ColumnParallel())
    square = init_device_mesh("cpu", (2, 1))
    with pytest.raises(ValueError, match=r"the mesh has 2 dimensions; expected 1, such as mesh\['tp'\]"):
        parallelize_module(made(MXFP4Linear, "16bit", False, 64), square, ColumnParallel())


def test_errors_of_loading(mesh, tmp_path):
    torch.manual_seed(3)
    checkpoint.save(quantize_(Model().bfloat16(), "nvfp4"), tmp_path, "modelopt")
    plan = decoder_plan(128, merged=False)

    def refuse(error, match, plan=plan, model=None):
        with torch.device("meta"):
            given = model or Model().bfloat16()
        with pytest.raises(error, match=match):
            load_(given, tmp_path, mesh, plan)

    refuse(ValueError, "the model contains none of the layers in the plan: a.b", {"a.b": ColumnParallel()})
    refuse(TypeError, "embed is a Embedding; expected a torch.nn.Linear", {"embed": ColumnParallel()})
    refuse(TypeError, "the plan has a str for lm_head", {"lm_head": "columns"})
    refuse(
        ValueError, r"q_proj has 256 rows in units of 96, which 2 ranks cannot divide", decoder_plan(96, merged=False)
    )
    with torch.device("meta"):
        other = Model().bfloat16()
        other.model.layers[0].self_attn.o_proj = nn.Linear(512, K, bias=False)
    refuse(
        ValueError,
        r"o_proj.weight in .*: \(N, K\) is \(256, 256\); expected \(256, 512\), as in the model",
        model=other,
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "modelopt"
