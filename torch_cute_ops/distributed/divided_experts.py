"""The style of experts that ranks divide, each rank with the tokens of all."""

from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torch_cute_ops.distributed.collectives import all_reduce
from torch_cute_ops.distributed.compare import agree_on_rows
from torch_cute_ops.distributed.parallel import Cut, Divided, Style, fit_bias_, keep_parts_, refuse_gradient, shard_
from torch_cute_ops.nn import QuantExperts
from torch_cute_ops.nn.experts import MOST_FEW, reason_unsupported

By = Literal["expert", "tensor"]
WAYS: Final = get_args(By)


class _Experts(Divided):
    """Experts of which each rank has some, or a part of each: it computes a part of every token's sum.

    Attributes:
        first: the number of this rank's first expert.
    """

    style: "DividedExperts"
    first: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        module: Any = self
        refuse_gradient(module, hidden_states)
        agree_on_rows(type(self).__name__, (*hidden_states.shape[:-1],), self.group)
        dtype = hidden_states.dtype
        y: Tensor = module.summed(hidden_states, top_k_index - self.first, top_k_weights, self.style.sums or dtype)
        return all_reduce(y, self.group).to(dtype)

    def is_few(self, tokens: int, topk: int) -> bool:
        """As of whole experts, for which all ranks take the same way."""
        parts = self.world if self.style.by == "expert" else 1
        return tokens <= MOST_FEW and bool(self.base.is_few(self, -(-tokens // parts), topk))

    def forward_dense(self, *_: Any, **__: Any) -> Tensor:
        """Refuse: a call is of all ranks, by ids.

        Raises:
            RuntimeError: in any case.
        """
        raise RuntimeError("experts that ranks divide take the ids of each token's experts: call the module")

    forward_permuted = forward_dense


class DividedExperts(Style):
    """Experts whose results all ranks add up: every rank has all tokens, as between tensor-parallel layers.

    For :class:`torch_cute_ops.nn.QuantExperts`. Where each rank has tokens of its own, :class:`ExpertParallel` sends
    these to their experts instead.

    Args:
        by: ``"expert"``: each expert is on one rank, which computes it for the tokens that are routed there.
            ``"tensor"``: each rank has its share of every expert's intermediate size, and works as much as the others
            whatever the routing is.
        sums: dtype in which the ranks' parts travel and are added; ``None``: that of the activations, to which each
            part is rounded, and each sum. With ``torch.float32`` each expert's result is not rounded before its token's
            sum is.

    Raises:
        ValueError: for another ``by``.
    """

    _kind = _Experts

    def __init__(self, by: By = "expert", *, sums: torch.dtype | None = None) -> None:
        if by not in WAYS:
            raise ValueError(f"DividedExperts: by is {by!r}; expected one of {', '.join(map(repr, WAYS))}")
        super().__init__(by=by, sums=None if sums is None else str(sums))
        self.by, self.sums = by, sums

    def own(self, experts: int, width: int, mesh: DeviceMesh, name: str = "DividedExperts") -> tuple[int, int]:
        """The first, and one past the last, of this rank's experts, or of its elements of the intermediate size.

        Raises:
            ValueError: if the ranks cannot divide them equally.
        """
        what, size = ("experts", experts) if self.by == "expert" else ("elements between the GEMMs", width)
        if size % mesh.size():
            raise ValueError(f"{name} has {size} {what}, which {mesh.size()} ranks cannot divide equally")
        each = size // mesh.size()
        return mesh.get_local_rank() * each, (mesh.get_local_rank() + 1) * each

    def check_module(self, module: nn.Module) -> None:
        """Refuse what are no quantised experts.

        Raises:
            TypeError: naming the class.
        """
        if not isinstance(module, QuantExperts):
            raise TypeError(f"DividedExperts is for QuantExperts; got {type(module).__name__}")

    def divide(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Leave experts this rank's part, and have them compute with the other ranks."""
        assert isinstance(module, QuantExperts)
        begin, end = self.own(module.experts, module.intermediate_size, mesh)
        if self.by == "tensor":
            reason = reason_unsupported(module.scheme, module.experts, module.hidden_size, end - begin)
            if reason is not None:
                raise ValueError(f"DividedExperts: of {mesh.size()} ranks, {reason}")
        few, module.side_by_side = module.side_by_side, None
        if self.by == "tensor":
            for dim, layer in enumerate((module.gate_up_proj, module.down_proj)):
                shard_(layer, Cut(dim, mesh.get_local_rank(), mesh.size()))
            module.intermediate_size = end - begin
        else:
            keep_parts_(module.gate_up_proj, 2 * begin, 2 * end)
            keep_parts_(module.down_proj, begin, end)
            module.experts = end - begin
        self.bind_experts(module, mesh)
        if few is not None:
            hidden_scale = few.hidden_global_scale
            if hidden_scale is not None and self.by == "expert":
                hidden_scale = hidden_scale[begin:end]
            module.route_few_(
                few.activations,
                input_global_scale=few.input_global_scale,
                hidden_global_scale=hidden_scale,
                tokens_of_expert=module.tokens_of_expert,
            )

    def bind_experts(self, module: QuantExperts, mesh: DeviceMesh) -> None:
        """Have experts of which a rank has its part compute with the other ranks."""
        # Where each rank has a part of every sum, the first one adds the bias.
        fit_bias_(module.down_proj, self.sums, is_added=self.by == "expert" or mesh.get_local_rank() == 0)
        self.bind(module, mesh).first = mesh.get_local_rank() * module.experts if self.by == "expert" else 0
