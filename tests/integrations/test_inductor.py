"""The Inductor pass within the whole compiler, and on Hugging Face models."""

import copy

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from support.inductor_graphs import (
    EPS,
    Compiler,
    H,
    assert_equal,
    compiled,
    fresh,  # noqa: F401  (a fixture)
    llama_norm,
    numbers,
)
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

import torch_cute_ops as tco
import torch_cute_ops.nn
from torch_cute_ops.integrations import inductor
from torch_cute_ops.integrations._inductor_graph import named_arguments


class Marks(CustomGraphPass):
    """Stand-in for another party's pass: it negates the factor 2 of products."""

    def __call__(self, graph):
        for node in graph.nodes:
            if node.target is torch.ops.aten.mul.Tensor and node.args[1] == 2:
                node.args = (node.args[0], -2)

    def uuid(self):
        return "marks"


def test_compiled_by_inductor(device):
    """Compile a function with Inductor, with our pass as its custom pass. Our pass runs another pass first."""
    x, weight = numbers(4, H, device=device), numbers(H, device=device)

    def layer(x, weight):
        return tco.fp8_quantize(llama_norm(x * 2, weight))

    options = {"post_grad_custom_pre_pass": inductor.FuseQuantization(Marks())}
    with torch.no_grad():
        got = torch.compile(layer, fullgraph=True, options=options)(x, weight)
    assert_equal(got, tco.rmsnorm_fp8quant(x * -2, weight, eps=EPS))


@pytest.mark.slow
def test_a_residual_that_is_read_before(device):
    """Check ops that update a residual in place, if another node reads the residual before the first update. One
    dimension of the residual is of size 1, and Inductor has already chosen this dimension's stride."""
    weight, (codes, scale) = numbers(H, device=device), tco.fp4_quantize(numbers(H, H, device=device) / H**0.5)

    def layers(table, ids):
        residual = F.embedding(ids, table)
        y = torch.tanh(F.layer_norm(residual, (H,)))
        for _ in range(3):
            residual = residual + y
            norm = llama_norm(residual, weight).flatten(0, 1)
            y = tco.mm_fp4_weight_only(norm, codes.t(), scale).view(residual.shape)
        return residual + y

    given = numbers(8, H, device=device), torch.tensor([[3], [1], [4]], device=device)
    options = {"post_grad_custom_pre_pass": inductor.FuseQuantization()}
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(layers, fullgraph=True, dynamic=False, options=options), *given)
    assert code.count("cute.add_rmsnorm.default(") == 3
    assert F.cosine_similarity(got.double().flatten(), layers(*given).double().flatten(), 0) > 0.999


@pytest.mark.gpu
def test_inductors_kernels_overlap_with_ours():
    """Check that Inductor's kernels and our kernels may overlap. With ``triton.enable_pdl`` a kernel starts before its
    predecessor ends. Results must stay bitwise equal, even in a captured graph. GEMMs read their weights early, because
    the weights are static."""
    width, layers, rows = 1024, 12, 3
    weights = [tco.fp4_quantize(numbers(width, width, device="cuda") / width**0.5) for _ in range(layers)]

    def chain(x, bias):
        total = x
        for codes, scale in weights:
            y = F.rms_norm(total * 0.5 + bias, (width,))  # Inductor computes a norm without a weight
            y = tco.mm_fp4_weight_only(y, codes.t(), scale, static_weight=True)
            total = total + torch.sin(y.roll(1, -1))
        return total

    def captured(options):
        torch._dynamo.reset()
        run = torch.compile(chain, fullgraph=True, dynamic=False, options=options)
        x, bias = numbers(rows, width, device="cuda"), numbers(width, device="cuda")
        for _ in range(2):
            run(x, bias)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run(x, bias)
        return graph, x, bias, result

    with torch.no_grad():
        plain, overlapping = captured({}), captured({"triton.enable_pdl": True})
        for _ in range(200):
            given = numbers(rows, width, device="cuda"), numbers(width, device="cuda")
            for graph, x, bias, _ in (plain, overlapping):
                x.copy_(given[0])
                bias.copy_(given[1])
                graph.replay()
            assert torch.equal(plain[3], overlapping[3]) and plain[3].isfinite().all()


def test_enable():
    ours, marks = inductor.FuseQuantization, Marks()

    def plain(graph):
        pass

    with inductor_config.patch(post_grad_custom_pre_pass=marks):
        inductor.enable()
        first = inductor_config.post_grad_custom_pre_pass
        inductor.enable()
        assert inductor_config.post_grad_custom_pre_pass is first
        assert isinstance(first, ours) and first.before == (marks,)
        inductor.disable()
        assert inductor_config.post_grad_custom_pre_pass is marks
        with pytest.raises(RuntimeError, match=r"post_grad_custom_pre_pass is .*Marks"):
            inductor.disable()
    with inductor_config.patch(post_grad_custom_pre_pass=None):
        inductor.enable()
        inductor.disable()
        inductor.disable()
        assert inductor_config.post_grad_custom_pre_pass is None
    assert ours().uuid() == ours().uuid() is not None
    assert ours(marks).uuid() == (*ours().uuid(), "marks")
    assert ours(plain).uuid() is None and ours([marks, plain]).uuid() is None


