"""Experts with quantised weights compared with float64."""

from __future__ import annotations

import copy
import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from support import experts as support
from support.experts import GPT_OSS, TOPK, Block, E, Experts, GptOssExperts, H, I
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_cute_ops import moe_route_dense, moe_route_ids, nvfp4_global_scale
from torch_cute_ops.nn import NVFP4Linear, QuantExperts, QuantLinear, SwiGLU, quantize_, random_, warmup
from torch_cute_ops.nn.experts import MOST_FEW, as_int32, few_tokens, reason_unrouted
from torch_cute_ops.runtime.arch import ARCHS

SCHEMES = ("nvfp4", "mxfp4", "fp8_block", "fp8_channel", "mxfp8")
by_scheme = pytest.mark.parametrize("scheme", SCHEMES)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def routed(count: int, device: str, topk: int = TOPK) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(count, H, device=device).bfloat16()
    ids = torch.rand(count, E).argsort(1)[:, :topk].to(device)
    return x, ids, torch.rand(count, topk, device=device)


def assert_close(got: torch.Tensor, want: np.ndarray) -> None:
    """Check the relative error of the whole result. Some elements may be off by more, because their activations were
    rounded to another code: few on a CPU, up to one hundredth on a GPU, whose sums are less precise."""
    error = np.linalg.norm(got.double().cpu().numpy() - want) / np.linalg.norm(want)
    assert error < 0.015, error


def computed(experts: QuantExperts, *given) -> np.ndarray:
    """Return the expected results, with activations rounded at the granularity that the experts use."""
    x, ids, factors, *rest = given
    granularity = "block32" if experts.scheme == "mxfp8" else "token" if experts.has_token_scales else "block128"
    return support.computed(x, ids, factors, *support.multiplied(experts), *rest, granularity=granularity)


def block_of(module: nn.Module, scheme: str, device: str = "cpu", **given) -> Block:
    return quantize_(Block(module).bfloat16(), scheme, **given).to(device)


@by_scheme
@pytest.mark.parametrize("form", [Experts, GptOssExperts])
@torch.no_grad()
def test_values(scheme, form, device):
    """Check results against the decoded weights, with int64 ids as torch.topk returns them."""
    module = form()
    block = block_of(copy.deepcopy(module), scheme, device)
    experts = block.mlp.experts
    assert isinstance(experts, QuantExperts) and isinstance(block.o_proj, QuantLinear)
    assert experts.scheme == scheme and experts.topk == TOPK
    x, ids, factors = routed(9, device)
    gate_up, down = support.decoded(experts)
    biases, swiglu = None, (1.0, 0.0, None)
    want_gate_up, want_down = module.gate_up_proj.detach(), module.down_proj.detach()
    if form is GptOssExperts:
        gated, bias = want_gate_up.mT, module.gate_up_proj_bias.detach().bfloat16()
        want_gate_up, want_down = torch.cat((gated[:, 0::2], gated[:, 1::2]), 1), want_down.mT
        biases = (
            torch.cat((bias[:, 0::2], bias[:, 1::2]), 1).double().numpy(),
            module.down_proj_bias.detach().bfloat16().double().numpy(),
        )
        swiglu = GPT_OSS
    # The decoded weights approximate the original module's weights, which shows the order of gate and up.
    for got, want in ((gate_up, want_gate_up), (down, want_down)):
        error = np.linalg.norm(got - want.double().numpy()) / want.norm().item()
        assert error < {"nvfp4": 0.11, "mxfp4": 0.16, "fp8_block": 0.04, "fp8_channel": 0.04, "mxfp8": 0.04}[scheme]
    for mine, theirs in zip(experts.dequantize(), (gate_up, down), strict=True):
        assert np.allclose(mine.cpu().double().numpy(), theirs, rtol=1e-6, atol=0)
    got = experts(x, ids, factors)
    assert got.shape == x.shape and got.dtype == x.dtype
    assert_close(got, computed(experts, x, ids, factors, biases, swiglu))


