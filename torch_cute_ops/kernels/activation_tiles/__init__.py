"""Activations as the shared-memory operand of ``kernels.fp4_wgmma``: decoded if they are in FP4, and in its order of k.

A lane of a warpgroup's product reads codes of the weight as they lie, and decodes eight at a time into pairs (see
``kernels.common.fp4_weights``); so its k is in another order, and the activations are put into the same. Of a chunk of
256 elements of k the quarter ``q`` goes to lane ``q`` of a quad. Each k16 step takes four elements of each quarter:

    step = 2 · (eighth of the quarter) + (half of the decoded word),    position in the step = 8 · h + 2 · q + e

for element ``e`` of pair ``h``. What is written are the very bytes of shared memory: tiles of 8 tokens x 64 positions,
1,024 bytes, rows of 128 bytes whose 16-byte pieces are swapped as wgmma's 128-byte swizzle wants it (PTX ISA,
"Matrix-descriptor"). Tile (group of tokens ``g``, 64 positions ``c``) is the ``c · groups + g``-th, so that the tiles
of neighbouring tokens are one bulk copy. What is beyond k is zero; tokens beyond m are not written.

Besides, it clears the flags by which CTAs of the product tell each other of their sums. One thread writes 64 bytes.
"""

from typing import TYPE_CHECKING, Any

from torch_cute_ops.kernels.activation_tiles.config import CHUNK, TILE_BYTES, TILE_TOKENS, Config

if TYPE_CHECKING:
    from torch_cute_ops.kernels.activation_tiles.kernel import ActivationTilesKernel

__all__ = ["CHUNK", "TILE_BYTES", "TILE_TOKENS", "ActivationTilesKernel", "Config"]


def __getattr__(name: str) -> Any:
    """The kernel's class, which needs the DSL, only when it is asked for."""
    if name != "ActivationTilesKernel":
        raise AttributeError(name)
    from torch_cute_ops.kernels.activation_tiles.kernel import ActivationTilesKernel

    return ActivationTilesKernel
