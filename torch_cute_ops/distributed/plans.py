"""Plans for ``parallelize_module`` and ``load_``. A plan is a dict of parallel styles, keyed by layer name."""

from typing import Literal

import torch

from torch_cute_ops.distributed.divided_experts import DividedExperts
from torch_cute_ops.distributed.parallel import ColumnParallel, RowParallel


def decoder_plan(
    head_dim: int,
    *,
    merged: bool = True,
    experts: Literal["expert", "tensor"] | None = None,
    sequence: bool = False,
    sums: torch.dtype | None = None,
    partial: bool = False,
    prefix: str = "model.layers.*",
) -> dict[str, ColumnParallel | RowParallel | DividedExperts]:
    """Return the plan for a decoder whose layers are named as in Llama, Mistral and Qwen.

    Args:
        head_dim: number of rows of one attention head.
        merged: True if q, k and v are one layer, ``qkv_proj``, and gate and up are one layer, ``gate_up_proj``.
        experts: how ``mlp.experts`` is divided: ``by`` of :class:`DividedExperts`. ``None`` for a model without
            experts. The plan does not divide shared experts and routers.
        sequence: True if each rank processes different tokens between the divided layers, as in :class:`ColumnParallel`
            and :class:`RowParallel`.
        sums: as in :class:`RowParallel`.
        partial: True if o and down return partial sums, as in :class:`RowParallel`. The model passes them with the
            group to :func:`normed_rows`, or to an op that sums over ranks.
        prefix: name pattern of the decoder layers.

    Raises:
        ValueError: for experts with ``sequence``; use :class:`ExpertParallel` for tokens that are divided among ranks.
            For ``partial`` with ``experts``, ``sequence`` or ``sums``.
    """
    if experts is not None and sequence:
        raise ValueError("decoder_plan: experts take the tokens of all ranks; with sequence=True use ExpertParallel")
    if experts is not None and partial:
        raise ValueError("decoder_plan: experts return sums over all ranks; expected no partial=True with experts")
    heads, column, row = (
        ColumnParallel(unit=head_dim, sequence=sequence),
        ColumnParallel(sequence=sequence),
        RowParallel(sequence=sequence, sums=sums, partial=partial),
    )
    plan: dict[str, ColumnParallel | RowParallel | DividedExperts] = {
        f"{prefix}.self_attn.{'qkv_proj' if merged else '[qkv]_proj'}": heads,
        f"{prefix}.self_attn.o_proj": row,
        f"{prefix}.mlp.down_proj": row,
    }
    for name in ("gate_up_proj",) if merged else ("gate_proj", "up_proj"):
        plan[f"{prefix}.mlp.{name}"] = column
    if experts is not None:
        plan[f"{prefix}.mlp.experts"] = DividedExperts(experts, sums=sums)
    return plan
