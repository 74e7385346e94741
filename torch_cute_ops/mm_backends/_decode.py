"""FP4 operands decoded in memory, for backends that multiply 16-bit numbers."""

import torch

from torch_cute_ops.formats import MXFP4, NVFP4, FP4Format, ScaleLayout
from torch_cute_ops.kernels.activation_tiles.config import CHUNK
from torch_cute_ops.kernels.common.weight_chunks import TILE_ROWS, WeightChunks
from torch_cute_ops.mm_backends._base import Product, Target
from torch_cute_ops.ops import fp4_dequantize as dequantize
from torch_cute_ops.runtime.compiler import Wanted


def sixteen_bit_dtype(product: Product) -> torch.dtype:
    """What our kernels decode operands to: the dtype of ``a``; float16, which holds NVFP4 exactly, or else bfloat16."""
    if product.a_layout is None:
        return product.a_dtype
    return torch.float16 if product.fmt == NVFP4 else torch.bfloat16


def reason_undecodable(product: Product, target: Target) -> str | None:
    """Why our kernels cannot decode the operands of ``product`` to 16 bits on ``target``; ``None`` if they can."""
    if target.device.type != "cuda":
        return f"needs a CUDA device; the tensors are on {target.device}"
    if target.arch is None:
        return "kernels are compiled for no such architecture"
    if product.a_dtype == torch.float16 and product.fmt == MXFP4:
        return "the numbers of MXFP4 exceed float16, which a has; pass a as bfloat16"
    return None


def reason_misaligned(product: Product) -> str | None:
    """Why our kernels cannot load the operands as they lie; ``None`` if they can."""
    if product.n % 8 or product.k % 32:
        return f"n={product.n} and k={product.k}: they have to be multiples of 8 and 32"
    return None


def reason_not_linear(product: Product, width: int, what: str) -> str | None:
    """Why scales in the linear layout cannot be copied as boxes of a tensor map, a chunk at a time; ``None`` if they
    can, or lie otherwise. ``width`` are the elements of k of ``what``."""
    if not product.b_layout.is_linear:
        return None
    if width % CHUNK:
        return f"in the linear layout {what} has to be a multiple of {CHUNK}"
    return WeightChunks(product.fmt, product.b_layout, TILE_ROWS).reason_not_copied


def reason_experts(product: Product) -> str | None:
    """Why a backend of plain products cannot compute ``product``; ``None`` if it is one."""
    return None if product.experts is None else "computes no products with experts"


def decoded(
    codes: torch.Tensor, scale: torch.Tensor, fmt: FP4Format, layout: ScaleLayout, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers (rows, K) of codes (rows, K/2) and their scales, in ``dtype``."""
    out: torch.Tensor = dequantize.fp4_dequantize(
        codes, scale, block_size=fmt.block_size, scale_layout=layout.name, out_dtype=dtype
    )
    return out


def decoding_kernel(product: Product, layout: ScaleLayout, dtype: torch.dtype) -> Wanted:
    """The kernel of ``decoded`` for an operand of ``product``."""
    return dequantize.kernel_for(product.k, product.fmt, layout, dtype)
