"""``fuse_attention_``: attention blocks of transformers that call ``qkv_norm_rope_append``."""

from __future__ import annotations

import copy
import io
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.compiling import fresh_compiler  # noqa: F401  (a fixture)
from support.decoded_models import decode_layers
from torch import nn

pytest.importorskip("transformers")
import transformers
from support.transformers_cache import NAME, cached
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    CohereConfig,
    CompileConfig,
    DynamicCache,
    Ernie4_5Config,
    Gemma3TextConfig,
    GenerationConfig,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    StaticCache,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    T5GemmaModuleConfig,
)
from transformers.models.llama import modeling_llama

from torch_cute_ops.integrations.transformers import from_config, fuse_attention_
from torch_cute_ops.nn import QuantLinear, _qkv_steps, merge_, quantize_, summary
from torch_cute_ops.nn.warmup import collect
from torch_cute_ops.runtime.arch import ARCHS

SIZES = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
WINDOW = 12
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),  # q, k and v with biases
    "qwen3": Qwen3Config(**SIZES, head_dim=64),
    "gemma3": Gemma3TextConfig(
        **SIZES, head_dim=64, query_pre_attn_scalar=64, sliding_window=WINDOW, rope_parameters=ROPES,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "cohere": CohereConfig(**SIZES),  # neighbouring elements are pairs
    "glm4": Glm4Config(**SIZES, head_dim=128, partial_rotary_factor=0.5),  # half of each head is rotated
}  # fmt: skip
PROMPT, TOKENS = 9, 17
LONGEST = 20
"""Positions of a static cache."""


def made(config, change=lambda model: None) -> tuple[nn.Module, nn.Module]:
    """Return a quantised model in bfloat16, after ``change(model)``, and transformers' own model with the decoded
    weights in float32. Queries and keys are so large that attention depends on positions."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.normal_(0 if "gemma" in config.model_type else 1, 0.2)
        elif "self_attn" in name:
            parameter.normal_(std=0.08)
    quantize_(model, "nvfp4")
    exact = copy.deepcopy(model)
    decode_layers(exact, torch.float32)
    change(model)
    return merge_(model), exact.float()


IDS = torch.randint(1, 96, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def static_cache(config) -> StaticCache:
    return StaticCache(config=config, max_cache_len=LONGEST)


def dynamic_cache(config) -> DynamicCache:
    return DynamicCache(config=config)


CACHES = {"static": static_cache, "dynamic": dynamic_cache, "none": lambda config: None}


@torch.no_grad()
def logits(model: nn.Module, cache, padding: int = 0) -> torch.Tensor:
    """Return the logits of a prefill and, with a cache, of decode steps: (2, tokens, vocabulary) float64.

    The first ``padding`` tokens of the first sequence are masked.
    """
    device, found = model.device, []
    mask = torch.ones_like(IDS)
    mask[0, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ends = [PROMPT] if cache is None else [PROMPT, *range(PROMPT + 1, TOKENS + 1)]
    for start, end in zip([0, *ends], ends, strict=False):
        given = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        given = {key: value.to(device) for key, value in given.items()}
        found.append(model(IDS[:, start:end].to(device), use_cache=cache is not None, **cached(cache), **given).logits)
    return torch.cat(found, 1).double().cpu()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest relative error of a token's logits."""
    return ((got - want).norm(dim=-1) / want.norm(dim=-1)).max().item()


@pytest.mark.parametrize(
    ("name", "cache"),
    [*((name, "static") for name in CONFIGS), ("qwen3", "dynamic"), ("gemma3", "dynamic"), ("llama", "none")],
)
def test_logits(name, cache, device, monkeypatch):
    """Compare prefill and decode steps with transformers' model in float32, and with the error of the separate steps.

    If all angles of the rotary embedding grow by 5 %, logits differ by more than 0.07.
    """
    config = CONFIGS[name]
    model, exact = made(config)
    model = model.to(device)
    calls = counted(monkeypatch)
    fused = fuse_attention_(copy.deepcopy(model))
    assert len(summary(fused).replaced) == 2 and not summary(fused).left
    want, apart = (logits(each, CACHES[cache](config)) for each in (exact, model))
    assert not calls
    got = logits(fused, CACHES[cache](config))
    assert len(calls) == 2 * (1 if cache == "none" else 1 + TOKENS - PROMPT)
    assert error(apart, want) < 0.03
    assert error(got, want) < 1.2 * error(apart, want)


