"""Read experts that a checkpoint stores in three-dimensional parameters: gpt-oss's experts, and parameters that
transformers or ModelOpt quantised as a whole."""

from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from torch_cute_ops.checkpoint._files import Files
from torch_cute_ops.checkpoint._values import (
    POWERS,
    block_factors,
    check_elements,
    check_factors,
    check_finite,
    check_scales,
    check_zeros,
)
from torch_cute_ops.checkpoint.spec import LayerScheme, read_spec

_BLOCK_BYTES = 16

EXPERT_NAMES: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's gate, up and down layers. Mixtral's checkpoints use the second triple."""
RENAMED: Final = ((".mlp.", ".block_sparse_moe."),)
"""Pairs of a name component in models and the name component that some checkpoints use instead."""


class MXFP4Experts(NamedTuple):
    """MXFP4 weights of a layer's E experts with hidden size H and intermediate size I.

    Attributes:
        gate_up: (E, 2I, H/2) uint8 codes. For each expert, the gate's rows come before up's rows.
        gate_up_scale: (E, 2I, H/32) uint8, linear.
        gate_up_bias: (E, 2I), in the checkpoint's dtype.
        down: (E, H, I/2) uint8 codes.
        down_scale: (E, H, I/32) uint8, linear.
        down_bias: (E, H), in the checkpoint's dtype.
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    gate_up_bias: Tensor
    down: Tensor
    down_scale: Tensor
    down_bias: Tensor


def read_experts(
    path: str | Path, name: str, *, experts: tuple[int, int] | None = None, device: torch.device | str = "cpu"
) -> MXFP4Experts:
    """Read the experts of a gpt-oss layer.

    The checkpoint interleaves the rows of gate and up. The result stores each expert's gate rows first, as the ops'
    SwiGLU expects.

    Args:
        path: folder of the checkpoint.
        name: name of the layer's experts, such as ``"model.layers.0.mlp.experts"``.
        experts: range (begin, end) of experts to read, such as one rank's experts; data of other experts is not read.
            ``None`` reads all experts.
        device: device of the result.

    Raises:
        FileNotFoundError: for a missing file.
        ValueError: for a checkpoint that is not gpt-oss, a truncated file, experts out of range, or a tensor that is
            missing or has a wrong shape, dtype or value; the message names tensor and file.
    """
    spec = read_spec(path)
    if spec.style != "gpt-oss":
        raise ValueError(f"{spec.path}: quant_method is not 'mxfp4'; expected a gpt-oss checkpoint")
    with Files(path) as files:
        return mxfp4_experts(files, name, device, experts)


