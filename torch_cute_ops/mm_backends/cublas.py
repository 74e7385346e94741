"""Decode to 16 bits once, then cuBLAS: for many rows, where the product and not the weight's bytes takes the time."""

from functools import partial

import torch

from torch_cute_ops.mm_backends._base import Backend, Launcher, Product, Tactic, Target
from torch_cute_ops.mm_backends._decode import decoded, decoding_kernel, reason_experts, reason_undecodable
from torch_cute_ops.mm_backends._model import memory_seconds, tensor_core_seconds
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import Wanted

DECODING_EFFICIENCY = 0.45
"""Of the kernel that decodes, over a copy of its bytes (measured on an H200)."""


class Cublas(Backend):
    """The decoded operands are exact in the 16-bit dtype; sums are in fp32, and rounded once, after ``alpha``."""

    name = "cublas"

    def reason_unsupported(self, product: Product, target: Target) -> str | None:
        return reason_undecodable(product, target) or reason_experts(product)

    def tactics(self, product: Product, m: int, target: Target) -> tuple[Tactic, ...]:
        return ((),)

    def estimate(self, product: Product, m: int, tactic: Tactic, target: Target) -> float:
        # What is decoded is written and read again, and so is the fp32 result.
        size = 2 * product.k * (product.n + (m if product.a_layout is not None else 0))
        decoding = memory_seconds(size + product.bytes_moved(m), 1, target) / DECODING_EFFICIENCY
        sums = 4 * m * product.n
        multiplying = max(memory_seconds(size + sums, 1, target), tensor_core_seconds(product.flops(m), target))
        return decoding + multiplying + memory_seconds(2 * sums, 1, target)

    def kernels(self, product: Product, tactic: Tactic, arch: Arch) -> tuple[Wanted, ...]:
        layouts = dict.fromkeys((product.b_layout, *([product.a_layout] if product.a_layout is not None else [])))
        return tuple(decoding_kernel(product, layout, _dtype(product)) for layout in layouts)

    def launcher(self, product: Product, tactic: Tactic, target: Target) -> Launcher:
        return partial(_multiply, product)


def _multiply(
    product: Product,
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    dtype = _dtype(product)
    if a_scale is not None and product.a_layout is not None:
        a = decoded(a, a_scale, product.fmt, product.a_layout, dtype)
    weight = decoded(b.t(), b_scale, product.fmt, product.b_layout, dtype)
    total = _sums(a, weight)
    if alpha is None:
        out.copy_(total)
    else:
        torch.mul(total, alpha, out=out)


def _dtype(product: Product) -> torch.dtype:
    """What operands are decoded to: the dtype of ``a``, or bfloat16."""
    return torch.bfloat16 if product.a_layout is not None else product.a_dtype


def _sums(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``a @ weight.T`` in fp32: with a 16-bit result cuBLAS may round partial sums to it."""
    return torch.mm(a, weight.t(), out_dtype=torch.float32)
