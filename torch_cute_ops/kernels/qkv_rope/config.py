"""Configuration of the kernel that normalises and rotates heads and writes caches. No device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from torch_cute_ops.runtime.arch import Arch

VECTOR = 8
"""Number of elements of a head that a lane holds."""
WARP = 32
THREADS = 128
"""Number of threads of a CTA."""
FEW = 256
"""Largest number of rows for which each lane holds only one head."""
HEADS_AT_ONCE = 4
"""Largest number of heads whose loads a lane issues together."""

Kind = Literal["q", "k", "v"]


@dataclass(frozen=True)
class QkvRopeSpec:
    """Static properties of a call.

    Attributes:
        dtype: dtype of the rows, bfloat16 or float16.
        head_dim: number of elements of a head.
        q_heads, kv_heads: numbers of heads of q, and of k and v.
        rotary_dim: number of leading elements of a head that are rotated.
        interleaved: True if neighbouring elements form a pair; False if the i-th elements of both halves form a pair.
        table_dtype: dtype of the cosines and sines.
        position_dtype, slot_dtype: int32 or int64.
        q_norm_dtype, k_norm_dtype: dtype of the weight of the RMSNorm, or None without an RMSNorm.
        norm_plus_one: True if 1 is added to the weights of the RMSNorms.
        q_dtype: dtype of the stored q: ``dtype`` or float8_e4m3fn.
        key_dtype, value_dtype: dtypes of the caches: ``dtype``, float8_e4m3fn, or uint8 for NVFP4.
        has_q_scale, has_k_scale, has_v_scale: True if the call passes a scale for q, for k, or for v.
    """

    dtype: torch.dtype
    head_dim: int
    q_heads: int
    kv_heads: int
    rotary_dim: int
    interleaved: bool
    table_dtype: torch.dtype
    position_dtype: torch.dtype
    slot_dtype: torch.dtype
    q_norm_dtype: torch.dtype | None
    k_norm_dtype: torch.dtype | None
    norm_plus_one: bool
    q_dtype: torch.dtype
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    has_q_scale: bool
    has_k_scale: bool
    has_v_scale: bool

    @property
    def pairs(self) -> int:
        """Number of rotated pairs of a head."""
        return self.rotary_dim // 2

    @property
    def vectors(self) -> int:
        """Number of vectors of a head."""
        return self.head_dim // VECTOR

    @property
    def lanes(self) -> int:
        """Number of lanes per head. If it exceeds ``vectors``, the last lanes hold zeros."""
        return 1 << (self.vectors - 1).bit_length()

    @property
    def heads_per_warp(self) -> int:
        """Number of heads that the lanes of a warp hold side by side."""
        return WARP // self.lanes

    @property
    def lane_pairs(self) -> int:
        """Number of cosines, and also of sines, that a lane needs."""
        return VECTOR // 2 if self.interleaved else VECTOR

    @property
    def has_table_vectors(self) -> bool:
        """True if the cosines of a lane are adjacent and aligned, so that a lane loads them as vectors."""
        return self.pairs % self.lane_pairs == 0

    @property
    def table_align(self) -> int:
        """Alignment in bytes of the rows of the table."""
        return 16 if self.has_table_vectors else 4

    def heads(self, kind: Kind) -> int:
        """Return the number of heads of q, k or v."""
        return self.q_heads if kind == "q" else self.kv_heads

    def first_head(self, kind: Kind) -> int:
        """Return the index, among all heads of a row, of the first head of q, k or v."""
        return {"q": 0, "k": self.q_heads, "v": self.q_heads + self.kv_heads}[kind]

    def stored_dtype(self, kind: Kind) -> torch.dtype:
        """Return the dtype in which q, k or v is stored."""
        return {"q": self.q_dtype, "k": self.key_dtype, "v": self.value_dtype}[kind]

    def norm_dtype(self, kind: Kind) -> torch.dtype | None:
        """Return the dtype of the weight of the RMSNorm, or None without an RMSNorm."""
        return {"q": self.q_norm_dtype, "k": self.k_norm_dtype, "v": None}[kind]


class Division(NamedTuple):
    """Division of the heads of one row over warps.

    Attributes:
        q_at_once, kv_at_once: number of heads that a lane holds at once.
        q_warps, kv_warps: numbers of warps for the heads of q, and for the heads of k (the same number for v).
    """

    q_at_once: int
    kv_at_once: int
    q_warps: int
    kv_warps: int

    @property
    def warps(self) -> int:
        """Number of warps of a row."""
        return self.q_warps + 2 * self.kv_warps


@dataclass(frozen=True)
class Config:
    """Configuration of the kernel.

    Attributes:
        spec: static properties of the call.
        threads: number of threads of a CTA.
        few: largest number of rows for which each lane holds one head.
        heads_at_once: largest number of heads that a lane holds at once if there are more rows.
        has_e2m1_cvt: True if the kernel converts to e2m1 with an instruction of the GPU.
        pdl: True to launch with programmatic dependent launch.
    """

    spec: QkvRopeSpec
    threads: int
    few: int
    heads_at_once: int
    has_e2m1_cvt: bool
    pdl: bool

    def division(self, are_few: bool) -> Division:
        """Return the division of a row's heads over warps, for few rows or for more rows."""
        most = 1 if are_few else self.heads_at_once
        (q, q_warps), (kv, kv_warps) = (self._divided(self.spec.heads(kind), most) for kind in ("q", "k"))
        return Division(q, kv, q_warps, kv_warps)

    def _divided(self, heads: int, most: int) -> tuple[int, int]:
        """Return the number of heads that a lane holds at once, at most ``most``, and the number of warps."""
        steps = -(-heads // self.spec.heads_per_warp)
        warps = -(-steps // most)
        return -(-steps // warps), warps


class Arguments(
    namedtuple(
        "Arguments",
        "qkv cos_sin positions key_cache value_cache slots q_norm k_norm q_scale k_scale v_scale "
        "key_block_scale value_block_scale q eps",
    )
):
    """Run-time arguments, in order, for M rows, and heads of D elements.

    Attributes:
        qkv: (M, all heads · D) of ``dtype``. Rows may be strided.
        cos_sin: (positions, ``rotary_dim``) of ``table_dtype``: cosines, then sines. Rows may be strided.
        positions: (M,) of ``position_dtype``, contiguous.
        key_cache, value_cache: (blocks, page, ``kv_heads``, D), or (blocks, page, ``kv_heads``, D/2) uint8 in NVFP4.
            The last stride is 1. The other strides are multiples of a vector.
        slots: (S,) of ``slot_dtype``, contiguous, S at most M.
        q_norm, k_norm: (D,) weights, or None without an RMSNorm.
        q_scale, k_scale, v_scale: fp32, one element or one per head, or None.
        key_block_scale, value_block_scale: (blocks, page, ``kv_heads``, D/16) float8_e4m3fn, any strides, or None.
        q: (M, ``q_heads``, D) of ``q_dtype``, contiguous.
        eps: fp32, number added to the mean square.
    """


def plan(spec: QkvRopeSpec, arch: Arch, pdl: bool = True) -> Config:
    """Return the configuration for a call with these properties. Every architecture supports it."""
    has_fp4 = torch.uint8 in (spec.key_dtype, spec.value_dtype)
    return Config(spec, THREADS, FEW, HEADS_AT_ONCE, has_fp4 and arch.has_e2m1_cvt, pdl)
