"""Backends of `python -m benchmarks vllm`: kernels that multiply by a checkpoint's quantised weights in vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

PLUGINS = "vllm.general_plugins"
"""Group of entry points that vLLM loads in each of its processes."""
ENTRY_POINT = "torch_cute_ops"
NORMS = {"rms_norm": [ENTRY_POINT], "fused_add_rms_norm": [ENTRY_POINT]}
CLOSE, ROUGH = 0.05, 0.3
"""Largest accepted mean difference of log probabilities: for 16-bit activations, and for FP8 activations.

On a CPU, for a Llama with 32 layers of width 512 and random NVFP4 weights, bfloat16 changes the log probabilities of
the five likeliest tokens by 0.0056 on average. The standard deviation of its logits is 0.45; for the 8B model it is
1.28. Rounding activations to FP8 changes the log probabilities of small models by 0.13."""


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
            but not judged.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_ours: bool = False
    is_decoded: bool = False
    module: str = ""
    limit: float | None = CLOSE

    def reason_absent(self) -> str | None:
        """Return the reason that this environment cannot run the backend, or None."""
        if self.is_ours and not metadata.entry_points(group=PLUGINS, name=ENTRY_POINT):
            return f"the entry point {ENTRY_POINT} of {PLUGINS} is not installed; run pip install . in the checkout"
        if self.module and importlib.util.find_spec(self.module) is None:
            return f"the module {self.module} is not installed"
        return None


BACKENDS = {
    each.name: each
    for each in (
        Backend("ours", {"quantization": "torch_cute_ops"}, is_ours=True),
        Backend(
            "ours_norms",
            {"quantization": "torch_cute_ops", "kernel_config": {"ir_op_priority": NORMS}},
            is_ours=True,
        ),
        Backend("ours_fp8", {"quantization": "torch_cute_ops_fp8"}, is_ours=True, limit=ROUGH),
        Backend("ours_fp4", {"quantization": "torch_cute_ops_fp4"}, is_ours=True, limit=None),
        Backend("bf16", is_decoded=True),
        Backend("vllm"),
        Backend("marlin", {"linear_backend": "marlin"}),
        Backend("humming", {"linear_backend": "humming"}, module="humming"),
    )
}
"""Backends by name. ``vllm`` means the kernels that vLLM chooses without any setting."""
OURS = tuple(name for name, each in BACKENDS.items() if each.is_ours)
PEERS = tuple(name for name, each in BACKENDS.items() if not each.is_ours)
"""Backends without this package's kernels. The first of them that runs gives the reference answers."""
