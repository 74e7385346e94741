"""qkv_norm_rope_append: norm and rotation of q and k, and the write of k and v to paged caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

import torch_cute_ops
from torch_cute_ops.registry import OPS

from .. import compositions, peers, targets
from ..buffers import poisoned_outputs
from ..case import Benchmark, Case, Mark, Row, Tensors, Variant, at_least, at_most
from ..formulas import row_bytes

DTYPE = torch.bfloat16
PAGE = 16
POSITIONS = 8192
EPS = 1e-6
CACHES = {"bf16": DTYPE, "fp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}
"""Dtype of the caches by the choice of a case."""
WRITTEN = ("key_cache", "value_cache", "key_block_scale", "value_block_scale")
DECODE_ROWS = (1, 8, 32, 64)
LARGE_ROWS = (8192,)
SIZES = {
    "marks": (*DECODE_ROWS, *LARGE_ROWS),
    "quick": (*DECODE_ROWS, 512, *LARGE_ROWS),
    "full": tuple(2**k for k in range(14)),
}
"""Numbers of rows by set of sizes."""


class QkvNormRopeAppend(Benchmark):
    """Benchmark on M rows with 32 heads of q and 8 heads of k and v, of D elements."""

    op = "qkv_norm_rope_append"
    family = "qkv_rope"
    peers = ("vllm", "separate", "inductor")
    of_copy = targets.QKV_OF_COPY
    tolerance = 1e-3
    settings: ClassVar = {"dtype": "bfloat16", "table": "float32", "page": str(PAGE), "rotated": "D, halves"}
    about = """\
