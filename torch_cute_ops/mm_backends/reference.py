"""The executable specification as a backend: right on every device, and slow."""

import torch

from torch_cute_ops.mm_backends._base import Backend, Launcher, Product, Tactic, Target
from torch_cute_ops.reference.mm_fp4 import product as reference_product
from torch_cute_ops.reference.moe_fc2_fp4 import expert_product
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import Wanted


class Reference(Backend):
    """Decodes to float64 and multiplies there."""

    name = "reference"

    def reason_unsupported(self, product: Product, target: Target) -> str | None:
        return None

    def tactics(self, product: Product, m: int, target: Target) -> tuple[Tactic, ...]:
        return ((),)

    def estimate(self, product: Product, m: int, tactic: Tactic, target: Target) -> float:
        # Of the order of what float64 units do; after every other backend in any case.
        return 1e-3 + product.flops(m) * 1e-12

    def kernels(self, product: Product, tactic: Tactic, arch: Arch) -> tuple[Wanted, ...]:
        return ()

    def launcher(self, product: Product, tactic: Tactic, target: Target) -> Launcher:
        facts = (product.out_dtype, product.fmt, product.a_layout, product.b_layout)

        def multiply(
            a: torch.Tensor,
            a_scale: torch.Tensor | None,
            b: torch.Tensor,
            b_scale: torch.Tensor,
            alpha: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:
            out.copy_(reference_product(a, a_scale, b.t(), b_scale, alpha, *facts))

        def add_up_experts(
            a: torch.Tensor,
            a_scale: torch.Tensor | None,
            b: torch.Tensor,
            b_scale: torch.Tensor,
            alpha: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:
            assert alpha is not None
            out.copy_(expert_product(a, a_scale, b.t(), b_scale, alpha, *facts))

        return multiply if product.experts is None else add_up_experts
