"""``fp4_dequantize``: results must equal the specification bit for bit."""

import torch
from support import spec

from expected import Tensors, assert_same, scalar_of

_ARGUMENTS = (
    "Tensor y, Tensor scale, Tensor? global_scale=None, int block_size=16, str? scale_format=None, "
    "str? scale_layout=None, ScalarType? out_dtype=None"
)
SCHEMA = f"cute::fp4_dequantize({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::fp4_dequantize.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"

assert_results = assert_same


def layout_of(given) -> str:
    """Return the layout that the call names, or else the layout that follows from the shape of the scales."""
    if given["scale_layout"] is None and given["scale"].shape[:-1] == given["y"].shape[:-1]:
        return "linear"  # linear scales: their leading dimensions equal the codes' leading dimensions
    return spec.layout_named(given["scale_layout"], given["scale"])


def results(given) -> Tensors:
    packed = given["y"].cpu().view(torch.uint8).contiguous()
    lead, width = packed.shape[:-1], packed.shape[-1] * 2
    rows, blocks = lead.numel(), width // given["block_size"]
    scale = given["scale"].cpu().contiguous().view(torch.uint8).numpy()
    scales = spec.collect(scale, layout_of(given), rows, blocks)
    codes = spec.unpack(packed.reshape(rows, width // 2).numpy())
    value = spec.dequantise(codes, scales, scalar_of(given["global_scale"]))
    return (torch.from_numpy(value).to(given["out_dtype"] or torch.bfloat16).reshape(*lead, width),)
