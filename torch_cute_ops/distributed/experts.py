"""Expert parallelism: each rank sends its tokens in FP8 or FP4 to the ranks of their experts, and gets results back."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Self

from torch_cute_ops.distributed.collectives import Group, as_bytes
from torch_cute_ops.distributed.compare import agree_on_rows, compare
from torch_cute_ops.formats import FP8_BLOCK128, convert_scales
from torch_cute_ops.nn._base import moved
from torch_cute_ops.ops.fp4_dequantize import fp4_dequantize
from torch_cute_ops.ops.fp4_quantize import fp4_quantize
from torch_cute_ops.ops.fp8_quantize import fp8_quantize
from torch_cute_ops.ops.grouped_mm_fp8 import grouped_mm_fp8
from torch_cute_ops.ops.grouped_mm_fp8_fp4 import grouped_mm_fp8_fp4
from torch_cute_ops.ops.moe_finalize import moe_finalize
from torch_cute_ops.ops.moe_permute_fp8quant import moe_permute_fp8quant
from torch_cute_ops.ops.moe_route_ids import moe_route_ids
from torch_cute_ops.ops.moe_swiglu_fp8quant import moe_swiglu_fp8quant

BLOCK = FP8_BLOCK128.block_size
Wire = Literal["fp8", "fp4"]
Back = Literal["16bit", "fp8"]


class ExpertWeights(NamedTuple):
    """Weights of E experts for one of the two GEMMs of an expert layer.

    Attributes:
        codes: (E, N, K) float8_e4m3fn, or (E, N, K/2) uint8, two e2m1 codes per byte.
        scale: FP8: (E, ⌈N/128⌉, ⌈K/128⌉) float32. FP4: (E, N, K/block_size), linear, or scales of all E · N rows in
            ``scale_layout``.
        alpha: float32, factor of the result: one element, (E,) or (E, N), as in ``grouped_mm_fp8``; ``None`` means 1.
        bias: (E, N), or ``None``.
        block_size: elements per FP4 scale: 16 for NVFP4, 32 for MXFP4.
        scale_layout: layout of FP4 scales: ``"linear"`` or ``"128x4"``.
    """

    codes: Tensor
    scale: Tensor
    alpha: Tensor | None = None
    bias: Tensor | None = None
    block_size: int = 16
    scale_layout: Literal["linear", "128x4"] = "linear"

    @property
    def is_fp4(self) -> bool:
        """True if the weights are FP4, False if they are FP8."""
        return self.codes.dtype == torch.uint8

    def multiply(self, a: Tensor, a_scale: Tensor, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Multiply each expert's rows of ``a`` (R, K) by the expert's weight, and return (R, N)."""
        if not self.is_fp4:
            return grouped_mm_fp8(
                a, self.codes.mT, a_scale, self.scale, offsets, None, self.alpha, self.bias, out_dtype=out_dtype
            )
        return grouped_mm_fp8_fp4(
            *(a, self.codes.mT, a_scale, self.scale, offsets, None, self.alpha, self.bias),
            out_dtype=out_dtype,
            block_size=self.block_size,
            scale_layout=self.scale_layout,
        )

    def of_experts(self, begin: int, end: int) -> "ExpertWeights":
        """Return the weights of a range of experts.

        Raises:
            ValueError: for a range outside the experts.
        """
        experts = self.codes.shape[0]
        if not 0 <= begin < end <= experts:
            raise ValueError(f"of_experts: from {begin} to {end}; expected a range of the {experts} experts")
        own = slice(begin, end)
        alpha = self.alpha if self.alpha is None or self.alpha.numel() == 1 else self.alpha[own].contiguous()
        bias = None if self.bias is None else self.bias[own].contiguous()
        return self._with(_copied(self.codes, 0, own), _copied(self._linear(), 0, own), alpha, bias)

    def of_rows(self, rank: int, world: int, parts: int = 1) -> "ExpertWeights":
        """Return one rank's shard of the rows (N) of each expert's weight.

        Args:
            rank: index of the rank.
            world: number of ranks.
            parts: number of equal parts of N that are sharded separately: 2 for gate and up.

        Raises:
            ValueError: if the rows cannot be divided among the ranks. FP8 weights can be divided only into whole blocks
                of 128.
        """
        n = self.codes.shape[1]
        own = self._shard_size("N", n // parts, world, 1 if self.is_fp4 else BLOCK, 8)
        at = [part * (n // parts) + rank * own for part in range(parts)]
        each = 1 if self.is_fp4 else BLOCK

        def rows(tensor: Tensor, of: int) -> Tensor:
            return _joined([_copied(tensor, 1, slice(first // of, (first + own) // of)) for first in at])

        alpha = rows(self.alpha, 1) if self.alpha is not None and self.alpha.dim() == 2 else self.alpha
        bias = None if self.bias is None else rows(self.bias, 1)
        return self._with(rows(self.codes, 1), rows(self._linear(), each), alpha, bias)

    def of_columns(self, rank: int, world: int) -> "ExpertWeights":
        """Return one rank's shard of the columns (K) of each expert's weight. Its GEMM gives partial sums, so only the
        first rank keeps the bias.

        Raises:
            ValueError: if the columns cannot be divided among the ranks in whole blocks of 128.
        """
        packed, each = (2, self.block_size) if self.is_fp4 else (1, BLOCK)
        own = self._shard_size("K", self.codes.shape[2] * packed, world, BLOCK, BLOCK)
        codes = _copied(self.codes, 2, slice(rank * own // packed, (rank + 1) * own // packed))
        scale = _copied(self._linear(), 2, slice(rank * own // each, (rank + 1) * own // each))
        return self._with(codes, scale, self.alpha, self.bias if rank == 0 else None)

    def _shard_size(self, name: str, size: int, world: int, block: int, multiple: int) -> int:
        own = size // world
        if size % world or own % block or own % multiple:
            expected = world * max(block, multiple)
            raise ValueError(f"{name} is {size} per expert; expected a multiple of {expected} for {world} ranks")
        return own

    def _linear(self) -> Tensor:
        """Return the scales in the linear layout, with the experts as the first dimension."""
        if not self.is_fp4 or self.scale_layout == "linear":
            return self.scale
        experts, n, half = self.codes.shape
        return convert_scales(self.scale, experts * n, 2 * half, "128x4", "linear").view(experts, n, -1)

    def _with(self, codes: Tensor, scale: Tensor, alpha: Tensor | None, bias: Tensor | None) -> "ExpertWeights":
        if self.is_fp4 and self.scale_layout != "linear":
            rows, k = codes.shape[0] * codes.shape[1], 2 * codes.shape[2]
            scale = convert_scales(scale.reshape(rows, -1), rows, k, "linear", self.scale_layout)
        return self._replace(codes=codes, scale=scale, alpha=alpha, bias=bias)


def _copied(tensor: Tensor, dim: int, own: slice) -> Tensor:
    view = as_bytes(tensor).narrow(dim, own.start, own.stop - own.start)
    return view.clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([*map(as_bytes, tensors)], 1).view(tensors[0].dtype)


class ExpertParallel(nn.Module):
    """Experts of a layer, divided among ranks by expert, by intermediate size, or both.

    Each rank processes different tokens. For each pair of a token and an expert, ``all_to_all_single`` sends a row of
    codes and scales to the expert's rank. That rank computes ``down(swiglu(up(row)))`` and sends the result back. The
    token's rank sums the results with the routing weights, in the order of the token's experts. With ``back="16bit"``,
    results are sent back unchanged. A token's result then equals the result on one rank with all experts, bit for bit,
    for the same backend and tactic.

    Without ``max_rows``, only routed rows are sent, and their numbers are copied to the host. With ``max_rows``, the
    host does not wait, so the call can be captured if the backend's collectives can be captured, as with NCCL. Each
    rank then sends ``max_rows`` rows to every expert, most of them padding, and drops pairs that exceed this number.

    Args:
        up: gate and up weights of this rank's experts, (E, 2I, H), gate rows first.
        down: down weights, (E, H, I).
        group: ranks that divide the experts, in order; ``None`` if this rank has all experts.
        tensor_group: ranks that divide each expert's I, as :meth:`ExpertWeights.of_rows` with ``parts=2`` and
            :meth:`ExpertWeights.of_columns` do; these ranks process the same tokens and sum their results in float32.
        wire: format of the rows that are sent. ``"fp8"`` sends one scale per 128 elements, the format that the GEMM
            reads. ``"fp4"`` sends NVFP4, which the expert's rank decodes and quantises to FP8 for the GEMM. FP4 loses
            precision.
        back: format of the results that are sent: ``"16bit"``, or ``"fp8"`` with one scale per 128 elements. FP8 loses
            precision.
        max_rows: largest number of rows that a rank sends to an expert. If it is the rank's number of tokens, no pair
            is ever dropped. ``None`` sends only routed rows.
        swiglu_alpha, swiglu_beta, swiglu_limit: as in ``moe_swiglu_fp8quant``.

    Raises:
        ValueError: for weights of inconsistent sizes, or an unknown format.
        RuntimeError: if ranks of a group differ in sizes, dtypes or settings; all ranks construct the layer and
            compare.
    """

    def __init__(
        self,
        up: ExpertWeights,
        down: ExpertWeights,
        group: Group | None = None,
        tensor_group: Group | None = None,
        *,
        wire: Wire = "fp8",
        back: Back = "16bit",
        max_rows: int | None = None,
        swiglu_alpha: float = 1.0,
        swiglu_beta: float = 0.0,
        swiglu_limit: float | None = None,
    ) -> None:
        super().__init__()
        experts, width = up.codes.shape[:2]
        intermediate = down.codes.shape[2] * (2 if down.is_fp4 else 1)
        if down.codes.shape[0] != experts or width != 2 * intermediate:
            raise ValueError(
                f"ExpertParallel: up is {tuple(up.codes.shape)} and down {tuple(down.codes.shape)}; "
                "expected (E, 2I, H) and (E, H, I)"
            )
        for name, value, known in (("wire", wire, ("fp8", "fp4")), ("back", back, ("16bit", "fp8"))):
            if value not in known:
                raise ValueError(f"ExpertParallel: {name} is {value!r}; expected one of {', '.join(map(repr, known))}")
        self.experts, self.group, self.tensor_group = experts, group, tensor_group
        self.world = 1 if group is None else dist.get_world_size(group)
        self.wire, self.back, self.max_rows = wire, back, max_rows
        self.swiglu = (swiglu_alpha, swiglu_beta, swiglu_limit)
        self._forms: dict[str, dict[str, Any]] = {}
        for name, weights in (("up", up), ("down", down)):
            self._forms[name] = {"block_size": weights.block_size, "scale_layout": weights.scale_layout}
            for field in ("codes", "scale", "alpha", "bias"):
                self.register_buffer(f"{name}_{field}", getattr(weights, field))

        facts: dict[str, Any] = {"wire": wire, "back": back, "max_rows": max_rows, "swiglu": self.swiglu}
        for name, buffer in self.named_buffers():
            if not name.endswith("bias"):  # in a tensor group, only the first rank keeps the bias of down
                facts[name] = f"{tuple(buffer.shape)} {buffer.dtype}"
        for each in (group, tensor_group):
            if each is not None:
                compare("ExpertParallel", facts, each)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the tensors without casting them, because codes and scales must stay as in the checkpoint."""
        return super()._apply(partial(moved, fn), recurse)

    def _weights(self, name: str) -> ExpertWeights:
        tensors = {field: getattr(self, f"{name}_{field}") for field in ("codes", "scale", "alpha", "bias")}
        return ExpertWeights(**tensors, **self._forms[name])

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute the experts' results for this rank's tokens.

        Args:
            x: (M, H), bfloat16 or float16; H a multiple of 64. Without ``max_rows``, M may differ between ranks.
            ids: (M, topk) int32, indices among the experts of all ranks, as ``moe_route`` returns; -1 for no expert.
            weights: (M, topk) float32.
            residual: (M, H) like ``x``, added to the result; or ``None``.

        Returns:
            (M, H) in the dtype of ``x``.

        Raises:
            ValueError, TypeError: as the ops, for a wrong shape or dtype.
        """
        if self.tensor_group is not None:
            agree_on_rows("ExpertParallel", (x.shape[0],), self.tensor_group)
        total, topk = self.experts * self.world, ids.shape[1]
        expanded, permuted, _, counts = moe_route_ids(ids, total, 1, self.max_rows)
        operands = self._rows(x, permuted, expanded, topk)
        received = self._exchange(counts)
        # Numbers of rows to send to each rank and to receive from each rank, or None if ``max_rows`` fixes them.
        sizes = None if self.max_rows is not None else _host_sizes(counts.view(self.world, -1), received)
        operands = tuple(self._sent(each, sizes) for each in operands)
        y = self._computed(operands, self._ids_of(received, operands[0].shape[0]), x.dtype)
        y = self._returned(y, sizes, permuted.shape[0])
        if self.tensor_group is None:
            return moe_finalize(y, expanded, weights, residual)
        sums = moe_finalize(y, expanded, weights)
        dist.all_reduce(sums, group=self.tensor_group)
        return (sums if residual is None else sums + residual).to(x.dtype)

    def _rows(self, x: Tensor, permuted: Tensor, expanded: Tensor, topk: int) -> tuple[Tensor, ...]:
        """Quantise the tokens. Return the codes and scales of each pair's row as bytes, ordered by expert."""
        if self.wire == "fp8":
            codes, scale = moe_permute_fp8quant(x, permuted, topk, expanded)
            return as_bytes(codes), scale.contiguous()
        if not len(x):  # with max_rows, a rank without tokens still sends padding
            x = x.new_zeros(1, x.shape[1])
        codes, scale = fp4_quantize(x, scale_layout="linear")
        token = permuted.clamp(min=0) // topk
        return codes[token], as_bytes(scale)[token]

    def _exchange(self, counts: Tensor) -> Tensor:
        """Exchange the numbers of rows that the ranks will send to each other. Return the numbers of rows that this
        rank will receive, (ranks, this rank's experts)."""
        counts = counts.view(self.world, self.experts)
        if self.group is None:
            return counts
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts.contiguous(), group=self.group)
        return received

    def _sent(self, rows: Tensor, sizes: tuple[list[int], list[int]] | None, *, is_back: bool = False) -> Tensor:
        if self.group is None:
            return rows
        sent, come = (None, None) if sizes is None else sizes[::-1] if is_back else sizes
        if sent is not None:
            rows = rows[: sum(sent)]
        received = rows.new_empty((rows.shape[0] if come is None else sum(come), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), come, sent, group=self.group)
        return received

    def _ids_of(self, received: Tensor, rows: int) -> Tensor:
        """Return, for each received row, the index of its expert among this rank's experts, (rows, 1); -1 for
        padding."""
        experts = torch.arange(self.experts, dtype=torch.int32, device=received.device)
        if self.max_rows is None:
            ends = received.flatten().cumsum(0)
            run = torch.searchsorted(ends, torch.arange(rows, device=received.device), right=True)
            # Without a process group, the buffer ends with the rows of pairs that have no expert. Their id is -1.
            ids = torch.where(run < ends.numel(), run % self.experts, -1)
            return ids.to(torch.int32).unsqueeze(1)
        place = torch.arange(self.max_rows, device=received.device)
        return torch.where(place < received.unsqueeze(-1), experts.view(1, -1, 1), -1).reshape(-1, 1)

    def _computed(self, operands: tuple[Tensor, ...], ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the experts on the received rows, and return the results in the order in which the rows arrived."""
        codes, scale = operands
        place, order, offsets, _ = moe_route_ids(ids, self.experts, 1)
        if self.wire == "fp8":
            index = order.clamp(min=0)
            a, a_scale = codes[index].view(torch.float8_e4m3fn), scale[index]
        else:
            numbers = fp4_dequantize(codes, scale.view(torch.float8_e4m3fn), scale_layout="linear")
            a, a_scale = moe_permute_fp8quant(numbers, order, 1, place)
        h = self._weights("up").multiply(a, a_scale, offsets, dtype)
        a, a_scale = moe_swiglu_fp8quant(h, offsets, None, *self.swiglu)
        y = self._weights("down").multiply(a, a_scale, offsets, dtype if self.tensor_group is None else torch.float32)
        return y[place[:, 0].clamp(min=0)]

    def _returned(self, y: Tensor, sizes: tuple[list[int], list[int]] | None, rows: int) -> Tensor:
        """Send the results back to the tokens' ranks. Return the results of this rank's pairs, ordered by expert."""
        if self.group is None:
            return y
        if self.back == "fp8":
            codes, scale = fp8_quantize(y, granularity="block128", scale_layout="row")
            codes, scale = (self._sent(each, sizes, is_back=True) for each in (as_bytes(codes), scale))
            wide = scale.repeat_interleave(BLOCK, 1)[:, : y.shape[1]]
            y = (codes.view(torch.float8_e4m3fn).float() * wide).to(y.dtype)
        else:
            y = self._sent(y, sizes, is_back=True)
        return y if y.shape[0] == rows else torch.cat((y, y.new_zeros(rows - y.shape[0], y.shape[1])))


def _host_sizes(sent: Tensor, received: Tensor) -> tuple[list[int], list[int]]:
    """Copy two lists to the host: the numbers of rows to send to each rank, and to receive from each rank."""
    both = torch.stack((sent.sum(1), received.sum(1))).tolist()
    return both[0], both[1]
