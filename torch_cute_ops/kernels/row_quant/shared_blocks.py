"""Blocks that neighbouring lanes of a warp share: values of a whole block are computed by one lane, not by all.

``lanes`` neighbours have a part of each of ``count`` blocks. A butterfly reduction of every block would leave each lane
with all results, and all lanes would repeat the same work on them. Here the lanes divide the blocks among themselves
while they reduce (recursive halving), so that each ends up with one block: the two divisions that its scale takes are
computed once, not ``count`` times. The other lanes receive the results by a shuffle for each value.
"""

import cutlass.cute as cute

from torch_cute_ops.kernels.common.core import ptx


class SharedBlocks:
    """``count`` blocks that ``lanes`` neighbouring lanes share; whole warps call the methods, with their ``lane``."""

    def __init__(self, lanes: int, count: int):
        self.lanes, self.count = lanes, count
        self.share = lanes
        while self.share > 1 and lanes // self.share < count:
            self.share //= 2
        if lanes // self.share < count:
            raise ValueError(f"{lanes} lanes cannot have one of {count} blocks each")

    def largest(self, values: list, lane):
        """The amax of this lane's block; ``values`` are the lane's own amaxes of all blocks. NaN if one is."""
        values = [*values, *[values[-1]] * (self.lanes // self.share - self.count)]
        offset = self.lanes // 2
        while len(values) > 1:
            half = len(values) // 2
            is_upper = lane & offset != 0
            kept = [ptx.select(is_upper, b, a) for a, b in zip(values[:half], values[half:], strict=True)]
            sent = [ptx.select(is_upper, a, b) for a, b in zip(values[:half], values[half:], strict=True)]
            values = [
                ptx.max_abs_nan(a, cute.arch.shuffle_sync_bfly(b, offset=offset))
                for a, b in zip(kept, sent, strict=True)
            ]
            offset //= 2
        (value,) = values
        while offset > 0:
            value = ptx.max_abs_nan(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
            offset //= 2
        return value

    def mine(self, lane):
        """The index of this lane's block; may be ``count`` or more, for a lane without one."""
        return lane % self.lanes // self.share

    def leads(self, lane):
        """Whether this lane is the first of the lanes with the same block."""
        return lane % self.share == 0

    def broadcast(self, value, index: int, lane):
        """``value`` of the lanes that have block ``index``."""
        if self.count == 1:
            return value
        return cute.arch.shuffle_sync(value, lane // self.lanes * self.lanes + index * self.share)
