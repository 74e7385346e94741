"""Cases of the kernel that normalises and rotates heads and writes caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from support.kernel_grid.common import BF16, FP16, FP32, KernelCase, short
from torch_cute_ops.kernels import qkv_rope
from torch_cute_ops.runtime.arch import ARCHS

FP8, FP4 = torch.float8_e4m3fn, torch.uint8
INT32, INT64 = torch.int32, torch.int64


@dataclass(frozen=True)
class QkvRopeCase(KernelCase):
    """A configuration of ``qkv_rope``.

    Attributes:
        dim: number of elements of a head.
        heads: numbers of heads of q, and of k and v.
        rotary: number of rotated elements of a head.
        interleaved: True if neighbouring elements form a pair.
        dtype: dtype of the rows.
        table: dtype of the cosines and sines.
        norm: dtype of the weights of the RMSNorms, or None without RMSNorms.
        plus_one: True if 1 is added to the weights.
        stored: dtypes of q, of the keys, and of the values; None stands for ``dtype``.
        scaled: True if all one-byte results have a scale.
        integers: dtype of positions and slots.
        arch: architecture to compile for.
        few: largest number of rows for which lanes hold one head, or None for the planned number.
    """

    dim: int
    heads: tuple[int, int]
    rotary: int
    interleaved: bool = False
    dtype: torch.dtype = BF16
    table: torch.dtype = FP32
    norm: torch.dtype | None = None
    plus_one: bool = False
    stored: tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None] = (None, None, None)
    scaled: bool = False
    integers: torch.dtype = INT64
    arch: str = "sm_90a"
    few: int | None = None

    @property
    def id(self) -> str:
        norm = [] if self.norm is None else [f"norm_{short(self.norm)[0]}{'_plus_one' if self.plus_one else ''}"]
        dtypes = short(self.dtype, self.table, *(each or self.dtype for each in self.stored), self.integers)
        sizes = (self.dim, *self.heads, self.rotary, *(["interleaved"] if self.interleaved else []))
        rest = (*norm, *(["scaled"] if self.scaled else []), *([] if self.few is None else [f"few_{self.few}"]))
        return "-".join(map(str, ("qkv_rope", *sizes, *dtypes, *rest, self.arch)))

    @property
    def kernel(self) -> Any:
        """Kernel with the configuration that ``plan`` chooses."""
        q, key, value = (each or self.dtype for each in self.stored)
        has_q, has_k, has_v = (self.scaled and each != self.dtype for each in (q, key, value))
        numbers = (self.dtype, self.dim, *self.heads, self.rotary, self.interleaved, self.table)
        norms = (self.norm, self.norm, self.plus_one)
        rest = (self.integers, self.integers, *norms, q, key, value, has_q, has_k, has_v)
        config = qkv_rope.plan(qkv_rope.QkvRopeSpec(*numbers, *rest), ARCHS[self.arch])
        return qkv_rope.QkvRopeKernel(config if self.few is None else replace(config, few=self.few))


def qkv_rope_cases() -> list[QkvRopeCase]:
    """Return cases of all sizes of heads, formats and architectures, and the cases that need most registers."""
    fp4, fp8 = (FP8, FP4, FP4), (FP8, FP8, FP8)
    return [
        QkvRopeCase(64, (8, 1), 64, False, BF16, BF16, BF16, False, fp8, True, INT32, "sm_100a"),
        QkvRopeCase(64, (71, 71), 16, True, FP16, FP32, None, False, fp4, True, INT64, "sm_90a"),
        QkvRopeCase(80, (32, 32), 20, False, BF16, FP32, FP32, True, fp4, True, INT64, "sm_90a"),
        QkvRopeCase(96, (32, 32), 96, True, FP16, FP16, FP32, False, fp8, True, INT32, "sm_120a"),
        QkvRopeCase(128, (32, 8), 128, False, BF16, FP32, FP32, False, fp4, True, INT64, "sm_90a"),
        QkvRopeCase(128, (32, 8), 128, False, BF16, BF16, BF16, False, (None, None, None), False, INT64, "sm_90a"),
        QkvRopeCase(128, (32, 8), 128, False, BF16, FP32, FP32, False, fp8, True, INT64, "sm_100a"),
        QkvRopeCase(192, (96, 8), 192, False, BF16, FP32, FP32, True, fp4, True, INT64, "sm_120a"),
        QkvRopeCase(256, (16, 8), 250, False, FP16, FP32, FP32, True, fp4, True, INT64, "sm_90a"),
        QkvRopeCase(256, (8, 4), 256, True, BF16, FP32, FP32, True, (None, FP8, FP4), True, INT64, "sm_100a"),
    ]
