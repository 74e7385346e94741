#!/usr/bin/env python3
"""Quantise hidden states to FP4 with `torch.ops.cute.rmsnorm_fp4quant`, and check the result against float64.

    python examples/quickstart.py                            # synthetic hidden states with outlier channels
    python examples/quickstart.py --model minilm             # a real model's, on real text (the extra `examples`)
    python examples/quickstart.py --model model.safetensors  # a norm weight and an embedding from a file

The script runs the op eagerly, under torch.compile and, on a GPU, captured in a CUDA graph. Without a GPU the op runs
its reference in plain torch. The last line starts with SUCCESS or FAILURE; the exit status is 0 or 1 accordingly.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

import torch_cute_ops
from hidden_states import load
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.runtime.arch import arch_of_device

EPS = 1e-6
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FORMATS = {fmt.name: fmt for fmt in (NVFP4, MXFP4)}

# Limits of the checks. The op computes in fp32, so a value near a rounding boundary may be rounded differently than in
# float64: one element in a thousand may differ, by one step. The signal-to-noise ratio of quantised hidden states is 20
# to 24 dB in NVFP4 and 15.5 to 18 dB in MXFP4.
AGREEMENT = 0.999
MAX_STEPS = 1
MIN_SNR_DB = {"nvfp4": 18.0, "mxfp4": 14.0}

Outputs = tuple[torch.Tensor, torch.Tensor]
Call = Callable[[], Outputs]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    fmt = FORMATS[options.format]
    device, backend = pick_device()
    x, weight, source = load(options)
    x = x.to(device, getattr(torch, options.dtype))
    weight = weight.to(device, x.dtype)
    exact = norm_float64(x, weight)
    # In a served model, the amax comes from a calibration instead of from the input.
    factor = torch_cute_ops.nvfp4_global_scale(exact.abs().max()) if fmt.has_global_scale else None
    print(f"device     {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}: {backend}")
    print(f"input      {x.shape[0]} x {x.shape[1]} {options.dtype}: {source}")
    scaled = "no global scale" if factor is None else f"global scale {factor.item():.5g}"
    print(f"output     {fmt.name}, {options.layout} scales, {scaled}")

    def quantize(x: torch.Tensor) -> Outputs:
        return torch.ops.cute.rmsnorm_fp4quant(
            x, weight, factor, EPS, block_size=fmt.block_size, scale_layout=options.layout
        )

    y, scale = eager = quantize(x)
    problems = compare_with_float64(y, scale, exact, factor, fmt, options.layout)
    before, after = x.numel() * x.element_size(), y.numel() + scale.numel()
    print(f"bytes      {before:,} as {options.dtype}, {after:,} as codes and scales: {before / after:.2f} times fewer")

    print(f"eager      {timed(lambda: quantize(x))}")
    for way, prepare in {"compiled": compiled, "captured": captured}.items():
        call = prepare(quantize, x)
        if isinstance(call, str):
            print(f"{way}   skipped: {call}")
        elif all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(call(), eager, strict=True)):
            print(f"{way}   {timed(call)}, bit for bit the eager result")
        else:
            print(f"{way}   {timed(call)}, NOT the eager result")
            problems.append(f"{way} differs from eager")
    return conclude(problems)


def conclude(problems: list[str]) -> int:
    """Print SUCCESS, or FAILURE with the problems, and return the exit status."""
    print(f"FAILURE: {'; '.join(problems)}" if problems else "SUCCESS: every check passed")
    return 1 if problems else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, default=1024, help="rows (tokens); with --model, the maximum (default: 1024)"
    )
    parser.add_argument("--hidden", type=int, default=4096, help="row length of synthetic input (default: 4096)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the input")
    parser.add_argument("--format", choices=tuple(FORMATS), default="nvfp4")
    parser.add_argument("--layout", choices=tuple(SCALE_LAYOUTS), default="128x4", help="of the scales")
    parser.add_argument("--seed", type=int, default=0, help="of synthetic input")
    parser.add_argument("--model", help="'minilm', or a .safetensors file")
    parser.add_argument("--text", type=Path, help="file with the text for minilm (default: a few paragraphs)")
    parser.add_argument("--weight", help="norm weight in the file (default: the largest (H,) named *norm*weight)")
    parser.add_argument("--tensor", help="matrix in the file (default: the largest named *embed*, else the largest)")
    return parser.parse_args(arguments)


def multiple_of(step: int, least: int = 1) -> Callable[[str], int]:
    """Return a function that parses an option's value, which must be a multiple of ``step`` and at least ``least``."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = -1
        if value < least or value % step:
            what = "an integer" if step == 1 else f"a multiple of {step}"
            raise argparse.ArgumentTypeError(f"{text!r}: expected {what}, {max(step, least)} or more")
        return value

    return number