@by_scheme
@torch.no_grad()
def test_calls(scheme, device):
    """Check that a row gives the same result alone, that the id -1 adds nothing, that other dtypes work, and that the
    call compiles to one graph."""
    experts = block_of(Experts(), scheme, device).mlp.experts
    x, ids, factors = routed(5, device)
    want = experts(x, ids, factors)
    if device == "cpu":  # on a GPU, the number of rows can change the tactic
        for row in range(5):
            assert torch.equal(experts(x[row, None], ids[row, None], factors[row, None]), want[row, None])
    assert torch.equal(experts(x, ids.int(), factors.bfloat16().float()), experts(x, ids, factors.bfloat16()))
    elsewhere = ids.clone()
    elsewhere[:, 1] = -1 if device == "cpu" else -5  # a CPU would refuse -5
    elsewhere[0, 1] = -1
    assert_close(experts(x, elsewhere, factors), computed(experts, x, elsewhere, factors))
    assert experts(x[:0], ids[:0], factors[:0]).shape == (0, H)
    assert experts(x.half(), ids, factors).dtype == torch.float16
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids, factors), want)


@by_scheme
def test_state_dict_and_moves(scheme):
    experts = block_of(GptOssExperts(), scheme).mlp.experts
    state = experts.state_dict()
    assert {"gate_up_proj.weight", "gate_up_proj.bias", "down_proj.weight", "down_proj.bias"} <= {*state}
    other = block_of(GptOssExperts(), scheme).mlp.experts
    other.load_state_dict(state)
    moved = copy.deepcopy(experts).half()
    for name, tensor in state.items():
        assert torch.equal(other.state_dict()[name].view(torch.uint8), tensor.view(torch.uint8))
        got = moved.state_dict()[name]
        assert got.dtype == (torch.float16 if name.endswith("bias") else tensor.dtype)
    x, ids, factors = routed(3, "cpu")
    with torch.no_grad():
        assert torch.equal(other(x, ids, factors), experts(x, ids, factors))


def test_split():
    """Check that each expert's layers equal separately quantised layers, and that gate and up share a global scale."""
    module = Experts().bfloat16()
    experts = block_of(copy.deepcopy(module), "nvfp4").mlp.experts
    parts = [*experts.split()]
    assert len(parts) == E
    for e, (gate, up, down) in enumerate(parts):
        assert gate.weight_scale_2.item() == up.weight_scale_2.item()
        assert gate.weight_scale_2.item() == pytest.approx(module.gate_up_proj[e].abs().max().item() / 2688, rel=1e-6)
        assert down.weight_scale_2.item() == pytest.approx(module.down_proj[e].abs().max().item() / 2688, rel=1e-6)
        linear = nn.Linear(H, I, bias=False)
        linear.weight.data = module.gate_up_proj.data[e, I:]
        alone = NVFP4Linear.from_float(linear, amax=module.gate_up_proj[e].abs().max())
        for name, tensor in alone.tensors().items():
            assert torch.equal(up.tensors()[name].view(torch.uint8), tensor.view(torch.uint8))


def test_experts_that_stay():
    with pytest.warns(UserWarning, match=r"mlp.experts: Experts computes something else than experts with SwiGLU"):
        block = block_of(Experts(act_fn=nn.ReLU()), "nvfp4")
    assert isinstance(block.mlp.experts, Experts) and isinstance(block.o_proj, NVFP4Linear)
    with pytest.warns(UserWarning, match=r"experts are 256 and 64 wide; expected multiples of 128"):
        block_of(Experts(width=64), "fp8_block")
    with pytest.warns(
        UserWarning, match=r"scheme is 'fp8_tensor'; expected 'nvfp4', 'mxfp4', 'fp8_block', 'fp8_channel', 'mxfp8'"
    ):
        block_of(Experts(), "fp8_tensor")
    for ignore in (("experts",), ("mlp.*",)):
        assert isinstance(block_of(Experts(), "nvfp4", ignore=ignore).mlp.experts, Experts)


