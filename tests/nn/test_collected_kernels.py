"""Kernels that a model's calls need, collected without launching them."""

import pytest
import torch
import torch._inductor.config as inductor_config
from support.inductor_graphs import Compiler
from support.launch_model import launches  # noqa: F401  a fixture
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_cute_ops
from torch_cute_ops.collecting import CollectKernels
from torch_cute_ops.integrations import inductor
from torch_cute_ops.kernels import row_quant
from torch_cute_ops.nn import ExpertLayer, QuantExperts, warmup
from torch_cute_ops.nn.quantize import SCHEMES
from torch_cute_ops.nn.warmup import collect
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.compiler import KernelSpec

SM90 = ARCHS["sm_90a"]
ROWS = (1, 5, 40)
E, H, I, TOPK = 4, 256, 128, 2  # noqa: E741


class Launch(TorchDispatchMode):
    """Block in which the ops' CUDA implementations run on CPU tensors, with the launch model."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        spec = OPS.get(func.__name__.split(".")[0]) if func.namespace == "cute" else None
        if spec is None:
            return func(*args, **(kwargs or {}))
        return spec.path.run(None, 0, *spec.bind(*args, **(kwargs or {})))


def model_of(scheme, activations):
    """Return layers with undefined weights: a norm, gate and up, and down; and an expert layer with its router."""
    cls = SCHEMES[scheme]
    model = nn.Module()
    model.norm = nn.RMSNorm(H, dtype=torch.bfloat16)
    model.gate_up = cls(H, 2 * H, activations=activations, parts=(H, H))
    model.down = cls(H, H, activations=activations)
    if scheme in ("mxfp4", "fp8_block", "mxfp8"):
        experts = QuantExperts(cls(H, 2 * E * I, parts=[I] * (2 * E)), cls(I, E * H, parts=[H] * E), E, topk=TOPK)
        model.experts = ExpertLayer(torch.zeros(E, H), experts, TOPK)
    return model


CASES = [
    ("nvfp4", "fp4"),
    ("nvfp4", "16bit"),
    ("mxfp4", "fp8"),
    ("fp8_block", "auto"),
    ("fp8_channel", "auto"),
    ("mxfp8", "auto"),
]


@pytest.mark.parametrize(("scheme", "activations"), CASES)
def test_every_launched_kernel_is_collected(launches, scheme, activations):  # noqa: F811
    """Check that a model of fake tensors needs at least the kernels that ``warmup`` launches for it on a GPU with 132
    SMs."""
    torch.manual_seed(0)
    model = model_of(scheme, activations)
    with Launch():
        warmup(model, ROWS)
    launched = {(f"{type(each).__module__}.{type(each).__qualname__}", each.config) for each in launches.compiled}
    launches.anew()
    with FakeTensorMode():
        kernels = collect(model_of(scheme, activations), ROWS, SM90).kernels[SM90]
    collected = {(each.kernel, each.config) for each in kernels}
    assert len(launched) > 3 and launched <= collected
    assert not launches.compiled


class NormWithBias(nn.Module):
    """RMSNorm with a weight and a bias in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(H)) for _ in range(2))

    def forward(self, x):
        return nn.functional.rms_norm(x, (H,)) * self.weight + self.bias


class Decoder(nn.Module):
    """Gated MLPs with squared ReLU, each after a norm of a residual in this dtype."""

    def __init__(self, scheme: str, activations: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            [
                NormWithBias(),
                nn.RMSNorm(H, dtype=torch.bfloat16),
                nn.RMSNorm(H, elementwise_affine=False),
                nn.LayerNorm(H, dtype=dtype),
                NormWithBias(),
            ]
        )
        self.gate_up = SCHEMES[scheme](H, 2 * H, activations=activations, parts=(H, H))
        self.down = SCHEMES[scheme](H, H, activations=activations)

    def forward(self, x):
        residual = x * 2  # the pass never overwrites an input of the graph
        for norm in self.norms:
            gate, up = self.gate_up(norm(residual).bfloat16()).chunk(2, -1)
            residual = residual + self.down(nn.functional.relu(gate).square() * up)
        return residual


class Collector(Compiler):
    """Compiler backend whose programs collect kernels instead of computing results."""

    def __init__(self) -> None:
        super().__init__()
        self.collected = CollectKernels(SM90)

    def inner(self, graph, inputs, **named):
        run = super().inner(graph, inputs, **named)

        def collect_kernels(arguments):
            with self.collected:
                return run(arguments)

        collect_kernels._boxed_call = True
        return collect_kernels


