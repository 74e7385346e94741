"""mm_fp8_fp4: the GEMM of FP8 activations, with block scales or per-token scales, and an FP4 weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

import torch_cute_ops
from torch_cute_ops.formats import FP4Format
from torch_cute_ops.formats.interleave import INTERLEAVED_K, deinterleave_k
from torch_cute_ops.reference.mm_fp8_fp4 import prepared_weight

from .. import fp8_fp4_gemms, targets
from ..case import Case, Mark, Row, Tensors, Variant
from ..fp8_fp4_gemms import FORMATS, HUMMING
from ..fp8_gemms import DEEP_GEMM, DTYPE, NOISE, TOKEN_NOISE, FP8GemmBenchmark, codes, peer_mark, scales
from ..gemms import problem_of
from .mm_fp8 import BENCHMARK as TOKEN_FP8
from .mm_fp8_block import BENCHMARK as FP8

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (57344, 8192))
"""(N, K) of all weights of Llama 8B, and of the largest weight of Llama 70B."""
ROWS = {
    "marks": (1, 16, 64, 256, 2048),
    "quick": (1, 16, 64, 128, 256, 1024, 2048, 4096),
    "full": tuple(2**i for i in range(14)),
}
BLOCKS = "blocks"
TOKENS = {"tokens": False, "tokens_fast": True}
"""Values of `fast_accum` with per-token scales, by the name of the case's scales."""
ROWWISE = "rowwise"
ABOUT = f"""\
{fp8_fp4_gemms.ABOUT}
"blocks" cases have 1 x 128 scales of the activations. "tokens" cases have one scale for each token, prepared scales of
the weight, and interleaved activations; "tokens_fast" cases run with `fast_accum=True`. In both, "fp8_weight" is
`mm_fp8`, and "rowwise" is torch's GEMM with an FP8 weight, both with the same accumulation as our op."""


