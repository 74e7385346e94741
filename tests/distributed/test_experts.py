"""``ExpertParallel`` in real processes: results, captures, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import spec
from support.ranks import run_ranks

from torch_cute_ops import convert_scales, fp4_quantize, moe_route, nvfp4_global_scale
from torch_cute_ops.distributed import ExpertParallel, ExpertWeights, count_traffic

WORLD = 2
EXPERTS, H, WIDTH, TOPK = 4, 256, 256, 2
TOKENS = 5
FORMATS = ("fp8", "nvfp4", "mxfp4")


def weights_of(fmt: str, n: int, k: int) -> ExpertWeights:
    """Return random weights of experts in the format ``fmt``. FP4 weights have a bias, and NVFP4 weights have 128x4
    scales."""
    weight = torch.randn(EXPERTS, n, k) / k**0.5
    if fmt == "fp8":
        blocks = weight.view(EXPERTS, n // 128, 128, k // 128, 128)
        scale = blocks.abs().amax((2, 4)) / 448
        codes = (blocks / scale[:, :, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
        return ExpertWeights(codes, scale)
    if fmt == "mxfp4":
        codes, scale = fp4_quantize(weight, block_size=32, scale_layout="linear")
        return ExpertWeights(codes, scale, bias=torch.randn(EXPERTS, n), block_size=32)
    factor = nvfp4_global_scale(weight.abs().amax())
    codes, scale = fp4_quantize(weight, factor)
    alpha = (1 / factor).expand(EXPERTS, n).contiguous()
    return ExpertWeights(codes, scale, alpha, torch.randn(EXPERTS, n), scale_layout="128x4")


def decoded(weights: ExpertWeights) -> np.ndarray:
    """Decode the weights to (E, N, K) in float64."""
    experts, n, _ = weights.codes.shape
    codes = weights.codes.view(torch.uint8).numpy()
    if not weights.is_fp4:
        scale = weights.scale.double().numpy().repeat(128, 1).repeat(128, 2)
        return spec.scale_value(codes, "e4m3").astype(np.float64) * scale
    numbers = spec.e2m1_value(spec.unpack(codes.reshape(experts * n, -1))).astype(np.float64)
    scale = weights.scale
    if weights.scale_layout != "linear":
        scale = convert_scales(scale, experts * n, numbers.shape[1], "128x4", "linear")
    kind = "e4m3" if weights.block_size == 16 else "ue8m0"
    scales = spec.scale_value(scale.contiguous().view(torch.uint8).numpy(), kind).astype(np.float64)
    numbers *= scales.reshape(experts * n, -1).repeat(weights.block_size, 1)
    numbers = numbers.reshape(experts, n, -1)
    return numbers if weights.alpha is None else numbers * weights.alpha.double().numpy()[:, :, None]


def layer_in_float64(up: ExpertWeights, down: ExpertWeights, x, ids, factors, residual) -> np.ndarray:
    """Compute the layer's result in float64, without rounding activations."""
    w_up, w_down = decoded(up), decoded(down)
    b_up, b_down = (0 if each.bias is None else each.bias.double().numpy() for each in (up, down))
    total = residual.double().numpy().copy()
    for m, token in enumerate(x.double().numpy()):
        for j, e in enumerate(ids[m].tolist()):
            if e < 0:
                continue
            both = w_up[e] @ token + (b_up[e] if up.bias is not None else 0)
            gate, value = np.split(both, 2)
            hidden = gate / (1 + np.exp(-gate)) * value
            total[m] += factors[m, j].item() * (w_down[e] @ hidden + (b_down[e] if down.bias is not None else 0))
    return total