def test_errors():
    experts = block_of(Experts(), "nvfp4").mlp.experts
    gate_up, down = experts.gate_up_proj, experts.down_proj
    with pytest.raises(ValueError, match=r"gate_up_proj has 8 parts, the first with 128 rows; expected 16 with 128"):
        QuantExperts(gate_up, down, 8)
    with pytest.raises(ValueError, match="gate_up_proj has 4 parts"):
        QuantExperts(down, gate_up, E)
    with pytest.raises(ValueError, match="NVFP4Linear and MXFP4Linear; expected two layers of one format"):
        QuantExperts(gate_up, block_of(Experts(), "mxfp4").mlp.experts.down_proj, E)
    with pytest.raises(ValueError, match="number of experts is 0; expected 1 to 1024"):
        QuantExperts(gate_up, down, 0)
    with pytest.raises(ValueError, match="gate is 'relu'; expected one of 'silu', 'gelu_tanh', 'gelu'"):
        QuantExperts(gate_up, down, E, swiglu=SwiGLU(gate="relu"))
    with pytest.raises(ValueError, match="gate='gelu' takes no alpha, beta or limit"):
        QuantExperts(gate_up, down, E, swiglu=SwiGLU(1.702, gate="gelu"))
    x, ids, factors = routed(2, "cpu")
    with pytest.raises(ValueError, match="grouped_mm_fp8_fp4"):
        experts(x[:, :128], ids, factors)
    with pytest.raises(ValueError, match="moe_finalize: got weights"):
        experts(x, ids, factors[:1])


@pytest.mark.parametrize("few", [False, True])
def test_wrong_routing_is_refused(few):
    """Check that swapped arguments, ids that are no integers, and ids of experts that do not exist are refused, on the
    path for few tokens and on the path for many tokens."""
    experts = block_of(Experts(), "nvfp4").mlp.experts
    if few:
        experts.route_few_()
    x, ids, factors = routed(3, "cpu")
    swapped = r"top_k_index with dtype torch.float32; expected int32 or int64; pass the indices before the weights"
    with pytest.raises(TypeError, match=swapped):
        experts(x, factors, ids)
    for wrong in (ids[None], ids[0]):
        with pytest.raises(ValueError, match=r"top_k_index with shape .*; expected \(M, topk\): flatten the tokens"):
            experts(x, wrong, factors)
    for wrong in (ids + 0.9, ids.bool(), ids.short(), ids.byte()):
        with pytest.raises(TypeError, match=r"expected int32 or int64; pass top_k_index.long\(\)"):
            experts(x, wrong, factors)
    with pytest.raises(TypeError, match=r"top_k_weights with dtype torch.int64; expected floating-point numbers"):
        experts(x, ids, ids)
    for outside in (E, 2**31 - 1, -2, -(2**31)):
        wrong = ids.clone()
        wrong[2, 1] = outside
        with pytest.raises(ValueError, match=f"top_k_index holds {outside}, out of range: there are 4 experts"):
            experts(x, wrong, factors)


def test_large_ids_stay_out_of_range():
    """Check that an int64 id whose low 32 bits equal an expert's id is not taken for this id. On a GPU, layers pass ids
    to the ops without checking them."""
    ids = torch.tensor([[2**32 + 1, 3], [-1, -(2**32)], [2**31, -2]])
    converted = as_int32(ids, 4)
    assert converted.dtype == torch.int32
    assert converted.tolist() == [[4, 3], [-1, -2], [4, -2]]
    assert as_int32(converted, 4) is converted


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "grouped_mm" in str(func):
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def test_warmup():
    block = block_of(Experts(), "mxfp4")
    with Calls() as calls:
        warmup(nn.ModuleList([block, block_of(Experts(), "mxfp4")]), rows=(1, 4, 40))
    assert sorted(calls.rows) == [8, 8, 80, 80]  # two GEMMs of each size; 1 and 4 tokens are in the same bucket
    block.mlp.experts.topk = None
    with pytest.raises(ValueError, match=r"mlp.experts.topk is None"):
        warmup(block)


@by_scheme
def test_random(scheme, device):
    """Check that a model on the meta device gets random weights with the standard deviation of freshly initialised
    models."""
    with torch.device("meta"):
        block = Block(GptOssExperts()).bfloat16()
    experts = random_(block, scheme, device=device).mlp.experts
    assert experts.swiglu == SwiGLU(*GPT_OSS) and experts.topk == TOPK
    assert all(0.015 < weight.float().std() < 0.025 for weight in experts.dequantize())
    assert not experts.gate_up_proj.bias.any() and experts.down_proj.bias.shape == (E * H,)
    x, ids, factors = routed(3, device)
    with torch.no_grad():
        assert_close(
            experts(x, ids, factors),
            computed(experts, x, ids, factors, None, GPT_OSS),
        )


# Few tokens

FEW = few_tokens(I) * E // TOPK
"""Largest number of tokens for which these experts compute only routed pairs."""