class MmFp8Fp4(FP8GemmBenchmark):
    op = "mm_fp8_fp4"
    peers = (*fp8_fp4_gemms.PEERS, ROWWISE)
    family = "fp8_fp4_wgmma_ss"
    about = ABOUT
    settings: ClassVar = {"activations": "e4m3", "scale layout": "128x4", "result": "bfloat16"}

    def properties(self, case: Case) -> dict[str, Any]:
        named = {**super().properties(case), **fp8_fp4_gemms.choices_of(case)}
        if _scales(case.choices) == BLOCKS:
            return named
        forms = {"token_scales": True, "prepared_scales": True, "interleaved_k": True}
        return {**named, **forms, "fast_accum": TOKENS[_scales(case.choices)]}

    def case(self, m: int, n: int, k: int, weight: str = "mxfp4", scales: str = BLOCKS) -> Case:
        """Return the benchmark case of a GEMM with these sizes, this format of the weight, and these scales of the
        activations."""
        return Case({"M": m, "N": n, "K": k}, choices={"weight": weight, "scales": scales})

    def cases(self, sizes: str) -> list[Case]:
        return [
            self.case(m, n, k, weight, scales)
            for scales in (BLOCKS, *TOKENS)
            for weight in FORMATS
            for n, k in SHAPES
            for m in ROWS[sizes]
        ]

    def noise(self, case: Case | None) -> float:
        return NOISE if case is not None and _scales(case.choices) == BLOCKS else TOKEN_NOISE

    def panel(self, case: Case) -> str:
        kind = _scales(case.choices)
        title = f"{super().panel(case)}, {case.choices['weight']}"
        return title if kind == BLOCKS else f"{title}, {kind}"

    def operands(self, case: Case, device: torch.device) -> Tensors:
        m, n, k, fmt = case["M"], case["N"], case["K"], FORMATS[case.choices["weight"]]
        weight = fp8_fp4_gemms.random_weight(fmt, n, k, device=device)
        if _scales(case.choices) == BLOCKS:
            return self.activations(m, case, device) | weight
        prepared = torch_cute_ops.prepare_scales(weight["b_scale"], n, k, block_size=fmt.block_size)
        a = torch_cute_ops.interleave_k(codes(m, k, device))
        return {"a": a, "a_scale": scales(m, 1, device=device), "b": weight["b"], "b_scale": prepared}

    def arguments(self, tensors: Tensors) -> Tensors:
        given: dict[str, Any] = {name: tensors[name] for name in ("a", "a_scale", "b_scale")}
        return {"b": tensors["b"].t(), **given, "block_size": _format(tensors).block_size}

    def with_backend(self, case: Case, sets: Sequence[Tensors], backend: str) -> Variant:
        fast_accum = TOKENS.get(_scales(case.choices), False)

        def call(i: int) -> tuple[torch.Tensor, ...]:
            options: dict[str, Any] = {"backend": backend, "fast_accum": fast_accum, "out": sets[i]["out"]}
            torch_cute_ops.mm_fp8_fp4(**self.arguments(sets[i]), **options)
            return self.results(sets[i])

        return Variant(call, self.bytes_moved(case))

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        """Return the peer `name`: our GEMM, DeepGEMM's GEMM or torch's GEMM with an FP8 weight, or humming's GEMM with
        the FP4 weight."""
        if _scales(case.choices) != BLOCKS:
            return self._token_peer(name, case, sets)
        if name == ROWWISE:
            return "has no block scales"
        if name in HUMMING:
            return fp8_fp4_gemms.humming(name, self.problem(case), case["M"], sets)
        weights = [{name: one[0] for name, one in self.weight(case, tensors["a"].device).items()} for tensors in sets]
        if name == DEEP_GEMM:
            with_weights = [{**tensors, **weight} for tensors, weight in zip(sets, weights, strict=True)]
            return fp8_fp4_gemms.with_fp8_weight(FP8.peer(name, case, with_weights))

        def call(i: int) -> tuple[torch.Tensor, ...]:
            one, weight = sets[i], weights[i]
            out = one["out"]
            torch_cute_ops.mm_fp8_block(one["a"], weight["b"].t(), one["a_scale"], weight["b_scale"], out=out)
            return (out,)

        size = problem_of("mm_fp8_block", n=case["N"], k=case["K"], m=case["M"]).bytes_moved(case["M"])
        return Variant(call, size, "an FP8 weight", checked=False)

    def _token_peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        """Return our GEMM or torch's GEMM with an FP8 weight and per-token scales."""
        if name not in (fp8_fp4_gemms.FP8_WEIGHT, ROWWISE):
            return "has no per-token scales"
        m, n, k = (case[size] for size in ("M", "N", "K"))
        sums = "fast" if TOKENS[_scales(case.choices)] else "promoted"
        of_fp8 = TOKEN_FP8.case(m, n, k, sums)
        made = [TOKEN_FP8.make_set(of_fp8, tensors["a"].device) for tensors in sets]
        if name == fp8_fp4_gemms.FP8_WEIGHT:
            return fp8_fp4_gemms.with_fp8_weight(TOKEN_FP8.ours(of_fp8, made))
        rowwise = "rowwise_fast" if sums == "fast" else ROWWISE
        return fp8_fp4_gemms.with_fp8_weight(TOKEN_FP8.peer(rowwise, of_fp8, made))

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        if _scales(case.choices) == BLOCKS:
            weight = fp8_fp4_gemms.decoded_weight(tensors)
            return (fp8_fp4_gemms.gemm(tensors["a"], tensors["a_scale"], weight),)
        numbers, units = prepared_weight(tensors["b"], tensors["b_scale"], _format(tensors))
        a = deinterleave_k(tensors["a"], case["K"]).double() * tensors["a_scale"].double()
        return ((a @ (numbers.double() * units.double()[:, None]).t()).to(DTYPE),)

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        blocks = [row for row in rows if _scales(row["choices"]) == BLOCKS]
        many = fp8_fp4_gemms.times_over_fp8(blocks, lambda row: row["sizes"]["M"] >= 2048)
        marks = [fp8_fp4_gemms.many_rows_mark("M ≥ 2,048", many, targets.FP8_FP4_OVER_FP8)]
        for kind in TOKENS:
            some = [row for row in rows if _scales(row["choices"]) == kind and row["sizes"]["M"] >= 512]
            name = f"{kind}, M ≥ 512: rate over torch's with an FP8 weight"
            marks += [peer_mark(name, some, (ROWWISE,), targets.TOKEN_FP4_OVER_PEER)] if some else []
        return marks


def _scales(choices: Mapping[str, Any]) -> str:
    """Return the kind of scales of the activations. Older results have only block scales, and do not name them."""
    kind: str = choices.get("scales", BLOCKS)
    return kind


def _format(tensors: Tensors) -> FP4Format:
    """Return the format of the weight in a buffer set, which may have prepared scales."""
    if tensors["b_scale"].dim() == 3:
        return next(fmt for fmt in FORMATS.values() if INTERLEAVED_K // fmt.block_size == tensors["b_scale"].shape[-1])
    return fp8_fp4_gemms.format_of(tensors)


BENCHMARK = MmFp8Fp4()
