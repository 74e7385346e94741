"""``fp8_quantize_block128x128``: FP8 quantisation of matrices with a scale per 128 × 128 elements."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_cute_ops.formats.fp8 import FP8_BLOCK128
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._call import KernelLauncher, KernelPath, Outputs
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._properties import REQUIRED, Property, dtype
from torch_cute_ops.ops._signature import FP8ScaleFormat
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec


class _Call(NamedTuple):
    input: Tensor
    scale_format: str | None


class _Launcher(KernelLauncher[_Call]):
    """Launcher of ``fp8_quantize_block128x128``."""

    def run(self, call: _Call, out: Any) -> Any:
        n, k = call.input.shape  # raises unless ``input`` is a matrix
        if not (n and k):
            return None
        blocks = rows, columns = -(-n // FP8_BLOCK128.block_size), -(-k // FP8_BLOCK128.block_size)
        if out is None:
            new = allocator(self.device)
            scale = new((rows, columns), (columns, 1), torch.float32)
            out = (new((n, k), (k, 1), torch.float8_e4m3fn), scale)
        elif (out[0].shape, out[1].shape) != ((n, k), blocks):
            return None  # The compiled function does not compare these sizes with the size of ``input``.
        self.function(call.input.unsqueeze(0), *out)
        return out

    def launch(self, call: _Call, out: Outputs) -> None:
        input, (y, scale) = call.input, out
        matrices = input.reshape(-1, *input.shape[-2:])
        outputs = y.view(-1, y.shape[-1]), scale.view(-1, scale.shape[-1])
        try:
            self.function(matrices, *outputs)
        except (ValueError, TypeError):
            # The compiled function refused rows that do not start at multiples of 16 bytes. So copy them.
            self.function(matrices.clone(memory_format=torch.contiguous_format), *outputs)


class _SquareBlocks(KernelPath[_Call]):
    call_type = _Call
    launcher_type = _Launcher
    # The kernel stores scales one at a time, so they need no alignment.
    any_address = frozenset(("scale",))

    def key(self, call: _Call, device: int) -> tuple[Any, ...]:
        return call.input.dtype, call.scale_format, device

    def check(self, call: _Call) -> None:
        op, (input, scale_format) = self.op, call
        _checks.check_fp8_format(op, FP8_BLOCK128.granularity, None, scale_format)
        if input.dim() == 1:
            raise ValueError(f"cute::{op}: input has one dimension; expected (..., N, K)")
        _checks.check_rows(op, "input", input, FP8_BLOCK128, _checks.INPUT_DTYPES)

    def kernel(self, call: _Call, arch: Arch) -> KernelSpec:
        """Return the kernel that calls with the same static key launch."""
        from torch_cute_ops.kernels import fp8_square_blocks

        config = fp8_square_blocks.plan(call.input.dtype, call.scale_format, pdl=settings.PDL)
        return KernelSpec(fp8_square_blocks.KERNEL, config)

    def declare(self) -> dict[str, Property]:
        declared = {"dtype": dtype(lambda call: call.input.dtype, REQUIRED)}
        return declared | self.arguments_as_properties("scale_format")

    def make_example(self, given: Any, device: torch.device) -> dict[str, Any]:
        return vars(given) | {"input": torch.ones(1, FP8_BLOCK128.block_size, dtype=given.dtype, device=device)}


@define(_SquareBlocks(), "y", "scale")
def fp8_quantize_block128x128(
    input: Tensor, scale_format: FP8ScaleFormat | None = None, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise matrices to FP8 with one scale per block of 128 × 128 elements, as :func:`mm_fp8_block` takes a weight.

    Each block of values ``v``, with ``amax = max |v|``, is quantised in fp32::

        scale = amax / 448
        scale = 2 ** ceil(log2(amax / 448))  # if scales are powers of two, at least 2 ** -127
        y = e4m3(v / scale)

    The last blocks of a matrix may have fewer rows, or 64 columns. Codes are rounded to nearest even and saturate. A
    block with NaN or infinity gets a NaN scale and zero codes; a zero block gets scale zero, or 2 ** -127 if scales are
    powers of two. CPU and GPU results are equal bit for bit.

    Args:
        input: (..., N, K) bfloat16, float16 or float32; K is a multiple of 64. Rows and matrices may be strided. If
            they do not start at multiples of 16 bytes, the op first copies them.
        scale_format: ``"ue8m0"`` for scales that are powers of two. ``None`` means float32 scales of any value.
        out: contiguous tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., N, K) float8_e4m3fn.
        ``scale``: (..., ⌈N/128⌉, ⌈K/128⌉) float32, row-major.

    Raises:
        ValueError: If a shape, device or format is wrong, or if an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp8_quantize, fp8_quantize_block128x128, mm_fp8_block
        >>> weight = torch.ones(256, 64)
        >>> weight[128:] = 896.0
        >>> b, b_scale = fp8_quantize_block128x128(weight, scale_format="ue8m0")
        >>> b[::128, 0].float().tolist(), b_scale.tolist()
        ([256.0, 448.0], [[0.00390625], [2.0]])
        >>> a, a_scale = fp8_quantize(torch.ones(1, 64), granularity="block128")
        >>> mm_fp8_block(a, b.t(), a_scale, b_scale)[0, ::128].tolist()
        [64.0, 57344.0]

    References:
        DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2. Roundings and special values:
        docs/numerics.md, "Quantising to FP8".
    """