"separate" computes the norm of q, the norm of k, the rotation, and the write to the caches in four functions, each
compiled by Inductor. "inductor" compiles the four functions as one. Both write NVFP4 caches by plain torch operations.
"vllm" calls two kernels of vLLM: norm and rotation of q and k, and the write to the caches. It has no NVFP4 caches.
Slots are scattered over caches twice as large as needed."""
    heads: ClassVar[tuple[int, int]] = (32, 8)

    # --- cases ---

    def case(self, m: int, dim: int = 128, cache: str = "bf16") -> Case:
        """Return the benchmark case with these sizes and this format of both caches."""
        return Case({"M": m, "D": dim}, "static", {"cache": cache})

    def cases(self, sizes: str) -> list[Case]:
        return [self.case(m, cache=cache) for cache in CACHES for m in sorted(SIZES[sizes], reverse=True)]

    def smallest(self, case: Case) -> Case:
        return self.case(1, case["D"], case.choices["cache"])

    def panel(self, case: Case) -> str:
        return f"D = {case['D']}, {case.choices['cache']} caches"

    # --- formulas ---

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (rows, a row of the table, position and slot of each row, both weights)
        and writes (q, k and v, with block scales), and the two scales of FP8 and NVFP4 caches."""
        m, dim, (q_heads, kv_heads) = case["M"], case["D"], self.heads
        kind = CACHES[case.choices["cache"]]
        scalars = 0 if kind == DTYPE else 2 * 4
        bits = {DTYPE: 16, torch.float8_e4m3fn: 8, torch.uint8: 4.5}[kind]
        read = row_bytes(m, (q_heads + 2 * kv_heads) * dim, DTYPE.itemsize) + row_bytes(m, dim, 4) + row_bytes(m, 2, 8)
        written = row_bytes(m, q_heads * dim, DTYPE.itemsize) + int(m * 2 * kv_heads * dim * bits) // 8
        return read + written + row_bytes(2, dim, DTYPE.itemsize) + scalars

    # --- tensors and calls ---

    def make_set(self, case: Case, device: torch.device) -> Tensors:
        m, dim, (q_heads, kv_heads), kind = case["M"], case["D"], self.heads, CACHES[case.choices["cache"]]
        blocks = -(-2 * m // PAGE)
        angles = torch.rand(POSITIONS, dim // 2, device=device) * 6.28
        tensors = {
            "qkv": torch.randn(m, (q_heads + 2 * kv_heads) * dim, dtype=DTYPE, device=device),
            "cos_sin": torch.cat((angles.cos(), angles.sin()), 1),
            "positions": torch.arange(m, device=device) % POSITIONS,
            "slots": torch.randperm(blocks * PAGE, device=device)[:m],
            "q_norm": torch.rand(dim, device=device).to(DTYPE),
            "k_norm": torch.rand(dim, device=device).to(DTYPE),
        }
        width = dim // 2 if kind == torch.uint8 else dim
        for name, scale in (("key", "k_scale"), ("value", "v_scale")):
            shape = blocks, PAGE, kv_heads, width
            tensors[f"{name}_cache"] = torch.zeros(shape, dtype=torch.uint8 if kind != DTYPE else DTYPE, device=device)
            if kind != DTYPE:
                tensors[f"{name}_cache"] = tensors[f"{name}_cache"].view(kind)
                tensors[scale] = torch.full((1,), 0.0625, device=device)
            if kind == torch.uint8:
                scales = torch.zeros(*shape[:-1], dim // 16, dtype=torch.uint8, device=device)
                tensors[f"{name}_block_scale"] = scales.view(torch.float8_e4m3fn)
        return tensors | poisoned_outputs(self.op, lambda fake: fake(**self.arguments(tensors)))

    def arguments(self, tensors: Tensors) -> dict[str, Any]:
        """Return the arguments of a call, except `out`."""
        given = {name: tensor for name, tensor in tensors.items() if name != "out"}
        return {**given, "q_heads": self.heads[0], "kv_heads": self.heads[1], "eps": EPS}

    def results(self, out: torch.Tensor, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """Return all tensors that a call writes."""
        return out, *(tensors[name] for name in WRITTEN if name in tensors)

    def ours(self, case: Case, sets: Sequence[Tensors]) -> Variant:
        def call(i: int) -> tuple[torch.Tensor, ...]:
            torch_cute_ops.qkv_norm_rope_append(**self.arguments(sets[i]), out=sets[i]["out"])
            return self.results(sets[i]["out"], sets[i])

        return Variant(call, self.bytes_moved(case))

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        if name == "vllm":
            return self.vllm(case, sets)
        function: Callable[..., Any]
        if name == "inductor":
            compiled = peers.inductor(compositions.qkv_norm_rope_append, case, [])
            if isinstance(compiled, str):
                return compiled
            function = compiled
        else:
            function = partial(compositions.qkv_norm_rope_append, compiled=True)

        def call(i: int) -> tuple[torch.Tensor, ...]:
            return self.results(function(**self.arguments(sets[i])), sets[i])

        # The peers are not checked, because their steps round intermediate results to 16 bits.
        return Variant(call, self.bytes_moved(case), case.inductor, checked=False)

    def vllm(self, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        """Return the variant that calls vLLM's kernels, or the reason why it is missing."""
        function = peers.vllm_qkv_append()
        if isinstance(function, str):
            return function
        if case.choices["cache"] == "nvfp4":
            return "vLLM's kernel does not write NVFP4 caches"
        # vLLM's table has the dtype of q, q and k are normalised in place, and scales are not optional.
        one = torch.ones(1, device=sets[0]["qkv"].device)
        given = [{"k_scale": one, "v_scale": one, **self.arguments(each)} for each in sets]
        given = [{**each, "qkv": each["qkv"].clone(), "cos_sin": each["cos_sin"].to(DTYPE)} for each in given]

        def call(i: int) -> tuple[torch.Tensor, ...]:
            return self.results(function(**given[i]), sets[i])

        # Not checked: each call normalises the result of the preceding call, and vLLM rounds at other places.
        return Variant(call, self.bytes_moved(case), checked=False)

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        own = tensors | {name: tensors[name].clone() for name in WRITTEN if name in tensors}
        return self.results(OPS[self.op].reference(**self.arguments(own)), own)

    # --- marks ---

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        marks = []
        for cache in CACHES:
            some = [row for row in rows if row["choices"]["cache"] == cache]
            decode = [row["variants"] for row in some if row["sizes"]["M"] <= max(DECODE_ROWS)]
            times = [variants["ours"]["us"] for variants in decode]
            saved = [each["separate"]["us"] - each["ours"]["us"] for each in decode if "separate" in each]
            where = f"{cache} caches, M ≤ {max(DECODE_ROWS)}"
            marks.append(at_most(f"{where}: time", max(times, default=None), targets.QKV_DECODE_US, " µs"))
            name = f"{where}: less than separate steps"
            marks.append(at_least(name, min(saved, default=None), targets.QKV_SAVED_US, " µs"))
            large = [row["variants"]["ours"]["of_copy"] for row in some if row["sizes"]["M"] >= min(LARGE_ROWS)]
            name = f"{cache} caches, M ≥ {min(LARGE_ROWS):,}: of copy"
            marks.append(at_least(name, min(large, default=None), targets.QKV_OF_COPY))
        return marks


BENCHMARK = QkvNormRopeAppend()
