"""Compile GEMMs of other projects' packages without a GPU, for ``calibrate_ptx.py --peers``.

NVIDIA, FlashInfer and QuACK publish kernels in CuTe DSL as Python packages. Install these packages, without their
dependencies, into a folder: ``pip install --no-deps --target FOLDER nvidia-cutlass-operators flashinfer-python
quack-kernels``. The kernels are used unchanged. Host code of the packages, which needs a GPU or other packages, is not
imported.

All kernels compute ``C = A @ B.T`` with row-major A ``(m, k)``, B ``(n, k)`` and C ``(m, n)``, or with one B per group
of rows of A. Scales of blocks are in the 128x4 layout.
"""

import importlib
import sys
import tempfile
import types
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import numpy as np
from cuda.bindings.driver import CUstream
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import make_fake_stream, make_ptr
from exact_operands import Problem, bits_of, check_exact, encoded, matrix, scaled, unwritten

CLUSTERS = 2
"""Number of clusters of persistent kernels."""
QUANTUM = 2.0**-6
F4, E4M3, E5M2, E8M0 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, cutlass.Float8E5M2, cutlass.Float8E8M0FNU
BF16, F32, I32 = cutlass.BFloat16, cutlass.Float32, cutlass.Int32
NVIDIA, FLASHINFER, QUACK = "nvidia-cutlass-operators", "flashinfer-python", "quack-kernels"
OPERATORS = "cutlass.operators.providers.cutedsl.gemm.implementations."
KERNELS = "flashinfer.gemm.kernels."

Sizes = tuple[int, int, int]
Launch = Callable[[Any, Any, CUstream], None]
"""Function that launches a kernel on pointers to the buffers, and on the sizes ``(m, n, k)``."""


class PeerCase(NamedTuple):
    """One kernel of a package with its configuration and its problem.

    Attributes:
        name: name that ``--only`` selects by.
        arch: target architecture, such as ``sm_100a``.
        package: name of the package, which the table shows with its version.
        types: DSL types of the buffers. The last buffer is C.
        sizes: ``(m, n, k)``.
        problem: function that returns the buffers and the expected result.
        kernel: function that imports the kernel from the folder of the packages.
        hangs: fault for which the kernel waits for ever, or an empty text.
    """

    name: str
    arch: str
    package: str
    types: tuple[Any, ...]
    sizes: Sizes
    problem: Callable[[Sizes], Problem]
    kernel: Callable[[Path], Launch]
    hangs: str = ""


# Imports


