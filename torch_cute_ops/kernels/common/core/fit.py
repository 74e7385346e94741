"""Which configuration of a kernel fits an SM: no device code."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from torch_cute_ops.runtime.arch import Arch


class Fits(Protocol):
    """A configuration that knows where it cannot run."""

    def reason_unsupported(self, arch: Arch) -> str | None:
        """Why this cannot run on ``arch``; ``None`` if it can."""


Config = TypeVar("Config", bound=Fits)


def first_fit(configs: Iterable[Config], arch: Arch) -> Config | None:
    """The first configuration that can run on ``arch``; ``None`` if none can."""
    return next((config for config in configs if config.reason_unsupported(arch) is None), None)
