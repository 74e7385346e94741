"""Read and write checkpoints of quantised models.

Needs safetensors: the extra ``checkpoint``.
"""

from torch_cute_ops.checkpoint.experts import MXFP4Experts, read_experts
from torch_cute_ops.checkpoint.load import load_
from torch_cute_ops.checkpoint.save import save
from torch_cute_ops.checkpoint.spec import LayerScheme, QuantSpec, read_spec

__all__ = ["LayerScheme", "MXFP4Experts", "QuantSpec", "load_", "read_experts", "read_spec", "save"]
