"""Helpers for tests of the Inductor pass: run a graph after Inductor's passes without code generation, and compute
RMSNorms with the operations of known models."""

import collections

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._dynamo.utils import detect_fake_mode
from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx
from torch._inductor.virtualized import V

from torch_cute_ops.integrations import inductor

H = 64
EPS = 1e-5


@pytest.fixture(autouse=True)
def fresh():
    """Reset the compiler and the seed before each test."""
    torch._dynamo.reset()
    torch.manual_seed(0)


class Compiler:
    """Compiler backend that applies Inductor's passes and then runs the graph directly, without code generation, so
    that no C++ compiler is needed."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, module, inputs):
        return compile_fx(module, inputs, inner_compile=self.inner)

    def inner(self, graph, inputs, **_):
        with V.set_fake_mode(detect_fake_mode(inputs)):
            _recursive_post_grad_passes(graph, is_inference=True)
        self.graphs.append(graph)

        def run(arguments):
            return graph(*arguments)

        run._boxed_call = True
        return run

    def calls(self, index: int = -1) -> list[str]:
        """Return the names of a graph's calls, except views and similar calls."""
        nodes = self.graphs[index].graph.nodes
        return [str(node.target).removesuffix(".default") for node in nodes if node.op == "call_function"]

    def quantising(self, index: int = -1) -> dict[str, int]:
        """Return the number of calls of each of our quantising ops."""
        return {name: count for name, count in self.ours(index).items() if "quant" in name}

    def ours(self, index: int = -1) -> dict[str, int]:
        """Return the number of calls of each of our ops."""
        names = [name for name in self.calls(index) if name.startswith("cute.")]
        return dict(collections.Counter(name.removeprefix("cute.") for name in names))


def compiled(function, *inputs):
    compiler = Compiler()
    with inductor_config.patch(post_grad_custom_pre_pass=inductor.FuseQuantization()), torch.no_grad():
        results = torch.compile(function, backend=compiler, fullgraph=True)(*inputs)
    return results, compiler


def assert_equal(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        # Copy to contiguous strides, because strides of dimensions of size 1 may differ.
        assert torch.equal(*(each.clone(memory_format=torch.contiguous_format).view(torch.uint8) for each in (a, b)))


def numbers(*shape, device="cpu", dtype=torch.bfloat16):
    return torch.randn(shape, dtype=dtype, device=device)


def llama_norm(x, weight):
    """Compute RMSNorm as Hugging Face's Llama does."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def late_norm(x, weight):
    """Compute RMSNorm as gpt-oss does, with a single rounding at the end."""
    wide = x.to(torch.float32)
    return (weight * (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + EPS))).to(x.dtype)


def torch_norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


NORMS = {"llama": llama_norm, "gpt-oss": late_norm, "torch": torch_norm}
by_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
