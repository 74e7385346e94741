"""Convert tensors to the alignment and layout that kernels need, and choose the device of examples."""

import contextlib
from collections.abc import Iterator

import torch

from torch_cute_ops.formats.fp8 import is_packed_column, new_column_scales

Tensor = torch.Tensor


def cuda_device(device: torch.device | int | str | None) -> torch.device:
    """Return ``device`` as a ``torch.device``, or the current CUDA device if ``device`` is None."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor if it is contiguous and starts at a multiple of 16 bytes, or else a contiguous, aligned
    copy."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def readable_rows(rows: Tensor) -> Tensor:
    """Return the matrix itself if each row starts at a multiple of 16 bytes, or else a contiguous copy."""
    step = rows.stride(0) * rows.element_size() if rows.shape[0] > 1 else 0
    if (rows.stride(1) == 1 or rows.shape[1] == 1) and rows.data_ptr() % 16 == 0 and step % 16 == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def writable_columns(scale: Tensor) -> Iterator[Tensor]:
    """Provide column-major FP8 block scales without padding, (..., blocks), that a kernel can write to.

    The context yields ``scale`` itself, or a copy that is written back to ``scale`` when the ``with`` block ends. The
    copy starts with the values of ``scale``, because a kernel may leave elements unwritten.
    """
    if is_packed_column(scale):
        yield scale
        return
    columns = new_column_scales(scale).copy_(scale)
    yield columns
    scale.copy_(columns)


def are_int32(*tensors: Tensor | None) -> bool:
    """Return True if all tensors that are not None are int32. Compiled functions do not check this, because they also
    accept uint32."""
    for tensor in tensors:  # noqa: SIM110 (a generator takes twice as long)
        if tensor is not None and tensor.dtype is not torch.int32:
            return False
    return True