def counted(monkeypatch) -> list[tuple[int, ...]]:
    """Record the shapes of ``qkv`` in calls of the op."""
    shapes, op = [], _qkv_steps.qkv_norm_rope_append

    def call(qkv, *args, **kwargs):
        shapes.append(tuple(qkv.shape))
        return op(qkv, *args, **kwargs)

    monkeypatch.setattr(_qkv_steps, "qkv_norm_rope_append", call)
    return shapes


def test_a_padded_prompt():
    """Check sequences of different lengths: slots count from the start of the cache, positions from the first token."""
    config, padding = CONFIGS["llama"], 4
    model, exact = made(config)
    want, apart = (logits(each, static_cache(config), padding) for each in (exact, model))
    got = logits(fuse_attention_(model), static_cache(config), padding)
    for each in (got, apart, want):
        each[0, :padding] = 1
    assert error(got, want) < 1.2 * error(apart, want) < 0.04
    assert error(logits(exact, static_cache(config))[:1, padding:], want[:1, padding:]) > 0.1


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_static_caches(name):
    """Check the tensors of a static cache: values with equal bits, keys up to a rounding, and the numbers of tokens."""
    config = CONFIGS[name]
    model, _ = made(config)
    caches = []
    for each in (model, fuse_attention_(copy.deepcopy(model))):
        caches.append(static_cache(config))
        logits(each, caches[-1])
    for i, (want, got) in enumerate(zip(caches[0].layers, caches[1].layers, strict=True)):
        assert torch.equal(got.cumulative_length, want.cumulative_length)
        assert getattr(got, "cumulative_length_int", 0) == getattr(want, "cumulative_length_int", 0)
        assert got.keys.shape == want.keys.shape == (2, 2, WINDOW if got.is_sliding else LONGEST, 64)
        if i == 0:
            assert torch.equal(got.values, want.values)
            torch.testing.assert_close(got.keys, want.keys, rtol=2**-5, atol=2**-5 * want.keys.std().item())


def test_more_tokens_than_a_static_cache_takes():
    """Check that a token beyond the end raises an error instead of overwriting the next sequence's first token."""
    config = CONFIGS["llama"]
    model, cache = fuse_attention_(made(config)[0]), static_cache(config)
    with torch.no_grad():
        model(torch.ones(2, LONGEST, dtype=torch.int64), **cached(cache))
        before = cache.layers[0].keys.clone()
        with pytest.raises(ValueError, match=r"cute::qkv_norm_rope_append: slots holds 40, out of range"):
            model(torch.ones(2, 1, dtype=torch.int64), **cached(cache))
    assert torch.equal(cache.layers[0].keys, before)


def test_generate(fresh_compiler):  # noqa: F811
    """Check that ``generate`` with a static cache compiles the decode step once, to a whole graph, and that it
    generates the tokens of the eager model."""
    model, graphs = fuse_attention_(made(CONFIGS["qwen3"])[0]), []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    whole = CompileConfig(fullgraph=True, backend=keep, mode=None)
    whole._compile_all_devices = True
    how = {"do_sample": False, "max_new_tokens": 6, "cache_implementation": "static"}
    want = model.generate(IDS[:, :5], **how, disable_compile=True)
    assert torch.equal(model.generate(IDS[:, :5], **how, compile_config=whole), want)
    (graph,) = graphs
    steps = [node for node in graph.graph.nodes if "qkv_norm_rope_append" in str(node.target)]
    assert len(steps) == 2
    shared = [[node.args[i] for node in steps] for i in (1, 2, 5)]  # cos_sin, positions and slots
    assert all(first is second for first, second in shared)


def test_served_in_a_paged_cache(monkeypatch):
    """Check ``generate_batch``: each token is the best of transformers' model in float32, up to roundings."""
    model, exact = made(CONFIGS["qwen3"])
    calls = counted(monkeypatch)
    prompts = [[3, 5, 7, 9, 11], [8, 6, 4]]
    served = fuse_attention_(model).generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16),
        progress_bar=False,
    )
    assert calls == [(8, 512)] * 2 + [(2, 512)] * 4
    for prompt, one in zip(prompts, served.values(), strict=True):
        new = one.generated_tokens
        assert len(new) == 3
        with torch.no_grad():
            found = exact(torch.tensor([[*prompt, *new[:-1]]])).logits[0, len(prompt) - 1 :]
        short = found.amax(1) - found[range(3), new]
        assert (short < 0.1 * found.std(1)).all()


