"""Ops that sum rows over ranks, on gloo ranks: results, compiled programs, the Inductor pass and divided layers."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expected import assert_same
from support.inductor_graphs import EPS, Compiler, H, llama_norm
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import torch_cute_ops
from torch_cute_ops.distributed import RowParallel, decoder_plan, normed_rows
from torch_cute_ops.integrations import inductor
from torch_cute_ops.nn import FP8BlockLinear, NVFP4Linear, merge
from torch_cute_ops.runtime import groups

ROWS = 5
FORMS: dict[str, dict[str, Any]] = {
    "add_rmsnorm": {},
    "add_rmsnorm_fp4quant": {"block_size": 32, "scale_layout": "8x4"},
    "add_rmsnorm_fp8quant": {"granularity": "block128"},
}


def made(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return the tensor of a rank, which every rank can compute; magnitudes differ, so that the order of a sum
    matters."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-8, 8, shape, generator=generator)
    return values.to(dtype)


def total(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Add up all ranks' tensors in fp32, in the order of the ranks, and round once."""
    found = made(0, *shape, dtype=dtype).float()
    for rank in range(1, dist.get_world_size()):
        found += made(rank, *shape, dtype=dtype).float()
    return found.to(dtype)


def name() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def outputs(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def check_results(rank: int) -> None:
    weight = made(50, 128).abs().float()
    for op, given in FORMS.items():
        for dtype in (torch.bfloat16, torch.float32):
            residual, other = (made(99, 2, ROWS, 128, dtype=dtype) for _ in range(2))
            summed = getattr(torch_cute_ops, f"all_reduce_{op}")
            got = summed(made(rank, 2, ROWS, 128, dtype=dtype), residual, weight, name(), **given)
            want = getattr(torch_cute_ops, op)(total(2, ROWS, 128, dtype=dtype), other, weight, **given)
            assert_same((*outputs(got), residual), (*outputs(want), other))
            into = tuple(map(torch.empty_like, outputs(got)))
            again = made(99, 2, ROWS, 128, dtype=dtype)
            out = into if len(into) > 1 else into[0]
            summed(made(rank, 2, ROWS, 128, dtype=dtype), again, weight, name(), **given, out=out)
            assert_same((*into, again), (*outputs(want), other))
    # The sum must be in fp32 and in the order of the ranks: other orders and roundings give other results here.
    x = torch.full((1, 64), [2.0**30, 1.0, -(2.0**30), 3.0][rank])
    residual = torch.zeros(1, 64)
    torch_cute_ops.all_reduce_add_rmsnorm(x, residual, torch.ones(64), name())
    expected = 2.0**30 + 1 if dist.get_world_size() == 2 else 3.0
    assert (residual == torch.tensor(expected)).all()
    with pytest.raises(ValueError, match="group is 'nobody', which names no process group"):
        torch_cute_ops.all_reduce_add_rmsnorm(x, residual, torch.ones(64), "nobody")
    assert groups.timeout_of(dist.group.WORLD, torch.device("cpu")) == 60


def test_results_of_two_ranks() -> None:
    run_ranks(2, check_results)


def test_results_of_four_ranks() -> None:
    run_ranks(4, check_results)


def check_compiled(rank: int) -> None:
    weight, group = made(50, H).abs(), name()

    def program(x: torch.Tensor, start: torch.Tensor) -> Any:
        residual = start * 1.0
        y, scale = torch_cute_ops.all_reduce_add_rmsnorm_fp8quant(x, residual, weight, group)
        again = torch_cute_ops.all_reduce_add_rmsnorm((y.float() * scale).to(x.dtype), residual, weight, group)
        return y, scale, again, residual

    given = made(rank, ROWS, H), made(99, ROWS, H)
    assert_same(torch.compile(program, fullgraph=True)(*given), program(*given))


def test_compiled() -> None:
    run_ranks(2, check_compiled)


def check_pass(rank: int) -> None:
    weights = [made(60 + i, H).abs() for i in range(3)]
    compiler = Compiler()

    def program(x: torch.Tensor, start: torch.Tensor) -> Any:
        residual, results = torch.tanh(start), []
        # Norms in FP8, in FP4, and in FP4 with a second reader. No op combines the third norm with a sum over ranks.
        for weight, quantise in zip(weights, ("fp8_quantize", "fp4_quantize", "fp4_quantize"), strict=True):
            y = x * (1 + len(results))
            dist.all_reduce(y)
            residual = residual + y.view(residual.shape)
            norm = llama_norm(residual, weight)
            results += getattr(torch_cute_ops, quantise)(norm)
            if len(results) == 6:
                results.append(norm * 2)
        return *results, residual

    x, start = made(rank, ROWS, H), made(99, 1, ROWS, H)
    with torch.no_grad(), torch._inductor.config.patch(post_grad_custom_pre_pass=inductor.FuseQuantization()):
        got = torch.compile(program, backend=compiler, fullgraph=True)(x, start)
    assert compiler.ours() == {
        "all_reduce_add_rmsnorm_fp8quant": 1,
        "all_reduce_add_rmsnorm_fp4quant": 1,
        "add_rmsnorm_fp4quant_with_norm": 1,
    }
    assert sum("all_reduce" in each and "cute" not in each for each in compiler.calls()) == 1
    assert sum("wait_tensor" in each for each in compiler.calls()) == 1
    residual, results = torch.tanh(start), []
    for i, op in enumerate(("fp8quant", "fp4quant")):
        each = torch.zeros(1, ROWS, H)
        for other in range(dist.get_world_size()):
            each += (made(other, ROWS, H) * (1 + 2 * i)).float()
        summed = each.bfloat16()
        results += getattr(torch_cute_ops, f"add_rmsnorm_{op}")(summed, residual, weights[i], eps=EPS)
    assert_same(got[:4], results)


def test_the_pass_fuses_sums_over_ranks() -> None:
    run_ranks(2, check_pass)


def check_what_the_pass_leaves(rank: int) -> None:
    weight, x, start = made(60, H).abs(), made(rank, ROWS, H), made(99, ROWS, H)

    def read_again(x: torch.Tensor, start: torch.Tensor) -> Any:
        y = x * 1.0
        dist.all_reduce(y)
        return *torch_cute_ops.fp8_quantize(llama_norm(torch.tanh(start) + y, weight)), y

    def of_an_input(x: torch.Tensor, start: torch.Tensor) -> Any:
        y = x * 1.0
        dist.all_reduce(y)
        return torch_cute_ops.fp8_quantize(llama_norm(start + y, weight))  # must not be overwritten

    def without_weight(x: torch.Tensor, start: torch.Tensor) -> Any:
        y = x * 1.0
        dist.all_reduce(y)
        return torch_cute_ops.fp8_quantize(torch.nn.functional.rms_norm(torch.tanh(start) + y, (H,), None, EPS))

    def with_bias(x: torch.Tensor, start: torch.Tensor) -> Any:
        y = x * 1.0
        dist.all_reduce(y)
        return torch_cute_ops.fp8_quantize(llama_norm(torch.tanh(start) + y, weight) + weight)

    def with_float32(x: torch.Tensor, start: torch.Tensor) -> Any:
        y = x * 1.0
        dist.all_reduce(y)
        return torch_cute_ops.fp8_quantize(llama_norm(torch.tanh(start.float()) + y, weight))

    def of_maxima(x: torch.Tensor, start: torch.Tensor) -> Any:
        y = x * 1.0
        dist.all_reduce(y, op=dist.ReduceOp.MAX)
        return torch_cute_ops.fp8_quantize(llama_norm(torch.tanh(start) + y, weight))

    for program in (read_again, of_an_input, without_weight, with_bias, with_float32, of_maxima):
        compiler = Compiler()
        with torch.no_grad(), torch._inductor.config.patch(post_grad_custom_pre_pass=inductor.FuseQuantization()):
            torch.compile(program, backend=compiler, fullgraph=True)(x, start)
        assert compiler.ours() == {"add_rmsnorm_fp8quant": 1}, program


def test_the_pass_leaves_other_sums() -> None:
    run_ranks(2, check_what_the_pass_leaves)


def check_layers(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight, x = made(60, 256).abs(), torch.randn(ROWS, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    torch.manual_seed(0)
    down = nn.Linear(512, 256, bias=False).bfloat16()
    own = x[:, 256 * rank : 256 * rank + 256]
    for following in (
        NVFP4Linear.from_float(nn.Linear(256, 128).bfloat16(), activations="fp4", input_amax=4.0),
        FP8BlockLinear.from_float(nn.Linear(256, 128).bfloat16(), activations="fp8"),
    ):
        layer = copy.deepcopy(down)
        parallelize_module(nn.Sequential(layer), mesh, {"0": RowParallel(partial=True)})
        parts = [
            nn.functional.linear(x[:, 256 * i : 256 * i + 256], down.weight[:, 256 * i : 256 * i + 256])
            for i in range(dist.get_world_size())
        ]
        with torch.no_grad():
            partial = layer(own)
            assert_same([partial], [parts[rank]])
            residual, other = made(99, ROWS, 256), made(99, ROWS, 256)
            got = normed_rows(following, partial, weight, residual, group=dist.group.WORLD)
            summed = (parts[0].float() + parts[1].float()).bfloat16()
            want = normed_rows(following, summed, weight, other)
        assert_same((*got.operands, residual), (*want.operands, other))
        assert got.lead == want.lead and got.dtype == want.dtype
    with pytest.raises(ValueError, match="expected a residual, and activations"):
        normed_rows(following, partial, weight, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="expected partial=True alone"):
        RowParallel(partial=True, sequence=True)


def test_divided_layers() -> None:
    run_ranks(2, check_layers)


HIDDEN, HEAD, HEADS, INNER, LAYERS = 256, 128, 2, 512, 2


class Layer(nn.Module):
    """Layer of a decoder with FP8 weights: attention and a gated MLP, each after an RMSNorm whose weights are ones."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.qkv_proj = merge([self.made(HIDDEN, HEADS * HEAD) for _ in range(3)])
        self.self_attn.o_proj = self.made(HEADS * HEAD, HIDDEN)
        self.mlp.gate_up_proj = merge([self.made(HIDDEN, INNER) for _ in range(2)])
        self.mlp.down_proj = self.made(INNER, HIDDEN)

    @staticmethod
    def made(k: int, n: int) -> FP8BlockLinear:
        return FP8BlockLinear.from_float(nn.Linear(k, n, bias=False).bfloat16(), activations="fp8")

    def forward(self, x: torch.Tensor, residual: torch.Tensor, groups: tuple[Any, Any]) -> torch.Tensor:
        """Return the result of the MLP. ``groups`` are the groups over which the inputs of the two norms are summed."""
        weight, (before_attention, before_mlp) = torch.ones(HIDDEN), groups
        qkv_proj, gate_up_proj = self.self_attn.qkv_proj, self.mlp.gate_up_proj
        qkv = qkv_proj(normed_rows(qkv_proj, x, weight, residual, group=before_attention))
        q, k, v = (each.unflatten(1, (-1, HEAD)).transpose(0, 1) for each in qkv.chunk(3, 1))
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.self_attn.o_proj(attention.transpose(0, 1).flatten(1))
        gate_and_up = gate_up_proj(normed_rows(gate_up_proj, x, weight, residual, group=before_mlp))
        return self.mlp.down_proj(torch_cute_ops.silu_mul(gate_and_up))


class Calls(TorchDispatchMode):
    """Count calls of this package's ops and of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removesuffix(".default")
        if "c10d" in name or "all_reduce" in name:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def check_decoder(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    x, weight = torch.randn(ROWS, HIDDEN).bfloat16(), torch.ones(HIDDEN)
    with torch.no_grad():
        want, sums = x, torch.zeros_like(x)
        for layer in model.model.layers:
            want = layer(want, sums, (None, None))
        want = torch_cute_ops.add_rmsnorm(want, sums, weight)
        parallelize_module(model, init_device_mesh("cpu", (2,)), decoder_plan(HEAD, partial=True))
        got, residual, calls = x, torch.zeros_like(x), Calls()
        with calls:
            for i, layer in enumerate(model.model.layers):
                # The embedding before the first norm is complete on each rank.
                got = layer(got, residual, (dist.group.WORLD if i else None, dist.group.WORLD))
            got = torch_cute_ops.all_reduce_add_rmsnorm(got, residual, weight, name())
    # Two sums over ranks in each layer, each in the launch of the norm after it, and no other collective.
    ours = {each: count for each, count in calls.found.items() if each.startswith("cute.")}
    assert ours == {"cute.all_reduce_add_rmsnorm_fp8quant": 2 * LAYERS - 1, "cute.all_reduce_add_rmsnorm": 1}
    assert not any("reduce" in each for each in calls.found if each not in ours), calls.found
    assert (got.double() - want.double()).norm() < 0.03 * want.double().norm()
    for each in (got, residual):
        everywhere = [torch.empty_like(each) for _ in range(2)]
        dist.all_gather(everywhere, each)
        assert_same(everywhere[:1], everywhere[1:])


def test_launches_of_a_decoder() -> None:
    run_ranks(2, check_decoder)


def test_plans_with_partial_sums() -> None:
    styles = decoder_plan(HEAD, partial=True)
    assert {each for each, style in styles.items() if isinstance(style, RowParallel) and style.partial} == {
        "model.layers.*.self_attn.o_proj",
        "model.layers.*.mlp.down_proj",
    }
    with pytest.raises(ValueError, match="expected no partial=True with experts"):
        decoder_plan(HEAD, partial=True, experts="tensor")
    with pytest.raises(ValueError, match="expected partial=True alone"):
        decoder_plan(HEAD, partial=True, sequence=True)
