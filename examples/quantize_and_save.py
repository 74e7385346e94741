#!/usr/bin/env python3
"""Quantise a model's linear layers, save it in a format that other libraries read, and load it again.

    python examples/quantize_and_save.py                             # NVFP4, for ModelOpt and compressed-tensors
    python examples/quantize_and_save.py --activations fp4           # for calibrated FP4 activations
    python examples/quantize_and_save.py --scheme fp8_block --out x  # FP8; keep the checkpoints, in the new folder x

The model is a stack of decoder layers in bf16 with random weights. The script loads each checkpoint into a model on the
meta device, in which q, k and v are merged into one layer, and gate and up into another. It compares the logits of the
loaded model with the logits of the saved model. Without a GPU the ops run their references in plain torch. The last
line starts with SUCCESS or FAILURE; the exit status is 0 or 1 accordingly.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import torch_cute_ops.checkpoint
import torch_cute_ops.nn
from quickstart import conclude, multiple_of, pick_device
from torch_cute_ops.nn.quantize import SCHEMES

HEAD = 64  # elements of an attention head
VOCABULARY = 512

STYLES = {
    "nvfp4": ("modelopt", "compressed-tensors"),
    "mxfp4": ("compressed-tensors",),
    "fp8_block": ("compressed-tensors",),
}
# Largest accepted relative error of the logits, compared with the bf16 model: more than twice the error that we
# measured for four random layers.
MAX_ERROR = {"16bit": 0.15, "fp4": 0.2, "fp8": 0.05}
# Largest accepted relative difference between the logits of the saved model and of the loaded model with merged layers.
# Merging does not change the order of any sum, but on a GPU the wider GEMM may use another tactic.
MAX_DIFFERENCE = 0.02


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device, backend = pick_device()
    print(f"device     {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}: {backend}")
    sizes = (options.layers, options.hidden)
    torch.manual_seed(0)
    model = Model(*sizes).to(device, torch.bfloat16)
    ids = torch.randint(VOCABULARY, (2, options.tokens), device=device)
    want, before = model(ids), bytes_of(model)

    torch_cute_ops.nn.quantize_(model, options.scheme, activations=options.activations, calibrate=lambda m: m(ids))
    logits = model(ids)
    activations = model.layers[0].q_proj.activations
    error = relative(logits, want)
    print(f"model      {options.layers} layers, {options.hidden} wide; {options.scheme} with {activations} activations")
    print(f"memory     {before:,} bytes in bf16, {bytes_of(model):,} quantised")
    print(f"logits     {error:.4f} from the bf16 model's (limit {MAX_ERROR[activations]})")
    problems = [] if error <= MAX_ERROR[activations] else [f"the logits are {error:.4f} from the bf16 model's"]

    with tempfile.TemporaryDirectory() as folder:
        for style in STYLES[options.scheme]:
            path = (options.out or Path(folder)) / style
            torch_cute_ops.checkpoint.save(model, path, style, config={"model_type": "example"})
            with torch.device("meta"):
                loaded = Model(*sizes, is_merged=True).bfloat16()
            torch_cute_ops.checkpoint.load_(loaded, path, activations=options.activations, device=device)
            difference = relative(loaded(ids), logits)
            size = sum(file.stat().st_size for file in path.iterdir())
            print(f"{style:18} {size:,} bytes; loaded and merged, {difference:.5f} from what was saved")
            if not difference <= MAX_DIFFERENCE:
                problems.append(f"{style} is {difference:.5f} from what was saved")
    return conclude(problems)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", choices=tuple(STYLES), default="nvfp4", help="of the weights")
    parser.add_argument("--activations", choices=("auto", "16bit", "fp4", "fp8"), default="auto")
    parser.add_argument("--layers", type=multiple_of(1), default=4)
    parser.add_argument(
        "--hidden", type=multiple_of(256), default=256, help="width of the model, a multiple of 256 (default: 256)"
    )
    parser.add_argument("--tokens", type=multiple_of(1), default=16, help="tokens per sequence (default: 16)")
    parser.add_argument("--out", type=Path, help="folder for the checkpoints; without it they are deleted")
    options = parser.parse_args(arguments)
    refuse_activations(parser, options)
    return options


def refuse_activations(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a message if the layers of the scheme do not support the requested format of activations."""
    taken = ("auto", *SCHEMES[options.scheme].choices)
    if options.activations not in taken:
        parser.error(f"--activations {options.activations}: the scheme {options.scheme} takes {' or '.join(taken)}")


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def bytes_of(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


# The model


class Layer(nn.Module):
    """A decoder layer. Its linear layers have the same names as in Llama.

    Args:
        hidden: width of the residual stream.
        is_merged: True if q, k and v are one linear layer, and gate and up another.
    """

    def __init__(self, hidden: int, is_merged: bool) -> None:
        super().__init__()
        self.widths = (hidden, hidden // 2, hidden // 2)
        wide = 2 * hidden
        self.input_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)
        if is_merged:
            self.qkv_proj = nn.Linear(hidden, sum(self.widths), bias=False)
            self.gate_up_proj = nn.Linear(hidden, 2 * wide, bias=False)
        else:
            for name, width in zip("qkv", self.widths, strict=True):
                self.add_module(f"{name}_proj", nn.Linear(hidden, width, bias=False))
            self.gate_proj, self.up_proj = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)
        self.is_merged = is_merged

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.input_norm(x)
        if self.is_merged:
            qkv = self.qkv_proj(normed).split(self.widths, -1)
        else:
            qkv = (self.q_proj(normed), self.k_proj(normed), self.v_proj(normed))
        q, k, v = (each.unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in qkv)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(heads.transpose(1, 2).flatten(-2))
        normed = self.mlp_norm(x)
        gate, up = (
            self.gate_up_proj(normed).chunk(2, -1) if self.is_merged else (self.gate_proj(normed), self.up_proj(normed))
        )
        return x + self.down_proj(F.silu(gate) * up)


class Model(nn.Module):
    """A stack of decoder layers that computes logits (N, T, vocabulary) from token ids (N, T)."""

    def __init__(self, layers: int, hidden: int, is_merged: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Layer(hidden, is_merged) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.lm_head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


if __name__ == "__main__":
    sys.exit(main())
