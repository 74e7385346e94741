"""Tiny models that ``save`` wrote, served by vLLM on a CPU, and compared with the same checkpoints in transformers."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import serving
import torch
import vllm
from safetensors.torch import load_file, save_file
from serving import OPTIONS, OURS, PROMPTS, TOKENS, Served, differences, model_of, save, serve
from torch import nn
from vllm.model_executor.model_loader.reload import meta as reloading

from torch_cute_ops.integrations import transformers as cute_transformers
from torch_cute_ops.integrations.vllm import METHODS, _checkpoints
from torch_cute_ops.integrations.vllm._linear import CuteLinearMethod
from torch_cute_ops.runtime import settings


def check_as_transformers(folder: Path, served: Served, unquantised: nn.Module | None = None) -> None:
    """Check that vLLM answers as transformers does with the checkpoint, and that the unquantised model answers
    differently."""
    assert [*served.methods] == [CuteLinearMethod.__name__]
    wrong, apart = differences(cute_transformers.from_pretrained(folder), served.answers)
    assert wrong == 0 and apart < 0.03, (wrong, apart)
    if unquantised is not None:
        wrong, apart = differences(unquantised, served.answers)
        assert wrong > 3 and apart > 0.1, (wrong, apart)


DENSE = [
    ("nvfp4", "modelopt", False), ("nvfp4", "compressed-tensors", False), ("mxfp4", "compressed-tensors", False),
    ("nvfp4", "modelopt", True), ("nvfp4", "compressed-tensors", True),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "style", "calibrated"), DENSE)
def test_fp4_checkpoints(scheme, style, calibrated, tmp_path):
    """Check that with 16-bit activations, tokens and log probabilities agree with transformers."""
    seeds = (0, 1, 2) if (scheme, style, calibrated) in DENSE[1:3] else (0,)
    for seed in seeds:
        folder = save(tmp_path / str(seed), scheme, style, calibrated=calibrated, seed=seed)
        check_as_transformers(folder, serve(folder), model_of(seed=seed))


MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class LayersAgree:
    """Check that each of our layers in vLLM's model computes what the layers of transformers compute.

    FP8 and FP4 activations amplify the rounding of 16-bit operations before a layer, so that whole models can only be
    compared roughly.
    """

    def __init__(self, model: nn.Module, bound: float = 2**-7) -> None:
        self.model, self.bound, self.count = model, bound, 0

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> None:
        for name, layer in model.named_modules():
            if not isinstance(getattr(layer, "quant_method", None), CuteLinearMethod):
                continue
            lead, _, last = name.rpartition(".")
            parts = [self.model.get_submodule(f"{lead}.{part}") for part in MERGED.get(last, (last,))]
            x = torch.randn(5, parts[0].in_features).bfloat16()
            got = layer.quant_method.apply(layer, x, None).double()
            want = torch.cat([part(x) for part in parts], 1).double()
            assert (got - want).norm() <= self.bound * want.norm(), (name, got, want)
            self.count += 1


QUANTISED = [
    ("fp8_block", "compressed-tensors", False, "auto"), ("fp8_channel", "compressed-tensors", False, "auto"),
    ("fp8_channel", "modelopt", False, "auto"), ("fp8_channel", "compressed-tensors", True, "auto"),
    ("fp8_tensor", "compressed-tensors", False, "auto"), ("fp8_tensor", "modelopt", True, "auto"),
    ("nvfp4", "modelopt", True, "fp4"), ("mxfp4", "compressed-tensors", False, "fp8"),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "style", "calibrated", "activations"), QUANTISED)
def test_layers_with_quantised_activations(scheme, style, calibrated, activations, tmp_path):
    folder = save(tmp_path / "model", scheme, style, calibrated=calibrated)
    check = LayersAgree(cute_transformers.from_pretrained(folder, activations=activations, merge=False))
    served = serve(folder, METHODS[activations], check)
    assert [*served.methods] == [CuteLinearMethod.__name__] and check.count == 8
    if activations != "fp4":  # the noise of FP4 is 8 times the noise of FP8
        wrong, apart = differences(cute_transformers.from_pretrained(folder, activations=activations), served.answers)
        assert wrong < 12 and apart < 0.25, (wrong, apart)


def skewed(folder: Path) -> Path:
    """Double the global scales of k and up, and halve their block scales, so that the weights stay equal."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("weight_scale_2") and ("k_proj" in name or "up" in name)]:
        block = name.removesuffix("_2")
        halved = tensors[block].float() / 2
        assert torch.equal(halved.to(torch.float8_e4m3fn).float(), halved)
        tensors |= {block: halved.to(torch.float8_e4m3fn), name: tensors[name] * 2}
    save_file(tensors, file, {"format": "pt"})
    return folder