@pytest.mark.parametrize("residual", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("scheme", "activations"), [*CASES, ("nvfp4", "fp4_token")])
def test_kernels_of_a_compiled_model_are_collected(scheme, activations, residual):
    """Check that `warmup` loads every kernel of norms and gates that a compiled model calls if its residual is float32,
    its norms have a bias or no weight, and its gates are squared ReLU."""
    torch._dynamo.reset()
    model, compiler = Decoder(scheme, activations, residual), Collector()
    with inductor_config.patch(post_grad_custom_pre_pass=inductor.FuseQuantization()), torch.no_grad():
        run = torch.compile(model, backend=compiler, fullgraph=True)
        run(torch.ones(3, H, dtype=residual))
    (ours,) = (compiler.ours(i) for i in range(len(compiler.graphs)))
    assert sum(count for name, count in ours.items() if "add_rmsnorm" in name) == len(model.norms) - 1
    called, warmed = (
        {each.config for each in kernels[SM90] if each.kernel == row_quant.KERNEL}
        for kernels in (compiler.collected.kernels, collect(model, 3, SM90).kernels)
    )
    assert called <= warmed
    specs = [each.spec for each in called]
    assert any(each.has_fp32_residual for each in specs) == (residual == torch.float32)
    gates = {each.gate for each in specs if each.source == "silu_mul"}
    assert gates == (set() if activations == "16bit" else {"relu2"})  # before GEMMs of 16 bits, Inductor gates
    norms = {(each.has_weight, each.has_bias, each.subtracts_mean) for each in specs if each.source == "add"}
    assert norms == {(True, False, False), (False, False, False), (True, True, True), (True, True, False)}


def test_a_call_returns_zeros_and_launches_nothing():
    x, weight = torch.ones(3, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    out, calls = torch.ones_like(x), []
    with CollectKernels(SM90, lambda kernels, arch: calls.append((arch, *kernels))) as collected:
        y, scale = torch_cute_ops.fp4_quantize(x)
        torch_cute_ops.rmsnorm(x, weight, out=out)
        torch_cute_ops.rmsnorm(x[:0], weight)
        doubled = x + x
    assert y.shape == (3, 32) and not y.any() and not scale.view(torch.uint8).any() and not out.any()
    assert torch.equal(doubled, torch.full_like(x, 2))
    (kernels,) = collected.kernels.values()
    expected = [
        *OPS["fp4_quantize"].kernels(SM90, x),
        *OPS["rmsnorm"].kernels(SM90, x, weight),
    ]
    assert [*kernels] == expected and all(type(each) is KernelSpec for each in expected)
    assert calls == [(SM90, each) for each in expected]


def test_a_cpu_computes():
    """Check that, without an architecture, only calls on a GPU are collected."""
    x = torch.randn(3, 64)
    want = torch_cute_ops.rmsnorm(x, torch.ones(64))
    with CollectKernels() as collected:
        assert torch.equal(torch_cute_ops.rmsnorm(x, torch.ones(64)), want)
        out = torch_cute_ops.rmsnorm(x, torch.ones(64), out=torch.empty_like(x))
    assert torch.equal(out, want) and not collected.kernels


def test_refused_calls():
    """Check that a wrong call raises, and that a call that only the architecture does not support is noted."""
    a = torch.zeros(4, 128, dtype=torch.bfloat16, device="meta")
    b = torch.zeros(64, 64, dtype=torch.uint8, device="meta").t()
    scale = torch.zeros(64, 8, dtype=torch.float8_e4m3fn, device="meta")
    with CollectKernels(SM90) as collected:
        torch_cute_ops.mm_fp4_weight_only(a, b, scale, backend="mma_sync")
        with pytest.raises(ValueError, match="cute::mm_fp4_weight_only"):
            torch_cute_ops.mm_fp4_weight_only(a[:, 1:], b, scale)
    assert not collected.refused and len(collected.kernels[SM90]) == 1 and collected.served == {"mm_fp4_weight_only"}
    with CollectKernels(ARCHS["sm_120a"]) as collected:
        torch_cute_ops.mm_fp4_weight_only(a, b, scale, backend="wgmma")
    ((op, error),) = collected.refused
    assert op == "mm_fp4_weight_only" and "wgmma" in str(error) and not collected.kernels and not collected.served