def test_copies():
    """Check copies and pickles, and that a second call of ``fuse_attention_`` changes nothing."""
    model = fuse_attention_(made(CONFIGS["gemma3"])[0])
    want = logits(model, static_cache(model.config))
    again = fuse_attention_(copy.deepcopy(model))
    assert len(summary(again).replaced) == 2 and len(again.model._forward_pre_hooks) == 1
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (again, torch.load(file, weights_only=False)):
        attention = other.model.layers[1].self_attn
        assert type(attention) is type(model.model.layers[1].self_attn)
        assert attention.shared_tables is other.model.layers[0].self_attn.shared_tables
        assert attention.shared_tables is not model.model.layers[1].self_attn.shared_tables
        assert torch.equal(logits(other, static_cache(model.config)), want)


def test_one_block():
    """Check a block that is called outside its decoder: each call computes its own tables and slots."""
    config = CONFIGS["qwen3"]
    model, cache = fuse_attention_(made(config)[0]), static_cache(config)
    hidden = torch.randn(2, 1, 256).bfloat16()
    embeddings = model.model.rotary_emb(hidden, torch.tensor([[3]]))
    with torch.no_grad():
        for _ in range(2):
            model.model.layers[0].self_attn(hidden, embeddings, None, cache)
    first, second, *rest = cache.layers[0].keys.unbind(2)
    assert torch.equal(first, second) and first.abs().max() > 0.1 and not any(each.any() for each in rest)


@pytest.mark.parametrize("way", ["layers", "export", "threads"])
def test_other_ways_to_call(way, fresh_compiler):  # noqa: F811
    """Check layers that are compiled one by one, an exported program, and threads that share a model."""
    model = fuse_attention_(made(CONFIGS["qwen3"])[0])
    want = logits(model, None if way == "export" else static_cache(model.config))
    if way == "export":
        with torch.no_grad():
            program = torch.export.export(model, (IDS[:, :PROMPT],), {"use_cache": False}).module()
            got = program(IDS[:, :PROMPT], use_cache=False).logits.double()
        assert torch.equal(got, want)
    elif way == "threads":
        with ThreadPoolExecutor(2) as pool:
            results = [pool.submit(logits, model, static_cache(model.config)) for _ in range(2)]
        assert all(torch.equal(each.result(), want) for each in results)
    else:
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="eager")
        # In compiled code, transformers' attention sums in another order.
        assert error(logits(model, static_cache(model.config)), want) < 0.01


@pytest.mark.parametrize("case", ["training", "gradients", "float32"])
def test_calls_that_compute_separate_steps(case, monkeypatch):
    model, _ = made(CONFIGS["qwen3"])
    fused, calls = fuse_attention_(copy.deepcopy(model)), counted(monkeypatch)
    results = []
    for each in (model, fused):
        each.train(case == "training")
        if case == "float32":
            each.float()
            quantised = [layer for layer in each.modules() if isinstance(layer, QuantLinear)]
            for layer in quantised:  # a layer that takes float32
                layer.forward = lambda x, layer=layer: nn.functional.linear(x, layer.dequantize(torch.float32))
        attention, projected = each.model.layers[0].self_attn, []
        attention.q_norm.weight.requires_grad_(case == "gradients")
        attention.qkv_proj.register_forward_hook(lambda *args, projected=projected: projected.append(args))
        result = each(IDS).logits
        assert len(projected) == 1
        if case == "gradients":
            result.float().square().mean().backward()
            results.append(each.model.layers[0].self_attn.q_norm.weight.grad)
        results.append(result)
    half = len(results) // 2
    assert all(map(torch.equal, results[:half], results[half:])) and not calls


# Blocks that stay unchanged


