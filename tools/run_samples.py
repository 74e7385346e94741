"""Run every op on its sample inputs on the GPU, with each of its backends, and compare with the reference.

``tools/sanitize.py`` runs this program under compute-sanitizer. ``--device cpu`` runs only the references. ``--part
2/4`` runs the second of every four samples.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch

from torch_cute_ops.formats import MXFP8
from torch_cute_ops.gemm.select import BACKENDS
from torch_cute_ops.ops._define import OpSpec, as_tuple
from torch_cute_ops.reference.mm_fp8_block import MX_GROUP, fold_mxfp8, linear_mx_scales
from torch_cute_ops.registry import OPS

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from samples import Sample, sample_inputs
from support.parts import part_of

NAMES = sorted({backend.name for backend in BACKENDS})
"""Names of the backends of all GEMM ops."""


def main() -> None:
    """Run the samples that the command line selects; exit with a message at the first wrong output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--without", default=[], nargs="+", metavar="BACKEND", help="leave out these backends")
    parser.add_argument("--only", choices=NAMES, metavar="BACKEND", help="run only this backend")
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="I/N", help="run every Nth sample from the Ith")
    parser.add_argument("ops", nargs="*", metavar="OP", help="run only these ops")
    given = parser.parse_args()
    device, (first, step) = torch.device(given.device), given.part
    calls = 0
    for spec in [OPS[name] for name in given.ops or OPS]:
        # Make each sample twice, because some ops update an argument in place.
        pairs = list(zip(samples(spec, device), samples(spec, device), strict=True))
        for sample, same in pairs[first - 1 :: step]:
            results = as_tuple(spec.reference(*same.args, **same.kwargs))
            expected = (*defined(spec, same, results), *updated(spec, same))
            more = lost(spec, same)
            for choice in backends(spec, sample, given.without, given.only):
                outputs = (*defined(spec, sample, called(spec, sample, choice, results)), *updated(spec, sample))
                for name, output, reference in zip(names_of(spec, sample), outputs, expected, strict=True):
                    share = differing(output, reference, relative(spec), more)
                    # Kernels sum a norm in another order than the reference, so about one element in 1,000 rounds
                    # differently. In a small tensor the fraction may be larger.
                    if share > 2e-2:
                        raise SystemExit(f"{spec.name} {sample.name} {choice}: {share:.1%} of {name} differs")
                calls += 1
    print(f"{calls} calls")


def relative(spec: OpSpec) -> float:
    """Return the relative tolerance that is added to the output dtype's. It is larger for GEMMs, because terms of a sum
    may cancel."""
    return 2.0**-18 if not spec.has_backends else 2.0**-14


