"""Base class of the benchmarks of all GEMMs. It defines the GEMM problem of a case, counts the bytes and operations,
and calls our op."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

import torch_cute_ops
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.ops._backend_path import BackendPath
from torch_cute_ops.registry import OPS

from .buffers import poisoned_outputs
from .case import Benchmark, Case, Tensors, Variant

DTYPE = torch.bfloat16
"""Dtype of the results, and of 16-bit operands."""


@cache
def problem_of(op: str, **properties: Any) -> GemmProblem:
    """Return the `GemmProblem` that describes calls of an op with these static properties."""
    spec = OPS[op]
    assert isinstance(spec.path, BackendPath)
    kwargs = spec.path.example(**properties, device="meta")
    problem: GemmProblem = spec.path.problem(spec.bind(**kwargs))
    return problem


class GemmBenchmark(Benchmark):
    """Benchmark of a GEMM op with bfloat16 results. Subclasses define cases, operands and peers."""

    checked_elements = 2**28

    def properties(self, case: Case) -> dict[str, Any]:
        """Return the static properties of a case's calls, with the names that `warmup` uses."""
        return {"n": case["N"], "k": case["K"], "m": case["M"]}

    def problem(self, case: Case) -> GemmProblem:
        """Return the `GemmProblem` that describes a case's GEMM."""
        return problem_of(self.op, **self.properties(case))

    def bytes_moved(self, case: Case) -> int:
        return self.problem(case).bytes_moved(case["M"])

    def flops(self, case: Case) -> int:
        return self.problem(case).flops(case["M"])

    def smallest(self, case: Case) -> Case:
        return case  # each size may use another kernel, so a smaller case would not compile the kernel of this case

    @abstractmethod
    def operands(self, case: Case, device: torch.device) -> Tensors:
        """Return the input tensors of one buffer set."""

    @abstractmethod
    def arguments(self, tensors: Tensors) -> Tensors:
        """Return the arguments of our op by name, taken from the tensors of a buffer set."""

    def make_set(self, case: Case, device: torch.device) -> Tensors:
        tensors = self.operands(case, device)
        return tensors | poisoned_outputs(self.op, lambda fake: fake(**self.arguments(tensors)))

    def run(self, tensors: Tensors, backend: str = "auto") -> None:
        """Run our op on one buffer set, into its preallocated outputs."""
        results = self.results(tensors)
        out = results if len(results) > 1 else results[0]
        getattr(torch_cute_ops, self.op)(**self.arguments(tensors), backend=backend, out=out)

    def results(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """Return the output tensors of a buffer set."""
        return tuple(tensors[name] for name in OPS[self.op].outputs)

    def ours(self, case: Case, sets: Sequence[Tensors]) -> Variant:
        return self.with_backend(case, sets, "auto")

    def with_backend(self, case: Case, sets: Sequence[Tensors], backend: str) -> Variant:
        """Return the variant of our op with the named backend."""

        def call(i: int) -> tuple[torch.Tensor, ...]:
            self.run(sets[i], backend)
            return self.results(sets[i])

        return Variant(call, self.bytes_moved(case))
