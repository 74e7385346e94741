"""Host side of the kernel that sums rows of several GPUs: its ``Config``, its ``Arguments`` and ``plan``."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Final

from torch_cute_ops.kernels import row_quant
from torch_cute_ops.kernels.row_quant.config import RowQuantSpec
from torch_cute_ops.runtime.arch import Arch

MAX_RANKS: Final = 8
"""Largest number of GPUs in a group. All GPUs need direct access to each other's memory."""
SAVED_BYTES: Final = 1 << 20
"""Number of bytes per GPU that two shots must save. In the time of one trip over NVLink, about this many bytes can be
sent."""
MAX_CTAS: Final = 1024
"""Number of words of ``control`` that count launches."""
FAILED, CONTROL_WORDS = MAX_CTAS, MAX_CTAS + 4
"""Index of the word of ``control`` that is 1 after a failed wait, and number of words of ``control``."""


@dataclass(frozen=True)
class Config:
    """Static properties of a kernel that sums rows of several GPUs.

    Attributes:
        rows: configuration of the ``row_quant`` kernel that adds the residual to the sum, normalises and quantises the
            result.
        ranks: number of GPUs, 2 to ``MAX_RANKS``.
    """

    rows: row_quant.Config
    ranks: int

    @property
    def spec(self) -> RowQuantSpec:
        """Specification of the steps after the sum: residual, normalisation and quantisation."""
        return self.rows.spec

    @property
    def two_shot_rows(self) -> int | None:
        """Smallest number of rows of a launch that are exchanged in two shots, or None if one shot is always used.

        With one shot, each rank sends ``ranks - 1`` copies of each row. With two shots, each rank sends ``2 * (ranks -
        1) / ranks`` rows per row of the input, on average. The launch needs at least one row per rank: each rank must
        own a row, so that each rank waits for each peer.
        """
        saved = (self.ranks - 1) * (self.ranks - 2) * self.row_bytes
        return max(self.ranks * self.rows.group_rows, -(-SAVED_BYTES * self.ranks // saved)) if saved else None

    @property
    def waves(self) -> int:
        """Number of CTAs to launch, in multiples of the number of CTAs that the GPU runs at the same time. Always 1,
        because CTAs wait for the peers' CTAs with the same index."""
        return 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the input."""
        return self.rows.spec.width * self.rows.spec.dtype.itemsize


class Arguments(
    namedtuple(
        "Arguments",
        "input residual weight factor y scale norm eps max_ctas "
        "rank staging peer0 peer1 peer2 peer3 peer4 peer5 peer6 control report timeout_ms",
    )
):
    """Run-time arguments, in order. ``row_quant.Arguments`` describes the first nine arguments.

    Attributes:
        rank: int32, index of this GPU.
        staging: (2, ranks - 1, S) int32 in this GPU's memory, into which the peers write their rows: one half for even
            and one for odd launches, and in each half one slot of S words for each peer, in the order of the ranks. All
            words are ``instructions.ABSENT`` between launches. peer0 … peer6: (2, S) int32, this GPU's slots in the
            staging of the peers, in the order of the ranks. Fields without a peer are None.
        control: (``CONTROL_WORDS``,) int32 in this GPU's memory: ``MAX_CTAS`` copies of the number of launches so far,
            and a word that is 1 after a failed wait.
        report: (ranks - 1,) int32, which the host can read: 1 for each peer whose rows did not arrive in time.
        timeout_ms: int32, time from the start of the kernel to the end of all waits, in milliseconds.
    """


def plan(spec: RowQuantSpec, arch: Arch, ranks: int, pdl: bool = True) -> Config:
    """Return the configuration for ``spec``, whose source is ``"add"``, on ``ranks`` GPUs of ``arch``.

    Raises:
        ValueError: if no configuration fits, or there are too many GPUs. The message gives the reason.
    """
    if not 2 <= ranks <= MAX_RANKS:
        raise ValueError(f"the kernel sums rows of 2 to {MAX_RANKS} GPUs; the group has {ranks}")
    return Config(row_quant.plan(spec, arch, pdl=pdl), ranks)
