"""Graphs that ``torch.fx.symbolic_trace`` records from the ops' Python functions and from modules."""

import inspect

import pytest
import torch
from expected import assert_same
from support.cases import arguments, copied, defined, named, op_cases, plain_sample, run, updated
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import torch_cute_ops
from torch_cute_ops.nn import GatedMLP, NVFP4Linear, QuantExperts, merge, merge_, quantize_
from torch_cute_ops.ops._define import as_tuple


@pytest.mark.parametrize("op", op_cases())
def test_functions(op, device):
    """Record a call whose tensors are all placeholders, and compare the results of the graph with the op's."""
    sample = plain_sample(op, device)
    given = arguments(op, sample)
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    fixed = {name: value for name, value in given.items() if name not in tensors}

    # Generate a program whose parameters are the tensors, so that each becomes a placeholder.
    source = f"def program({', '.join(tensors)}): return call({', '.join(f'{name}={name}' for name in tensors)})"
    namespace = {"call": lambda **unknown: op.function(**unknown, **fixed)}
    exec(source, namespace)
    graph = symbolic_trace(namespace["program"])
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called == [getattr(torch.ops.cute, op.name).default]
    after = copied(named(op, given))
    results = as_tuple(graph(*(after.kwargs[name] for name in tensors)))
    assert_same((*defined(op, after, results), *updated(op, after)), run(op, sample))


def test_outputs_that_are_given():
    def program(x, y, scale):
        torch_cute_ops.fp4_quantize(x, out=(y, scale))
        return torch_cute_ops.rmsnorm(x, torch.ones(64), out=x.clone())

    x = torch.randn(3, 64)
    want = torch_cute_ops.fp4_quantize(x)
    out = tuple(torch.empty_like(each) for each in want)
    assert torch.equal(symbolic_trace(program)(x, *out), torch_cute_ops.rmsnorm(x, torch.ones(64)))
    assert_same(out, want)


def test_wrong_kinds_are_refused_as_before():
    with pytest.raises(TypeError, match=r"block_size is 'x', a str; expected an int"):
        symbolic_trace(lambda x: torch_cute_ops.fp4_quantize(x, block_size="x"))


def modules_called(graph: GraphModule) -> list[str]:
    return [node.target for node in graph.graph.nodes if node.op == "call_module"]


class Attention(nn.Module):
    """Attention whose projections have the same input, so that ``merge_`` merges them."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, n) for n in (64, 32, 32))

    def forward(self, x):
        return self.q_proj(x).relu(), self.k_proj(x) + self.v_proj(x)


@pytest.mark.parametrize("merges", [False, True], ids=["apart", "merged"])
def test_modules(merges):
    """Check that each layer is recorded as one node, which keeps its module."""
    model = quantize_(Attention().bfloat16())
    graph = symbolic_trace(merge_(model) if merges else model)
    assert modules_called(graph) == (["qkv_proj"] if merges else ["q_proj", "k_proj", "v_proj"])
    for shape in ((3, 64), (2, 5, 64), (64,)):
        x = torch.randn(shape).bfloat16()
        assert_same(graph(x), model(x))


def test_experts_and_gated_layers():
    def layers(count, n, k):
        return [NVFP4Linear.from_float(nn.Linear(k, n)) for _ in range(count)]

    gated = GatedMLP(merge(layers(2, 128, 64)), *layers(1, 64, 128))
    experts = QuantExperts(merge(layers(8, 128, 64)), merge(layers(4, 64, 128)), 4)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.experts = gated, experts

        def forward(self, x, ids, weights):
            return self.shared(x) + self.experts(x, ids, weights)

    layer = Layer()
    graph = symbolic_trace(layer)
    assert modules_called(graph) == ["shared", "experts"]
    for rows in (1, 40):
        x, ids = torch.randn(rows, 64).bfloat16(), torch.randint(4, (rows, 2))
        assert torch.equal(graph(x, ids, torch.full((rows, 2), 0.5)), layer(x, ids, torch.full((rows, 2), 0.5)))


def test_a_layer_by_itself():
    """Check that tracing a layer by itself raises an error that says what to trace instead."""
    layer = NVFP4Linear.from_float(nn.Linear(64, 64))
    with pytest.raises(ValueError, match="a NVFP4Linear is one node and is not traced itself"):
        symbolic_trace(layer)
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(symbolic_trace(nn.Sequential(layer))(x), layer(x))


def test_records():
    """Check that ``quantize``, ``linear`` and ``dequantize`` are recorded as one node each."""
    q = torch_cute_ops.quantize(torch.randn(64, 64))
    bias = torch.randn(64)

    def program(x, w):
        made = torch_cute_ops.quantize(w, "mxfp4")
        y = torch_cute_ops.linear(torch_cute_ops.linear(x, q, bias), made)
        return y + torch_cute_ops.dequantize(made).sum(0).bfloat16()

    graph = symbolic_trace(program)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert [targets.count(each) for each in (torch_cute_ops.linear, torch_cute_ops.dequantize)] == [2, 1]
    x, w = torch.randn(3, 64).bfloat16(), torch.randn(64, 64)
    assert torch.equal(graph(x, w), program(x, w))
    assert inspect.signature(graph.forward).parameters.keys() == {"x", "w"}