class _HostCode(types.ModuleType):
    """Replacement for a module that only the package's host code needs. Its attributes are functions that do
    nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


HOST_CODE = ("flashinfer.utils", KERNELS + "grouped_gemm_masked_wrapper")
ALSO_WITHOUT_INIT = ("flashinfer", "flashinfer.cute_dsl")
"""Packages that kernels import from, whose ``__init__`` files are not executed."""


def module_of(folder: Path, name: str) -> Any:
    """Import a module of a package in ``folder``, but not what the ``__init__`` files above it import."""
    if name.startswith("cutlass."):
        if str(folder / "cutlass") not in cutlass.__path__:
            cutlass.__path__.append(str(folder / "cutlass"))
        return importlib.import_module(name)
    for one in HOST_CODE:
        sys.modules.setdefault(one, _HostCode(one))
    parts = name.split(".")
    for above in (*ALSO_WITHOUT_INIT, *(".".join(parts[:i]) for i in range(1, len(parts)))):
        if above not in sys.modules:
            sys.modules[above] = types.ModuleType(above)
            sys.modules[above].__path__ = [str(folder.joinpath(*above.split(".")))]
    return importlib.import_module(name)


def versions(folder: Path) -> dict[str, str]:
    """Return the versions of the packages in ``folder``."""
    return {one.metadata["Name"].lower(): one.version for one in distributions(path=[str(folder)])}


# Compilation


class _Kernel:
    """Function for the DSL that takes pointers and sizes."""

    def __init__(self, launch: Launch):
        self.launch = launch

    @cute.jit
    def __call__(self, pointers: tuple[Any, ...], sizes: tuple[Any, ...], stream: CUstream) -> None:
        """Launch the kernel."""
        self.launch(pointers, sizes, stream)


def compile_peer(folder: Path, case: PeerCase) -> Any:
    """Compile a kernel; return its function with the PTX as an attribute."""
    pointers = tuple(make_ptr(one, 0, cute.AddressSpace.gmem, assumed_align=32) for one in case.types)
    sizes = (I32(0), I32(0), I32(0))
    with tempfile.TemporaryDirectory() as dump:
        options = f"--gpu-arch {case.arch} --keep-ptx --dump-dir={dump} --ptxas-options=-O0"
        kernel = _Kernel(case.kernel(folder))
        compiled = cute.compile(kernel, pointers, sizes, make_fake_stream(), options=options)
        compiled.artifacts.PTX  # noqa: B018  (reads the file before the folder is deleted)
    return compiled


def ordered(pointer: Any, shape: tuple[Any, ...], order: tuple[int, ...] = (1, 0, 2)) -> cute.Tensor:
    """Return a tensor without padding that starts at ``pointer``. ``order`` ranks the modes, the contiguous mode
    first."""
    return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=order[: len(shape)]))


# Problems


def block_scaled(
    a: Any, b: Any, scale: Any, block: int, out: Any, alpha: float | None = None
) -> Callable[[Sizes], Problem]:
    """Return the problem of a GEMM with block scales. If ``alpha`` is given, the result is multiplied by it."""

    def problem(sizes: Sizes) -> Problem:
        (m, n, k), random = sizes, np.random.default_rng(sizes)
        left, right = scaled(a, scale, block, m, k, random), scaled(b, scale, block, n, k, random)
        check_exact(left.numbers, right.numbers, QUANTUM)
        expected = bits_of(left.numbers @ right.numbers.T * (1 if alpha is None else alpha), out)
        factor = [] if alpha is None else [np.array([alpha], np.float32)]
        return Problem(
            sizes, [left.data, right.data, left.scales, right.scales, *factor, unwritten(expected)], expected
        )

    return problem


def masked(dtype: Any, scale: Any, block: int, counts: tuple[int, ...]) -> Callable[[Sizes], Problem]:
    """Return the problem of a GEMM of several matrices. Only the first ``counts[i]`` rows of matrix i need a result.

    Kernels compute whole tiles of 128 rows, so that rows up to the end of a tile also have a result.
    """

    def problem(sizes: Sizes) -> Problem:
        (m, n, k), random = sizes, np.random.default_rng(sizes)
        lefts = [scaled(dtype, scale, block, m, k, random) for _ in counts]
        rights = [scaled(dtype, scale, block, n, k, random) for _ in counts]
        for left, right in zip(lefts, rights, strict=True):
            check_exact(left.numbers, right.numbers, QUANTUM)
        products = [left.numbers @ right.numbers.T for left, right in zip(lefts, rights, strict=True)]
        expected = np.stack([bits_of(one, F32) for one in products])
        out = unwritten(expected)
        for one, count, before in zip(expected, counts, out, strict=True):
            one[-(-count // 128) * 128 :] = before[-(-count // 128) * 128 :]
        buffers = [np.stack([one.data for one in side]) for side in (lefts, rights)]
        buffers += [np.stack([one.scales for one in side]) for side in (lefts, rights)]
        return Problem(sizes, [*buffers, np.array(counts, np.int32), out], expected)

    return problem


def of_groups(ends: tuple[int, ...], m: int) -> Any:
    """Return the group of each of ``m`` rows. Group i ends before row ``ends[i]``."""
    return np.searchsorted(ends, np.arange(m), side="right")


def fp32_scaled(ends: tuple[int, ...] | None = None, m_major: bool = True) -> Callable[[Sizes], Problem]:
    """Return the problem of an FP8 GEMM with fp32 scales: one per row and 128 elements of A, and one per 128 × 128
    elements of B.

    ``ends`` are the ends of the groups of rows, each with its own B. The scales of A are M-major if ``m_major``.
    """

    def problem(sizes: Sizes) -> Problem:
        (m, n, k), random = sizes, np.random.default_rng(sizes)
        groups, blocks = len(ends or (m,)), -(-k // 128)
        left, right = matrix(E4M3, m, k, random), matrix(E4M3, groups * n, k, random)
        left_scale = np.exp2(random.integers(-2, 3, (m, blocks)))
        right_scale = np.exp2(random.integers(-2, 3, (groups, -(-n // 128), blocks)))
        a = left.numbers * np.repeat(left_scale, 128, 1)[:, :k]
        full = np.repeat(np.repeat(right_scale, 128, 1)[:, :n], 128, 2)[:, :, :k]
        b = right.numbers.reshape(groups, n, k) * full
        group = of_groups(ends or (m,), m)
        check_exact(a, b.reshape(-1, k), QUANTUM)
        expected = bits_of(np.einsum("mk,mnk->mn", a, b[group]), BF16)
        scales = [left_scale.T if m_major else left_scale, right_scale]
        buffers = [left.data, right.data, *(np.ascontiguousarray(one, np.float32) for one in scales)]
        indices = [] if ends is None else [group.astype(np.int32)]
        return Problem(sizes, [*buffers, *indices, unwritten(expected)], expected)

    return problem


def grouped(dtype: Any, ends: tuple[int, ...]) -> Callable[[Sizes], Problem]:
    """Return the problem of a GEMM without scales, with groups of rows that end before the rows ``ends``."""

    def problem(sizes: Sizes) -> Problem:
        (m, n, k), random = sizes, np.random.default_rng(sizes)
        left, right = matrix(dtype, m, k, random), matrix(dtype, len(ends) * n, k, random)
        data = [one.data if dtype is E4M3 else encoded(one.numbers, dtype) for one in (left, right)]
        b = right.numbers.reshape(len(ends), n, k)[of_groups(ends, m)]
        check_exact(left.numbers, right.numbers, QUANTUM)
        expected = bits_of(np.einsum("mk,mnk->mn", left.numbers, b), BF16)
        return Problem(sizes, [*data, np.array(ends, np.int32), unwritten(expected)], expected)

    return problem


def mixed(bits: int, block: int) -> Callable[[Sizes], Problem]:
    """Return the problem of a GEMM of integers of ``bits`` bits and bfloat16. If ``block``, each ``block`` integers of
    a row have a bfloat16 scale, in an M-major matrix."""

    def problem(sizes: Sizes) -> Problem:
        (m, n, k), random = sizes, np.random.default_rng(sizes)
        integers = random.integers(-8, 8, (m, k))
        data = integers.astype(np.int8)
        if bits == 4:
            codes = (integers & 15).astype(np.uint8)
            data = codes[:, ::2] | codes[:, 1::2] << 4
        a, scales = integers.astype(np.float64), []
        if block:
            scale = np.exp2(random.integers(-1, 2, (m, k // block)))
            a, scales = a * np.repeat(scale, block, 1), [encoded(scale.T, BF16)]
        b = matrix(BF16, n, k, random).numbers
        check_exact(a, b, QUANTUM)
        expected = bits_of(a @ b.T, F32)
        return Problem(sizes, [data, encoded(b, BF16), *scales, unwritten(expected)], expected)

    return problem


def weight_only(sizes: Sizes) -> Problem:
    """Return the problem of an NVFP4 weight times bfloat16 activations, with the weight first among the buffers."""
    (m, n, k), random = sizes, np.random.default_rng(sizes)
    weight, a = scaled(F4, E4M3, 16, n, k, random), matrix(BF16, m, k, random).numbers
    check_exact(a, weight.numbers, QUANTUM)
    expected = bits_of(a @ weight.numbers.T / 2, BF16)
    alpha = np.array([0.5], np.float32)
    return Problem(sizes, [weight.data, weight.scales, encoded(a, BF16), alpha, unwritten(expected)], expected)


# NVIDIA's kernels


def _nvidia_scaled(
    a: Any, b: Any, tile: tuple[int, int], cluster: tuple[int, int], sizes: Sizes, hangs: str = ""
) -> PeerCase:
    def kernel(folder: Path) -> Launch:
        module = module_of(folder, OPERATORS + "sm100_dense_blockscaled_static_persistent_impl")
        made = module.PersistentDenseBlockScaledGemmKernel(32, tile, cluster)
        layouts = (OperandMajorMode.K, OperandMajorMode.K, cutlass.tensor_utils.LayoutEnum.ROW_MAJOR)
        return lambda p, s, stream: made(*p, layouts, (*s, I32(1)), CLUSTERS, stream)

    name = f"block-scaled {_name(a)} by {_name(b)} {_shape(tile, cluster)}"
    problem = block_scaled(a, b, E8M0, 32, F32)
    return PeerCase(name, "sm_100a", NVIDIA, (a, b, E8M0, E8M0, F32), sizes, problem, kernel, hangs)


def _nvidia_mixed(
    narrow: Any, block: int, tile: tuple[int, int, int], cluster: tuple[int, int], sizes: Sizes
) -> PeerCase:
    def kernel(folder: Path) -> Launch:
        module = module_of(folder, OPERATORS + "sm100_mixed_input_impl")
        rows = 1 if block else 0
        made = module.MixedInputGemmKernel(rows, block, F32, tile[0] == 256, tile, cluster, True, False, narrow)

        def launch(p: Any, s: Any, stream: CUstream) -> None:
            m, n, k = s[0], s[1], cute.assume(s[2], 128)
            a, b = ordered(p[0], (1, m, k), (2, 1, 0)), ordered(p[1], (1, k, n), (2, 0, 1))
            scale = ordered(p[2], (1, cute.assume(m, 32), k // block), (2, 0, 1)) if block else None
            made(a, scale, b, ordered(p[-1], (1, m, cute.assume(n, 16)), (2, 1, 0)), CLUSTERS, stream)

        return launch

    name = f"{narrow.__name__} by bfloat16, A in tensor memory {_shape(tile[:2], cluster)}"
    buffers = (narrow, BF16, *([BF16] if block else []), F32)
    return PeerCase(name, "sm_100a", NVIDIA, buffers, sizes, mixed(narrow.width, block), kernel)


def _nvidia_grouped(
    dtype: Any, tile: tuple[int, int], cluster: tuple[int, int], sizes: Sizes, ends: tuple[int, ...]
) -> PeerCase:
    def kernel(folder: Path) -> Launch:
        module = module_of(folder, OPERATORS + "sm100_contiguous_offset_2d3d_dense_gemm_impl")
        made = module.ContiguousOffset2D3DGemmDenseKernel(F32, tile[0] == 256, tile, cluster)

        def launch(p: Any, s: Any, stream: CUstream) -> None:
            m, n, k = s[0], cute.assume(s[1], 16), cute.assume(s[2], 64)
            a, b = ordered(p[0], (1, m, k), (2, 1, 0)), ordered(p[1], (len(ends), k, n), (2, 0, 1))
            offsets = cute.make_tensor(p[2], cute.make_layout((len(ends),)))
            made(a, b, ordered(p[3], (1, m, n), (2, 1, 0)), offsets, CLUSTERS, stream)

        return launch

    name = f"grouped {_name(dtype)} {_shape(tile, cluster)}"
    return PeerCase(name, "sm_100a", NVIDIA, (dtype, dtype, I32, BF16), sizes, grouped(dtype, ends), kernel)


# FlashInfer's kernels


def _flashinfer_fp32_scaled(tile: tuple[int, int], cluster: tuple[int, int], sizes: Sizes) -> PeerCase:
    def kernel(folder: Path) -> Launch:
        module = module_of(folder, KERNELS + "blockwise_gemm_blackwell")
        made = module.BlockwiseGemmKernel(F32, tile[0] == 256, tile, cluster)

        def launch(p: Any, s: Any, stream: CUstream) -> None:
            m, n, k = s[0], cute.assume(s[1], 16), cute.assume(s[2], 128)
            blocks = cute.ceil_div(k, 128)
            a, b, c = ordered(p[0], (m, k, 1)), ordered(p[1], (n, k, 1)), ordered(p[4], (m, n, 1))
            b_scale = ordered(p[3], (cute.ceil_div(n, 128), blocks, 1))
            made(a, b, c, ordered(p[2], (m, blocks, 1), (0, 1, 2)), b_scale, CLUSTERS, stream)

        return launch

    name = f"FP8 with fp32 scales {_shape(tile, cluster)}"
    return PeerCase(name, "sm_100a", FLASHINFER, (E4M3, E4M3, F32, F32, BF16), sizes, fp32_scaled(), kernel)


def _flashinfer_grouped(chosen: bool, sizes: Sizes, ends: tuple[int, ...]) -> PeerCase:
    def kernel(folder: Path) -> Launch:
        module = module_of(folder, KERNELS + "grouped_gemm_contiguous_blackwell")
        if chosen:
            made = module._build(*sizes, len(ends), module._pick_config(*sizes, len(ends)))
        else:
            made = module.BlockwiseContiguousGroupedGemmKernel(F32, False, (128, 128), (1, 1))

        def launch(p: Any, s: Any, stream: CUstream) -> None:
            m, n, k = s[0], cute.assume(s[1], 16), cute.assume(s[2], 128)
            blocks, groups = cute.ceil_div(k, 128), len(ends)
            a, b, c = ordered(p[0], (m, k, 1)), ordered(p[1], (n, k, groups)), ordered(p[5], (m, n, 1))
            b_scale = ordered(p[3], (cute.ceil_div(n, 128), blocks, groups))
            indices = cute.make_tensor(p[4], cute.make_layout((m,)))
            made(a, b, c, ordered(p[2], (m, blocks, 1)), b_scale, indices, CLUSTERS, stream)

        return launch

    name = f"grouped FP8 with fp32 scales, {'configuration for the size' if chosen else '128x128'}"
    buffers = (E4M3, E4M3, F32, F32, I32, BF16)
    return PeerCase(name, "sm_100a", FLASHINFER, buffers, sizes, fp32_scaled(ends, m_major=False), kernel)


def _flashinfer_masked(dtype: Any, scale: Any, block: int, sizes: Sizes, counts: tuple[int, ...]) -> PeerCase:
    def kernel(folder: Path) -> Launch:
        module = module_of(folder, KERNELS + "grouped_gemm_masked_blackwell")
        made = module.Sm100BlockScaledPersistentDenseGemmKernel(block, (128, 128), (1, 1), "sm_100")
        (m, n, k), groups, nothing = sizes, len(counts), [None] * 8

        def launch(p: Any, s: Any, stream: CUstream) -> None:
            a, b, c = ordered(p[0], (m, k, groups)), ordered(p[1], (n, k, groups)), ordered(p[5], (m, n, groups))
            scales = ordered(p[2], (m, k, groups)), ordered(p[3], (n, k, groups))
            numbers = cute.make_tensor(p[4], cute.make_layout((groups,)))
            made(a, b, *scales, c, numbers, *nothing, CLUSTERS, stream)

        return launch

    name = f"masked groups, block-scaled {_name(dtype)} 128x128"
    buffers = (dtype, dtype, scale, scale, I32, F32)
    return PeerCase(name, "sm_100a", FLASHINFER, buffers, sizes, masked(dtype, scale, block, counts), kernel)


def _flashinfer_scaled(
    arch: str, file: str, kernel_of: Callable[[Any], Any], name: str, dtype: Any, scale: Any, block: int, sizes: Sizes
) -> PeerCase:
    """Return a case of a kernel that takes tensors in the order A, B, their scales, C, alpha."""

    def kernel(folder: Path) -> Launch:
        made = kernel_of(module_of(folder, KERNELS + file))

        def launch(p: Any, s: Any, stream: CUstream) -> None:
            m, n, k = s[0], cute.assume(s[1], 8), cute.assume(s[2], 128)
            a, b, c = ordered(p[0], (m, k, 1)), ordered(p[1], (n, k, 1)), ordered(p[5], (m, n, 1))
            scales, alpha = (ordered(p[2], (m, k, 1)), ordered(p[3], (n, k, 1))), ordered(p[4], (1,), (0,))
            made(a, b, *scales, c, alpha, CLUSTERS, stream)

        return launch

    buffers, problem = (dtype, dtype, scale, scale, F32, BF16), block_scaled(dtype, dtype, scale, block, BF16, 0.5)
    return PeerCase(f"block-scaled {name}", arch, FLASHINFER, buffers, sizes, problem, kernel)


def _flashinfer_dense(tile: tuple[int, int], cluster: tuple[int, int], sizes: Sizes) -> PeerCase:
    def kernel_of(module: Any) -> Any:
        return module.Sm100BlockScaledPersistentDenseGemmKernel(32, tile, cluster)

    name = f"MXFP8 {_shape(tile, cluster)}"
    return _flashinfer_scaled("sm_100a", "dense_blockscaled_gemm_sm100", kernel_of, name, E4M3, E8M0, 32, sizes)


def _flashinfer_sm120(dtype: Any, tile: tuple[int, int], sizes: Sizes, swap: bool = False) -> PeerCase:
    of_bytes = {"mma_k": 32, "tile_k": 128} if dtype is E4M3 else {}

    def kernel_of(module: Any) -> Any:
        return module.DenseGemmKernel(32 if of_bytes else 16, tile, (1, 1), swap_ab=swap, **of_bytes)

    name = f"{'MXFP8' if of_bytes else 'NVFP4'} {tile[0]}x{tile[1]}{', A and B swapped' * swap}"
    scale, block = (E8M0, 32) if of_bytes else (E4M3, 16)
    return _flashinfer_scaled(
        "sm_120a", "dense_blockscaled_gemm_sm120_b12x", kernel_of, name, dtype, scale, block, sizes
    )


def _flashinfer_weight_only(tile: tuple[int, int, int], cluster: tuple[int, int], sizes: Sizes) -> PeerCase:
    def kernel(folder: Path) -> Launch:
        module = module_of(folder, KERNELS + "cute_dsl.dense_gemm_bf16_fp4_sm100")
        made = module.Sm100DenseGemmBf16Fp4Kernel(F32, tile[0] == 256, tile, cluster, False, True, 32)
        return lambda p, s, stream: made.wrapper(*p, s[1], s[0], s[2], CLUSTERS, stream)

    name = f"NVFP4 weight by bfloat16, A in tensor memory {_shape(tile[:2], cluster)}"
    return PeerCase(name, "sm_100a", FLASHINFER, (F4, E4M3, BF16, F32, BF16), sizes, weight_only, kernel)


# QuACK's kernels


def _quack(
    arch: str,
    a: Any,
    b: Any,
    tile: tuple[int, int],
    sizes: Sizes,
    cluster: tuple[int, int] = (1, 1),
    block: int = 32,
    **options: bool,
) -> PeerCase:
    def kernel(folder: Path) -> Launch:
        epilogues = module_of(folder, "quack.gemm_default_epi")
        scheduling = module_of(folder, "quack.tile_scheduler").TileSchedulerOptions
        chosen = epilogues.GemmDefaultSm120 if arch == "sm_120a" else epilogues.GemmDefaultSm100
        made = chosen(
            F32, a, tile, (*cluster, 1), sf_vec_size=block, use_pdl=False, use_clc_persistence=False, **options
        )

        def launch(p: Any, s: Any, stream: CUstream) -> None:
            m, n, k = s[0], cute.assume(s[1], 16), cute.assume(s[2], 128)

            def scales(pointer: Any, rows: Any) -> cute.Tensor:
                shape = (1, cute.ceil_div(rows, 128), cute.ceil_div(k, 4 * block), 32, 4, 4)
                return ordered(pointer, shape, (5, 4, 3, 2, 1, 0))

            left, right, c = ordered(p[0], (m, k)), ordered(p[1], (n, k)), ordered(p[4], (m, n))
            schedule, nothing = scheduling(I32(CLUSTERS)), chosen.EpilogueArguments()
            made(left, right, c, None, nothing, schedule, None, stream, scales(p[2], m), scales(p[3], n))

        return launch

    scale = E8M0 if block == 32 else E4M3
    kind = f"{_name(a)} by {_name(b)}" if block == 32 else "NVFP4"
    name = f"block-scaled {kind} {_shape(tile, cluster)}{', pingpong' * options.get('pingpong', False)}"
    problem = block_scaled(a, b, scale, block, BF16)
    return PeerCase(name, arch, QUACK, (a, b, scale, scale, BF16), sizes, problem, kernel)


def _name(dtype: Any) -> str:
    return {"Float4E2M1FN": "FP4", "Float8E4M3FN": "e4m3", "Float8E5M2": "e5m2", "BFloat16": "bfloat16"}[dtype.__name__]


def _shape(tile: tuple[int, ...], cluster: tuple[int, int]) -> str:
    return f"{tile[0]}x{tile[1]} cluster {cluster[0]}x{cluster[1]}"


ONE, PAIR = (1, 1), (2, 1)
FEW_ARRIVALS = "one thread per warp arrives at a barrier that expects all threads; exact if all arrive"
"""Fault of NVIDIA's block-scaled kernel with 256 columns per tile. It arrives at the barrier of the accumulators in the
scope of ``elect_one``. Without this scope, as in other kernels of the same origin, its results are exact."""
PEER_CASES = (
    _nvidia_scaled(E4M3, E4M3, (128, 128), ONE, (200, 144, 512)),
    _nvidia_scaled(E5M2, E4M3, (256, 128), PAIR, (300, 208, 768)),
    _nvidia_scaled(F4, E4M3, (128, 128), ONE, (200, 144, 512)),
    _nvidia_scaled(E4M3, F4, (256, 128), PAIR, (300, 208, 768)),
    _nvidia_scaled(E4M3, E4M3, (128, 256), ONE, (300, 336, 512), FEW_ARRIVALS),
    _nvidia_mixed(cutlass.Int8, 0, (128, 128, 64), ONE, (200, 144, 512)),
    _nvidia_mixed(cutlass.Int8, 0, (256, 128, 64), PAIR, (300, 208, 512)),
    _nvidia_mixed(cutlass.Int4, 128, (128, 128, 128), ONE, (224, 144, 512)),
    _nvidia_grouped(E4M3, (128, 128), ONE, (300, 144, 512), (70, 70, 230, 300)),
    _nvidia_grouped(BF16, (256, 128), PAIR, (500, 144, 512), (170, 400, 500)),
    _flashinfer_fp32_scaled((128, 128), ONE, (200, 144, 640)),
    _flashinfer_fp32_scaled((256, 128), PAIR, (300, 272, 768)),
    _flashinfer_grouped(False, (340, 256, 640), (128, 256, 340)),
    _flashinfer_grouped(True, (384, 256, 640), (128, 256, 384)),
    _flashinfer_masked(E4M3, E8M0, 32, (192, 144, 512), (70, 0, 192)),
    _flashinfer_masked(F4, E4M3, 16, (192, 160, 512), (70, 0, 192)),
    _flashinfer_dense((256, 256), PAIR, (300, 336, 512)),
    _flashinfer_dense((128, 8), ONE, (200, 8, 512)),
    _flashinfer_weight_only((128, 8, 256), ONE, (8, 200, 512)),
    _flashinfer_weight_only((128, 16, 256), PAIR, (24, 400, 1024)),
    _flashinfer_weight_only((128, 64, 256), ONE, (40, 200, 512)),
    _flashinfer_weight_only((256, 128, 256), PAIR, (140, 400, 512)),
    _quack("sm_100a", E4M3, E4M3, (128, 128), (200, 144, 512)),
    _quack("sm_100a", E4M3, F4, (256, 128), (300, 208, 512), PAIR),
    _flashinfer_sm120(E4M3, (128, 128), (200, 144, 512)),
    _flashinfer_sm120(E4M3, (32, 64), (40, 144, 512)),
    _flashinfer_sm120(F4, (128, 128), (200, 144, 512)),
    _flashinfer_sm120(F4, (128, 16), (200, 16, 512), swap=True),
    _quack("sm_120a", E4M3, E5M2, (128, 128), (200, 144, 512)),
    _quack("sm_120a", E4M3, F4, (128, 128), (200, 144, 512)),
    _quack("sm_120a", F4, E4M3, (128, 128), (200, 144, 512), pingpong=True),
    _quack("sm_120a", F4, F4, (128, 128), (200, 160, 512), block=16),
)