def lost(spec: OpSpec, sample: Sample) -> torch.Tensor | None:
    """Return a bound on the absolute error that FP8 tensor cores cause in each output element, or None for other ops.

    An MMA step aligns its 32 products and the accumulator to the largest of these terms, and keeps 14 bits. The 128
    elements that share a scale take four steps. With per-token scales, tensor cores add up 512 elements of K in 16
    steps, or all of K. The bound replaces the largest term by the sum of all magnitudes.
    """
    given = arguments(spec, sample)
    if "a" not in given or given["a"].dtype != torch.float8_e4m3fn:
        return None
    if given["b"].dtype == torch.uint8:  # FP4 codes, two per byte
        given["b"] = given["b"].view(torch.float4_e2m1fn_x2)
    steps = 4
    if given["b"].dtype == torch.float8_e4m3fn and given["b_scale"].dim() < given["b"].dim():
        k = given["a"].shape[-1]
        steps = -(-(k if given.get("fast_accum") else min(k, 512)) // 32)
    is_mxfp8 = given["b"].dtype == torch.float8_e4m3fn and given["b_scale"].itemsize == 1
    off = off_by_folding(spec, given) if is_mxfp8 else 0.0
    given = {name: magnitude(argument) for name, argument in given.items()}
    (size,) = as_tuple(spec.reference(**{**given, "out_dtype": torch.float32}))
    return size.double() * (steps * 33 * 2.0**-13) + off


def off_by_folding(spec: OpSpec, given: dict[str, Any]) -> torch.Tensor:
    """Return the error of each output element if the operands of an MXFP8 GEMM are folded: one scale for each 128
    activations, and one for each 128 elements of the weight or for each of its rows. (Only Hopper's kernels fold.)"""
    (exact,) = as_tuple(spec.reference(**{**given, "out_dtype": torch.float32}))
    off = torch.zeros_like(exact)
    for by_row in (False, True):
        a, a_scale = folded(given["a"], given["a_scale"], False)
        b, b_scale = folded(given["b"].mT, given["b_scale"], by_row)
        operands = {"a": a, "a_scale": a_scale, "b": b.mT, "b_scale": b_scale, "out_dtype": torch.float32}
        (result,) = as_tuple(spec.reference(**{**given, **operands}))
        off = torch.maximum(off, (result - exact).abs().nan_to_num())
    return off.double()


def folded(codes: torch.Tensor, scale: torch.Tensor, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return folded MXFP8 elements (..., K) and their linear scales, bytes (..., K/32)."""
    *lead, k = codes.shape
    linear = linear_mx_scales(scale, math.prod(lead), k).view(*lead, k // MXFP8.block_size)
    elements, _ = fold_mxfp8(codes, linear, by_row)
    size = linear.shape[-1] if by_row else MX_GROUP
    largest = torch.nn.functional.pad(linear, (0, -linear.shape[-1] % size)).unflatten(-1, (-1, size)).amax(-1)
    return elements, largest.repeat_interleave(size, -1)[..., : linear.shape[-1]]


def magnitude(argument: Any) -> Any:
    """Return the absolute values of a floating-point tensor. Return any other argument unchanged."""
    if not isinstance(argument, torch.Tensor) or not argument.is_floating_point():
        return argument
    if argument.dtype == torch.float8_e4m3fn:
        return (argument.view(torch.uint8) & 0x7F).view(argument.dtype)
    if argument.dtype == torch.float4_e2m1fn_x2:
        return (argument.view(torch.uint8) & 0x77).view(argument.dtype)
    return argument if argument.dtype == torch.float8_e8m0fnu else argument.abs()


def samples(spec: OpSpec, device: torch.device) -> list[Sample]:
    """Return the op's samples. Every call returns the same data."""
    torch.manual_seed(0)
    return list(sample_inputs(spec.name, device))


def backends(spec: OpSpec, sample: Sample, without: list[str], only: str | None) -> list[dict[str, Any]]:
    """Return the backends to run the sample with, as keyword arguments: one dict per backend that supports the sample.

    If the sample names a backend, or the op has no backends, the only dict is empty. The list is empty if the named
    backend does not support the sample or is in ``without``.
    """
    if not spec.has_backends:
        return [] if only else [{}]
    device = sample.args[0].device
    reasons = spec.backends(device, *sample.args, **sample.kwargs)
    able = [name for name, reason in reasons.items() if reason is None and name not in without]
    named = arguments(spec, sample).get("backend")
    if named is None:
        return [{"backend": name} for name in able if only in (None, name)]
    if only:
        return [{}] if named == only and named in able else []
    if named == "auto" and device.type == "cuda":
        # "auto" never chooses the reference on a GPU, and might choose a backend in ``without``.
        return [{}] if able != ["reference"] and not without else []
    return [{}] if named in ("auto", *able) else []


def called(
    spec: OpSpec, sample: Sample, choice: dict[str, Any], like: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Fill output memory with 0xFF bytes, call the op, and return its outputs.

    Filling counts as initialisation for initcheck, which does not see the writes of bulk copies.
    """
    op = getattr(torch.ops.cute, spec.name)
    outputs = tuple(torch.empty_like(result) for result in like)
    for output in outputs:
        output.untyped_storage().fill_(0xFF)  # type: ignore[attr-defined]
    names = [argument.name for argument in op.out._schema.arguments if argument.is_out]
    op.out(*sample.args, **sample.kwargs, **choice, **dict(zip(names, outputs, strict=True)))
    return outputs


def defined(spec: OpSpec, sample: Sample, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Set the elements that the op leaves unspecified to zero, and return the outputs."""
    return outputs if spec.defined is None else spec.defined(outputs, *sample.args, **sample.kwargs)


def updated(spec: OpSpec, sample: Sample) -> tuple[torch.Tensor, ...]:
    """Return the sample's arguments that the op updates in place, except those that are None."""
    given = arguments(spec, sample)
    return tuple(given[name] for name in spec.updated if given.get(name) is not None)


def names_of(spec: OpSpec, sample: Sample) -> tuple[str, ...]:
    """Return the names of the op's outputs, and of the tensors that ``updated`` returns."""
    given = arguments(spec, sample)
    return *spec.outputs, *(name for name in spec.updated if given.get(name) is not None)


def arguments(spec: OpSpec, sample: Sample) -> dict[str, Any]:
    """Return the sample's arguments by name."""
    names = [argument.name for argument in getattr(torch.ops.cute, spec.name).default._schema.arguments]
    return dict(zip(names, sample.args, strict=False)) | sample.kwargs


def differing(output: torch.Tensor, reference: torch.Tensor, least: float, more: torch.Tensor | None) -> float:
    """Return the fraction of output elements that differ from the reference by more than allowed.

    Codes and integers must be equal. Other numbers may differ by a few ulps or the relative tolerance ``least``, or by
    the absolute tolerance ``more``.
    """
    if not output.numel():
        return 0.0
    if not output.dtype.is_floating_point and output.dtype.itemsize > 1:
        wrong = output != reference
    elif output.dtype.itemsize == 1:
        wrong = output.view(torch.uint8) != reference.view(torch.uint8)
    else:
        wrong = ~output.isclose(reference, rtol=max(4 * torch.finfo(output.dtype).eps, least), atol=0, equal_nan=True)
        if more is not None:
            wrong &= ~((output.double() - reference.double()).abs() <= more)
    return wrong.float().mean().item()


if __name__ == "__main__":
    main()