def renamed(forward):
    """Return the ``forward`` of a block with the installed transformers' name of the cache's parameter."""

    def other(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        return forward(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)

    return forward if NAME == "cache" else other


class Varied(modeling_llama.LlamaAttention):
    """Llama's attention in steps that subclasses change."""

    def input_of_keys(self, hidden_states):
        return hidden_states

    def clamped(self, projected):
        return projected

    def scaled(self, q, positions):
        return q

    @renamed
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        # Project here, because after ``merge_`` only the ``self`` of ``forward`` has the separate layers.
        projections = (
            self.q_proj(hidden_states),
            self.k_proj(self.input_of_keys(hidden_states)),
            self.v_proj(hidden_states),
        )
        q, k, v = (self.clamped(each).view(shape).transpose(1, 2) for each in projections)
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        q = self.scaled(q, kwargs.get("position_ids"))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        found, weights = attention(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(found.flatten(2)), weights


class Clamped(Varied):
    """Attention with a clamp of large queries, as with ``clip_qkv``."""

    def clamped(self, projected):
        return projected.clamp(-100, 100)


class ScaledByPosition(Varied):
    """Attention that scales queries at positions from 8,192 on, if it gets the positions."""

    def scaled(self, q, positions):
        return q if positions is None else q * (1 + 0.1 * (positions >= 8192).to(q.dtype))[:, None, :, None]


class TwoInputs(Varied):
    """Attention whose keys are projected from another tensor than queries and values."""

    def input_of_keys(self, hidden_states):
        return -hidden_states


class Rescaled(modeling_llama.LlamaAttention):
    """Attention whose scale depends on the number of tokens."""

    @renamed
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        self.scaling = hidden_states.shape[1] ** -0.5
        given = (hidden_states, position_embeddings, attention_mask)
        return modeling_llama.LlamaAttention.forward(self, *given, cache, **kwargs)


ALL_ATTENTION_FUNCTIONS, eager_attention_forward = AttentionInterface(), modeling_llama.eager_attention_forward


def with_class(kind):
    def change(model):
        model.model.layers[0].self_attn.__class__ = kind

    return change


def with_hook(model):
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: None)


def with_a_hook_of_a_norm(model):
    model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda *_: None)


def with_other_eps(model):
    model.model.layers[0].self_attn.q_norm.variance_epsilon = 1e-3


def nothing(model):
    pass


LEFT = {
    "a clamp": (CONFIGS["llama"], with_class(Clamped), r"its q, k and v differ by \d.\de-\d\d \(relative\)"),
    "a scale of positions": (
        CONFIGS["llama"], with_class(ScaledByPosition), r"its q, k and v differ by \d.\de-0\d \(relative\)"
    ),
    "a scale": (CONFIGS["llama"], with_class(Rescaled), "the arguments of attention depend on the tokens"),
    "a hook": (CONFIGS["qwen3"], with_hook, "a forward hook is registered on it"),
    "a hook of a norm": (CONFIGS["qwen3"], with_a_hook_of_a_norm, "of its Qwen3RMSNorm: a forward hook is registered"),
    "two eps": (CONFIGS["qwen3"], with_other_eps, "the norms of q and k add different numbers to the mean square"),
    "small heads": (LlamaConfig(**SIZES, head_dim=32), nothing, "its heads have 32 elements; expected 64, 80, 96, 128"),
    "norms of rows": (Olmo2Config(**SIZES), nothing, r"its norms have weights \(256,\); expected .* \(64,\)"),
    "no rotation": (
        SmolLM3Config(**SIZES, no_rope_layers=[0, 1]), nothing, r"its q, k and v differ by 1.\de\+00 \(relative\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_blocks_that_stay(case):
    config, change, reason = LEFT[case]
    model = made(config, change)[0]
    want = logits(model, dynamic_cache(config))
    with pytest.warns(UserWarning, match=rf"^fuse_attention_: attention stays unchanged\. .*self_attn.*: {reason}"):
        fuse_attention_(model)
    left = summary(model).left
    assert "model.layers.0.self_attn" in left
    if len(left) == 2:
        assert torch.equal(logits(model, dynamic_cache(config)), want)


def test_cross_attention():
    """Check that projections of cross-attention stay separate, because k and v get the encoder's result, and that only
    blocks that change are merged."""
    modules = {
        name: T5GemmaModuleConfig(**SIZES, head_dim=64, query_pre_attn_scalar=64) for name in ("encoder", "decoder")
    }
    torch.manual_seed(0)
    model = T5GemmaForConditionalGeneration(T5GemmaConfig(**modules, vocab_size=96)).bfloat16().eval()
    quantize_(model.requires_grad_(False), "nvfp4")

    @torch.no_grad()
    def run(each: nn.Module) -> torch.Tensor:
        return each(input_ids=IDS, decoder_input_ids=IDS[:, :5]).logits.double()

    want = run(model)
    fused = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"layers\.0\.cross_attn.*: its forward takes hidden_states, attention_mask"):
        fuse_attention_(fused)
    assert len(summary(fused).replaced) == 4 and len(summary(fused).left) == 2
    for layer in fused.model.decoder.layers:
        assert {"q_proj", "k_proj", "v_proj"} <= {*layer.cross_attn._modules}
        assert "qkv_proj" in layer.self_attn._modules and "gate_proj" in layer.mlp._modules
    assert error(run(fused), want) < 0.02


def test_projections_that_cannot_be_merged():
    """Check that layers with different inputs, hooks or activations stay separate, and that their blocks still run."""
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 3})
    model = from_config(config, device="cpu", merge=False)
    first, second, third = (layer.self_attn for layer in model.model.layers)
    first.__class__ = TwoInputs
    want = logits(model, dynamic_cache(config))
    second.v_proj.register_forward_hook(lambda *_: None)
    third.k_proj.activations = "fp4"
    with pytest.warns(UserWarning) as told:
        fuse_attention_(model)
    third.k_proj.activations = third.q_proj.activations
    for i, reason in enumerate(
        (
            "its forward refuses a trial: RuntimeError: qkv_proj merges layers that were called with different inputs",
            "of its v_proj: a forward hook is registered on it",
            "q_proj, k_proj and v_proj cannot be merged",
        )
    ):
        assert f"model.layers.{i}.self_attn: {reason}" in str(told[0].message)
    assert torch.equal(logits(model, dynamic_cache(config)), want)


