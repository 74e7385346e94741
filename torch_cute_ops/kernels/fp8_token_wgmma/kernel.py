"""Device code of the FP8 GEMM with per-token scales.

The package's docstring describes the roles of the warps and the data path.
"""

from torch_cute_ops.kernels.common.fp8.consumers import Consumers, GemmEpilogue, Results, SmemMma, TokenLoop
from torch_cute_ops.kernels.common.fp8.gemm import FP8Gemm, Stages, WorkSchedule
from torch_cute_ops.kernels.common.fp8.kernel import FP8Kernel
from torch_cute_ops.kernels.common.fp8.weights import FP8Weight
from torch_cute_ops.kernels.fp8_token_wgmma.config import Config


class FP8TokenWgmmaKernel(FP8Kernel):
    """GEMM kernel for per-token scales, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        stages = Stages(config)
        schedule = WorkSchedule(config, FP8Weight(config.tile_n, config.rows.is_plain, has_blocks=False))
        results = Results(config, stages, schedule, GemmEpilogue(config))
        loop = TokenLoop(config, stages, results)
        consumers = Consumers(config, stages, SmemMma(config), loop, results)
        self.gemm = FP8Gemm(config, schedule, None, consumers)
