"""Problems of many kinds, on a GPU that there is not."""

import torch

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.mm_backends import Product, Target

CPU = Target(torch.device("cpu"), None, 1, "GPU of test")


def products():
    for fmt in (NVFP4, MXFP4):
        for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
            for a_dtype, layout in ((torch.uint8, "8x4"), (torch.uint8, "linear"), (torch.bfloat16, None)):
                a_layout = SCALE_LAYOUTS[layout] if layout else None
                b_layout = SCALE_LAYOUTS["linear" if layout == "linear" else "128x4"]
                has_alpha = out_dtype == torch.float32
                yield Product(40, 96, fmt, a_dtype, a_layout, b_layout, has_alpha, out_dtype)
            yield Product(40, 12 * 64, fmt, a_dtype, a_layout, b_layout, True, out_dtype, experts=12)
