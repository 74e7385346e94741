"""Parallel style that divides the experts of a layer among ranks that all process the same tokens."""

from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torch_cute_ops.distributed.collectives import all_reduce
from torch_cute_ops.distributed.compare import agree_on_rows
from torch_cute_ops.distributed.parallel import (
    Divided,
    Style,
    WeightShard,
    fit_bias_,
    keep_parts_,
    refuse_gradient,
    shard_,
)
from torch_cute_ops.nn import QuantExperts
from torch_cute_ops.nn.experts import MOST_FEW, check_routing, reason_unsupported

By = Literal["expert", "tensor"]
WAYS: Final = get_args(By)


class _Experts(Divided):
    """Experts that are divided among ranks. Each rank stores some experts, or a shard of every expert, and computes
    partial sums for every token.

    Attributes:
        first: index of this rank's first expert.
    """

    style: "DividedExperts"
    first: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        module: Any = self
        refuse_gradient(module, hidden_states)
        agree_on_rows(type(self).__name__, (*hidden_states.shape[:-1],), self.group)
        dtype = hidden_states.dtype
        check_routing(top_k_index, top_k_weights, module.experts * (self.world if self.style.by == "expert" else 1))
        own = top_k_index - self.first
        own = torch.where((own >= 0) & (own < module.experts), own, -1)  # -1: computed by another rank
        y: Tensor = module.summed(hidden_states, own, top_k_weights, self.style.sums or dtype)
        return all_reduce(y, self.group).to(dtype)

    def is_few(self, tokens: int, topk: int) -> bool:
        """Return True if ``tokens`` is few, judged by the experts of all ranks. All ranks therefore decide alike."""
        world = self.world if self.style.by == "expert" else 1
        return tokens <= MOST_FEW and bool(self.base.is_few(self, -(-tokens // world), topk))

    def forward_dense(self, *_: Any, **__: Any) -> Tensor:
        """Refuse the call: divided experts need expert ids, and must be called on all ranks.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("experts that are divided among ranks take the ids of each token's experts; call the module")

    forward_permuted = forward_dense


class DividedExperts(Style):
    """Divide experts among ranks that process the same tokens, as between tensor-parallel layers. The ranks' partial
    results are summed.

    For :class:`torch_cute_ops.nn.QuantExperts`. If tokens differ between ranks, use :class:`ExpertParallel`, which
    sends tokens to their experts.

    Args:
        by: ``"expert"``: each expert is on one rank, which computes it for the tokens that are routed to it.
            ``"tensor"``: every expert's intermediate size is sharded, so that the load is balanced for any routing.
        sums: dtype in which the ranks' partial sums are sent and added. ``None`` uses the dtype of the activations, so
            each partial sum and each sum is rounded to this dtype. With ``torch.float32``, experts' results are not
            rounded before they are summed.

    Raises:
        ValueError: if ``by`` is neither ``"expert"`` nor ``"tensor"``.
    """

    _kind = _Experts

    def __init__(self, by: By = "expert", *, sums: torch.dtype | None = None) -> None:
        if by not in WAYS:
            raise ValueError(f"DividedExperts: by is {by!r}; expected one of {', '.join(map(repr, WAYS))}")
        super().__init__(by=by, sums=None if sums is None else str(sums))
        self.by, self.sums = by, sums

    def own(self, experts: int, width: int, mesh: DeviceMesh, name: str = "DividedExperts") -> tuple[int, int]:
        """Return this rank's range (begin, end) of experts, or of elements of the intermediate size.

        Raises:
            ValueError: if the size cannot be divided equally.
        """
        unit, size = ("experts", experts) if self.by == "expert" else ("elements of intermediate size", width)
        if size % mesh.size():
            raise ValueError(f"{name} has {size} {unit}, which {mesh.size()} ranks cannot divide equally")
        each = size // mesh.size()
        return mesh.get_local_rank() * each, (mesh.get_local_rank() + 1) * each

    def check_module(self, module: nn.Module) -> None:
        """Check that the module is :class:`torch_cute_ops.nn.QuantExperts`.

        Raises:
            TypeError: if it is not; the message names the class.
        """
        if not isinstance(module, QuantExperts):
            raise TypeError(f"DividedExperts is for QuantExperts; got {type(module).__name__}")

    def divide(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Replace undivided experts by this rank's shard, in place. The forward then sums the results of all ranks."""
        assert isinstance(module, QuantExperts)
        self._refuse_shared_scales(module)
        begin, end = self.own(module.experts, module.intermediate_size, mesh)
        if self.by == "tensor":
            reason = reason_unsupported(module.scheme, module.experts, module.hidden_size, end - begin)
            if reason is not None:
                raise ValueError(f"DividedExperts: for {mesh.size()} ranks, {reason}")
        few, module.side_by_side = module.side_by_side, None
        scales_tokens, module.prepared = module.prepared is not None, None
        if self.by == "tensor":
            for dim, layer in enumerate((module.gate_up_proj, module.down_proj)):
                shard_(layer, WeightShard(dim, mesh.get_local_rank(), mesh.size()))
            module.intermediate_size = end - begin
        else:
            keep_parts_(module.gate_up_proj, 2 * begin, 2 * end)
            keep_parts_(module.down_proj, begin, end)
            module.experts = end - begin
        self.bind_experts(module, mesh)
        if scales_tokens:
            module.scale_tokens_()
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

    def _refuse_shared_scales(self, module: QuantExperts) -> None:
        """Check that each scale of the activations between an expert's two layers covers elements of only one rank."""
        if self.by == "tensor" and module.has_token_scales:
            raise ValueError(
                f"DividedExperts: by is 'tensor', but with weights in {module.scheme} the activations of a token share "
                "one scale; expected by='expert'"
            )

    def bind_experts(self, module: QuantExperts, mesh: DeviceMesh) -> None:
        """Change the forward of experts that are already sharded, so that it sums the partial results of all ranks."""
        self._refuse_shared_scales(module)
        # With by="tensor", every rank computes partial sums of every expert, so only the first rank adds the bias.
        fit_bias_(module.down_proj, self.sums, is_added=self.by == "expert" or mesh.get_local_rank() == 0)
        self.bind(module, mesh).first = mesh.get_local_rank() * module.experts if self.by == "expert" else 0
