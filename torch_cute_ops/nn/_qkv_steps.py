"""Steps of an attention block between its merged projection and its KV cache, as one call of
``qkv_norm_rope_append``."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_cute_ops.nn._base import QuantLinear
from torch_cute_ops.ops.qkv_norm_rope_append import qkv_norm_rope_append

PARTS = 3
"""Number of layers that a projection of q, k and v merges."""


class QkvSteps(NamedTuple):
    """Steps of an attention block with a merged ``qkv_proj`` and, if it normalises heads, ``q_norm`` and ``k_norm``.

    Attributes:
        head_dim: number of elements of a head, D.
        rotary_dim: number of elements of a head that are rotated, at its start.
        interleaved: True if neighbouring elements are rotated as pairs, as in ``qkv_norm_rope_append``.
        has_q_norm: True if the block normalises the heads of q with the weight ``q_norm.weight``, (D,).
        has_k_norm: True if the block normalises the heads of k with the weight ``k_norm.weight``, (D,).
        eps: number that the norms add to the mean square.
        norm_plus_one: True if the norms multiply by ``1 + weight``.
        table_dtype: dtype of cosines and sines, or None if they have the dtype of the activations.
    """

    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    has_q_norm: bool = False
    has_k_norm: bool = False
    eps: float = 1e-6
    norm_plus_one: bool = False
    table_dtype: torch.dtype | None = None

    def heads(self, projection: Any) -> tuple[int, int]:
        """Return the numbers of heads of q and of k that a merged projection computes."""
        q, k, _ = projection.parts
        return q // self.head_dim, k // self.head_dim

    def weights(self, block: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights of the norms of q and k, or None for a missing norm."""
        q_norm = block.q_norm.weight if self.has_q_norm else None
        return q_norm, block.k_norm.weight if self.has_k_norm else None

    def append(
        self,
        block: Any,
        qkv: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Call the op for rows that ``block.qkv_proj`` computed. Return q, (M, heads of q, D).

        Args:
            block: attention block with the layers ``qkv_proj`` and, if any, ``q_norm`` and ``k_norm``.
            qkv, cos_sin, positions, key_cache, value_cache, slots: as in ``qkv_norm_rope_append``.
        """
        q_norm, k_norm = self.weights(block)
        return qkv_norm_rope_append(
            *(qkv, cos_sin, positions, key_cache, value_cache, slots, *self.heads(block.qkv_proj)),
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self.eps,
            norm_plus_one=self.norm_plus_one,
            interleaved=self.interleaved,
        )

    def form(self, block: Any) -> object:
        """Return a key that is equal for blocks whose calls use the same kernel."""
        dtypes = [None if each is None else (each.dtype, each.device) for each in self.weights(block)]
        return (self._replace(eps=0.0), self.heads(block.qkv_proj), *dtypes, block.qkv_proj.weight.device)

    def call(self, block: Any, dtype: torch.dtype) -> None:
        """Call the op once with zeros, with activations and a cache in ``dtype``, so that its kernel is compiled. The
        kernel does not depend on the number of rows."""
        projection, device = block.qkv_proj, block.qkv_proj.weight.device
        _, kv_heads = self.heads(projection)
        cache = torch.zeros(2, 1, 1, kv_heads, self.head_dim, dtype=dtype, device=device)
        qkv = torch.zeros(1, projection.out_features, dtype=dtype, device=device)
        cos_sin = torch.zeros(1, self.rotary_dim, dtype=self.table_dtype or dtype, device=device)
        row = torch.zeros(1, dtype=torch.int64, device=device)
        self.append(block, qkv, cos_sin, row, cache[0], cache[1], row)


def steps_of(block: nn.Module) -> QkvSteps | None:
    """Return the steps that a block computes by ``qkv_norm_rope_append``, or None for any other module."""
    steps = getattr(block, "qkv_steps", None)
    projection = getattr(block, "qkv_proj", None)
    return steps if isinstance(steps, QkvSteps) and isinstance(projection, QuantLinear) else None
