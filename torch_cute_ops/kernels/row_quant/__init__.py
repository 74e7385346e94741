"""Quantise rows to FP4 or FP8 in one pass over memory, after an optional addition or gate and an optional norm.

``RowQuantSpec`` combines:

- source, the origin of a row of values. ``"rows"``: a row of the input. ``"add"``: the sum of a row of the input and a
  row of the residual, which overwrites the residual. ``"silu_mul"``: the second half of a row of the input, gated by
  the first half: ``silu(gate) * up``, the general SwiGLU, or GELU or squared ReLU instead of SiLU.
- norm, or none: RMSNorm or LayerNorm. The norm may multiply by the weight or, as in Gemma, by 1 + weight, and may add a
  bias. RMSNorm with a weight and without a bias is the usual case. All other norms are called *general* norms.
- format: FP4, FP8, or none. An NVFP4 row may have its own global scale, which the kernel computes from the row's amax;
  the inverse of this global scale is then an output. An FP8 scale belongs to the whole tensor, to a row, to 128
  elements (64 elements in the last block of some rows), or to 32 elements (MXFP8). The scale of a whole tensor comes
  from the caller, or from an earlier kernel of the same call that computes the tensor's amax (``tensor_amax``). In rows
  without a norm or a gate, each NVFP4 block may be encoded with two scales ("4 over 6"). A thread then decodes both
  encodings in registers, and keeps the encoding with the smaller error. MXFP8 blocks are processed like MXFP4 blocks,
  and their scales are stored in the same way; only the codes differ.
- outputs: codes and scales. Optional outputs are the same scales in the linear layout, and the values before
  quantisation. Without a format, these values are the only output. FP8 codes with one scale per token or tensor may be
  interleaved along k (``formats.interleave``), for ``kernels.fp8_fp4_token_wgmma``. A thread then stores its 16 codes
  as four words that are 16 bytes apart, and some threads of each row store zeros up to a multiple of 256 elements.
- rows: all rows of the input, or the experts' rows in a buffer with padding. Padding is neither read nor written: a
  table in shared memory maps the experts' rows to one dense range (``experts.ExpertRows``). Without counts, the buffer
  contains no padding between experts, and the rows are the range from the first offset to the last offset.

Roles and data path. A *group* of ``max(32, threads_per_row)`` threads works on one row at a time, or on several rows at
a time if a row needs less than a warp. A CTA runs one or more groups, which share only the norm's weight. A row that is
too wide for a CTA is cut into ``splits`` slices, one per CTA of a cluster. A wide row without reductions is also cut;
its slices are then independent. (If there are at most ``FEW_ROWS`` FP4 rows, a separate kernel cuts them into smaller
slices.) CTAs are persistent: the groups of the grid take turns at the rows.

1. One thread of a group starts a bulk copy of a later row (of both source rows, if there are two) into one of
   ``stages`` buffers in shared memory, while the group processes the current row. The weight is copied once per CTA and
   stays in registers; general norms read weight and bias from shared memory for each row.
2. Each thread reads its blocks: thread i processes blocks i, i + threads_per_row, and so on. It adds or gates,
   multiplies by the weight, and computes each block's amax and the sum of squares. A warp reduction, shared memory and
   one barrier reduce the sum of squares over the row, and also the amax if each row has a scale. Rows with an NVFP4
   scale of extreme magnitude are multiplied by a power of two in registers; few rows take this branch. In a cluster,
   each warp sends its partial results to all CTAs (``st.async``, whose bytes an mbarrier counts). The group's barrier
   also releases the row's buffer. With a residual, each thread writes its sums to the residual's buffer, and after the
   barrier one thread stores the sums in bulk. The buffer is free when the bulk store has read it. On an H200 at width
   16,384, the bulk store is 4 % faster than stores from registers, in which each thread writes half of a 32-byte
   sector. If only some warps have a last block, and arithmetic limits the speed, the other warps skip the last block's
   instructions.
3. The norm is computed as ``(v · w) · rstd``: the row factor ``rstd`` multiplies the block's amax and its encode
   factor, once per block instead of once per element. Three kinds of rows need ``(v · rstd) · w`` instead: rows of
   extreme magnitude, rows with a block of extreme magnitude in MXFP4 or FP8, and all rows in fp32. These rows take a
   second pass over the row in shared memory, and a second barrier. The scale and 8 to 32 bytes of codes of each block
   are stored in global memory. If the norm is an output and shared memory suffices (``bulk_norm``), the norm is written
   to shared memory and stored in bulk while the next row is processed. Eight threads share an FP8 block of 128
   elements. Each thread computes the scales of some of the blocks that it shares, and passes the scales to the other
   threads by shuffles (``codes.SharedBlocks``). General norms are computed as ``(v - mean) · rstd · w + bias`` in
   registers, without a second pass: the mean, the sum of squares and the amax, if needed, are reduced one after the
   other.
4. Scales. In the 128x4 layout, the scales of a row occupy 4 bytes of every 512. If they were stored row by row, every 4
   bytes would be a separate L2 request, which costs 6 % of the time at large sizes on an H200. Therefore a group
   processes in sequence the four rows whose scales share 16 bytes (a *quad*), collects their scales in shared memory,
   and stores 16 bytes at a time, while it processes the next row. Quads are distributed in rounds, one quad per group
   of the grid. Rows that do not fill a round, such as all rows of a small batch, are distributed one by one, and their
   scales are stored as single bytes. Scales of padding rows are zeroed while the first copies are in flight.

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| full | row buffers of a group | first thread of each row | group | 1 | - | groups * stages |
| partial_sums_full | partial results | warps of all CTAs | group | 1 | - | groups * (group_barriers - stages) |
| weight_barrier | weight, bias | thread 0 | all groups | 1 | - | 1 |

Row buffers have no empty mbarriers: a barrier of the group's threads releases them.

Bytes moved per row of H elements: H · itemsize bytes are read, or 2 · H · itemsize bytes with a residual or a gate. H ·
itemsize bytes are written for the residual. H/2 + H/block_size bytes are written for FP4, or H bytes plus the scales
for FP8. A residual in fp32 takes 4 · H bytes instead. Weight and bias are read once per CTA, from L2.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.row_quant.config import Arguments, Config, RowQuantSpec, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.row_quant.kernel import RowQuantKernel

__all__ = ["KERNEL", "Arguments", "Config", "RowQuantKernel", "RowQuantSpec", "plan"]

KERNEL = f"{__name__}.kernel.RowQuantKernel"
__getattr__ = on_demand(__name__, "RowQuantKernel")
