"""Modules with quantised weights (linear layers and experts), and functions that put these modules into a model."""

from torch_cute_ops.nn._base import Quantization, QuantizedRows, QuantLinear, merge, prefetch_
from torch_cute_ops.nn._summary import Summary, summary
from torch_cute_ops.nn.expert_layer import ExpertLayer, GatedMLP
from torch_cute_ops.nn.experts import QuantExperts, SwiGLU
from torch_cute_ops.nn.fp4_linear import MXFP4Linear, NVFP4Linear
from torch_cute_ops.nn.fp8_linear import FP8BlockLinear, FP8ChannelLinear, FP8TensorLinear, MXFP8Linear
from torch_cute_ops.nn.merging import merge_
from torch_cute_ops.nn.quantize import quantize_
from torch_cute_ops.nn.random import random_
from torch_cute_ops.nn.warmup import warmup

__all__ = [
    "ExpertLayer",
    "FP8BlockLinear",
    "FP8ChannelLinear",
    "FP8TensorLinear",
    "GatedMLP",
    "MXFP4Linear",
    "MXFP8Linear",
    "NVFP4Linear",
    "QuantExperts",
    "QuantLinear",
    "Quantization",
    "QuantizedRows",
    "Summary",
    "SwiGLU",
    "merge",
    "merge_",
    "prefetch_",
    "quantize_",
    "random_",
    "summary",
    "warmup",
]
