"""Inputs of ``silu_mul_mm_fp4_weight_only``."""

from collections.abc import Iterator

import torch

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.testing._inputs import Sample
from torch_cute_ops.testing.samples._fp4_gemm import GemmSamples
from torch_cute_ops.testing.samples._rows import short


class GateGemmSamples(GemmSamples):
    """Samples of a GEMM of gate and up."""

    def a_width(self, k: int) -> int:
        """Gate and up."""
        return 2 * k

    def samples(self, device: torch.device) -> Iterator[Sample]:
        """Those of every GEMM, and of gates with special values."""
        yield from super().samples(device)
        m, n, k = self.sizes
        for dtype in (torch.bfloat16, torch.float16):
            sample = self.sample("", m, n, k, NVFP4, "128x4", device, dtype=dtype, out_dtype=torch.float32)
            up = sample.args[0].chunk(2, 1)[1]
            # From where exp(-gate) overflows, over the least value of silu, to where it is the gate.
            slope = torch.linspace(-110, 20, up.numel(), device=device).view_as(up)
            special = torch.ones_like(up)
            special[:3, 5] = torch.tensor([torch.inf, -torch.inf, torch.nan], device=device)
            for name, gate in (("slope", slope), ("special", special)):
                a = torch.cat((gate.to(dtype), up), 1)
                yield self.changed(sample, f"gate-{name}-{short(dtype)}", a=a)


SAMPLES = GateGemmSamples(has_a_scale=False)
sample_inputs = SAMPLES.samples
error_inputs = SAMPLES.errors
