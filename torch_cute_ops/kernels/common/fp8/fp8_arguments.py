"""Run-time arguments of the FP8 GEMM kernels: no device code."""

from collections import namedtuple


class Arguments(namedtuple("Arguments", "a b a_scale b_scale offsets counts alpha bias out prefetch max_ctas")):
    """The run-time arguments of an FP8 GEMM, in order.

    Sizes: R rows of activations, of all experts; E experts; N rows of an expert's weight, a multiple of 8; K elements
    of a sum, a multiple of 64; ``blocks`` = ⌈K / 128⌉. In the masked layout (``ExpertLayout.is_masked``) each expert
    has R / E rows, and ``a``, ``a_scale`` and ``out`` have three dimensions, of which the last two are contiguous.

    Attributes:
        a: (R, K) e4m3, contiguous; masked (E, R / E, K).
        b: (K, N) e4m3, the transposed view of a row-major (N, K) weight; of grouped GEMMs (E, N, K).
        a_scale: (blocks, R) float32, any pitch between blocks; masked (blocks, E, R / E).
        b_scale: (⌈N / 128⌉, blocks) float32; of grouped GEMMs (E, ⌈N / 128⌉, blocks).
        offsets: (E + 1,) int32, or ``None``: as ``ExpertLayout`` says.
        counts: (E,) int32, or ``None``.
        alpha: (1,), (N,), (E,) or (E, N) float32, or ``None``: as ``Config.epilogue`` says.
        bias: (N,) or (E, N), or ``None``.
        out: (R, N), written in rows that an expert has; masked (E, R / E, N).
        prefetch: (rows, bytes) uint8, contiguous, which ``FP8TilesConfig.prefetches`` is about; or ``None``.
        max_ctas: how many CTAs may run at once, a number: of a GPU, not of a call; a multiple of ``Config.splits``.
    """