def mxfp4_experts(
    files: Files, name: str, device: torch.device | str, experts: tuple[int, int] | None = None
) -> MXFP4Experts:
    """Read the experts of a gpt-oss layer from an open checkpoint. The arguments are as for :func:`read_experts`."""
    gate_up = _projection(files, f"{name}.gate_up_proj", experts)
    down = _projection(files, f"{name}.down_proj", experts)
    count, hidden, width = down[0].shape[0], down[0].shape[1], down[0].shape[2] * 2
    if gate_up[0].shape != (count, 2 * width, hidden // 2):
        raise ValueError(
            f"{files.describe(f'{name}.gate_up_proj_blocks')} has (E, N, K) "
            f"{(*gate_up[0].shape[:2], 2 * gate_up[0].shape[2])}; expected {(count, 2 * width, hidden)}, to "
            "match down_proj"
        )
    parted = (torch.cat((each[:, 0::2], each[:, 1::2]), 1).to(device) for each in gate_up)
    return MXFP4Experts(*parted, *(each.to(device, copy=True) for each in down))


def gpt_oss_names(name: str) -> list[str]:
    """Return the names of the tensors in which a checkpoint stores the experts of a gpt-oss layer."""
    return [f"{name}.{part}_{suffix}" for part in ("gate_up_proj", "down_proj")
            for suffix in ("blocks", "scales", "bias")]  # fmt: skip


def _projection(files: Files, name: str, experts: tuple[int, int] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Read one of the experts' two projections: codes (E, N, K/2), scales (E, N, K/32) and bias (E, N)."""
    blocks, scales, bias = (_of_experts(files, f"{name}_{suffix}", experts) for suffix in ("blocks", "scales", "bias"))
    for suffix, tensor in (("blocks", blocks), ("scales", scales)):
        if tensor.dtype != torch.uint8:
            raise ValueError(
                f"got {files.describe(f'{name}_{suffix}')} with dtype {tensor.dtype}; expected {torch.uint8}"
            )
    if blocks.dim() != 4 or blocks.shape[-1] != _BLOCK_BYTES:
        raise ValueError(
            f"got {files.describe(f'{name}_blocks')} with shape {tuple(blocks.shape)}; expected (E, N, K/32, "
            f"{_BLOCK_BYTES})"
        )
    for suffix, tensor, shape in (("scales", scales, blocks.shape[:3]), ("bias", bias, blocks.shape[:2])):
        if tensor.shape != shape:
            raise ValueError(
                f"got {files.describe(f'{name}_{suffix}')} with shape {tuple(tensor.shape)}; expected {tuple(shape)}"
            )
    check_scales(files.describe(f"{name}_scales"), scales)
    check_finite(files.describe(f"{name}_bias"), bias)
    return blocks.flatten(-2), scales, bias


# Experts whose parameters (E, ...) were quantised as a whole, not layer by layer


def fused_names(files: Files, stored: str, part: str) -> list[str]:
    """Return the last name components of the tensors that store a quantised parameter. The bias is left out."""
    return [each for each in files.suffixes(stored) if each.startswith(part) and not each.endswith("_bias")]


def read_fused(
    files: Files, name: str, scheme: LayerScheme, experts: int, n: int, k: int, *, is_transposed: bool
) -> dict[str, Tensor]:
    """Read a three-dimensional parameter of experts that transformers (FP8 blocks) or ModelOpt (NVFP4) quantised as a
    whole.

    Args:
        files: tensors of the checkpoint.
        name: name of the parameter, such as ``"model.layers.0.mlp.experts.gate_up_proj"``.
        scheme: quantisation of the parameter.
        experts: E.
        n: rows of each expert's weight.
        k: columns of each expert's weight.
        is_transposed: True if the unquantised parameter is (E, K, N).

    Returns:
        Tensors by name, with E as the first dimension. The slices of one expert are the arguments of the layer class's
        ``from_tensors``.

    Raises:
        ValueError: for another format, or a tensor that is missing or unknown, or that has a wrong shape, dtype or
            value.
    """
    module, _, part = name.rpartition(".")
    fields: dict[str, tuple[str, tuple[int, ...], torch.dtype]]
    if (scheme.style, scheme.format) == ("deepseek", "fp8_block"):
        fields = {"": ("weight", (experts, n, k), torch.float8_e4m3fn),
                  "_scale_inv": ("weight_scale_inv", (experts, -(-n // 128), -(-k // 128)), torch.float32)}  # fmt: skip
    elif (scheme.style, scheme.format) == ("modelopt", "nvfp4"):
        fields = {"": ("weight", (experts, n, k // 2), torch.uint8),
                  "_weight_scale": ("weight_scale", (experts, n, k // 16), torch.float8_e4m3fn),
                  "_weight_scale_2": ("weight_scale_2", (experts,), torch.float32)}  # fmt: skip
    else:
        raise ValueError(
            f"{files.describe(name)} holds all experts as {scheme.style} {scheme.format}; expected FP8 blocks of "
            "transformers or NVFP4 of ModelOpt, or a layer for each expert"
        )
    known = {f"{part}{suffix}" for suffix in (*fields, "_input_scale")}
    unknown = sorted({*fused_names(files, module, part)} - known)
    if unknown:
        raise ValueError(
            f"{files.describe(f'{module}.{unknown[0]}')} is unknown to {scheme.style} {scheme.format}; expected only "
            f"{', '.join(sorted(known))}"
        )
    read: dict[str, Tensor] = {}
    for suffix, (key, shape, dtype) in fields.items():
        tensor = files.read(f"{name}{suffix}")
        described = files.describe(f"{name}{suffix}")
        if tensor.dtype != dtype and not (key == "weight_scale_inv" and tensor.dtype in POWERS):
            raise ValueError(f"got {described} with dtype {tensor.dtype}; expected {dtype}")
        if key == "weight_scale_2" and tensor.numel() in (1, experts):
            tensor = tensor.reshape(-1).expand(experts)
        if is_transposed and tensor.dim() == 3:
            tensor = tensor.mT
        if tensor.shape != shape:
            given = (shape[0], shape[2], shape[1]) if is_transposed and len(shape) == 3 else shape
            raise ValueError(f"got {described} with shape {tuple(files.shape(f'{name}{suffix}'))}; expected {given}")
        if key == "weight_scale_inv":
            tensor = block_factors(described, tensor)
        elif key == "weight_scale":
            check_scales(described, tensor.contiguous())
        elif key == "weight_scale_2":
            check_factors(described, tensor, is_zero_allowed=True)
        elif dtype == torch.float8_e4m3fn:
            check_elements(described, tensor)
        if key in ("weight_scale_2", "weight_scale_inv"):
            for expert in (tensor == 0).view(experts, -1).any(1).nonzero().flatten().tolist():
                check_zeros(described, tensor[expert], read["weight"][expert])
        read[key] = tensor
    return read


def _of_experts(files: Files, name: str, experts: tuple[int, int] | None) -> Tensor:
    if experts is None or name not in files:
        return files.read(name)
    begin, end = experts
    count = files.shape(name)[0]
    if not 0 <= begin < end <= count:
        raise ValueError(
            f"{files.describe(name)} holds {count} experts; expected a range of these, got {begin} to {end}"
        )
    return files.read_slice(name, 0, begin, end)
