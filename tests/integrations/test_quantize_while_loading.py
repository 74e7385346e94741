"""``from_pretrained(..., quantize=...)``: quantise a 16-bit checkpoint layer by layer while it is loaded."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3MoeConfig

from torch_cute_ops.integrations import transformers as integration
from torch_cute_ops.nn import QuantExperts, QuantLinear, merge_, quantize_, summary
from torch_cute_ops.nn import quantize as quantize_module

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),  # q, k and v with biases
    "mixtral": MixtralConfig(**{**SIZES, "intermediate_size": 128}, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, head_dim=32, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2),
    "gpt-oss": GptOssConfig(**{**SIZES, "intermediate_size": 64}, head_dim=32, num_local_experts=4),
}


def saved(name: str, path: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Save a model as transformers does, with random biases, and return it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "bias" in key:
                parameter.normal_()
    model.save_pretrained(path)
    return model


def load(path: Path, quantize: str | None = "nvfp4", **given) -> nn.Module:
    return integration.from_pretrained(path, quantize=quantize, device="cpu", progress=False, **given)


def assert_same(got: nn.Module, want: nn.Module) -> None:
    """Check that all tensors are equal bit for bit."""
    expected = want.state_dict()
    assert got.state_dict().keys() == expected.keys()
    for name, tensor in got.state_dict().items():
        other = expected[name]
        assert tensor.dtype == other.dtype and torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("llama", "nvfp4"),
        ("llama-tied", "mxfp4"),
        ("qwen2", "fp8_channel"),
        ("mixtral", "nvfp4"),
        ("qwen3-moe", "fp8_block"),
        ("gpt-oss", "mxfp4"),
    ],
)
def test_equals_the_quantised_model(name, scheme, tmp_path):
    """Check that the loaded model equals ``quantize_`` of the whole model bit for bit."""
    whole = saved(name, tmp_path)
    got = load(tmp_path, scheme)
    want = merge_(quantize_(whole, scheme))
    assert_same(got, want)
    assert not any(parameter.requires_grad for parameter in got.parameters())
    assert summary(got).replaced == summary(want).replaced and summary(got).function == "from_pretrained"
    assert summary(got).bytes_before == summary(want).bytes_before
    kinds = [type(module) for module in got.modules() if isinstance(module, (QuantLinear, QuantExperts))]
    assert kinds == [type(module) for module in want.modules() if isinstance(module, (QuantLinear, QuantExperts))]
    assert (QuantExperts in kinds) == (name in ("mixtral", "qwen3-moe", "gpt-oss"))
    ids = torch.randint(1, 96, (2, 7))
    with torch.no_grad():
        assert torch.equal(got(ids).logits, want(ids).logits)


def test_float32_checkpoints(tmp_path):
    """Check that weights of a float32 checkpoint are rounded to the model's dtype before they are quantised."""
    saved("llama", tmp_path, torch.float32)
    got = load(tmp_path, dtype=torch.bfloat16)
    plain = integration.from_pretrained(tmp_path, device="cpu", progress=False, dtype=torch.bfloat16)
    assert type(plain.model.layers[0].mlp.up_proj) is nn.Linear
    assert_same(got, merge_(quantize_(plain, "nvfp4")))


def test_layers_that_stay(tmp_path):
    """Check that ``ignore`` and ``filter_fn`` select layers as in ``quantize_``, with the same warnings."""
    whole = saved("llama", tmp_path)
    given = {"ignore": ("lm_head", "*.down_proj", "model.layers.0.self_attn.*"),
             "filter_fn": lambda module, name: "layers.1.mlp.up" not in name}  # fmt: skip
    got = load(tmp_path, merge=False, **given)
    assert_same(got, quantize_(whole, "nvfp4", **given))
    layers = got.model.layers
    assert type(layers[0].self_attn.q_proj) is type(layers[1].mlp.up_proj) is type(got.lm_head) is nn.Linear
    assert isinstance(layers[1].self_attn.q_proj, QuantLinear) and isinstance(layers[1].mlp.gate_proj, QuantLinear)
    with pytest.warns(UserWarning, match=r"from_pretrained: .*mlp\.nothing") as warned:
        load(tmp_path, ignore=("lm_head", "mlp.nothing"))
    assert warned[0].filename == __file__
    assert isinstance(load(tmp_path, ignore=()).lm_head, QuantLinear)


