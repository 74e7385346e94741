"""Conversion of tensors to the alignment and layout that kernels need, and the device of examples."""

import contextlib
from collections.abc import Iterator

import torch

from torch_cute_ops.formats.fp8 import is_packed_column, new_column_scales

Tensor = torch.Tensor


def cuda_device(device: torch.device | int | str | None) -> torch.device:
    """Return the named device, or the current CUDA device for None."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor if it is contiguous and starts at a multiple of 16 bytes, or else a copy that does."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def readable_rows(rows: Tensor) -> Tensor:
    """Return the matrix, or a contiguous copy if a row does not start at a multiple of 16 bytes."""
    step = rows.stride(0) * rows.element_size() if rows.shape[0] > 1 else 0
    if (rows.stride(1) == 1 or rows.shape[1] == 1) and rows.data_ptr() % 16 == 0 and step % 16 == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def writable_columns(scale: Tensor) -> Iterator[Tensor]:
    """Yield FP8 block scales (..., blocks) for a kernel that writes column-major scales without padding.

    The result is ``scale`` itself, or a copy that is written back to ``scale`` when the block ends. The copy is
    initialised from ``scale``, because a kernel may leave elements unwritten.
    """
    if is_packed_column(scale):
        yield scale
        return
    columns = new_column_scales(scale).copy_(scale)
    yield columns
    scale.copy_(columns)


def are_int32(*tensors: Tensor | None) -> bool:
    """Return True if all tensors that are not None hold int32; compiled functions also take uint32."""
    for tensor in tensors:  # noqa: SIM110 (a generator takes twice as long)
        if tensor is not None and tensor.dtype is not torch.int32:
            return False
    return True