def routes(device: str) -> bool:
    return device == "cpu" or torch.cuda.get_device_capability() == (9, 0)


ROUTED = {"moe_fc1_fp4_weight_only", "moe_fc2_fp4_weight_only"}


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("form", [Experts, GptOssExperts])
@torch.no_grad()
def test_few_tokens_are_routed(scheme, form, device):
    """Check that calls with few tokens run the two ops for routed pairs, and that their error against the decoded
    weights is smaller than with FP8 activations. The id -1 must add nothing. Calls with more tokens use the permuted
    path, and their results do not change."""
    if not routes(device):
        return
    experts = block_of(form(), scheme, device).mlp.experts
    x, ids, factors = routed(FEW + 1, device)
    want = experts(x, ids, factors)
    state = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    assert experts.route_few_() is experts and experts.route_few_() is experts
    assert [*experts.state_dict()] == [*state]
    assert torch.equal(experts(x, ids, factors), want)
    few = x[1:], ids[1:], factors[1:]
    assert support.ops_of(experts, *few) == ROUTED and not support.ops_of(experts, x, ids, factors) & ROUTED
    if form is Experts:
        assert not support.ops_of(experts, few[0].float(), *few[1:]) & ROUTED
    biases, swiglu = None, (1.0, 0.0, None)
    if form is GptOssExperts:
        swiglu = GPT_OSS
        layers = experts.gate_up_proj, experts.down_proj
        biases = tuple(layer.bias.double().cpu().view(E, -1).numpy() for layer in layers)
    elsewhere = few[1].clone()
    elsewhere[0, 1], elsewhere[1, 0] = -1 if device == "cpu" else -2, -1  # a CPU would refuse -2
    for chosen in (few[1], elsewhere):
        got = experts(few[0], chosen, few[2]).double().cpu().numpy()
        gate_up_and_down = support.decoded(experts)
        exact = support.computed(few[0], chosen, few[2], *gate_up_and_down, biases, swiglu, in_16_bits=True)
        assert np.linalg.norm(got - exact) < 0.004 * np.linalg.norm(exact)
    assert experts(few[0], few[1].int(), few[2].bfloat16()).dtype == torch.bfloat16
    sums = experts.summed(*few, torch.float32)
    assert sums.dtype == torch.float32 and torch.equal(sums.bfloat16(), experts(*few))
    assert experts(x[:0], ids[:0], factors[:0]).shape == (0, H)


@torch.no_grad()
def test_derived_buffers_follow_the_weights():
    """Check that loading a state dict updates derived buffers in place, that copies contain them, and that casts do not
    change them."""
    experts = block_of(GptOssExperts(), "nvfp4").mlp.experts.route_few_()
    torch.manual_seed(1)
    other = block_of(GptOssExperts(), "nvfp4").mlp.experts.route_few_()
    given = routed(3, "cpu")
    want = other(*given)
    assert not torch.equal(experts(*given), want)
    copied = copy.deepcopy(experts)
    before = copied.side_by_side.weight.data_ptr()
    copied.load_state_dict(other.state_dict())
    assert copied.side_by_side.weight.data_ptr() == before
    assert torch.equal(copied(*given), want) and not torch.equal(experts(*given), want)
    half = copied.half()
    assert half.side_by_side.weight_scale.dtype == torch.float8_e4m3fn
    assert half.side_by_side.alpha.dtype == half.side_by_side.bias.dtype == torch.float32
    x, ids, factors = given
    got = half(x.half(), ids, factors).double()
    assert (got - want.double()).norm() < 0.01 * want.double().norm()


@torch.no_grad()
def test_few_tokens_compiled():
    experts = block_of(Experts(), "mxfp4").mlp.experts.route_few_()
    given = routed(5, "cpu")
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), experts(*given))


def test_few_tokens_of_fp8_weights():
    with pytest.raises(ValueError, match="route_few_: the weights are in FP8; the ops take FP4"):
        block_of(Experts(), "fp8_block").mlp.experts.route_few_()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("activations", ["16bit", "fp4"])
def test_few_tokens_are_routed_on_every_gpu(arch, activations):
    """Check that kernels support the sizes of gpt-oss-120b, and of DeepSeek-V3 on eight GPUs, without a GPU."""
    assert reason_unrouted("mxfp4", 128, 2880, 2880, arch, activations) is None
    assert reason_unrouted("nvfp4", 256, 7168, 256, arch, activations) is None
    assert reason_unrouted("nvfp4", 256, 7168, 256, arch, "fp4_token") is None


