"""Rows to FP4 or FP8: a sum or a gate before, RMSNorm or nothing, scales, codes, layouts, in one pass over memory.

What differs between kernels is in ``Problem``; the parts compose:

- source: a row of the input; the input's plus the residual's, which the sum replaces; or silu of a row's first half
  times its second;
- norm, or none;
- scales and codes: FP4 blocks; FP8 under a given scale, one of the row, or one of each 128 elements;
- scale layout; linear scales besides; the norm besides;
- rows: all of them; or those that experts have in a buffer with padding, which is neither read nor written, as one
  dense range (a table in shared memory says where a row lies: ``common.expert_rows``); or all from the first expert's
  offset to the last one's end, if no counts say that there is padding between.

Roles and data path. A *group* of ``max(32, threads_per_row)`` threads works on one row at a time (several, if a row
needs less than a warp). A CTA has one or more groups, which share nothing but the weight; a row that is too wide is cut
into ``splits`` slices, one for each CTA of a cluster. CTAs are persistent: each group walks over the rows with the
grid's stride.

1. One thread of a group starts a bulk copy of a coming row (or of both rows that make one) into one of ``stages``
   buffers of shared memory; the copies run ahead of the arithmetic. The weight is copied once a CTA, and lives in
   registers.
2. A thread reads its blocks (thread t has blocks t, t + threads_per_row, …), sums or gates, multiplies by the weight,
   takes each block's amax, and sums the squares; a warp reduction, shared memory and one barrier give the row's sum,
   and the row's amax where a scale is of the row. In a cluster every warp sends its partial results to all CTAs
   (``st.async`` on an mbarrier). The barrier also frees the row's buffer. Sums with the residual take the residual's
   place in the buffer, and one thread stores them from there in bulk, once the barrier says that they are complete
   (4 % faster than from registers at width 16,384 on an H200, where a thread's stores fill half of every 32 bytes);
   the buffer is free when that has been read.
   Where a row's blocks do not fill its threads, and arithmetic limits, the warps without a last block leave it out.
3. ``norm = (v · w) · rstd``: the row factor is applied to the block's amax and to its encode factor, once a block
   instead of once an element. (Rows of extreme magnitude, those with a block of MXFP4 or FP8 that is, and all in fp32
   want ``(v · rstd) · w``, by a second pass over the row in shared memory and a second barrier.) Block scale, and 8 or
   16 bytes of codes per thread and block, go to global memory; the norm, if it is an output, by way of shared memory
   and in bulk one row later, where there is room for that (``bulk_norm``). A block of FP8 is shared by eight threads:
   each computes the scales of some of theirs, and tells the others (``common.shared_blocks``).
4. Scales. A row of the 128x4 layout has 4 bytes in every 512: stored row by row, that is one L2 request for each 4
   bytes, and costs 6 % at large sizes (H200). So a group takes the four rows that share 16 bytes (a *quad*) one after
   the other, gathers their scales in shared memory, and writes 16 bytes at a time, one row later. The rows that do not
   fill a round of quads over the whole grid, and so all rows of a small batch, are dealt out singly, and each thread
   stores its byte. Rows of padding are zeroed while the first copies are under way.

Bytes moved a row: H · itemsize read (twice that for a sum or a gate), the residual written, H/2 + H/block_size (FP8: H
and its scales) written; the weight once a CTA, from L2.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.row_quant.config import Config, Problem, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.row_quant.kernel import RowQuantKernel

__all__ = ["KERNEL", "Config", "Problem", "RowQuantKernel", "plan"]

KERNEL = f"{__name__}.kernel.RowQuantKernel"
__getattr__ = on_demand(__name__, "RowQuantKernel")
