"""Kernels among CUTLASS's CuTe DSL examples that ``calibrate_ptx.py`` runs, and how they are compiled without a GPU.

All compute ``C = A @ B.T`` of row-major A ``(m, k)``, B ``(n, k)`` and C ``(m, n)``, with their code unchanged: the
examples query a GPU in their ``run`` functions alone, and these are not called.
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
"""Of persistent kernels: so few that each works on several tiles of a problem that can be emulated."""


class Case(NamedTuple):
    """One kernel with its configuration.

    Attributes:
        name: what ``--only`` matches.
        arch: what it is compiled for.
        file: below ``EXAMPLES``.
        make: the kernel, of its module and of ``config``.
        config: what ``make`` takes: tile, cluster and such.
        operand: the type of A and B.
        scale: the type of block scales, if there are any.
        block: numbers to a scale.
        out: the type of C.
        sizes: ``(m, n, k)`` of problems.
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
    """An example's module."""
    for folder in (root / EXAMPLES, root / EXAMPLES / Path(file).parent, (root / EXAMPLES).parent):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # some import their neighbours
    name = "cutlass_example_" + Path(file).stem
    spec = importlib.util.spec_from_file_location(name, root / EXAMPLES / file)
    if spec is None or spec.loader is None or not (root / EXAMPLES / file).exists():
        raise FileNotFoundError(root / EXAMPLES / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Dense:
    """Pointers and sizes to what a kernel without scales takes."""

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
        """Launch."""
        k, n_out = cute.assume(k, 32), cute.assume(n, 16)
        a = cute.make_tensor(a_ptr, cute.make_ordered_layout((m, k, 1), order=(1, 0, 2)))
        b = cute.make_tensor(b_ptr, cute.make_ordered_layout((n, k, 1), order=(1, 0, 2)))
        c = cute.make_tensor(c_ptr, cute.make_ordered_layout((m, n_out, 1), order=(1, 0, 2)))
        self.kernel(a, b, c, *self.rest, stream)


class BlockScaled:
    """Pointers and sizes to what a block-scaled kernel takes: of scales, it uses the address alone."""

    def __init__(self, kernel: Any, *rest: Any):
        self.kernel = kernel
        self.rest = rest

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
        """Launch."""
        k, n_out = cute.assume(k, 32), cute.assume(n, 8)
        a = cute.make_tensor(a_ptr, cute.make_ordered_layout((m, k, 1), order=(1, 0, 2)))
        b = cute.make_tensor(b_ptr, cute.make_ordered_layout((n, k, 1), order=(1, 0, 2)))
        c = cute.make_tensor(c_ptr, cute.make_ordered_layout((m, n_out, 1), order=(1, 0, 2)))
        a_scale = cute.make_tensor(a_scale_ptr, cute.make_ordered_layout((m, k, 1), order=(1, 0, 2)))
        b_scale = cute.make_tensor(b_scale_ptr, cute.make_ordered_layout((n, k, 1), order=(1, 0, 2)))
        self.kernel(a, b, a_scale, b_scale, c, *self.rest, stream)


class OfPointers:
    """The same of a kernel that takes pointers and a problem's size."""

    def __init__(self, kernel: Any, layouts: bool):
        self.kernel = kernel
        self.layouts = (OperandMajorMode.K, OperandMajorMode.K, utils.LayoutEnum.ROW_MAJOR) if layouts else None

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
        """Launch."""
        problem = (m, n, k, cutlass.Int32(1))
        if cutlass.const_expr(self.layouts is None):
            self.kernel(a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, c_ptr, problem, stream)
        else:
            self.kernel(a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, c_ptr, self.layouts, problem, CLUSTERS, stream)


def compile_case(root: Path, case: Case, optimised: bool) -> Any:
    """The compiled function, which takes pointers, ``m``, ``n``, ``k`` and a stream; with its PTX."""
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
        compiled.artifacts.PTX  # noqa: B018  (read before the folder goes)
    return compiled


F4, E4M3, E8M0 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, cutlass.Float8E8M0FNU
F16, BF16, F32 = cutlass.Float16, cutlass.BFloat16, cutlass.Float32
SM100 = "blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py"
SM100_PREFETCH = "blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_prefetch.py"
SM103 = "blackwell/kernel/blockscaled_gemm/sm103_dense_blockscaled_gemm_persistent.py"
SM120 = "blackwell_geforce/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_{}.py"
TUTORIAL = "blackwell/tutorial/tutorial_gemm/{}.py"
HOPPER = "hopper/kernel/dense_gemm/{}.py"


def persistent(module: Any, *config: Any) -> Any:
    """Data-center Blackwell's persistent kernel of (block, tile, cluster)."""
    return OfPointers(module.Sm100BlockScaledPersistentDenseGemmKernel(*config), layouts=True)


def prefetching(module: Any, *config: Any) -> Any:
    """The same with prefetches to L2."""
    return BlockScaled(module.Sm100BlockScaledPersistentDenseGemmKernel(*config), CLUSTERS)


def ultra(module: Any, *config: Any) -> Any:
    """That of sm_103a, whose MMAs have K = 96."""
    return BlockScaled(module.Sm103BlockScaledPersistentDenseGemmKernel(*config, True), CLUSTERS)


def tutorial(module: Any) -> Any:
    """A kernel of one tile a CTA."""
    return OfPointers(module.Sm100BlockScaledDenseGemmKernel(), layouts=False)


def consumer(module: Any, block: int) -> Any:
    """Consumer Blackwell's kernels."""
    return BlockScaled(module.Sm120BlockScaledGemmKernel(F32, block, (128, 128, 128), (64, 32)), CLUSTERS)


def wgmma(module: Any, tile: tuple[int, int], cluster: tuple[int, int]) -> Any:
    """Hopper's kernel of one tile a CTA."""
    return Dense(module.HopperWgmmaGemmKernel(F32, tile, cluster))


def wgmma_persistent(module: Any, tile: tuple[int, int], cluster: tuple[int, int]) -> Any:
    """Hopper's persistent kernel."""
    return Dense(module.HopperWgmmaGemmPersistentKernel(F32, tile, cluster, 1, True), CLUSTERS)


def _sm100(tile: tuple[int, int], cluster: tuple[int, int], *sizes: tuple[int, int, int], kind: str = "NVFP4") -> Case:
    block, scale, out = {"NVFP4": (16, E4M3, BF16), "NVFP4 UE8M0": (16, E8M0, BF16), "MXFP4": (32, E8M0, F32)}[kind]
    name = f"{kind} {tile[0]}x{tile[1]} cluster {cluster[0]}x{cluster[1]}"
    return Case(name, "sm_100a", SM100, persistent, (block, tile, cluster), F4, scale, block, out, sizes)


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
    _hopper("dense_gemm", wgmma, (128, 128), (1, 1), F16, F32),
    _hopper("dense_gemm", wgmma, (64, 64), (2, 1), F16, F16),
    _hopper("dense_gemm", wgmma, (128, 128), (1, 2), E4M3, F32),
    _hopper("dense_gemm_persistent", wgmma_persistent, (128, 128), (1, 1), F16, F32),
    _hopper("dense_gemm_persistent", wgmma_persistent, (128, 256), (2, 1), E4M3, F16),
)