# Hugging Face's Llama


def small_llama(dtype):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.fixture(scope="module")
def llama():
    """Return a Llama with FP4 activations, in which q, k and v, and gate and up, are merged."""
    model = small_llama(torch.float32)
    ids = torch.randint(1, 96, (2, 7))
    tco.nn.quantize_(model, "nvfp4", activations="fp4", calibrate=lambda model: model(ids))
    return tco.nn.merge_(model), ids


# No addition precedes the first norm, no norm precedes o_proj, and lm_head is not quantised.
LLAMA_NODES = {"rmsnorm_fp4quant": 1, "add_rmsnorm_fp4quant": 3, "silu_mul_fp4quant": 2, "fp4_quantize": 2}


def assert_one_residual(graph):
    """Check that all additions overwrite the result of the embedding, and that nothing copies it."""
    updated = [node.args[1] for node in graph.graph.nodes if "add_rmsnorm" in str(node.target)]
    assert len(updated) == 3 and len({*updated}) == 1 and "embedding" in str(updated[0].target)
    copying = (torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten.copy.default)
    assert not any(user.target in copying for user in updated[0].users)


def test_llama_generates_the_same_tokens(llama):
    """Check that the fused model generates the same tokens as the unfused model. Both models compute in float32, in
    which fusing skips no rounding that could change a code."""
    from transformers import CompileConfig

    model, ids = llama
    given = {"do_sample": False, "max_new_tokens": 6, "cache_implementation": "static"}
    want = model.generate(ids, **given, disable_compile=True)
    compiler = Compiler()
    # Compile a function instead of the model, because generate copies its configuration.
    whole = CompileConfig(fullgraph=True, backend=lambda *given: compiler(*given), mode=None)
    whole._compile_all_devices = True
    with inductor_config.patch(post_grad_custom_pre_pass=inductor.FuseQuantization()):
        got = model.generate(ids, **given, compile_config=whole)
    assert torch.equal(got, want)
    assert compiler.quantising() == LLAMA_NODES and len(compiler.graphs) == 1
    assert_one_residual(compiler.graphs[0])


def test_llama_with_16_bit_activations():
    """Check that the pass replaces the RMSNorms of a model with quantised weights and 16-bit activations."""
    model = small_llama(torch.bfloat16)
    tco.nn.merge_(tco.nn.quantize_(model, "nvfp4", activations="16bit"))
    ids = torch.randint(1, 96, (2, 7))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        got, compiler = compiled(lambda ids: model(ids, use_cache=False).logits, ids)
    # The last norm precedes lm_head, which is not quantised.
    assert compiler.ours() == {"rmsnorm": 1, "add_rmsnorm": 3, "mm_fp4_weight_only": 8}
    assert_one_residual(compiler.graphs[0])
    assert F.cosine_similarity(got.double().flatten(), want.double().flatten(), 0) > 0.999


def test_gemma():
    """Check that the norms of Gemma 3, which multiply by 1 + weight, and its gates with GELU are fused."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=96, max_position_embeddings=64, pad_token_id=0, sliding_window=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(std=0.1)
    ids = torch.randint(1, 96, (2, 7))
    tco.nn.quantize_(model, "nvfp4", activations="fp4", calibrate=lambda model: model(ids))
    tco.nn.merge_(model)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        got, compiler = compiled(lambda ids: model(ids, use_cache=False).logits, ids)
    assert compiler.quantising() == LLAMA_NODES
    fused = [node for node in compiler.graphs[0].graph.nodes if "quant" in str(node.target)]
    named = [named_arguments(node) for node in fused if "silu" in str(node.target) or "rmsnorm" in str(node.target)]
    assert len(named) == 6
    assert all(each.get("gate") == "gelu_tanh" or each.get("weight_plus_one") for each in named)
    assert F.cosine_similarity(got.double().flatten(), want.double().flatten(), 0) > 0.999


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "activations"), [("nvfp4", "16bit"), ("fp8_block", "auto")])
def test_llama_decodes_by_inductor(scheme, activations, device):
    """Decode one token for each of several sequences with a model compiled by Inductor. One dimension of the residual
    is of size 1."""
    model = small_llama(torch.bfloat16)
    tco.nn.merge_(tco.nn.quantize_(model, scheme, activations=activations))
    model, ids = model.to(device), torch.randint(1, 96, (3, 1), device=device)
    options = {"post_grad_custom_pre_pass": inductor.FuseQuantization()}
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        got = torch.compile(model, dynamic=False, options=options)(ids, use_cache=False).logits
    assert F.cosine_similarity(got.double().flatten(), want.double().flatten(), 0) > 0.99


def test_llama_in_bfloat16(llama):
    model, ids = llama
    model = copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        got, compiler = compiled(lambda ids: model(ids, use_cache=False).logits, ids)
    assert compiler.quantising() == LLAMA_NODES
    assert_one_residual(compiler.graphs[0])
    assert F.cosine_similarity(got.double().flatten(), want.double().flatten(), 0) > 0.99
