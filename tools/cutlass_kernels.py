"""Compile kernels of CUTLASS's CuTe DSL examples without a GPU, for ``calibrate_ptx.py``.

All kernels compute ``C = A @ B.T`` with row-major A ``(m, k)``, B ``(n, k)`` and C ``(m, n)``. The examples are used
unchanged. Only their ``run`` functions query a GPU, and this file never calls these functions.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cuda.bindings.driver import CUstream
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import make_fake_stream, make_ptr

EXAMPLES = "examples/python/CuTeDSL/cute"
CLUSTERS = 2
"""Number of clusters of persistent kernels. The number is small, so that each cluster computes several tiles even if
the problem is small."""


class Case(NamedTuple):
    """One kernel of an example with its configuration.

    Attributes:
        name: name that ``--only`` selects by.
        arch: target architecture, such as ``sm_100a``.
        file: path of the example, relative to ``EXAMPLES``.
        make: function that builds the kernel from the example's module and ``config``.
        config: arguments of ``make``, such as tile and cluster shapes.
        operand: DSL type of A and B.
        scale: DSL type of the block scales, or None for a kernel without scales.
        block: elements per block scale, or 0 for a kernel without scales.
        out: DSL type of C.
        sizes: ``(m, n, k)`` of each problem to run.
    """

    name: str
    arch: str
    file: str
    make: Callable[..., Any]
    config: tuple[Any, ...]
    operand: Any
    scale: Any
    block: int
    out: Any
    sizes: tuple[tuple[int, int, int], ...]


@cache
def example(root: Path, file: str) -> Any:
    """Import an example and return its module."""
    for folder in (root / EXAMPLES, root / EXAMPLES / Path(file).parent, (root / EXAMPLES).parent):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # some examples import modules from their folder
    name = "cutlass_example_" + Path(file).stem
    spec = importlib.util.spec_from_file_location(name, root / EXAMPLES / file)
    if spec is None or spec.loader is None or not (root / EXAMPLES / file).exists():
        raise FileNotFoundError(root / EXAMPLES / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def row_major(pointer: cute.Pointer, rows: Any, columns: Any) -> cute.Tensor:
    """Return a row-major tensor (rows, columns, 1) that starts at ``pointer``."""
    return cute.make_tensor(pointer, cute.make_ordered_layout((rows, columns, 1), order=(1, 0, 2)))


class Dense:
    """Kernel without scales that takes pointers and sizes. It converts them to the tensors that the example's kernel
    expects."""

    def __init__(self, kernel: Any, *rest: Any):
        self.kernel = kernel
        self.rest = rest

    @cute.jit
    def __call__(
        self,
        a_ptr: cute.Pointer,
        b_ptr: cute.Pointer,
        c_ptr: cute.Pointer,
        m: cutlass.Int32,
        n: cutlass.Int32,
        k: cutlass.Int32,
        stream: CUstream,
    ) -> None:
        """Launch the kernel."""
        k, n_out = cute.assume(k, 32), cute.assume(n, 16)
        tensors = row_major(a_ptr, m, k), row_major(b_ptr, n, k), row_major(c_ptr, m, n_out)
        self.kernel(*tensors, *self.rest, stream)


class BlockScaled:
    """Base class of block-scaled kernels that take pointers and sizes. Subclasses define ``launch``."""

    def __init__(self, kernel: Any, *rest: Any):
        self.kernel = kernel
        self.rest = rest

    def launch(self, pointers: tuple[cute.Pointer, ...], sizes: tuple[cutlass.Int32, ...], stream: CUstream) -> None:
        """Launch the kernel on pointers to A, B, their scales and C, and on the sizes ``(m, n, k)``."""
        raise NotImplementedError

    @cute.jit
    def __call__(
        self,
        a_ptr: cute.Pointer,
        b_ptr: cute.Pointer,
        a_scale_ptr: cute.Pointer,
        b_scale_ptr: cute.Pointer,
        c_ptr: cute.Pointer,
        m: cutlass.Int32,
        n: cutlass.Int32,
        k: cutlass.Int32,
        stream: CUstream,
    ) -> None:
        """Launch the kernel."""
        self.launch((a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, c_ptr), (m, n, k), stream)


class OfTensors(BlockScaled):
    """Block-scaled kernel whose example expects tensors. The example ignores the shapes of the scales."""

    def launch(self, pointers: tuple[cute.Pointer, ...], sizes: tuple[cutlass.Int32, ...], stream: CUstream) -> None:
        (m, n, k), (a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, c_ptr) = sizes, pointers
        k, n_out = cute.assume(k, 32), cute.assume(n, 8)
        a, b, c = row_major(a_ptr, m, k), row_major(b_ptr, n, k), row_major(c_ptr, m, n_out)
        a_scale, b_scale = row_major(a_scale_ptr, m, k), row_major(b_scale_ptr, n, k)
        self.kernel(a, b, a_scale, b_scale, c, *self.rest, stream)


class OfPointers(BlockScaled):
    """Block-scaled kernel whose example expects pointers and sizes."""

    def launch(self, pointers: tuple[cute.Pointer, ...], sizes: tuple[cutlass.Int32, ...], stream: CUstream) -> None:
        problem = (*sizes, cutlass.Int32(1))
        if self.rest:
            self.kernel(*pointers, *self.rest, problem, CLUSTERS, stream)
        else:
            self.kernel(*pointers, problem, stream)


def compile_case(root: Path, case: Case, optimised: bool) -> Any:
    """Compile a kernel; return its function with the PTX as an attribute. The function takes pointers, ``m``, ``n``,
    ``k`` and a stream."""
    kernel = case.make(example(root, case.file), *case.config)
    scales = [make_ptr(case.scale, 0, cute.AddressSpace.gmem, assumed_align=32)] * 2 if case.block else []
    pointers = [
        *[make_ptr(case.operand, 0, cute.AddressSpace.gmem, assumed_align=32)] * 2,
        *scales,
        make_ptr(case.out, 0, cute.AddressSpace.gmem, assumed_align=32),
    ]
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {case.arch} --keep-ptx --dump-dir={folder}"
        if not optimised:
            options += " --ptxas-options=-O0"
        sizes = [cutlass.Int32(0)] * 3
        compiled = cute.compile(kernel, *pointers, *sizes, make_fake_stream(), options=options)
        compiled.artifacts.PTX  # noqa: B018  (reads the file before the folder is deleted)
    return compiled


F4, E4M3, E8M0 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, cutlass.Float8E8M0FNU
F16, BF16, F32 = cutlass.Float16, cutlass.BFloat16, cutlass.Float32
SM100 = "blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py"
SM100_PREFETCH = "blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_prefetch.py"
SM103 = "blackwell/kernel/blockscaled_gemm/sm103_dense_blockscaled_gemm_persistent.py"
SM120 = "blackwell_geforce/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_{}.py"
DENSE = "blackwell/kernel/dense_gemm/{}.py"
TUTORIAL = "blackwell/tutorial/tutorial_gemm/{}.py"
HOPPER = "hopper/kernel/dense_gemm/{}.py"


def persistent(module: Any, *config: Any) -> Any:
    """Return the persistent kernel for data-centre Blackwell; ``config`` is (block, tile, cluster)."""
    kernel = module.Sm100BlockScaledPersistentDenseGemmKernel(*config)
    return OfPointers(kernel, (OperandMajorMode.K, OperandMajorMode.K, utils.LayoutEnum.ROW_MAJOR))


def prefetching(module: Any, *config: Any) -> Any:
    """Return the persistent kernel for data-centre Blackwell that prefetches into L2."""
    return OfTensors(module.Sm100BlockScaledPersistentDenseGemmKernel(*config), CLUSTERS)


def ultra(module: Any, *config: Any) -> Any:
    """Return the persistent kernel for sm_103a, which uses MMAs with K = 96."""
    return OfTensors(module.Sm103BlockScaledPersistentDenseGemmKernel(*config, True), CLUSTERS)


def tutorial(module: Any) -> Any:
    """Return a tutorial's kernel, in which each CTA computes one tile."""
    return OfPointers(module.Sm100BlockScaledDenseGemmKernel())


