"""Programmatic dependent launch."""

import cutlass.cute as cute


def start(pdl: bool) -> None:
    """Wait for the kernels before this one, and then let those after it start; ``pdl`` is whether launches overlap.

    So all that was before this kernel has been done when one after it starts, but for what this one does.
    """
    if pdl:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
