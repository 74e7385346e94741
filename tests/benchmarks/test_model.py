"""Test the steps and tables of `python -m benchmarks model`."""

import copy
import dataclasses
import functools
import json

import pytest
import torch
import torch.nn.functional as F
from support.fake_device import FakeDevice
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM

from benchmarks import compare, layer, llama, model, performance
from torch_cute_ops.nn import QuantLinear

CPU = torch.device("cpu")
WIDTHS = layer.Widths(hidden=256, qkv=512, attention=256, intermediate=320)  # two query heads, one key head
SMALL = llama.Size(WIDTHS, 2, 64, llama.PARTS)
W4A16 = "nvfp4/16bit"


def cells(text):
    """Return the cells of each row of the printed tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def bench(result=None, **given):
    result = result or {"rows": [], "memory": [], "logits": [], "kernels_after_warmup": {}, "seconds": {}, "failed": {}}
    labels, rest = [W4A16], {"attention": "sdpa", "device": CPU, "backend": FakeDevice([1.0]), **given}
    one = model.Bench("8B", SMALL, llama.PARTS, labels, [1], 9, 12, result=result, **rest)
    result["failed"].setdefault(one.name, {})
    return one


# Timed calls


class Called(TorchDispatchMode):
    """Dispatch mode that records which operators are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize(
    ("attention", "label", "fuse"), [(llama.UNMASKED, W4A16, False), ("sdpa", "bf16", False), ("sdpa", W4A16, True)]
)
def test_a_decode_step(attention, label, fuse, monkeypatch):
    """Check that each decode step returns the same logits as a forward pass over all tokens, and that it does not
    synchronise with the device."""
    llama.register_unmasked()
    served = llama.build(label, SMALL.config(attention=attention), CPU, fuse=fuse)
    ids = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(1))
    context = llama.Context(served.config, 3, 9, CPU)
    assert all(0.8 < each.keys.float().std() < 1.2 for each in context.cache.layers)
    context.taken.zero_()
    llama.forward(served, ids[:, :-1], context.cache)
    step = llama.DecodeStep(served, context, 3)
    masks = []
    attend = F.scaled_dot_product_attention

    def noted(*args, attn_mask=None, **given):
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **given)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    for _ in range(3):
        step.ids.copy_(ids[:, -1:])
        with Called() as called:
            got = step()
        assert step.ids.tolist() == got[:, -1].argmax(-1, keepdim=True).tolist()
    assert not called.names & {"_local_scalar_dense", "is_nonzero", "nonzero", "lift_fresh"}
    assert ("qkv_norm_rope_append" in called.names) == fuse
    assert all((mask is None) == (attention == llama.UNMASKED) for mask in masks) and len(masks) == 3 * 2
    whole = served(ids, use_cache=True)
    want = whole.logits[:, -1:]
    # The first layer's keys depend only on tokens and their positions, so both caches must contain the same keys.
    new, old = (one.layers[0].keys[:, :, -1] for one in (context.cache, getattr(whole, "cache", whole.past_key_values)))
    torch.testing.assert_close(new, old, rtol=2**-6, atol=2**-8)
    assert got.shape == want.shape == (3, 1, 64)
    assert model.cosines(got, want).min() > 0.9995
    assert model.cosines(got, want.roll(1, 0)).max() < 0.9


@torch.no_grad()
def test_a_compiled_decode_step(monkeypatch):
    """Check that one compiled graph serves all decode steps, and that its results equal the results of eager code."""
    llama.register_unmasked()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    one = bench(is_compiled=True)
    served = llama.build(W4A16, SMALL.config(attention=llama.UNMASKED), CPU)
    context = llama.Context(served.config, 3, 9, CPU)
    steps = [llama.DecodeStep(made, context, 3) for made in (served, one.as_called(served))]
    want, got = steps[0](), steps[1]()
    assert torch.equal(steps[1](), steps[0]())  # the second step decodes the next tokens
    assert torch.equal(got, want) and counter.frame_count == 1
    assert bench().as_called(served) is served


def test_sizes():
    """Check the models' sizes against the configurations of Llama 3.1."""
    for name, heads, layers, wide in (("8B", 32, 32, 14336), ("70B", 64, 80, 28672)):
        config = llama.MODELS[name].config()
        assert (config.hidden_size, config.intermediate_size) == (heads * 128, wide)
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (heads, 8, 128)
        assert (config.num_hidden_layers, config.vocab_size) == (layers, 128256)


@torch.no_grad()
def test_logits():
    """Check the smallest cosine similarity of a token's logits against two references: transformers' model with decoded
    weights, and a separate formula."""
    found = bench()
    torch.manual_seed(7)
    found.logits()
    torch.manual_seed(7)
    ids = torch.randint(64, (1, model.LOGIT_TOKENS))
    merged = llama.build(W4A16, SMALL.config(), CPU)
    apart = llama.build(W4A16, SMALL.config(), CPU, merge=False)
    twin = AutoModelForCausalLM.from_config(SMALL.config(), dtype=torch.bfloat16)
    for name, parameter in twin.named_parameters():
        owner = apart.get_submodule(name.rpartition(".")[0])
        parameter.copy_(owner.dequantize(torch.bfloat16) if isinstance(owner, QuantLinear) else owner.weight)
    got, want = (each(ids, use_cache=False).logits[0].double() for each in (merged, twin))
    exact = twin.float()(ids, use_cache=False).logits[0].double()

    def least(one, other):
        each = (one * other).sum(-1) / (one.square().sum(-1) * other.square().sum(-1)).sqrt()
        return pytest.approx(each.min().item(), abs=1e-7)

    (row,) = found.result["logits"]
    assert (row["model"], row["label"]) == ("8B", W4A16)
    assert row["cosine"] == least(got, want) and 0.999 < row["cosine"] < 1
    assert row["to_fp32"] == least(got, exact) and row["bf16_to_fp32"] == least(want, exact)
    assert row["bf16_to_fp32"] > 0.9999 > 0.999 < row["to_fp32"]
    assert not found.result["failed"]["8B"]


