"""Run every tactic of an FP8 GEMM backend on the operands of one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from samples import Sample

from support.gemm_problems import backend_for
from torch_cute_ops.formats.experts import used_rows
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.ops._define import OpSpec


def operands_of(problem: GemmProblem, call: Any) -> Operands:
    """Return the operands of a GEMM call in the form that backends expect: per-token scales, or a single scale of all
    rows, become one column."""
    operands = Operands(**{name: getattr(call, name) for name in Operands._fields})
    if operands.a_scale is None or not problem.a.has_fp8_tokens:
        return operands
    rows = call.a.shape[: -2 if problem.a.is_interleaved else -1].numel()
    return operands._replace(a_scale=operands.a_scale.reshape(-1, 1).expand(rows, 1))


def results(
    op: OpSpec, name: str, one: Sample, given: Mapping[str, Any], target: Target
) -> Iterator[tuple[Tactic, torch.Tensor]]:
    """Run each tactic of the named backend; yield the tactic and its result. The result tensor is filled with NaN
    before the run.

    Args:
        given: keyword arguments that are added to the arguments of the sample.
    """
    call = op.bind(*one.args, **one.kwargs, **given)
    problem = op.path.problem(call)
    backend = backend_for(name, problem)
    lead = call.a.shape[: -2 if problem.a.is_interleaved else -1]
    for tactic in backend.tactics(problem, bucket(lead[-1]), target):
        out = torch.full((*lead, problem.n), torch.nan, dtype=problem.out_dtype, device=call.a.device)
        backend.launcher(problem, tactic, target)(operands_of(problem, call), out)
        yield tactic, out


def check_every_tactic(op: OpSpec, name: str, one: Sample, given: Mapping[str, Any], target: Target) -> None:
    """Check that every tactic gives the same bits as the reference, and does not write rows without an expert."""
    want = op.reference(*one.args, **one.kwargs, **given)
    call = op.bind(*one.args, **one.kwargs, **given)
    used = torch.ones(want.shape[:-1], dtype=torch.bool, device=want.device)
    if call.offsets is not None or call.counts is not None:
        used = used_rows(used.numel(), call.offsets, call.counts).view(used.shape)
    for tactic, out in results(op, name, one, given, target):
        assert torch.equal(out[used], want[used]) and out[~used].isnan().all(), tactic
