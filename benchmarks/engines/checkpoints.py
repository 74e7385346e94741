"""Checkpoints for `python -m benchmarks vllm`: Llamas with random weights in NVFP4, and decoded checkpoints.

    python -m benchmarks.engines.checkpoints random 8b FOLDER
    python -m benchmarks.engines.checkpoints decode CHECKPOINT FOLDER

The command runs this module in a separate process, so that its GPU memory is free afterwards.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_cute_ops import checkpoint
from torch_cute_ops.nn import QuantExperts

from .. import layer, llama

POSITIONS = 32768
TINY = llama.Size(layer.Widths(hidden=1024, qkv=1536, attention=1024, intermediate=2816), 2, 2048, ())
SIZES = {"8b": llama.MODELS["8B"], "tiny": TINY}
"""Sizes of random Llamas. `tiny` checks that the command works; its times say nothing about a GPU."""
SCHEME, STYLE = "nvfp4/16bit", "compressed-tensors"
"""Format of random weights, and style of their checkpoint.

vLLM 0.26 uses the kernels that `linear_backend` names for compressed-tensors' NVFP4 weights with 16-bit activations. In
ModelOpt's style (W4A16_NVFP4), the same weights are multiplied by Marlin, whatever `linear_backend` is. The checkpoint
has no scales of activations, because vLLM would otherwise quantise activations to FP4 on GPUs that support it."""


def device() -> torch.device:
    """Return the current GPU, or the CPU without a GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make(size: str, folder: Path) -> None:
    """Write a Llama with random NVFP4 weights, and without scales of activations, in compressed-tensors' format.

    Layers that vLLM merges share a global scale, because vLLM's own kernels need this.
    """
    config: Any = SIZES[size].config()
    config.max_position_embeddings = POSITIONS
    config.architectures = ["LlamaForCausalLM"]
    model = llama.build(SCHEME, config, device(), merge=False)
    checkpoint.save(model, folder, STYLE)


@torch.no_grad()
def decode(quantised: Path, folder: Path) -> None:
    """Write a checkpoint with the weights of a quantised checkpoint, decoded to bfloat16.

    Raises:
        ValueError: for a model with quantised experts.
    """
    from torch_cute_ops.integrations.transformers import from_pretrained

    model = from_pretrained(quantised, device=device(), dtype=torch.bfloat16, merge=False)
    if any(isinstance(module, QuantExperts) for module in model.modules()):
        raise ValueError(f"{quantised} contains quantised experts; only linear layers can be decoded")
    twin: Any = llama.decoded(model)
    # Call the class's method, because `from_pretrained` replaced the method of the quantised model by one that raises.
    type(twin).save_pretrained(twin, folder)


def read_through(folder: Path) -> None:
    """Read a checkpoint's files, so that the first start of an engine does not wait for the disk."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.read(2**26):
                pass


def main(arguments: Sequence[str]) -> int:
    what, source, folder = arguments
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if what == "random":
        make(source, Path(folder))
    else:
        decode(Path(source), Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
