"""Custom PyTorch ops for serving quantised models: CuTe DSL kernels on a GPU, plain torch on a CPU.

Importing the package registers the ops as ``torch.ops.cute.*``. It neither initialises CUDA nor imports the DSL.
"""

from torch_cute_ops._version import __version__
from torch_cute_ops.formats import as_tiles, convert_scales, nvfp4_global_scale
from torch_cute_ops.formats.expert_weights import moe_fc2_weight
from torch_cute_ops.formats.interleave import deinterleave_k, interleave_k
from torch_cute_ops.formats.prepared_scales import prepare_scales
from torch_cute_ops.ops.add_rmsnorm import add_rmsnorm
from torch_cute_ops.ops.add_rmsnorm_fp4quant import add_rmsnorm_fp4quant
from torch_cute_ops.ops.add_rmsnorm_fp4quant_both_layouts import add_rmsnorm_fp4quant_both_layouts
from torch_cute_ops.ops.add_rmsnorm_fp4quant_per_token import add_rmsnorm_fp4quant_per_token
from torch_cute_ops.ops.add_rmsnorm_fp4quant_with_norm import add_rmsnorm_fp4quant_with_norm
from torch_cute_ops.ops.add_rmsnorm_fp4quant_with_norm_both_layouts import add_rmsnorm_fp4quant_with_norm_both_layouts
from torch_cute_ops.ops.add_rmsnorm_fp8quant import add_rmsnorm_fp8quant
from torch_cute_ops.ops.all_reduce_add_rmsnorm import all_reduce_add_rmsnorm
from torch_cute_ops.ops.all_reduce_add_rmsnorm_fp4quant import all_reduce_add_rmsnorm_fp4quant
from torch_cute_ops.ops.all_reduce_add_rmsnorm_fp8quant import all_reduce_add_rmsnorm_fp8quant
from torch_cute_ops.ops.fp4_dequantize import fp4_dequantize
from torch_cute_ops.ops.fp4_quantize import fp4_quantize
from torch_cute_ops.ops.fp4_quantize_four_over_six import fp4_quantize_four_over_six
from torch_cute_ops.ops.fp4_quantize_per_token import fp4_quantize_per_token
from torch_cute_ops.ops.fp4quant_mm_fp4 import fp4quant_mm_fp4
from torch_cute_ops.ops.fp8_quantize import fp8_quantize
from torch_cute_ops.ops.fp8_quantize_block128x128 import fp8_quantize_block128x128
from torch_cute_ops.ops.fp8_quantize_per_tensor import fp8_quantize_per_tensor
from torch_cute_ops.ops.grouped_mm_fp8 import grouped_mm_fp8
from torch_cute_ops.ops.grouped_mm_fp8_fp4 import grouped_mm_fp8_fp4
from torch_cute_ops.ops.mm_fp4 import mm_fp4
from torch_cute_ops.ops.mm_fp4_weight_only import mm_fp4_weight_only
from torch_cute_ops.ops.mm_fp8 import mm_fp8
from torch_cute_ops.ops.mm_fp8_block import mm_fp8_block
from torch_cute_ops.ops.mm_fp8_fp4 import mm_fp8_fp4
from torch_cute_ops.ops.moe_fc1_fp4 import moe_fc1_fp4
from torch_cute_ops.ops.moe_fc1_fp4_weight_only import moe_fc1_fp4_weight_only
from torch_cute_ops.ops.moe_fc2_fp4 import moe_fc2_fp4
from torch_cute_ops.ops.moe_fc2_fp4_weight_only import moe_fc2_fp4_weight_only
from torch_cute_ops.ops.moe_finalize import moe_finalize
from torch_cute_ops.ops.moe_permute_fp8quant import moe_permute_fp8quant
from torch_cute_ops.ops.moe_route import moe_route
from torch_cute_ops.ops.moe_route_dense import moe_route_dense
from torch_cute_ops.ops.moe_route_ids import moe_route_ids
from torch_cute_ops.ops.moe_swiglu_fp8quant import moe_swiglu_fp8quant
from torch_cute_ops.ops.qkv_norm_rope_append import qkv_norm_rope_append
from torch_cute_ops.ops.rmsnorm import rmsnorm
from torch_cute_ops.ops.rmsnorm_fp4quant import rmsnorm_fp4quant
from torch_cute_ops.ops.rmsnorm_fp4quant_per_token import rmsnorm_fp4quant_per_token
from torch_cute_ops.ops.rmsnorm_fp4quant_with_norm import rmsnorm_fp4quant_with_norm
from torch_cute_ops.ops.rmsnorm_fp8quant import rmsnorm_fp8quant
from torch_cute_ops.ops.silu_mul import silu_mul
from torch_cute_ops.ops.silu_mul_fp4quant import silu_mul_fp4quant
from torch_cute_ops.ops.silu_mul_fp4quant_mm_fp4 import silu_mul_fp4quant_mm_fp4
from torch_cute_ops.ops.silu_mul_fp4quant_per_token import silu_mul_fp4quant_per_token
from torch_cute_ops.ops.silu_mul_fp8quant import silu_mul_fp8quant
from torch_cute_ops.ops.silu_mul_mm_fp4_weight_only import silu_mul_mm_fp4_weight_only
from torch_cute_ops.quantized import QuantizedWeight, dequantize, linear, quantize
from torch_cute_ops.registry import backends, precompile, properties_of, warmup
from torch_cute_ops.runtime.tuning import autotune

