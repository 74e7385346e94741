"""Tensors as kernels take them, and as examples of calls are made of."""

import torch

Tensor = torch.Tensor


def cuda_device(device: torch.device | int | str | None) -> torch.device:
    """The device that is meant; ``None``: the current CUDA device."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that is contiguous and starts at a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def readable_rows(rows: Tensor) -> Tensor:
    """The matrix, or a contiguous copy where its rows do not each start at a multiple of 16 bytes."""
    step = rows.stride(0) * rows.element_size() if rows.shape[0] > 1 else 0
    if (rows.stride(1) == 1 or rows.shape[1] == 1) and rows.data_ptr() % 16 == 0 and step % 16 == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def are_int32(*tensors: Tensor | None) -> bool:
    """Whether those that there are hold int32: compiled functions take uint32 too."""
    for tensor in tensors:  # noqa: SIM110 (a generator takes twice as long)
        if tensor is not None and tensor.dtype is not torch.int32:
            return False
    return True
