"""Method for SGLang's linear layers."""

import functools
import logging
from types import SimpleNamespace
from typing import ClassVar

from sglang.srt.layers.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from torch_cute_ops.integrations._engines.checkpoints import METHODS
from torch_cute_ops.integrations._engines.linear import Engine, LinearMethod
from torch_cute_ops.quantized import FP8_BLOCK

logger = logging.getLogger(__name__)


@functools.cache
def warn(message: str) -> None:
    """Log a warning, each message once."""
    logger.warning(message)


class CuteLinearMethod(LinearMethod, LinearMethodBase):
    """Method that multiplies by quantised weights with this package's kernels.

    Attributes:
        quant_config: block size of FP8 weights and name of the method, in the form that SGLang's weight loaders and
            models expect.
    """

    engine: ClassVar = Engine(
        name="SGLang",
        matrix=ModelWeightParameter,
        blocks=BlockQuantScaleParameter,
        channels=ChannelQuantScaleParameter,
        per_layer=PerTensorScaleParameter,
        unquantised=UnquantizedLinearMethod,
        warn=warn,
    )
    quant_config: ClassVar = SimpleNamespace(weight_block_size=[FP8_BLOCK, FP8_BLOCK], get_name=lambda: METHODS["auto"])
