"""mm_fp8_block: the GEMM of FP8 matrices with block scales, or with MXFP8's scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

import torch_cute_ops
from torch_cute_ops.formats import MXFP8

from .. import targets
from ..case import Case, Mark, Row, Tensors, Variant, at_least
from ..fp8_gemms import (
    ABOUT,
    BLOCK,
    DEEP_GEMM,
    FP8GemmBenchmark,
    Prepared,
    aligned_columns,
    decoded_gemm,
    found,
    peer_mark,
    rate,
    scales,
)
from ..gemms import DTYPE

SHAPES = ((4096, 7168), (7168, 2048))
"""(N, K) of DeepSeek-V3's experts."""
ROWS = {"marks": (8192,), "quick": (1, 16, 64, 256, 1024, 4096, 8192), "full": tuple(2**i for i in range(15))}
MX_ROWS = {"marks": (64, 4096), "quick": (64, 256, 1024, 4096), "full": tuple(2**i for i in range(6, 13))}
"""Numbers of rows that are measured with MXFP8's scales."""
TORCH = ("rowwise", "blockwise")
BLOCK128, BF16 = "block128", "bf16"
"""Peers of MXFP8: our GEMM with FP8 block scales, and torch's GEMM of 16-bit matrices."""
MX = {"scales": MXFP8.granularity}
"""Choices of the cases with MXFP8's scales."""


class MmFp8Block(FP8GemmBenchmark):
    op = "mm_fp8_block"
    peers = (*TORCH, DEEP_GEMM, BLOCK128, BF16)
    about = f"""{ABOUT} Cases named "{MXFP8.granularity}" have MXFP8's scales, a power of two for each 32 elements of K
in `a` and in `b`. Their peers "{BLOCK128}" (this op with block scales) and "{BF16}" (torch's GEMM of 16-bit matrices)
multiply other numbers, and are not compared."""

    def case(self, m: int, n: int, k: int) -> Case:
        """Return the benchmark case of a GEMM with these sizes and FP8 block scales."""
        return Case({"M": m, "N": n, "K": k})

    def cases(self, sizes: str) -> list[Case]:
        block = [self.case(m, n, k) for n, k in SHAPES for m in ROWS[sizes]]
        return block + [Case({"M": m, "N": n, "K": k}, choices=MX) for n, k in SHAPES for m in MX_ROWS[sizes]]

    def properties(self, case: Case) -> dict[str, Any]:
        return {**super().properties(case), "mxfp8": bool(case.choices)}

    def operands(self, case: Case, device: torch.device) -> Tensors:
        if not case.choices:
            weight = {name: tensor[0] for name, tensor in self.weight(case, device).items()}
            return self.activations(case["M"], case, device) | weight
        made = {}
        for name, rows in (("a", case["M"]), ("b", case["N"])):
            values = torch.randn(rows, case["K"], device=device, dtype=DTYPE)
            made[name], made[f"{name}_scale"] = torch_cute_ops.fp8_quantize(
                values, granularity=MXFP8.granularity, scale_layout="linear"
            )
        return made

    def arguments(self, tensors: Tensors) -> Tensors:
        return {"b": tensors["b"].t(), **{name: tensors[name] for name in ("a", "a_scale", "b_scale")}}

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        if name in (BLOCK128, BF16) and not case.choices:
            return "measured as a peer of MXFP8 only"
        if name in ("blockwise", DEEP_GEMM) and case.choices:
            return "does not multiply MXFP8 on this GPU"

        def rowwise(t: Tensors) -> Callable[[], torch.Tensor]:
            one, two = t["a"].new_ones(len(t["a"]), 1, dtype=torch.float32), t["a_scale"].new_ones(1, len(t["b"]))
            return lambda: torch._scaled_mm(t["a"], t["b"].t(), one, two, out_dtype=DTYPE, use_fast_accum=True)

        def blockwise(t: Tensors) -> Callable[[], torch.Tensor]:
            scale = t["a_scale"], t["b_scale"].t()
            return lambda: torch._scaled_mm(t["a"], t["b"].t(), *scale, out_dtype=DTYPE)

        def deep_gemm(library: ModuleType, t: Tensors) -> Prepared:
            a, b = (t["a"], aligned_columns(t["a_scale"])), (t["b"], t["b_scale"])
            return lambda: library.fp8_gemm_nt(a, b, t["out"]), t["out"]

        def block128(t: Tensors) -> Callable[[], torch.Tensor]:
            (m, k), n, device = t["a"].shape, len(t["b"]), t["a"].device
            a_scale = scales(k // BLOCK, m, device=device).t()
            b_scale = scales(-(-n // BLOCK), k // BLOCK, device=device)
            return lambda: torch_cute_ops.mm_fp8_block(t["a"], t["b"].t(), a_scale, b_scale)

        def bf16(t: Tensors) -> Callable[[], torch.Tensor]:
            a, b = t["a"].to(DTYPE), t["b"].to(DTYPE)
            return lambda: torch.mm(a, b.t())

        if name == DEEP_GEMM:
            return self.deep_gemm(deep_gemm, case, sets)
        if name == BLOCK128:
            return self.torch_gemm(block128, case, sets, "a scale for each 128 elements")
        if name == BF16:
            return self.torch_gemm(bf16, case, sets, "16-bit operands")
        if name == "rowwise":
            return self.torch_gemm(rowwise, case, sets, "one scale for each row")
        return self.torch_gemm(blockwise, case, sets)

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        a, b, a_scale, b_scale = (tensors[name] for name in ("a", "b", "a_scale", "b_scale"))
        if not case.choices:
            return (decoded_gemm(a, b, a_scale, b_scale),)
        decoded = [
            matrix.double() * torch.exp2(scale.double() - 127).repeat_interleave(MXFP8.block_size, 1)
            for matrix, scale in ((a, a_scale), (b, b_scale))
        ]
        return ((decoded[0] @ decoded[1].t()).to(DTYPE),)

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        large = found(rows, M=8192, N=4096, K=7168)
        mx = [row for row in rows if row["choices"]]
        many = [row for row in rows if row["sizes"]["M"] >= 4096 and not row["choices"]]
        at_large = None if large is None else rate(large)
        return [
            at_least("8192 x 4096 x 7168: rate", at_large, targets.FP8_TFLOPS, " TFLOP/s"),
            peer_mark("M ≥ 4,096: rate over torch's FP8 GEMMs", many, TORCH),
            peer_mark("M ≥ 4,096: rate over torch's with the same scales", many, ("blockwise",)),
            peer_mark("M ≥ 4,096: rate over DeepGEMM's", many, (DEEP_GEMM,)),
            *(
                replace(peer_mark(f"MXFP8, M ≥ 64: rate over {name}", mx, (peer,), least), notes="fp8_fp4_mma")
                for name, peer, least in (
                    ("FP8 block scales", BLOCK128, targets.MXFP8_OVER_BLOCK),
                    ("bfloat16", BF16, targets.MXFP8_OVER_BF16),
                )
            ),
        ]


BENCHMARK = MmFp8Block()
