"""A kernel that cannot be compiled, and a row-quantisation problem, for tests of the compiler and the kernel cache."""

import dataclasses

import torch

from torch_cute_ops.formats import NVFP4, SCALE_LAYOUTS
from torch_cute_ops.kernels import row_quant
from torch_cute_ops.runtime.arch import ARCHS

BF16 = torch.bfloat16


SM90 = ARCHS["sm_90a"]


PROBLEM = row_quant.RowQuantSpec("add", BF16, BF16, 4096, 4096, NVFP4, SCALE_LAYOUTS["128x4"], True, True, False)


@dataclasses.dataclass(frozen=True)
class FakeKernel:
    """Kernel without device code. Tracing it fails."""

    config: object = 0
    declared: tuple = ()

    def arguments(self):
        return self.declared