def test_merged_layers_keep_their_scales(tmp_path):
    folder, layers = save(tmp_path / "model", "nvfp4", "modelopt"), []
    before = serve(folder, check=lambda model: layers.extend(map(weakref.ref, model.modules())))
    gc.collect()
    assert layers and not any(layer() is not None for layer in layers)  # their memory is free
    assert serve(skewed(folder)) == before


def test_biases(tmp_path):
    folder = save(tmp_path / "model", "nvfp4", "modelopt", kind="Qwen2")
    check_as_transformers(folder, serve(folder), model_of(kind="Qwen2"))


def test_tied_output_head_and_scales_of_the_cache(tmp_path):
    """Check that scales of the KV cache, which are tensors of k_proj and v_proj in the file, are left to vLLM."""
    folder = save(tmp_path / "model", "nvfp4", "modelopt", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    for i, kind in ((0, "k"), (0, "v"), (1, "k"), (1, "v")):
        tensors[f"model.layers.{i}.self_attn.{kind}_proj.{kind}_scale"] = torch.tensor(0.5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    check_as_transformers(folder, serve(folder))


@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_quantised_output_head(style, tmp_path):
    folder = save(tmp_path / "model", "nvfp4", style, ignore=(), vocab_size=504)
    heads: list[Any] = []
    served = serve(folder, check=lambda model: heads.append(type(model.lm_head.quant_method)))
    check_as_transformers(folder, served, model_of(vocab_size=504))
    assert heads == [CuteLinearMethod]


def test_sizes_without_a_kernel(tmp_path):
    """Check that the weight of down_proj, for which K = 500 and no kernel exists, is decoded when it is loaded."""
    folder = save(tmp_path / "model", "fp8_channel", "compressed-tensors", intermediate_size=500)
    decoded: list[bool] = []
    served = serve(folder, check=lambda model: decoded.extend(
        each.mlp.down_proj.quant_method._decoded is not None for each in model.model.layers
    ))  # fmt: skip
    assert decoded == [True, True]
    wrong, apart = differences(cute_transformers.from_pretrained(folder), served.answers)
    assert wrong < 12 and apart < 0.25, (wrong, apart)


def test_choice_by_the_setting(tmp_path, monkeypatch):
    """Check that without --quantization vLLM uses its own method, unless the setting chooses our method."""
    folder = save(tmp_path / "model", "fp8_channel", "compressed-tensors")
    assert [*serve(folder, None).methods] == ["CompressedTensorsLinearMethod"]
    monkeypatch.setattr(settings, "VLLM", "auto")
    assert [*serve(folder, None).methods] == [CuteLinearMethod.__name__]


def test_compiled(tmp_path, monkeypatch, caplog):
    """Check that vLLM compiles the model as one graph, with our norms if the user prefers them, and reads every file
    that it traced."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    from vllm.compilation import backends

    messages: list[str] = []
    monkeypatch.setattr(backends.logger, "warning", lambda text, *args: messages.append(text % args))
    folder = save(tmp_path / "model", "nvfp4", "compressed-tensors")
    norms = {"rms_norm": ["torch_cute_ops"], "fused_add_rms_norm": ["torch_cute_ops"]}
    check_as_transformers(folder, serve(folder, enforce_eager=False, ir_op_priority=norms), model_of())
    generated = "".join(path.read_text(errors="ignore") for path in (tmp_path / "cache").rglob("*.py"))
    assert all(f"cute.{op}" in generated for op in ("mm_fp4_weight_only", "rmsnorm", "add_rmsnorm"))
    assert not [text for text in messages if "torch_cute_ops" in text]


@pytest.mark.parametrize(("is_eager", "alone"), [(True, range(len(PROMPTS))), (False, range(1, 2))])
def test_batch_invariance(is_eager, alone, tmp_path, monkeypatch):
    """Check that a prompt's log probabilities are the same, bit for bit, alone and in a batch. Only this package uses
    the batch-invariant mode: vLLM's own mode uses Triton kernels, which do not run on a CPU."""
    monkeypatch.setattr(_checkpoints, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    folder, found = save(tmp_path / "model", "nvfp4", "modelopt"), []
    batch = serve(folder, enforce_eager=is_eager, check=lambda model: found.extend(
        each.quant_method._form.backend for each in model.modules() if hasattr(each, "input_is_parallel")
    ))  # fmt: skip
    check_as_transformers(folder, batch)
    assert found == ["reference"] * 4
    for i in alone:
        monkeypatch.setattr(serving, "PROMPTS", PROMPTS[i : i + 1])
        assert serve(folder, enforce_eager=is_eager).answers == batch.answers[i : i + 1]


MOE: dict[str, Any] = {
    "kind": "Qwen3Moe", "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64,
    "norm_topk_prob": True,
}  # fmt: skip


def filled(meta: torch.Tensor) -> torch.Tensor:
    """Return vLLM's new tensor for reloaded weights, filled with positive numbers because its content is undefined."""
    tensor = _materialize(meta)
    tensor.view(torch.uint8).fill_(0x3C)
    return tensor


_materialize = reloading.materialize_meta_tensor


@pytest.mark.parametrize(("of", "calibrated"), [({}, True), (MOE, False)])
def test_reloaded_weights(of, calibrated, tmp_path, monkeypatch):
    """Check that, after vLLM loaded the weights of another file, its answers are the answers of this other file. A file
    without calibration contains no input scales, so activations stay in 16 bits."""
    monkeypatch.setattr(reloading, "materialize_meta_tensor", filled)
    folder, other = (
        save(tmp_path / str(seed), "nvfp4", "modelopt", seed=seed, calibrated=calibrated, **of) for seed in (0, 1)
    )
    want = serve(other, METHODS["fp4"]).answers
    llm = vllm.LLM(str(folder), quantization=METHODS["fp4"], enforce_eager=True, **OPTIONS)
    try:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        model = worker.model_runner.get_model()
        ours = [
            each for each in model.modules() if type(getattr(each, "quant_method", None)).__name__.startswith("Cute")
        ]
        pointers = [{name: p.data_ptr() for name, p in each.named_parameters(recurse=False)} for each in ours]
        for path in (folder, other):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        again = [{name: p.data_ptr() for name, p in each.named_parameters(recurse=False)} for each in ours]
        assert again == pointers and len(ours) == (6 if of else 8)  # graphs read these addresses
        parameters = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], parameters, use_tqdm=False)
    finally:
        del llm
        vllm.distributed.cleanup_dist_env_and_memory()
    assert [[*each.outputs[0].token_ids] for each in outputs] == [answer.tokens for answer in want]


@pytest.fixture
def server(tmp_path) -> Iterator[tuple[Path, str]]:
    """Start an OpenAI server of a checkpoint; yield the checkpoint and the server's address."""
    folder = save(tmp_path / "model", "nvfp4", "compressed-tensors")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {name.replace("_", "-"): value for name, value in OPTIONS.items() if value is not True}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *arguments,
               "--skip-tokenizer-init", "--enforce-eager", "--served-model-name", "tiny", "--host", "127.0.0.1",
               "--port", str(port), "--quantization", OURS]  # fmt: skip
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                time.sleep(1)
        yield folder, f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


def test_server(server):
    """Check that the server's answers equal offline answers."""
    folder, address = server
    want = serve(folder).answers
    for prompt, answer in zip(PROMPTS, want, strict=True):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1,
                "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True}  # fmt: skip
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        choice = json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]
        assert choice["token_ids"] == answer.tokens
        given = [step[token] for token, step in zip(answer.tokens, answer.logprobs, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(given, abs=0.05)
