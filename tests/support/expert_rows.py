"""Rows of a GEMM's activations, and the experts that own them."""

from typing import NamedTuple

import torch


class ExpertRows(NamedTuple):
    """Rows of a buffer, each of which belongs to one expert or to none.

    Attributes:
        layout: row layout: ``"plain"``, ``"offsets"``, ``"counted"`` or ``"masked"``.
        counts: number of rows of each expert.
        room: number of rows reserved for each expert in the masked layout.
    """

    layout: str
    counts: tuple[int, ...]
    room: int

    @property
    def begins(self) -> list[int]:
        """First row of each expert: a multiple of ``room`` in the masked layout, two rows after the previous expert's
        end if there are counts, and otherwise right after the previous expert."""
        if self.layout == "masked":
            return [expert * self.room for expert in range(len(self.counts))]
        gap = 2 if self.layout == "counted" else 0
        return [sum(self.counts[:expert]) + expert * gap for expert in range(len(self.counts))]

    @property
    def total(self) -> int:
        """Number of rows of the buffer. The last rows belong to no expert unless the layout is plain."""
        if self.layout == "masked":
            return self.room * len(self.counts)
        return self.begins[-1] + self.counts[-1] + (0 if self.layout == "plain" else 5)

    @property
    def owner(self) -> torch.Tensor:
        """Expert of each row, or -1."""
        owner = torch.full((self.total,), -1)
        for expert, (begin, count) in enumerate(zip(self.begins, self.counts, strict=True)):
            owner[begin : begin + count] = expert
        return owner

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading dimensions of activations and result."""
        return (len(self.counts), self.room) if self.layout == "masked" else (self.total,)

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Arguments ``offsets`` and ``counts`` of a kernel."""
        ends = [*self.begins, self.begins[-1] + self.counts[-1]]
        return {
            "offsets": torch.tensor(ends, dtype=torch.int32) if self.layout in ("offsets", "counted") else None,
            "counts": torch.tensor(self.counts, dtype=torch.int32) if self.layout in ("counted", "masked") else None,
        }
