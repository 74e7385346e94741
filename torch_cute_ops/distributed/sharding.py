"""Sharding strategies of the ops, registered with DTensor when :mod:`torch_cute_ops.distributed` is imported."""

import functools
import inspect
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._op_schema import OpSpec as Strategy

from torch_cute_ops.distributed.rules import OUT_REASON, Rule, has_rules, is_byte_float, reason_without, rules_of
from torch_cute_ops.ops._define import OpSpec
from torch_cute_ops.registry import OPS


def reason_unsharded(op: str) -> str | None:
    """Return the reason why an op accepts no sharded tensors, or None if it has sharding rules.

    Args:
        op: name of the op, or ``"fp4_quantize.out"`` for the ``.out`` overload of ``fp4_quantize``.

    Raises:
        ValueError: for an unknown op.
    """
    name, _, overload = op.partition(".")
    if name not in OPS or overload not in ("", "out"):
        raise ValueError(f"{op!r} is not an op; expected one of {', '.join(OPS)}")
    if overload:
        return OUT_REASON
    return None if has_rules(OPS[name]) else reason_without(name)


def redistribute(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Redistribute a tensor as ``tensor.redistribute`` does, but send FP8 as uint8, and preserve the strides.

    gloo cannot send FP8, and NCCL cannot on some GPUs. Collectives return contiguous tensors. So if the tensor is a
    transposed view, such as the weight of a GEMM, the row-major tensor behind the view is sent.

    Args:
        tensor: tensor of any dtype; an FP8 tensor cannot be ``Partial``.
        placements: placement for each dimension of the tensor's mesh.

    Raises:
        ValueError: for FP8 with ``Partial``, because summing bytes does not sum numbers.
    """
    is_bytes = is_byte_float(tensor.dtype)
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    if not is_bytes and order == [*range(tensor.ndim)]:
        return tensor.redistribute(placements=placements)
    if is_bytes and any(isinstance(each, Partial) for each in (*tensor.placements, *placements)):
        raise ValueError(
            f"redistribute: placements {tensor.placements} to {tuple(placements)} of {tensor.dtype}; "
            "expected no Partial, because FP8 cannot be summed"
        )
    inverse = [order.index(dim) for dim in range(tensor.ndim)]
    sent = torch.uint8 if is_bytes else tensor.dtype
    moved = _permuted(tensor, order, sent).redistribute(placements=[_moved(each, inverse) for each in placements])
    return _permuted(moved, inverse, tensor.dtype)


def _permuted(tensor: DTensor, order: Sequence[int], dtype: torch.dtype) -> DTensor:
    """Return a view of a tensor with permuted dimensions and the dtype ``dtype``."""
    inverse = [order.index(dim) for dim in range(tensor.ndim)]
    return DTensor.from_local(
        tensor.to_local().view(dtype).permute(*order),
        tensor.device_mesh,
        [_moved(each, inverse) for each in tensor.placements],
        run_check=False,
        shape=torch.Size(tensor.shape[dim] for dim in order),
        stride=tuple(tensor.stride(dim) for dim in order),
    )


def _moved(placement: Placement, to: Sequence[int]) -> Placement:
    """Return the placement that a tensor has after its dimension ``i`` was moved to position ``to[i]``, for every i."""
    return Shard(to[placement.dim]) if isinstance(placement, Shard) else placement


def full_tensor(tensor: DTensor) -> torch.Tensor:
    """Return the full tensor as ``tensor.full_tensor()`` does, but send FP8 tensors as uint8."""
    return redistribute(tensor, [Replicate()] * tensor.device_mesh.ndim).to_local()


class _Choice:
    """Choice of one rule per mesh dimension for a call, and the cost of redistributing the call's tensors for it."""

    def __init__(
        self, rules: Sequence[Rule], given: dict[str, DTensorSpec], sizes: Sequence[int], hints: Collection[str]
    ) -> None:
        self.rules, self.sizes = rules, sizes
        self.inputs = {name: tuple(rule.inputs.get(name, Replicate()) for rule in rules) for name in given}
        # No result depends on a hint such as ``prefetch``, so a hint keeps its placement.
        self.inputs |= {name: spec.placements for name, spec in given.items() if name in hints}
        self.moved = [
            name
            for name, spec in given.items()
            if any(not _is_local(old, new) for old, new in zip(spec.placements, self.inputs[name], strict=True))
        ]
        self.changed = [name for name, spec in given.items() if spec.placements != self.inputs[name]]
        nbytes = [given[name].shape.numel() * _dtype(given[name]).itemsize for name in self.moved]
        self.cost = (sum(nbytes), len(self.changed))

    def outputs(self, names: Sequence[str]) -> list[tuple[Placement, ...]]:
        """Return the placement of each output on each mesh dimension."""
        return [tuple(rule.outputs.get(name, Replicate()) for rule in self.rules) for name in names]

    def reason_unfit(self, spec: OpSpec, given: dict[str, DTensorSpec]) -> str | None:
        """Return the reason why the call cannot be sharded by these rules, or None if it can."""
        for rule in self.rules:
            if rule.refusal is not None:
                return rule.refusal
            same = [size for size, other in zip(self.sizes, self.rules, strict=True) if other.over == rule.over]
            shards = math.prod(same)
            for multiple in rule.multiples:
                reason = multiple.reason_unfit(shards)
                if reason is not None:
                    return reason
        updated = [name for name in spec.updated if name in self.changed]
        if updated:
            name = updated[0]
            return (
                f"{name} is updated in place and is {_shown(given[name].placements)}, while the call is sharded as "
                f"{_shown(self.inputs[name])}; a redistributed copy would take the update, so give it that placement"
            )
        for name in self.moved:
            dtype = _dtype(given[name])
            kept = "moves FP8 as bytes" if is_byte_float(dtype) else "keeps strides"
            if is_byte_float(dtype) or name == getattr(spec.path, "b_name", None):
                return (
                    f"{name} is {dtype} and {_shown(given[name].placements)}; expected {_shown(self.inputs[name])}, or "
                    f"call torch_cute_ops.distributed.redistribute, which {kept}"
                )
        return None


def _dtype(spec: DTensorSpec) -> torch.dtype:
    assert spec.tensor_meta is not None
    return spec.tensor_meta.dtype


def _is_local(old: Placement, new: Placement) -> bool:
    """Return True if a tensor can change from the old to the new placement without communication."""
    return old == new or (isinstance(old, Replicate) and isinstance(new, Shard))


def _shown(placements: Sequence[Placement]) -> str:
    return f"({', '.join(map(repr, placements))})"


def _bound(spec: OpSpec, schema: OpSchema) -> dict[str, Any]:
    """Return the arguments of a call by name, including defaults. Tensors are replaced by their DTensor specs."""
    parameters = spec.signature.parameters
    call = {each.name: None if each.default is inspect.Parameter.empty else each.default for each in parameters}
    call.update(zip(spec.signature.names, map(_as_spec, schema.args_schema), strict=False))
    call.update({name: _as_spec(value) for name, value in schema.kwargs_schema.items()})
    return call


def _as_spec(value: object) -> object:
    return value.strategies[0].output_spec if isinstance(value, OpStrategy) else value


class _Seen:
    """Replacement for a tensor of the call, from which rules read a dtype and a shape: the global shape, not a
    shard's."""

    def __init__(self, spec: DTensorSpec) -> None:
        assert spec.tensor_meta is not None
        self.shape, self.ndim, self.dtype = tuple(spec.shape), spec.ndim, spec.tensor_meta.dtype

    def numel(self) -> int:
        return math.prod(self.shape)


def _strategy(spec: OpSpec, *given_by_torch: Any) -> OpStrategy:
    """Choose the permitted combination of rules that moves the fewest bytes for a call. Return it as the only sharding
    strategy."""
    schema: OpSchema = given_by_torch[-1]  # the last argument, because some torch versions pass a mesh before it
    call = _bound(spec, schema)
    given = {name: value for name, value in call.items() if isinstance(value, DTensorSpec)}
    mesh = next(iter(given.values())).mesh
    seen = {name: _Seen(value) if isinstance(value, DTensorSpec) else value for name, value in call.items()}
    rules, sizes = rules_of(spec, seen), [mesh.size(dim) for dim in range(mesh.ndim)]
    if not has_rules(spec):
        for name, each in given.items():
            if any(not isinstance(placement, Replicate) for placement in each.placements):
                raise ValueError(
                    f"cute::{spec.name}: {name} is {_shown(each.placements)}; expected Replicate(): "
                    f"{reason_without(spec.name)}"
                )
    choices = [_Choice(each, given, sizes, spec.path.hints) for each in itertools.product(rules, repeat=mesh.ndim)]
    chosen = min(choices, key=lambda choice: choice.cost)
    reason = chosen.reason_unfit(spec, given)
    if reason is not None:
        raise ValueError(f"cute::{spec.name}: {reason}")
    outputs = tuple(DTensorSpec(mesh, placements) for placements in chosen.outputs(spec.outputs))
    inputs = [
        DTensorSpec(mesh, placements, tensor_meta=given[name].tensor_meta) for name, placements in chosen.inputs.items()
    ]
    # torch compares strategies by cost. This is the only strategy, so its cost does not matter.
    costs = [[0.0] for _ in inputs]
    return OpStrategy([Strategy(outputs if len(outputs) > 1 else outputs[0], inputs, costs)])


def _refuse_out(spec: OpSpec, *given_by_torch: Any) -> OpStrategy:
    raise ValueError(f"cute::{spec.name}.out: {OUT_REASON}")


def _schema_info(spec: OpSpec) -> RuntimeSchemaInfo:
    """Tell torch which arguments belong in its cache key: all tensors, and all arguments after the first non-tensor."""
    first = next((i for i, each in enumerate(spec.signature.parameters) if not each.is_tensor), 100)
    return RuntimeSchemaInfo(first, needs_pytree=True)


@functools.cache
def register() -> None:
    """Register a strategy for every op with DTensor, once per process.

    The function calls internals of torch instead of ``torch.distributed.tensor.experimental.register_sharding``,
    because ``register_sharding`` would let torch choose among the rules. Torch would then redistribute tensors that an
    op updates in place, and gather tensors instead of reporting why they cannot be sharded.
    """
    propagator: Final = DTensor._op_dispatcher.sharding_propagator
    for spec in OPS.values():
        packet, info = getattr(torch.ops.cute, spec.name), _schema_info(spec)
        propagator.register_op_strategy(packet.default, functools.partial(_strategy, spec), info)
        propagator.register_op_strategy(packet.out, functools.partial(_refuse_out, spec), info)
