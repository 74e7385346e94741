"""vLLM plugin that runs NVFP4 linear layers on ``mm_fp4_weight_only``.

Written for the interfaces of vLLM 0.33.0 and tested with stubs of them; it has never run in vLLM. vLLM finds
:func:`register` by the entry point ``torch_cute_ops`` in the group ``vllm.general_plugins``.
"""

import os
from typing import Any, Final

import torch
from torch import Tensor, nn

from torch_cute_ops.formats import convert_scales
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.nn import NVFP4Linear
from torch_cute_ops.ops.mm_fp4_weight_only import mm_fp4_weight_only
from torch_cute_ops.runtime.arch import arch_of_device

try:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
    from vllm.model_executor.utils import replace_parameter
    from vllm.platforms.interface import PlatformEnum
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"torch_cute_ops.integrations.vllm needs {missing.name} as in vLLM 0.33", name=missing.name
    ) from missing

__all__ = ["CuteNvFp4LinearKernel", "register"]

PLUGIN: Final = "torch_cute_ops"
"""Name of the entry point, for the environment variable ``VLLM_PLUGINS``."""

_made_ready: set[object] = set()


def register() -> None:
    """Add ``CuteNvFp4LinearKernel`` to the kernels from which vLLM selects for NVFP4 linear layers on CUDA.

    The kernel comes first if the environment variable ``VLLM_PLUGINS`` names ``torch_cute_ops``. Otherwise it comes
    last, and vLLM selects it only if ``VLLM_DISABLED_KERNELS`` disables vLLM's own kernels. A second call changes
    nothing.
    """
    kernels = linear._POSSIBLE_NVFP4_KERNELS.setdefault(PlatformEnum.CUDA, [])
    if CuteNvFp4LinearKernel not in kernels:
        linear.register_linear_kernel(CuteNvFp4LinearKernel, PlatformEnum.CUDA, "nvfp4")
    if PLUGIN in os.environ.get("VLLM_PLUGINS", "").replace(" ", "").split(","):
        kernels.remove(CuteNvFp4LinearKernel)
        kernels.insert(0, CuteNvFp4LinearKernel)


class CuteNvFp4LinearKernel(NvFp4LinearKernel):
    """Kernel that multiplies 16-bit activations by an NVFP4 weight. A layer's scales of activations are not used."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return (True, None) if kernels for the GPU exist, otherwise (False, reason)."""
        if not torch.cuda.is_available():
            return False, "torch_cute_ops needs a CUDA device"
        try:
            arch_of_device(torch.cuda.current_device())
        except RuntimeError as error:
            return False, str(error)
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Return (True, None). vLLM does not pass the layer's size; :meth:`process_weights_after_loading` refuses
        unsupported sizes."""
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Rearrange the scales to 128x4, and compile the kernels for the numbers of rows that vLLM captures.

        Args:
            layer: layer with ``weight`` (N, K/2) uint8; ``weight_scale`` (N, K/16) float8_e4m3fn in the linear layout;
                and ``weight_global_scale``, one float32 factor.

        Raises:
            ValueError: for a size that the op does not support.
        """
        given: Any = layer
        n, k = given.weight.shape[0], 2 * given.weight.shape[1]
        reason = NVFP4Linear.reason_unsupported(n, k)
        if reason is not None:
            raise ValueError(
                f"{type(layer).__name__}: {reason}; disable {type(self).__name__} by VLLM_DISABLED_KERNELS"
            )
        replace_parameter(layer, "weight_scale", convert_scales(given.weight_scale.data, n, k, "linear", "128x4"))
        alpha = given.weight_global_scale.data.reshape(1).to(torch.float32)
        replace_parameter(layer, "weight_global_scale", alpha)
        self._make_ready(given, k)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x · Wᵀ + bias``, (..., N) in the dtype of ``x`` (..., K)."""
        given: Any = layer
        rows = x.reshape(-1, x.shape[-1])
        y = mm_fp4_weight_only(rows, given.weight.t(), given.weight_scale, given.weight_global_scale, bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _make_ready(self, layer: Any, k: int) -> None:
        """Call the layer once for each number of rows that vLLM captures, because a capture cannot compile."""
        config = get_current_vllm_config_or_none()
        if config is None or not layer.weight.is_cuda:
            return
        dtype, bias = config.model_config.dtype, getattr(layer, "bias", None)
        form = (layer.weight.shape, dtype, None if bias is None else bias.dtype, layer.weight.device)
        if form in _made_ready:
            return
        _made_ready.add(form)
        sizes = config.compilation_config.cudagraph_capture_sizes or ()
        for count in {bucket(size): size for size in sizes}.values():
            self.apply_weights(layer, torch.zeros(count, k, dtype=dtype, device=layer.weight.device), bias)
