"""moe_permute_fp8quant: tokens permuted to the experts' order and quantised to FP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..case import Case, Tensors, Variant
from ..formulas import fp8_bytes, row_bytes
from ..moe_rows import DTYPE, TOP, MoeRowBenchmark


class MoePermuteFp8quant(MoeRowBenchmark):
    op = "moe_permute_fp8quant"
    family = "moe_permute"
    peers = ("fill",)
    notes = ("Fill: torch writes as many bytes as the codes, four fifths of the bytes that this op moves.",)

    def bytes_moved(self, case: Case) -> int:
        """Return the bytes that the op reads (tokens and indices, each once) and writes (codes and scales of each
        routed pair)."""
        pairs, width = self.pairs(case), case["H"]
        written = fp8_bytes(pairs, width, "block128")
        return row_bytes(case["M"], width, DTYPE.itemsize) + written + row_bytes(pairs, 1, 4)

    def numbers(self, case: Case) -> dict[str, Any]:
        return {"topk": TOP}

    def arguments(self, case: Case, device: torch.device) -> Tensors:
        rows = torch.randn(case["M"], case["H"], dtype=DTYPE, device=device)
        routed = self.routed(case, device, "permuted_to_expanded", "expanded_to_permuted")
        return {"input": rows, **routed}

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant:
        written = self.pairs(case) * case["H"]
        filled = [tensors["y"].view(-1)[:written].view(torch.int32) for tensors in sets]

        def call(i: int) -> tuple[torch.Tensor, ...]:
            return (filled[i].fill_(i),)

        return Variant(call, written, checked=False)


BENCHMARK = MoePermuteFp8quant()