@torch.no_grad()
def test_warmup_of_few_tokens(monkeypatch):
    """Check that `warmup` makes one call per bucket of rows, where rows are tokens on the path for few tokens, and
    otherwise (token, expert) pairs."""
    experts = block_of(Experts(), "nvfp4").mlp.experts
    counts = []
    real = QuantExperts.forward
    monkeypatch.setattr(
        QuantExperts, "forward", lambda self, x, *rest: (counts.append(len(x)), real(self, x, *rest))[1]
    )
    warmup(experts, (1, 4, 7, 8, 12, 17, 20))
    assert counts == [4, 8, 12, 20]
    counts.clear()
    warmup(experts.route_few_(), (1, 4, 7, 8, 12, 17, 20))
    assert counts == [1, 8, 12, 20]


def test_wide_experts_copy_nothing():
    """Check that wide experts never count tokens as few, that one warning says so, and that nothing is copied.
    `tokens_of_expert` turns the routed path on; a call without it turns it off again."""
    experts = block_of(Experts(width=1088), "mxfp4").mlp.experts
    with pytest.warns(UserWarning, match=r"nothing changed, because for experts with I = 1088 no number"):
        assert experts.route_few_() is experts
    assert experts.side_by_side is None and not experts.are_routed(1, 1, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experts.route_few_(tokens_of_expert=2)
    assert experts.is_few(2 * E, 1) and experts.is_few(E, 2) and not experts.is_few(2 * E + 1, 1)
    with torch.no_grad():
        assert support.ops_of(experts, *routed(3, "cpu")) == ROUTED
    with pytest.warns(UserWarning, match="nothing changed"):
        experts.route_few_()
    assert experts.side_by_side is None


def test_largest_number_of_few_tokens():
    """Check that at most one token block of the kernel that lists tokens counts as few tokens. The limit also bounds
    the size of the temporary tensor (M, E · I)."""
    from torch_cute_ops.kernels.fp4_gated_experts import TOKEN_BLOCKS

    assert max(TOKEN_BLOCKS) == MOST_FEW
    experts = block_of(Experts(), "mxfp4").mlp.experts.route_few_(tokens_of_expert=10_000)
    assert experts.is_few(MOST_FEW, 1) and not experts.is_few(MOST_FEW + 1, 1)


def few_times():
    """Return, for each measurement on an H200, the number of rows, whether it counts as few, and the times in µs."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "expert_layer.json"
    widths = {"DeepSeek-V3": 256, "gpt-oss-120b": 2880, "Qwen3-30B-A3B": 768}
    for row in json.loads(path.read_text())["rows"]:
        times = {name: each["us"] for name, each in row["variants"].items()}
        if {"few", "few-bf16", "many"} <= times.keys():
            is_few = row["rows"] <= MOST_FEW and row["rows_of_expert"] <= few_tokens(widths[row["model"]])
            yield pytest.param(row["rows"], is_few, times, id=f"{row['model']}-{row['routing']}-{row['rows']}")


@pytest.mark.parametrize(("tokens", "is_few", "times"), [*few_times()])
def test_the_routed_path_is_used_if_it_is_faster(tokens, is_few, times):
    """Check, for any measured routing, that the chosen path is at most 5 % slower than the other path. Measurements
    vary by that much, and a smaller gain (as for one token of gpt-oss's wide experts) does not justify a second copy of
    the down layers. Above ``MOST_FEW`` tokens, the permuted path is chosen to save memory, although it is up to 9 %
    slower with one of three routings."""
    slower = 1.05 if tokens <= MOST_FEW else 1.09
    for way in ("few", "few-bf16"):
        taken, other = (times[way], times["many"]) if is_few else (times["many"], times[way])
        assert taken <= slower * other


# Gates with GELU


@pytest.mark.parametrize(("approximate", "gate"), [("none", "gelu"), ("tanh", "gelu_tanh")])
@torch.no_grad()
def test_gates_with_gelu(approximate, gate, device):
    """Check that experts with GELU compute GELU in float64 with their decoded weights, on both paths and in FP8."""
    experts = block_of(Experts(act_fn=nn.GELU(approximate)), "nvfp4", device).mlp.experts
    assert experts.swiglu == SwiGLU(gate=gate)
    x, ids, factors = routed(FEW, device)
    gate_up, down = (torch.from_numpy(weight) for weight in support.decoded(experts))
    want = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double().cpu()):
        for expert, factor in zip(ids[token].tolist(), factors[token].double().tolist(), strict=True):
            first, up = (gate_up[expert].double() @ row).chunk(2)
            if approximate == "tanh":
                curve = 1 + (math.sqrt(2 / math.pi) * (first + 0.044715 * first**3)).tanh()
            else:
                curve = 1 + (first / math.sqrt(2)).erf()
            want[token] += factor * (down[expert].double() @ (first * curve / 2 * up))
    for bound, few in ((0.06, False), (0.01, True)):
        if few and not routes(device):
            continue
        got = (experts.route_few_() if few else experts)(x, ids, factors).double().cpu()
        assert (got - want).norm() < bound * want.norm()


# Few tokens in FP4


def scales_for(scheme: str, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return global scales of activations, different for each expert, if the format needs them."""
    if scheme != "nvfp4":
        return {}
    amax = torch.linspace(60, 90, E, device=device)
    hidden = torch.cat([nvfp4_global_scale(each) for each in amax])
    return {"input_global_scale": nvfp4_global_scale(torch.tensor(5.0, device=device)), "hidden_global_scale": hidden}


def exact_sums(experts: QuantExperts, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor) -> np.ndarray:
    """Compute the tokens' weighted sums in float64 from the decoded weights of ``Experts`` or ``GptOssExperts``."""
    layers = experts.gate_up_proj, experts.down_proj
    biases, swiglu = None, (1.0, 0.0, None)
    if layers[0].bias is not None:
        swiglu, biases = GPT_OSS, tuple(layer.bias.double().cpu().view(E, -1).numpy() for layer in layers)
    return support.computed(x, ids, factors, *support.decoded(experts), biases, swiglu, in_16_bits=True)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("form", [Experts, GptOssExperts])
@torch.no_grad()
def test_few_tokens_in_fp4(scheme, form, device):
    """Check that FP4 activations in any dtype give the results of the decoded weights within the error of FP4
    rounding."""
    if not routes(device):
        return
    experts = block_of(form(), scheme, device).mlp.experts
    assert experts.route_few_("fp4", **scales_for(scheme, device)) is experts
    x, ids, factors = routed(FEW, device)
    assert support.ops_of(experts, x, ids, factors) == {"fp4_quantize", "moe_fc1_fp4", "moe_fc2_fp4"}
    exact = exact_sums(experts, x, ids, factors)
    got = experts(x, ids, factors)
    assert np.linalg.norm(got.double().cpu().numpy() - exact) < 0.26 * np.linalg.norm(exact)
    assert torch.equal(experts(x.float(), ids, factors).bfloat16(), got)
    half = copy.deepcopy(experts).half()(x.half(), ids, factors).double()
    assert (half - got.double()).norm() < 0.01 * got.double().norm()
    # Switch to 16-bit activations and back.
    assert support.ops_of(experts.route_few_(), x, ids, factors) == ROUTED
    assert torch.equal(experts.route_few_("fp4", **scales_for(scheme, device))(x, ids, factors), got)


@pytest.mark.parametrize("form", [Experts, GptOssExperts])
@torch.no_grad()
def test_few_tokens_with_token_scales(form, device):
    """Check that tokens with separate global scales need no calibration: small tokens among large tokens get the same
    relative error."""
    if not routes(device):
        return
    experts = block_of(form(), "nvfp4", device).mlp.experts
    scales = scales_for("nvfp4", device)
    experts.route_few_("fp4_token", hidden_global_scale=scales["hidden_global_scale"])
    x, ids, factors = routed(FEW, device)
    assert support.ops_of(experts, x, ids, factors) == {"fp4_quantize_per_token", "moe_fc1_fp4", "moe_fc2_fp4"}
    exact = exact_sums(experts, x, ids, factors)
    assert np.linalg.norm(experts(x, ids, factors).double().cpu().numpy() - exact) < 0.26 * np.linalg.norm(exact)
    # Small tokens, which a common global scale would round to zero
    small = x.clone()
    small[::2] *= 2.0**-16
    exact = exact_sums(experts, small, ids, factors)[::2]
    got, norms = experts(small, ids, factors)[::2].double().cpu().numpy(), np.linalg.norm(exact, axis=1)
    if form is GptOssExperts:  # The first layer's bias dominates.
        assert (np.linalg.norm(got - exact, axis=1) < 0.3 * norms).all()
        return
    hidden = experts.route_few_("fp4_token", hidden_global_scale=scales["hidden_global_scale"] * 2.0**20)
    got = hidden(small[::2], ids[::2], factors[::2]).double().cpu().numpy()
    assert norms.min() > 0 and (np.linalg.norm(got - exact, axis=1) < 0.5 * norms).all()


def test_errors_of_few_tokens():
    experts, wide = (block_of(Experts(), scheme).mlp.experts for scheme in ("nvfp4", "mxfp4"))
    one = torch.ones(1)
    with pytest.raises(ValueError, match=r"activations is 'fp8'; expected one of \('16bit', 'fp4', 'fp4_token'\)"):
        experts.route_few_("fp8")
    with pytest.raises(ValueError, match="activations in NVFP4 need input_global_scale, 1 float32, from a calibration"):
        experts.route_few_("fp4")
    with pytest.raises(ValueError, match="need hidden_global_scale, 1 or 4 float32"):
        experts.route_few_("fp4", input_global_scale=one)
    with pytest.raises(ValueError, match="hidden_global_scale has 3 elements; expected 1 or 4"):
        experts.route_few_("fp4", input_global_scale=one, hidden_global_scale=torch.ones(3))
    for each, activations in ((experts, "16bit"), (wide, "fp4")):
        with pytest.raises(ValueError, match="take no input_global_scale"):
            each.route_few_(activations, input_global_scale=one)
    with pytest.raises(ValueError, match="activations='fp4_token' with weights in nvfp4 take no input_global_scale"):
        experts.route_few_("fp4_token", input_global_scale=one, hidden_global_scale=one)
    with pytest.raises(ValueError, match="need hidden_global_scale, 1 or 4 float32"):
        experts.route_few_("fp4_token")
    with pytest.raises(ValueError, match=r"activations is 'fp4_token'; expected one of .* for weights in mxfp4"):
        wide.route_few_("fp4_token")
    x = routed(2, "cpu")[0]
    with pytest.raises(
        RuntimeError, match=r"forward_dense: the down layers are not stored side by side; call route_few_\(\)"
    ):
        experts.forward_dense(x, torch.ones(2, E))


@torch.no_grad()
def test_new_global_scales_in_place():
    """Check that another calibration overwrites the global scales in place, because CUDA graphs read them."""
    experts = block_of(GptOssExperts(), "nvfp4").mlp.experts.route_few_("fp4", **scales_for("nvfp4"))
    given = routed(3, "cpu")
    before, held = experts(*given), experts.side_by_side.alpha.data_ptr()
    new = {name: scale / 5 for name, scale in scales_for("nvfp4").items()}
    want = block_of(GptOssExperts(), "nvfp4").mlp.experts
    want.load_state_dict(experts.state_dict())
    want = want.route_few_("fp4", **new)(*given)
    assert torch.equal(experts.route_few_("fp4", **new)(*given), want) and not torch.equal(want, before)
    assert experts.side_by_side.alpha.data_ptr() == held


# Inputs from the routing ops


@pytest.mark.parametrize("activations", ["16bit", "fp4"])
@torch.no_grad()
def test_dense_routing(activations):
    """Check that a routing matrix, with and without factors, gives the same results as ids. Tokens without experts must
    give 0, and calls without tokens must succeed."""
    experts = block_of(GptOssExperts(), "nvfp4").mlp.experts
    experts.route_few_(activations, **(scales_for("nvfp4") if activations == "fp4" else {}))
    x, logits = torch.randn(6, H).bfloat16(), torch.randn(6, E)
    routing = moe_route_dense(logits, TOPK)
    ids = routing.topk(TOPK).indices
    want = experts(x, ids, routing.gather(1, ids))
    assert torch.equal(experts.forward_dense(x, routing), want)
    with_factors = moe_route_dense(logits, TOPK, expert_factor=experts.expert_factor)
    assert torch.equal(experts.forward_dense(x, with_factors, has_factors=True), want)
    assert experts.forward_dense(x, routing, out_dtype=torch.float32).bfloat16().equal(want)
    routing[2] = 0
    got = experts.forward_dense(x, routing)
    assert not got[2].any() and torch.equal(got[3:], want[3:])
    assert experts.forward_dense(x[:0], routing[:0]).shape == (0, H)


@by_scheme
@torch.no_grad()
def test_permuted_rows(scheme):
    """Check that permuted rows give the same results as ids, and that the shared expert's result is added before the
    only rounding."""
    experts = block_of(Experts(), scheme).mlp.experts
    x, ids, factors = routed(6, "cpu")
    expanded, permuted, offsets, _ = moe_route_ids(ids.int(), E, alignment=1)
    rows = x, factors, expanded, permuted, offsets
    assert torch.equal(experts.forward_permuted(*rows), experts(x, ids, factors))
    shared = torch.randn(6, H)
    exact = experts.forward_permuted(*rows, out_dtype=torch.float32)
    got = experts.forward_permuted(*rows, shared, out_dtype=torch.float32)
    torch.testing.assert_close(got, exact + shared, rtol=1e-6, atol=1e-5)


# Unusual global scales


@pytest.mark.parametrize("activations", ["16bit", "fp4"])
@pytest.mark.parametrize("form", [Experts, GptOssExperts])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0, 1e-40])
@torch.no_grad()
def test_global_scales_of_an_expert(scale, form, activations):
    """Check any global scale of one expert: tokens without this expert keep their results, and tokens with it match the
    permuted path. With a scale of 0, the expert's bias remains."""
    experts = block_of(form(), "nvfp4").mlp.experts
    experts.down_proj.weight_scale_2[1] = scale
    experts.load_state_dict(experts.state_dict())  # computes the derived buffers again
    x, _, factors = routed(4, "cpu")
    ids = torch.tensor([[0, 2], [2, 3], [1, 3], [0, 1]])
    factors[2, 1] = 0  # so that this token uses only the first expert
    want = experts(x, ids, factors).double()
    experts.route_few_(activations, **(scales_for("nvfp4") if activations == "fp4" else {}))
    with_it, without = [2, 3], [0, 1]
    rounding = 0.08 if activations == "16bit" else 0.26
    routing = torch.zeros(4, E).scatter_(1, ids, factors)
    for got in (experts(x, ids, factors).double(), experts.forward_dense(x, routing).double()):
        assert (got[without] - want[without]).norm() < rounding * want[without].norm()
        if 0 <= scale < 1:
            for row in with_it:
                assert (got[row] - want[row]).norm() <= rounding * want[row].norm() + 1e-30, row
        else:
            assert not got[with_it].isfinite().any() and not want[with_it].isfinite().any()
    assert want[2].any() == (form is GptOssExperts or scale != 0)


