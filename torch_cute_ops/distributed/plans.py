"""Plans for ``parallelize_module`` and ``load_``: styles by the names of layers."""

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
    prefix: str = "model.layers.*",
) -> dict[str, ColumnParallel | RowParallel | DividedExperts]:
    """The plan of a decoder with the layers of Llama's, Mistral's and Qwen's.

    Args:
        head_dim: rows of a head.
        merged: whether q, k and v are one layer, ``qkv_proj``, and gate and up another, ``gate_up_proj``.
        experts: how ``mlp.experts`` is divided: as ``by`` of :class:`DividedExperts`; ``None``: there are none. Shared
            experts and routers are not in the plan.
        sequence: as of the styles of linear layers: the model gives each rank its share of the tokens between them.
        sums: as of :class:`RowParallel`.
        prefix: of the decoder layers.

    Raises:
        ValueError: for experts together with ``sequence``: :class:`ExpertParallel` takes tokens that ranks divide.
    """
    if experts is not None and sequence:
        raise ValueError("decoder_plan: experts take the tokens of all ranks; with sequence=True use ExpertParallel")
    heads, column, row = (
        ColumnParallel(unit=head_dim, sequence=sequence),
        ColumnParallel(sequence=sequence),
        RowParallel(sequence=sequence, sums=sums),
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