def test_unquantised_layers():
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.bfloat16)
    quantize_(model, ignore=("lm_head", "k_proj", "model.layers.1.*"))
    with pytest.warns(UserWarning, match=r"layers\.0\.self_attn: k_proj not quantised; .*: q_proj, k_proj, v_proj not"):
        fuse_attention_(model)
    with pytest.warns(UserWarning, match=r"^fuse_attention_: no attention block in this Linear"):
        fuse_attention_(nn.Linear(2, 2))


def test_a_vision_language_model():
    """Check that only the decoder of a model with a vision tower changes, without a warning."""
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = CONFIGS["gemma3"].to_dict()
    config = transformers.Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    model = from_config(config, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse_attention_(model)
    found = summary(model)
    assert len(found.replaced) == 2 and all("language_model" in name for name in found.replaced)
    ((name, reason),) = found.left.items()
    assert "vision" in name and reason == "no module around it contains a rotary_emb"
    with torch.no_grad():
        result = model(input_ids=IDS, token_type_ids=torch.zeros_like(IDS)).logits
    assert result.isfinite().all()


def test_gpt_oss():
    """Check blocks with attention sinks and with tables of half a head. Their model is on the meta device except for
    the rotary embedding."""
    config = GptOssConfig(**SIZES, head_dim=64, num_local_experts=2, num_experts_per_tok=1)
    model = from_config(config, "mxfp4", device="cpu", ignore=("lm_head", "*.experts"))
    rotary = copy.deepcopy(model.model.rotary_emb)
    model.to("meta")
    model.model.rotary_emb = rotary
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse_attention_(model)
    block = model.model.layers[0].self_attn.attention_block
    assert block.steps.rotary_dim == 64 and block.table == "once"
    assert block.tensors == (("s_aux", "sinks"),)


def test_warmup_compiles_the_kernel():
    model = from_config(CONFIGS["qwen3"], device="cpu")

    def kernels() -> list[str]:
        found = collect(model, (1, 5), ARCHS["sm_90a"]).kernels.values()
        return [str(spec) for specs in found for spec in specs if "qkv_rope" in str(spec)]

    assert not kernels()
    fuse_attention_(model)
    (spec,) = kernels()
    assert "q_norm_dtype=torch.bfloat16" in spec


def test_warmup_of_tables_in_float32():
    """Check that warm-up compiles the kernel for cosines in float32, which Ernie passes, and that the op gets these."""
    model = fuse_attention_(from_config(Ernie4_5Config(**SIZES, head_dim=64), device="cpu"))
    steps = model.model.layers[0].self_attn.qkv_steps
    cos, _ = model.model.rotary_emb(torch.zeros(1, 1, 256).bfloat16(), torch.zeros(1, 1).long())
    assert cos.dtype == steps.table_dtype == torch.float32
    found = collect(model, 1, ARCHS["sm_90a"]).kernels.values()
    (spec,) = (str(each) for specs in found for each in specs if "qkv_rope" in str(each))
    assert "float32" in spec