def pick_device() -> tuple[torch.device, str]:
    """Return the device, and a description of the implementation that runs on it."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "the op's reference in plain torch (torch sees no GPU)"
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        return device, f"the CuTe DSL kernel for {arch_of_device(device.index).name}"
    except RuntimeError as error:
        return torch.device("cpu"), f"the op's reference in plain torch ({error})"


# Each of the following functions prepares one way to run the op. It returns a callable, or the reason why this way does
# not work on this machine.


def compiled(quantize: Callable[[torch.Tensor], Outputs], x: torch.Tensor) -> Call | str:
    function = torch.compile(quantize, fullgraph=True)
    try:
        function(x)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if "InvalidCxxCompiler" not in str(error):
            raise
        return "torch.compile finds no C++ compiler here, which Inductor needs on a CPU (install g++)"
    return lambda: function(x)


def captured(quantize: Callable[[torch.Tensor], Outputs], x: torch.Tensor) -> Call | str:
    if x.device.type != "cuda":
        return "a CUDA graph needs a GPU"
    # The eager call before this has compiled and loaded the kernel. If you capture first, call torch_cute_ops.warmup.
    static = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = quantize(static)
    static.copy_(x)

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


def timed(call: Call) -> str:
    """Return the median wall time of a call, including the GPU's work."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    us = timer.blocked_autorange(min_run_time=0.2).median * 1e6
    return f"{us:.1f} µs a call" if us < 1000 else f"{us / 1000:.1f} ms a call"


# RMSNorm and FP4 quantisation in float64, written from the definitions in docs/numerics.md.


def norm_float64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    value = x.double()
    return value / torch.sqrt(value.square().mean(-1, keepdim=True) + EPS) * weight.double()


def round_to(value: torch.Tensor, mantissa_bits: int, min_exponent: int, largest: float) -> torch.Tensor:
    """Round `value` to the nearest number of a small float format, ties to even. Larger magnitudes become `largest`."""
    exponent = (torch.frexp(value).exponent - 1).clamp(min=min_exponent)
    step = torch.exp2((exponent - mantissa_bits).double())
    return ((value / step).round() * step).clamp(-largest, largest)


def quantize_float64(norm: torch.Tensor, factor: float, fmt: FP4Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise normalised rows in float64. Return the rounded elements (M, blocks, block size) and the block scales (M,
    blocks) as numbers, not as codes."""
    blocks = norm.unflatten(-1, (-1, fmt.block_size))
    amax = blocks.abs().amax(-1)
    if fmt is NVFP4:
        scale = round_to(amax * factor / 6, mantissa_bits=3, min_exponent=-6, largest=448)  # e4m3
    else:
        mantissa, exponent = torch.frexp(amax.clamp(min=6 * 2.0**-127) / 6)
        scale = torch.exp2((exponent - (mantissa == 0.5).int()).double())  # 2^ceil(log2(amax / 6))
    scaled = torch.where(scale.unsqueeze(-1) > 0, blocks * factor / scale.unsqueeze(-1), 0.0)
    return round_to(scaled, mantissa_bits=1, min_exponent=0, largest=6), scale  # e2m1


def compare_with_float64(
    y: torch.Tensor,
    scale: torch.Tensor,
    exact: torch.Tensor,
    factor: torch.Tensor | None,
    fmt: FP4Format,
    layout: str,
) -> list[str]:
    """Compare the op's outputs with the float64 computation and with the unquantised rows. Print the differences, and
    return a message for each violated limit."""
    rows, hidden = exact.shape
    want, want_scale = quantize_float64(exact, 1.0 if factor is None else factor.item(), fmt)
    want_steps = torch.bucketize(want.abs(), torch.tensor(E2M1, dtype=want.dtype, device=want.device)) * want.sign()

    codes = torch.stack((y & 0xF, y >> 4), -1).view(rows, -1, fmt.block_size)  # element 0 in the low nibble
    steps = torch.where(codes > 7, -1.0, 1.0) * (codes & 7)
    linear = torch_cute_ops.convert_scales(scale, rows, hidden, layout, "linear")
    got_scale = linear.double() if fmt is NVFP4 else torch.exp2(linear.double() - 127)

    same, same_scale = steps == want_steps, got_scale == want_scale
    agreement = min(same.double().mean().item(), same_scale.double().mean().item())
    most_steps = int(torch.where(same_scale.unsqueeze(-1), (steps - want_steps).abs(), 0).max())
    elements, scales = (f"{equal.sum():,} of {equal.numel():,}" for equal in (same, same_scale))
    print(f"float64    {elements} elements and {scales} scales identical; at most {most_steps} e2m1 step(s) away")

    decoded = torch_cute_ops.fp4_dequantize(y, scale, factor, block_size=fmt.block_size, out_dtype=torch.float32)
    signal, noise = exact.square().sum(-1), (decoded - exact).square().sum(-1)
    snr = 10 * torch.log10(signal.sum() / noise.sum()).item()
    worst = 10 * torch.log10(signal / noise)[signal > 0].min().item()
    print(f"SNR        {snr:.2f} dB, of the worst row {worst:.2f} dB")

    problems = []
    if not agreement >= AGREEMENT:
        problems.append(f"only {agreement:.3%} of the elements or scales are float64's, below {AGREEMENT:.1%}")
    if most_steps > MAX_STEPS:
        problems.append(f"an element is {most_steps} e2m1 steps from float64's, more than {MAX_STEPS}")
    if not snr >= MIN_SNR_DB[fmt.name]:
        problems.append(f"SNR {snr:.2f} dB is below {MIN_SNR_DB[fmt.name]} dB")
    return problems


if __name__ == "__main__":
    sys.exit(main())
