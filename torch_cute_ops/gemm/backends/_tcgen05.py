"""Tactic and cost model that the FP4 and FP8 backends for data-center Blackwell share.

The kernels were run only in a PTX emulator. All constants come from data sheets, not from measurements.
"""

from typing import ClassVar, Final, NamedTuple

from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.kernels.common.blackwell.layouts import MMA_M
from torch_cute_ops.runtime.arch import CLOCK_HZ

STORE_BYTES_PER_CLOCK: Final = 32
"""Rate at which a CTA stores results while no MMA runs."""


class Tcgen05Tactic(NamedTuple):
    """Tactic of tcgen05 GEMMs with two FP4 operands or with FP8 activations.

    Attributes:
        tile_m: number of rows of ``a`` in a tile.
        cta_group: number of CTAs that compute an MMA together, 1 or 2. Each computes 128 rows of the weight.
        split_k: number of CTAs that compute one tile, each over a range of K. They form a cluster.
    """

    tile_m: int
    cta_group: int
    split_k: int


class Tcgen05Model:
    """Constants and partial estimates from which backends estimate the time of a call."""

    ramp_seconds: ClassVar[float] = 1.5e-6
    """Time of a CTA to fill the pipeline, allocate tensor memory and store the last tile."""
    cluster_bytes_per_second: ClassVar[float] = 1.5e11
    """Rate at which a CTA of a cluster exchanges and adds partial sums (the rate of an H200)."""
    l2_rate: ClassVar[int] = 2
    """Bandwidth of L2, divided by the bandwidth of memory."""
    least_mma_n: ClassVar[int] = 64
    """Size N below which an MMA gets no faster, because it reads 128 rows of the other operand anyway."""

    def read_seconds(self, weight_bytes: float, activation_bytes: float, m_tiles: float, target: Target) -> float:
        """Return the time in seconds in which a CTA copies both operands of a k tile, at its share of the bandwidth.

        M tiles that run at the same time read the weight from memory once, and then from L2. The activations are
        always read from L2.
        """
        from_memory = weight_bytes / min(m_tiles, self.l2_rate) + activation_bytes / self.l2_rate
        return from_memory / (cost.bytes_per_second(target) / target.sms)

    def store_seconds(self, tile_m: int, itemsize: int) -> float:
        """Return the time in seconds in which a CTA stores the results of one tile."""
        return MMA_M * tile_m * itemsize / STORE_BYTES_PER_CLOCK / CLOCK_HZ

    def exchange_seconds(self, tile_m: int) -> float:
        """Return the time in seconds in which a CTA of a cluster exchanges the partial sums of one tile."""
        return 2 * 4 * MMA_M * tile_m / self.cluster_bytes_per_second
