"""Backends of `python -m benchmarks vllm`: kernels that multiply by a checkpoint's quantised weights in vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from .kernels import EXPERTS, LINEAR, listed

PLUGINS = "vllm.general_plugins"
"""Group of entry points that vLLM loads in each of its processes."""
ENTRY_POINT = "torch_cute_ops"
NORMS = {"rms_norm": [ENTRY_POINT], "fused_add_rms_norm": [ENTRY_POINT]}
CLOSE, DECODED, ROUGH = 0.05, 0.1, 0.3
"""Largest accepted mean difference of log probabilities: for 16-bit activations, for decoded weights, and for FP8
activations.

On an H200, for the random 8B model, this package's log probabilities differ from Marlin's by 0.041 on average, and from
the log probabilities with decoded weights, which are rounded to bfloat16, by 0.067. On a CPU, for a Llama with 32
layers of width 512 and random NVFP4 weights, bfloat16 changes the log probabilities of the five likeliest tokens by
0.0056 on average. The standard deviation of its logits is 0.45; for the 8B model it is 1.28. Rounding activations to
FP8 changes the log probabilities of small models by 0.13."""
GAP = 4
"""A token counts as wrong if the reference's log probability of the token is below the log probability of the
reference's own token by more than this multiple of the largest accepted mean difference.

A simulation with Marlin's 210 answers for the random 8B model shows why the gap grows with the limit. If normally
distributed differences of 0.067 on average are added to the log probabilities, as between Marlin and decoded weights,
the first different token is less likely by more than 0.2 in 3 % of the answers, and by more than 0.4 in 0.1 %."""


@dataclass(frozen=True)
class Backend:
    """One way to serve a checkpoint: with this package's kernels, with vLLM's kernels, or with 16-bit weights.

    Attributes:
        name: name in options, results and tables.
        options: arguments of ``vllm.LLM`` that select the backend.
        is_ours: True if this package's kernels multiply by the weights.
        is_decoded: True if the engine serves the checkpoint with its weights decoded to bfloat16.
        module: module that the backend needs, or an empty string.
        limit: largest accepted mean difference of log probabilities from the reference, or None if answers are compared
            but not judged. If the reference has a larger limit, the larger limit counts.
        kernel: start of the names of the classes that must multiply by the quantised weights, or an empty string if
            vLLM may choose any class.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_ours: bool = False
    is_decoded: bool = False
    module: str = ""
    limit: float | None = CLOSE
    kernel: str = ""

    def reason_absent(self) -> str | None:
        """Return the reason that this environment cannot run the backend, or None."""
        if self.is_ours and not metadata.entry_points(group=PLUGINS, name=ENTRY_POINT):
            return f"the entry point {ENTRY_POINT} of {PLUGINS} is not installed; run pip install . in the checkout"
        if self.module and importlib.util.find_spec(self.module) is None:
            return f"the module {self.module} is not installed"
        return None

    def limit_from(self, reference: Backend) -> float | None:
        """Return the largest accepted mean difference from the log probabilities of another backend, or None if answers
        are not judged."""
        return None if self.limit is None else max(self.limit, reference.limit or 0.0)

    def gap_from(self, reference: Backend) -> float:
        """Return the largest difference between the reference's log probabilities of two tokens at which both tokens
        count as right."""
        return GAP * (self.limit_from(reference) or CLOSE)

    def reason_other_kernels(self, found: Mapping[str, Mapping[str, int]]) -> str | None:
        """Return the reason that a served model does not use the backend's kernels, or None.

        Args:
            found: number of quantised layers by class, by kind, as :func:`benchmarks.engines.kernels.kernels_of` counts
                them.
        """
        linear, every = found[LINEAR], {**found[LINEAR], **found[EXPERTS]}
        if self.is_decoded:
            return f"the model has quantised layers: {listed(every)}" if every else None
        if not self.kernel:
            return None
        if self.is_ours:  # formats that this package does not support keep vLLM's methods
            has_ours = any(name.startswith(self.kernel) for name in every)
            return None if has_ours else f"no layer uses this package's kernels; vLLM uses {listed(every)}"
        # `linear_backend` selects the kernels of linear layers only.
        others = {name: count for name, count in linear.items() if not name.startswith(self.kernel)}
        if others or not linear:
            return f"vLLM uses other kernels for quantised linear layers: {listed(others)}; expected {self.kernel}…"
        return None


BACKENDS = {
    each.name: each
    for each in (
        Backend("ours", {"quantization": "torch_cute_ops"}, is_ours=True, kernel="Cute"),
        Backend(
            "ours_norms",
            {"quantization": "torch_cute_ops", "kernel_config": {"ir_op_priority": NORMS}},
            is_ours=True,
            kernel="Cute",
        ),
        Backend("ours_fp8", {"quantization": "torch_cute_ops_fp8"}, is_ours=True, limit=ROUGH, kernel="Cute"),
        Backend("ours_fp4", {"quantization": "torch_cute_ops_fp4"}, is_ours=True, limit=None, kernel="Cute"),
        Backend("marlin", {"linear_backend": "marlin"}, kernel="Marlin"),
        Backend("humming", {"linear_backend": "humming"}, module="humming", kernel="Humming"),
        Backend("vllm"),
        Backend("bf16", is_decoded=True, limit=DECODED),
    )
}
"""Backends by name. ``vllm`` means the kernels that vLLM chooses without any setting."""
OURS = tuple(name for name, each in BACKENDS.items() if each.is_ours)
PEERS = tuple(name for name, each in BACKENDS.items() if not each.is_ours)
"""Backends without this package's kernels. The first of them that runs gives the reference answers. `bf16` is the last,
because rounding the decoded weights to bfloat16 changes the answers more than another kernel does. `vllm` follows the
kernels for 16-bit activations, because vLLM may choose FP4 activations."""
