"""Programmatic dependent launch, and what may be read before the wait.

A kernel starts when every CTA of the one before it has released its dependents, or ended. All kernels of this package
release them only behind a wait of their own, which returns when the kernel before them has ended, with its stores
visible. So while a kernel has not waited, at most the one before it is under way: what was complete before that one
was launched can be read, and nothing else. Nothing is written before the wait, because the kernel before may read it.
The exception is what only a second kernel of an op touches: the kernel before it is then known, the op's first, which
touches no such memory, and waited itself, so that all kernels before that have ended. (``fp4_gated_experts`` zeroes the
padding of scales ahead. ``fp8_fp4_recoded`` is an op's third kernel, which multiplies while the second one recodes the
weight, and waits for its end before it releases dependents.)

That is what ``static_weight`` of the GEMMs promises: the weight and its scales were complete before the previous
launch. A weight that the previous launch writes is not. It is also why the second kernel of an op may read the op's
inputs ahead of the first one's end: they were complete before that one passed its wait, and it releases its dependents
behind it.
"""

import cutlass.cute as cute


def start(pdl: bool) -> None:
    """Wait for the kernels before this one, and then let those after it start; ``pdl`` is whether launches overlap.

    So all that was before this kernel has been done when one after it starts, but for what this one does.
    """
    if pdl:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
