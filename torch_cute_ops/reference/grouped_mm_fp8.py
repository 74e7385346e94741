"""Reference of ``grouped_mm_fp8``."""

import itertools

import torch

from torch_cute_ops.formats.experts import used_rows, zeroed_rows
from torch_cute_ops.reference.mm_fp8_block import block_product


def grouped_mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Each expert's rows times its weight, in ``out_dtype``; zero in rows that no expert has. See the op's docstring.

    What an expert's product is, ``block_product`` tells.
    """
    experts, n, k = b.shape
    rows = a.reshape(-1, k)
    scales = a_scale.reshape(k // 128, -1)
    out = rows.new_zeros((len(rows), n), dtype=out_dtype)
    for expert, of_expert in enumerate(row_ranges(len(rows), experts, offsets, counts)):
        out[of_expert] = block_product(rows[of_expert], b[expert], scales[:, of_expert], b_scale[expert]).to(out_dtype)
    return out.view(*a.shape[:-1], n)


def defined(
    outputs: tuple[torch.Tensor, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, ...]:
    """The result with zeros in rows that no expert has."""
    (out,) = outputs
    used = used_rows(out.shape[:-1].numel(), offsets, counts).view(out.shape[:-1])
    return (zeroed_rows(out, used[..., None]),)


def row_ranges(rows: int, experts: int, offsets: torch.Tensor | None, counts: torch.Tensor | None) -> list[slice]:
    """The rows of each expert, of a buffer of ``rows``, read from the device. Counts are cut to the room there is."""
    shares = [expert * (rows // experts) for expert in range(experts + 1)]
    begins = shares if offsets is None else offsets.tolist()
    rooms = [slice(begin, max(begin, end)) for begin, end in itertools.pairwise(begins)]
    if counts is None:
        return rooms
    cut = [max(0, min(count, room.stop - room.start)) for count, room in zip(counts.tolist(), rooms, strict=True)]
    return [slice(room.start, room.start + count) for room, count in zip(rooms, cut, strict=True)]
