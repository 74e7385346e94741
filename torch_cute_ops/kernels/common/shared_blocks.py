"""Blocks that neighbouring lanes of a warp share: what is of a whole block is computed by one lane, not by all.

``lanes`` neighbours have a part of each of ``count`` blocks. Reducing a block over all of them by exchanges would leave
every lane with every result, to make the same of it as the others do. Here the lanes halve the blocks among themselves
while they reduce, so that a lane ends with one block alone: what it takes two divisions to find, it finds once and not
``count`` times. The others are told, by a shuffle for each value.
"""

import cutlass.cute as cute

from torch_cute_ops.kernels.common import ptx


class SharedBlocks:
    """``count`` blocks that ``lanes`` lanes share; ``lane`` is that of the warp, of which all take part."""

    def __init__(self, lanes: int, count: int):
        self.lanes, self.count = lanes, count
        self.share = lanes
        while self.share > 1 and lanes // self.share < count:
            self.share //= 2
        if lanes // self.share < count:
            raise ValueError(f"{lanes} lanes cannot have one of {count} blocks each")

    def largest(self, values: list, lane):
        """Of the block that is this lane's the largest magnitude, NaN if one is, of each lane's ``values``."""
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
        """Which block is this lane's; there may be none of that number."""
        return lane % self.lanes // self.share

    def leads(self, lane):
        """Whether this lane is the first of those that have its block."""
        return lane % self.share == 0

    def told(self, value, index: int, lane):
        """What the lanes that have block ``index`` have as ``value``."""
        if self.count == 1:
            return value
        return cute.arch.shuffle_sync(value, lane // self.lanes * self.lanes + index * self.share)
