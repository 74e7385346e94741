"""What configurations of kernels of block-scaled ``tcgen05.mma`` share: no device code."""

from collections.abc import Callable
from typing import Final, TypeVar

from torch_cute_ops.kernels.common.blackwell.block_scaled_stage import COLUMNS, SCALE_BUFFERS, BlockScaledStage
from torch_cute_ops.kernels.common.core.fit import first_fit
from torch_cute_ops.runtime.arch import Arch

BARRIER_BYTES: Final = 512
MOST_STAGES: Final = 9
"""As many as cover the latency of memory with few rows of activations: 20 KB each at 54 bytes a nanosecond (by data
sheet)."""


class BlockScaledConfig:
    """A base of frozen dataclasses, which have a field ``stages``: stages of the ring."""

    stages: int

    @property
    def stage(self) -> BlockScaledStage:
        """A stage of the ring."""
        raise NotImplementedError

    @property
    def accumulators(self) -> int:
        """Tiles, or experts, whose sums are in tensor memory: one is stored while the next is computed."""
        raise NotImplementedError

    @property
    def frees(self) -> int:
        """Barriers that say that an accumulator may be overwritten."""
        raise NotImplementedError

    @property
    def sum_columns(self) -> int:
        """Columns of tensor memory of all accumulators."""
        raise NotImplementedError

    @property
    def tensor_columns(self) -> int:
        """Columns of tensor memory that are allocated: a power of two."""
        used = self.sum_columns + SCALE_BUFFERS * self.stage.scale_columns
        return max(32, 1 << (used - 1).bit_length())

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.stage.threads

    @property
    def stage_bytes(self) -> int:
        """All stages of a CTA."""
        return self.stages * self.stage.size_bytes

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.stage_bytes + BARRIER_BYTES

    def reason_unfit(self) -> str | None:
        """Why there is no such kernel, whatever the GPU; ``None`` if there is."""
        raise NotImplementedError

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""
        if not arch.has_tcgen05:
            return f"{arch.name} has no tcgen05 instructions"
        reason = self.stage.reason_unsupported() or self.reason_unfit()
        if reason is not None:
            return reason
        if self.tensor_columns > COLUMNS:
            return f"needs {self.tensor_columns} columns of tensor memory; there are {COLUMNS}"
        if self.smem_bytes > arch.smem_per_cta:
            return f"needs {self.smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
        return None


Config = TypeVar("Config", bound=BlockScaledConfig)


def with_most_stages(config: Callable[[int], Config], arch: Arch) -> Config | None:
    """The configuration, a function of the number of stages, with the most of them that fit into an SM of ``arch``;
    ``None`` if none does."""
    return first_fit(map(config, range(MOST_STAGES, 1, -1)), arch)