def consumer(module: Any, block: int) -> Any:
    """Return a kernel for consumer Blackwell."""
    return OfTensors(module.Sm120BlockScaledGemmKernel(F32, block, (128, 128, 128), (64, 32)), CLUSTERS)


def wgmma(module: Any, tile: tuple[int, int], cluster: tuple[int, int]) -> Any:
    """Return the Hopper kernel in which each CTA computes one tile."""
    return Dense(module.HopperWgmmaGemmKernel(F32, tile, cluster))


def wgmma_persistent(module: Any, tile: tuple[int, int], cluster: tuple[int, int]) -> Any:
    """Return the persistent Hopper kernel."""
    return Dense(module.HopperWgmmaGemmPersistentKernel(F32, tile, cluster, 1, True), CLUSTERS)


def dense_persistent(module: Any, tile: tuple[int, int], cluster: tuple[int, int], tma_store: bool) -> Any:
    """Return the persistent kernel for data-centre Blackwell without scales. Tiles of 256 rows use two CTAs per MMA."""
    return Dense(module.PersistentDenseGemmKernel(F32, tile[0] == 256, tile, cluster, tma_store), CLUSTERS)


def dense(module: Any, tile: tuple[int, int], cluster: tuple[int, int], tma_store: bool) -> Any:
    """Return the kernel for data-centre Blackwell without scales in which each CTA, or pair, computes one tile."""
    return Dense(module.DenseGemmKernel(F32, tile[0] == 256, tile, cluster, tma_store))


def _sm100(tile: tuple[int, int], cluster: tuple[int, int], *sizes: tuple[int, int, int], kind: str = "NVFP4") -> Case:
    block, scale, out = {"NVFP4": (16, E4M3, BF16), "NVFP4 UE8M0": (16, E8M0, BF16), "MXFP4": (32, E8M0, F32)}[kind]
    name = f"{kind} {tile[0]}x{tile[1]} cluster {cluster[0]}x{cluster[1]}"
    return Case(name, "sm_100a", SM100, persistent, (block, tile, cluster), F4, scale, block, out, sizes)


