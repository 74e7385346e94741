"""Products in GEMMs with a fixed number of rows, so that a row of the result does not depend on the other rows of the
batch.

With the same backend and tactic, a row of a GEMM's result does not depend on the other rows (docs/numerics.md,
"Determinism"). The number of rows selects the tactic. Each call is therefore divided into GEMMs of ``ROWS`` rows; the
last GEMM's rows are padded with zeros.
"""

from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from torch_cute_ops import registry
from torch_cute_ops.integrations._engines.gemms import INVARIANT_ROWS as ROWS
from torch_cute_ops.integrations._engines.gemms import Form, Gemm, product_of

BACKENDS: Final = ("tcgen05", "wgmma", "wgmma_ss", "mma_sync")
"""Backends that compute each row of a result independently of the other rows, in order of their speed for ``ROWS``
rows. cuBLAS and ``torch._scaled_mm`` do not guarantee this."""
NAMESPACE: Final = "torch_cute_ops_engines"


class FixedRows:
    """Product of a layer's input and its weight that is independent of the batch.

    Args:
        form: form of the layer.
    """

    def __init__(self, form: Form) -> None:
        self.scheme, self.activations, self.backend = form.scheme, form.activations, form.backend
        self.has_input_scale = form.has_input_scale

    def __call__(self, layer: Any, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``rows · Wᵀ + bias``. The operator is opaque to ``torch.compile``, so that the number of GEMMs may
        depend on the number of rows."""
        names = [name for name in NAMES if hasattr(layer, name)]
        y: Tensor = torch.ops.torch_cute_ops_engines.mm_fixed_rows(
            rows, [getattr(layer, name) for name in names], ",".join(names), bias, self.scheme, self.activations,
            self.has_input_scale, self.backend,
        )  # fmt: skip
        return y


NAMES: Final = (
    "weight", "weight_scale", "weight_scale_2", "weight_scale_inv", "alpha", "row_scale", "input_scale",
    "input_global_scale",
)  # fmt: skip
"""Attributes of a layer that products read. The weight is the first."""


def mm_fixed_rows(
    rows: Tensor,
    tensors: list[Tensor],
    names: str,
    bias: Tensor | None,
    scheme: str,
    activations: str,
    has_input_scale: bool,
    backend: str,
) -> Tensor:
    """Return ``rows · Wᵀ + bias``, computed by GEMMs of ``ROWS`` rows.

    Args:
        rows: (M, K), activations.
        tensors: tensors of the layer.
        names: names of ``tensors``, with commas; the weight is the first.
        bias: (N,), or None.
        scheme, activations, has_input_scale, backend: as in ``Form``.
    """
    m, k = rows.shape
    n = tensors[0].shape[0]
    form = Form(scheme, activations, n, k, 1, has_input_scale, rows.dtype, bias is not None, backend)
    product, layer = product_of(form), SimpleNamespace(**dict(zip(names.split(","), tensors, strict=True)))
    padded = rows if m % ROWS == 0 else torch.nn.functional.pad(rows, (0, 0, 0, -m % ROWS))
    results = [product(layer, part, bias) for part in padded.split(ROWS)]
    if not results:
        return rows.new_empty((0, n))
    return results[0][:m].clone() if len(results) == 1 else torch.cat(results)[:m]


def _shape(rows: Tensor, tensors: list[Tensor], *rest: Any) -> Tensor:
    """Return an uninitialised result of ``mm_fixed_rows``, for ``torch.compile``."""
    return rows.new_empty((rows.shape[0], tensors[0].shape[0]))


torch.library.custom_op(f"{NAMESPACE}::mm_fixed_rows", mm_fixed_rows, mutates_args=()).register_fake(_shape)


def gemm_of(form: Form) -> Gemm:
    """Return the product for a form."""
    return FixedRows(form) if form.is_invariant else product_of(form)


def backend_of(form: Form, arch: str | None) -> str:
    """Return the backend that computes each row of a form's GEMM independently of the other rows.

    Args:
        form: form of the layer.
        arch: name of the GPU's architecture, or None for a CPU.

    Raises:
        ValueError: if the architecture has no such backend.
    """
    if arch is None:
        return "reference"
    *_, (op, properties) = product_of(form).calls(form, ROWS)
    reasons = registry.backends(op, arch, **properties)
    found = [name for name in BACKENDS if name in reasons and reasons[name] is None]
    if not found:
        raise ValueError(
            f"no kernel of {op} for {arch} gives each row the same result in every batch; turn off the batch-invariant "
            "or deterministic mode, or serve without this quantization method"
        )
    return found[0]
