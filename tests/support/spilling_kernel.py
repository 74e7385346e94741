"""A kernel that must spill registers, because a thread holds more values at once than it has registers."""

import cutlass.cute as cute
from cutlass import Float32, range_constexpr

from torch_cute_ops.runtime.argspec import Dim, TensorArg


class SpillingKernel:
    """Kernel that computes ``y = x · sum(x)`` of 300 values per thread."""

    config = 300

    def arguments(self):
        n = Dim("n")
        return (
            TensorArg("Float32", (self.config, n), (n, 1), align=4),
            TensorArg("Float32", (self.config, n), (n, 1), align=4),
        )

    @cute.jit
    def __call__(self, x, y, stream):
        self.kernel(x, y).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x, y):
        thread, _, _ = cute.arch.thread_idx()
        values = []
        total = Float32(0.0)
        for i in range_constexpr(self.config):
            values.append(x[i, thread])
            total = total + values[i]
        for i in range_constexpr(self.config):
            y[i, thread] = values[i] * total