def test_tensors_that_the_model_lacks(tmp_path):
    """Check that a pattern in ``ignore`` that fits only a checkpoint tensor causes no warning."""
    from safetensors.torch import load_file, save_file

    saved("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "mtp.weight": torch.ones(3)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"does not use mtp\.weight"):
        load(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(load(tmp_path, ignore=("lm_head", "mtp.*")).model.layers[0].mlp.down_proj, QuantLinear)


def test_errors(tmp_path):
    saved("llama", tmp_path / "x")
    from torch_cute_ops import checkpoint

    checkpoint.save(load(tmp_path / "x"), tmp_path / "y", "modelopt")
    for given, message in (
        (
            {"path": tmp_path / "y"},
            r"quantize is 'nvfp4', but \S+ is quantised already, by modelopt; leave quantize out",
        ),
        ({"quantize": "int4"}, r"quantize is 'int4'; expected one of 'nvfp4', 'mxfp4'"),
        ({"activations": "fp4"}, r"activations='fp4' in NVFP4 need a calibration; load the model without quantize"),
        ({"activations": "int8"}, r"activations is 'int8'; expected one of 'auto', '16bit'"),
        ({"quantize": None, "filter_fn": lambda *_: True}, r"filter_fn is given, but quantize is None"),
    ):
        with pytest.raises(ValueError, match=message):
            load(**{"path": tmp_path / "x", **given})
    model = load(tmp_path / "x", activations={"nvfp4": "fp8"})
    assert model.model.layers[0].mlp.down_proj.activations == "fp8"


def live_bytes(dtypes: tuple[torch.dtype, ...]) -> int:
    """Return the bytes of all tensors of these dtypes that have been created since ``gc.freeze``, except tensors that
    are mapped from a file."""
    storages = {}
    for each in gc.get_objects():
        # Count only plain tensors, because other tensors, such as fake tensors of other tests, own no memory.
        if type(each) in (torch.Tensor, nn.Parameter) and each.dtype in dtypes and not each.is_meta:
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(("name", "scheme"), [("llama", "nvfp4"), ("mixtral", "mxfp4")])
def test_never_the_whole_model(name, scheme, tmp_path, monkeypatch):
    """Check that, whenever a layer is quantised, no other layer's weight exists in 16 or 32 bits."""
    whole = saved(name, tmp_path)
    of_layers = {
        key: parameter.nbytes
        for key, parameter in whole.named_parameters()
        if parameter.dim() > 1 and "embed" not in key and "lm_head" not in key
    }
    others = sum(each.nbytes for each in whole.parameters()) - sum(of_layers.values())
    largest = max(of_layers.values()) + (sum(of_layers.values()) // 2 if name == "mixtral" else 0)
    del whole
    floats = (torch.bfloat16, torch.float16, torch.float32)
    # Hide all older objects from ``gc.get_objects``, because earlier tests leave millions of objects, and searching
    # through them takes a second.
    gc.collect()
    gc.freeze()
    seen = []
    cls = quantize_module.SCHEMES[scheme]
    original = cls.from_float.__func__

    def watched(kind, linear, **given):
        seen.append(live_bytes(floats))
        return original(kind, linear, **given)

    monkeypatch.setattr(cls, "from_float", classmethod(watched))
    load(tmp_path, scheme)
    assert len(seen) >= 2 * 7
    assert max(seen) <= others + largest + 10_000
    assert others + sum(of_layers.values()) > others + largest + 10_000  # the whole model would exceed the bound