__all__ = [
    "QuantizedWeight",
    "__version__",
    "add_rmsnorm",
    "add_rmsnorm_fp4quant",
    "add_rmsnorm_fp4quant_both_layouts",
    "add_rmsnorm_fp4quant_per_token",
    "add_rmsnorm_fp4quant_with_norm",
    "add_rmsnorm_fp4quant_with_norm_both_layouts",
    "add_rmsnorm_fp8quant",
    "all_reduce_add_rmsnorm",
    "all_reduce_add_rmsnorm_fp4quant",
    "all_reduce_add_rmsnorm_fp8quant",
    "as_tiles",
    "autotune",
    "backends",
    "convert_scales",
    "deinterleave_k",
    "dequantize",
    "fp4_dequantize",
    "fp4_quantize",
    "fp4_quantize_four_over_six",
    "fp4_quantize_per_token",
    "fp4quant_mm_fp4",
    "fp8_quantize",
    "fp8_quantize_block128x128",
    "fp8_quantize_per_tensor",
    "grouped_mm_fp8",
    "grouped_mm_fp8_fp4",
    "interleave_k",
    "linear",
    "mm_fp4",
    "mm_fp4_weight_only",
    "mm_fp8",
    "mm_fp8_block",
    "mm_fp8_fp4",
    "moe_fc1_fp4",
    "moe_fc1_fp4_weight_only",
    "moe_fc2_fp4",
    "moe_fc2_fp4_weight_only",
    "moe_fc2_weight",
    "moe_finalize",
    "moe_permute_fp8quant",
    "moe_route",
    "moe_route_dense",
    "moe_route_ids",
    "moe_swiglu_fp8quant",
    "nvfp4_global_scale",
    "precompile",
    "prepare_scales",
    "properties_of",
    "qkv_norm_rope_append",
    "quantize",
    "rmsnorm",
    "rmsnorm_fp4quant",
    "rmsnorm_fp4quant_per_token",
    "rmsnorm_fp4quant_with_norm",
    "rmsnorm_fp8quant",
    "silu_mul",
    "silu_mul_fp4quant",
    "silu_mul_fp4quant_mm_fp4",
    "silu_mul_fp4quant_per_token",
    "silu_mul_fp8quant",
    "silu_mul_mm_fp4_weight_only",
    "warmup",
]