# Per-token scales


@pytest.mark.parametrize("form", [Experts, GptOssExperts])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4"])
@torch.no_grad()
def test_scales_of_tokens(scheme, form, device):
    """Check experts that quantise activations with one scale per token. Their prepared scales follow the weights in
    place, and are in no state dict."""
    experts = block_of(form(), scheme).mlp.experts.to(device)
    keys = experts.state_dict().keys()
    assert experts.scale_tokens_() is experts and experts.state_dict().keys() == keys
    given = routed(9, device)
    biases = [layer.bias for layer in (experts.gate_up_proj, experts.down_proj) if layer.bias is not None]
    stacked = [bias.double().cpu().numpy().reshape(E, -1) for bias in biases] or None
    assert_close(experts(*given), computed(experts, *given, stacked, experts.swiglu[:3]))
    torch.manual_seed(2)
    other = block_of(form(), scheme).mlp.experts.to(device)
    place = experts.prepared.down_scale.data_ptr()
    experts.load_state_dict(other.state_dict())
    assert experts.prepared.down_scale.data_ptr() == place
    assert torch.equal(experts(*given), other.scale_tokens_()(*given))
    assert experts.half().prepared.gate_up_scale.dtype == torch.uint8


def test_scales_of_tokens_of_fp8_weights():
    with pytest.raises(ValueError, match="scale_tokens_: the weights are in fp8_block, which decides"):
        block_of(Experts(), "fp8_block").mlp.experts.scale_tokens_()