def test_extrapolation():
    """Check the extrapolation to all layers of a model that takes 2 ms per layer and 6 ms for the rest."""
    assert model.extrapolated({2: 10.0, 6: 18.0}, 80) == pytest.approx(166.0)
    assert model.extrapolated({6: 18.0, 2: 10.0}, 2) == pytest.approx(10.0)


# Whole run


class Clock(FakeDevice):
    """Simulated clock: an eager run takes 1 ms, and a graph replay 1 ms plus its costs."""

    def mark(self):
        self.now += 1000.0
        return self.now


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Measure models with small sizes; return the exit status and the result."""
    monkeypatch.setattr(model.environment, "collect", lambda device: {"gpu": "made up"})
    monkeypatch.setattr(model.environment, "headline", lambda found: found["gpu"])
    monkeypatch.setattr(llama, "LONGEST", 4)
    monkeypatch.setattr(llama, "NEW", 3)
    monkeypatch.setattr(llama, "CONTEXT", 9)
    monkeypatch.setattr(llama, "TOKENS", 12)
    few = dataclasses.replace(SMALL, layers=4, bf16_layers=(1, 2), parts=("memory", "decode"))
    monkeypatch.setattr(llama, "MODELS", {"8B": SMALL, "70B": few})

    def measured(costs, *arguments):
        options = model.parse([*arguments, "--output", str(tmp_path), "--batch", "1"])
        status = model.measure_models(options, CPU, Clock(costs))
        return status, json.loads((tmp_path / "model.json").read_text()), (tmp_path / "model.md").read_text()

    return measured


def test_a_run(run, tmp_path, capsys):
    """Check the times of decode steps. A step of the small model takes 3 ms in W4A16 and 5 ms in bf16. A step of the
    70B model takes 3 ms in W4A16; in bf16 it takes 5 ms with one layer and 9 ms with two layers, so 17 ms are
    extrapolated for four layers."""
    status, result, text = run([2000.0, 4000.0, 2000.0, 4000.0, 8000.0])
    assert status == 0 and "8B, decode, batch 1, context 9: nvfp4/16bit 3.00, bf16 5.00 ms" in capsys.readouterr().out
    rows = {(row["model"], row["part"]): row["variants"] for row in result["rows"]}
    times = {key: {label: each["us"] for label, each in found.items()} for key, found in rows.items()}
    assert times["8B", "decode"] == pytest.approx({W4A16: 3000, "bf16": 5000})
    assert times["8B", "prefill"] == pytest.approx({W4A16: 1000, "mxfp4/fp8": 1000, "bf16": 1000})
    assert times["70B", "decode"] == pytest.approx({W4A16: 3000, "bf16": 17000})
    assert rows["70B", "decode"]["bf16"]["by_layers"] == {"1": 5000.0, "2": 9000.0}
    body = cells(text)
    assert body[0] == [
        *("model", "what", "bf16 ms", "nvfp4/16bit ms", "mxfp4/fp8 ms", "bf16 / nvfp4/16bit", "bf16 / mxfp4/fp8")
    ]
    assert body[2] == ["8B", "decode, batch 1, context 9", "5.00", "3.00", "–", "1.67", "–"]
    assert body[3] == ["8B", "prefill, 12 tokens", "1.00", "1.00", "1.00", "1.00", "1.00"]
    assert body[5] == ["70B", "decode, batch 1, context 9", "17.0*", "3.00", "–", "5.67", "–"]
    assert [row[:2] for row in body if row[-1] == "eager"] == [["8B", W4A16], ["8B", "bf16"]]
    # A weight takes 4.5 bits per element; embeddings and lm_head are bf16. The remaining bytes are norms and the
    # factors of merged layers.
    held = {(each["model"], each["label"]): each["bytes"] for each in result["memory"]}
    weights = 2 * (512 * 256 + 256 * 256 + 3 * 320 * 256) * 0.5625 + 2 * 64 * 256 * 2
    assert 0 < held["8B", W4A16] - weights < 0.03 * weights
    assert result["memory"][0]["peak_above"] is None
    # Marks, and other commands that read the file
    ((name, notes, gpu, marks),) = performance.measured(tmp_path)
    assert (name, notes, gpu) == ("model", layer.NOTES, "made up")
    verdicts = {mark.name: mark.passed for mark in marks}
    assert verdicts["8B, decode, batch 1, context 9, nvfp4/16bit: bf16 / ours"] is False
    assert verdicts["70B, decode, batch 1, context 9, nvfp4/16bit: bf16 / ours"] is True
    assert verdicts["8B, prefill, 12 tokens, nvfp4/16bit: bf16 / ours"] is True
    assert verdicts["8B, prefill, 12 tokens, mxfp4/fp8: bf16 / ours"] is False
    assert verdicts["8B, nvfp4/16bit: graphs recompiled by torch, 4 tokens"] is None
    new = copy.deepcopy(result)
    new["rows"][0]["variants"][W4A16]["us"] *= 1.5
    found, slower = compare.compared("model", result, new, 0.02)
    assert slower == 1 and "5 cases" in found and "SLOWER" in found.split("nvfp4/16bit, 8B, decode")[1].splitlines()[0]


# Marks