def _fp8(
    tile: tuple[int, int], cluster: tuple[int, int], *sizes: tuple[int, int, int], file: str = "dense_gemm_persistent"
) -> Case:
    make = dense_persistent if file == "dense_gemm_persistent" else dense
    name = f"FP8 {file} {tile[0]}x{tile[1]} cluster {cluster[0]}x{cluster[1]}"
    return Case(name, "sm_100a", DENSE.format(file), make, (tile, cluster, True), E4M3, None, 0, F32, sizes)


def _hopper(file: str, make: Any, tile: tuple[int, int], cluster: tuple[int, int], operand: Any, out: Any) -> Case:
    name = f"{file} {operand.__name__} {tile[0]}x{tile[1]} cluster {cluster[0]}x{cluster[1]}"
    sizes = ((256, 256, 256), (200, 144, 320))
    return Case(name, "sm_90a", HOPPER.format(file), make, (tile, cluster), operand, None, 0, out, sizes)


CASES = (
    _sm100((128, 128), (1, 1), (200, 136, 512), (300, 520, 768)),
    _sm100((128, 64), (1, 1), (200, 136, 512)),
    _sm100((128, 192), (1, 1), (200, 200, 512)),
    _sm100((128, 256), (1, 1), (200, 520, 512)),
    _sm100((128, 128), (1, 2), (200, 328, 512)),
    _sm100((256, 64), (2, 1), (300, 200, 768)),
    _sm100((256, 128), (2, 1), (300, 200, 768), (600, 392, 1280)),
    _sm100((256, 192), (2, 1), (300, 200, 768)),
    _sm100((256, 256), (2, 1), (300, 328, 512)),
    _sm100((256, 256), (2, 2), (300, 328, 512)),
    _sm100((256, 128), (4, 1), (300, 200, 512)),
    _sm100((128, 128), (1, 1), (200, 136, 512), kind="NVFP4 UE8M0"),
    _sm100((128, 128), (1, 1), (200, 136, 512), kind="MXFP4"),
    _sm100((256, 128), (2, 1), (300, 200, 512), kind="MXFP4"),
    Case(
        "NVFP4 prefetch 128x128",
        "sm_100a",
        SM100_PREFETCH,
        prefetching,
        (16, (128, 128), (1, 1), 3),
        F4,
        E4M3,
        16,
        BF16,
        ((200, 136, 768),),
    ),
    *(
        Case(f"tutorial {name}", "sm_100a", TUTORIAL.format(name), tutorial, (), F4, E4M3, 16, F16, ((256, 256, 512),))
        for name in ("nvfp4_gemm_0", "nvfp4_gemm_1")
    ),
    *(
        Case(
            f"sm_103a {kind} {tile[0]}x{tile[1]} cluster {cluster[0]}x{cluster[1]}",
            "sm_103a",
            SM103,
            ultra,
            (block, tile, cluster),
            F4,
            scale,
            block,
            BF16,
            ((200, 136, 768),),
        )
        for kind, block, scale, tile, cluster in (
            ("NVFP4", 16, E4M3, (128, 128), (1, 1)),
            ("NVFP4", 16, E4M3, (256, 256), (2, 1)),
            ("MXFP4", 32, E8M0, (128, 128), (1, 1)),
        )
    ),
    *(
        Case(f"sm_120a {kind} {name}", "sm_120a", SM120.format(name), consumer, (block,), F4, scale, block, BF16, sizes)
        for name in ("pingpong", "cooperative")
        for kind, block, scale in (("NVFP4", 16, E4M3), ("MXFP4", 32, E8M0))
        for sizes in [((200, 136, 512),)]
    ),
    _fp8((128, 128), (1, 1), (200, 144, 512), (300, 528, 768)),
    _fp8((128, 64), (1, 1), (200, 144, 512)),
    _fp8((128, 256), (1, 1), (200, 528, 512)),
    _fp8((128, 128), (1, 2), (200, 336, 512)),
    _fp8((256, 128), (2, 1), (300, 208, 768), (600, 400, 1280)),
    _fp8((256, 256), (2, 1), (300, 336, 512)),
    _fp8((256, 128), (4, 1), (300, 208, 512)),
    _fp8((128, 128), (1, 1), (256, 256, 512), file="dense_gemm"),
    _fp8((256, 128), (2, 1), (256, 256, 512), file="dense_gemm"),
    _hopper("dense_gemm", wgmma, (128, 128), (1, 1), F16, F32),
    _hopper("dense_gemm", wgmma, (64, 64), (2, 1), F16, F16),
    _hopper("dense_gemm", wgmma, (128, 128), (1, 2), E4M3, F32),
    _hopper("dense_gemm_persistent", wgmma_persistent, (128, 128), (1, 1), F16, F32),
    _hopper("dense_gemm_persistent", wgmma_persistent, (128, 256), (2, 1), E4M3, F16),
)