@torch.no_grad()
def everything(rank: int) -> None:
    group = dist.group.WORLD
    begin, end = rank * EXPERTS // WORLD, (rank + 1) * EXPERTS // WORLD
    for fmt in FORMATS:
        torch.manual_seed(0)
        up, down = weights_of(fmt, 2 * WIDTH, H), weights_of(fmt, H, WIDTH)
        x, residual = torch.randn(2, WORLD * TOKENS, H).bfloat16()
        factors, ids, *_ = moe_route(torch.randn(WORLD * TOKENS, EXPERTS), TOPK)
        ids[3] = torch.tensor([-1, 1])
        own_up, own_down = up.of_experts(begin, end), down.of_experts(begin, end)
        mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
        exact = layer_in_float64(up, down, x, ids, factors, residual)
        for wire in ("fp8", "fp4"):
            one = ExpertParallel(up, down, wire=wire)(x, ids, factors, residual)
            error = np.linalg.norm(one.double().numpy() - exact) / np.linalg.norm(exact)
            assert error < (0.06 if wire == "fp8" else 0.13), (fmt, wire, error)
            for max_rows in (None, TOKENS):
                layer = ExpertParallel(own_up, own_down, group, wire=wire, max_rows=max_rows)
                with count_traffic() as traffic:
                    y = layer(x[mine], ids[mine], factors[mine], residual[mine])
                # The result equals the result on one rank with all experts, bit for bit.
                assert torch.equal(y, one[mine]), (fmt, wire, max_rows)
                pairs = int((ids[mine] >= 0).sum()) if max_rows is None else EXPERTS * TOKENS
                counts, codes, scales, back = traffic.sent
                assert (counts.dtype, counts.nbytes) == (torch.int32, 4 * EXPERTS)
                assert (codes.dtype, codes.nbytes) == (torch.uint8, pairs * (H if wire == "fp8" else H // 2))
                assert scales.nbytes == pairs * (4 * H // 128 if wire == "fp8" else H // 16)
                assert back.dtype == torch.bfloat16
            layer = ExpertParallel(own_up, own_down, group, wire=wire, back="fp8")
            with count_traffic() as traffic:
                y = layer(x[mine], ids[mine], factors[mine], residual[mine])
            assert all(each.dtype != torch.bfloat16 for each in traffic.sent)
            error = (y.double() - one[mine].double()).norm() / (one[mine] - residual[mine]).double().norm()
            assert 0 < error < 0.04
        with pytest.raises(RuntimeError, match="ExpertParallel: rank 1 differs: max_rows is 6, on rank 0 5"):
            ExpertParallel(own_up, own_down, group, max_rows=TOKENS + rank)
        # Rank 0 has no tokens, and some experts get no rows.
        count = 0 if rank == 0 else TOKENS
        few = torch.zeros(count, TOPK, dtype=torch.int32)
        few[:, 1] = -1
        for wire in ("fp8", "fp4"):
            for max_rows in (None, TOKENS):
                layer = ExpertParallel(own_up, own_down, group, wire=wire, max_rows=max_rows)
                y = layer(x[:count], few, factors[:count])
                assert y.shape == (count, H)
                if count:
                    assert torch.equal(y, ExpertParallel(up, down, wire=wire)(x[:count], few, factors[:count]))
        # Two of each rank's five tokens fit; later pairs are dropped.
        y = ExpertParallel(own_up, own_down, group, max_rows=2)(x[mine], few_of(mine), factors[mine])
        want = ExpertParallel(up, down)(x[mine], few_of(mine), factors[mine])
        assert torch.equal(y[:2], want[:2]) and not y[2:].any()
        # Divide each expert among the ranks, instead of giving each rank whole experts.
        parts = up.of_rows(rank, WORLD, 2), down.of_columns(rank, WORLD)
        y = ExpertParallel(*parts, tensor_group=group)(x, ids, factors, residual)
        whole = [torch.empty_like(y) for _ in range(WORLD)]
        dist.all_gather(whole, y)
        assert torch.equal(whole[0], whole[1])
        error = np.linalg.norm(y.double().numpy() - exact) / np.linalg.norm(exact)
        assert error < 0.06, (fmt, error)


def few_of(mine: slice) -> torch.Tensor:
    ids = torch.zeros(TOKENS, TOPK, dtype=torch.int32)
    ids[:, 1] = -1
    return ids


def test_experts_of_ranks():
    run_ranks(WORLD, everything)


@pytest.mark.parametrize("fmt", FORMATS)
def test_parts_of_weights(fmt):
    """Check that shards of the weights decode to slices of the decoded weights."""
    up, down = weights_of(fmt, 2 * WIDTH, H), weights_of(fmt, H, WIDTH)
    whole = decoded(up)
    np.testing.assert_array_equal(decoded(up.of_experts(1, 3)), whole[1:3])
    own = decoded(up.of_rows(1, 2, 2))
    np.testing.assert_array_equal(own, np.concatenate((whole[:, 128:256], whole[:, 384:]), 1))
    if up.bias is not None:
        assert torch.equal(up.of_rows(1, 2, 2).bias, torch.cat((up.bias[:, 128:256], up.bias[:, 384:]), 1))
        assert torch.equal(up.of_experts(1, 3).bias, up.bias[1:3])
        assert down.of_columns(1, 2).bias is None and torch.equal(down.of_columns(0, 2).bias, down.bias)
    np.testing.assert_array_equal(decoded(down.of_columns(1, 2)), decoded(down)[:, :, 128:])


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_dtype_casts_nothing(fmt):
    layer = ExpertParallel(weights_of(fmt, 2 * WIDTH, H), weights_of(fmt, H, WIDTH))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    for name, buffer in layer.bfloat16().named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer.view(torch.uint8), before[name].view(torch.uint8))


def test_errors():
    up, down = weights_of("fp8", 2 * WIDTH, H), weights_of("fp8", H, WIDTH)
    with pytest.raises(ValueError, match=r"up is \(4, 256, 256\) and down \(4, 256, 256\); expected \(E, 2I, H\)"):
        ExpertParallel(down, down)
    with pytest.raises(ValueError, match="wire is 'bf16'; expected one of 'fp8', 'fp4'"):
        ExpertParallel(up, down, wire="bf16")
    with pytest.raises(ValueError, match="back is 'fp4'; expected one of '16bit', 'fp8'"):
        ExpertParallel(up, down, back="fp4")
    with pytest.raises(ValueError, match="from 3 to 5; expected a range of the 4 experts"):
        up.of_experts(3, 5)
    with pytest.raises(ValueError, match="N is 256 per expert; expected a multiple of 512 for 4 ranks"):
        up.of_rows(0, 4, 2)
    with pytest.raises(ValueError, match="K is 256 per expert; expected a multiple of 384 for 3 ranks"):
        down.of_columns(0, 3)
