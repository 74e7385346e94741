"""Sum rows of several GPUs and process the sums as ``row_quant`` does, in one launch on each GPU.

Each GPU (*rank*) of a group calls the kernel with its own input. The sum over the ranks is computed in fp32, in the
order of the ranks, and rounded once to the input's dtype. The kernel ``row_quant`` with the source ``"add"`` does the
rest: it adds the residual, normalises and quantises. All ranks get the same bits, for any number of rows.

Data path. In its memory, each rank has a buffer, the *staging*, into which its peers write over NVLink. The kernel is
``row_quant`` with an ``Exchange``:

1. A row of the input arrives in shared memory, as in ``row_quant``. Each thread sends its blocks of the row to all
   peers, one row ahead of the arithmetic if there are two stages.
2. Each thread loads the peers' blocks of its row from the staging. If some have not arrived, the thread waits for the
   last block, and then loads all missing blocks again, at once. The thread sets the blocks in the staging to
   ``ABSENT``, and replaces its own block in shared memory by the sum.
3. The row is processed as any other row of ``row_quant``.

With more than two ranks and many rows, a row is exchanged in two shots: each rank sends the row only to its *owner*.
The owner adds up all ranks' rows and sends the rounded sum to all peers, which wait for the sum instead of the rows.
This sends fewer bytes, but takes one more trip over NVLink. The ranks own the rows in turn. With one shot or two, a
place in the staging receives at most one vector: of the peer's row, or of the sum. If a vector did not arrive in time,
the owner does not send its sum, so the peers' waits fail too.

There are no flags: the words show if they have arrived. A word of the staging is ``ABSENT``, a pair of NaNs, until the
peer writes it. Instead of a word of data that equals ``ABSENT``, a peer sends another pair of NaNs; all NaNs give the
same sum. A store of 16 bytes may arrive in parts, but each of its words arrives as a whole. So neither a fence nor a
second message delays a row: the wait takes one trip over NVLink.

When the staging may be overwritten. The kernel itself counts its launches in ``control``, so that replays of a CUDA
graph count too. The count is the *epoch*. Even and odd epochs use different halves. Let rank A send words of epoch n +
2 to rank B. These words overwrite words of epoch n, which B must have read and cleared. A's kernel n + 2 sends nothing
before A's kernel n + 1 has ended, because launches of a stream follow each other, and because a kernel that is launched
with programmatic dependent launch first waits for the previous kernel. A's kernel n + 1 ended after it had received all
words of B's kernel n + 1, or sums that contain them, and B's kernel n + 1 sent nothing before B's kernel n had ended.
So B has read and cleared the words of epoch n. The launches may have different numbers of rows, because each launch
clears all words that it receives. The end and the start of a kernel order memory accesses at system scope.

Each CTA reads its own copy of the number of launches, after the wait for the previous kernel. After a barrier of the
CTA, its threads increment this copy, and every copy whose index differs from the CTA's index by a multiple of the
number of CTAs. So all copies are incremented in each launch, without atomic operations, and no CTA reads a copy that
another CTA writes.

The waits cannot deadlock: all ranks have the same number of SMs and launch the same CTAs, and each walker sends a row
before it waits for this row. In two shots, the owner of a row waits only for words that its peers send before they wait
for the sum, and each walker processes its rows in the same order on all ranks. If not all clusters are resident at
first, the other clusters start in the order of their indices on all ranks.

Waits end ``timeout_ms`` after the start of the kernel. The kernel then reports the peer to the host, marks the exchange
as failed, and finishes with wrong results. After that, launches neither send nor wait, so that the peers' waits end
too, and later words are not mistaken for earlier words. Only a new staging ends this state.

Bytes moved per row of H elements and rank, in addition to the bytes of ``row_quant``: in one shot, H · itemsize are
sent to each peer. In two shots, a rank of n sends 2 · (n - 1) / n · H · itemsize on average.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.all_reduce_rows.config import Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.all_reduce_rows.kernel import AllReduceRowsKernel

__all__ = ["KERNEL", "AllReduceRowsKernel", "Arguments", "Config", "plan"]

KERNEL = f"{__name__}.kernel.AllReduceRowsKernel"
__getattr__ = on_demand(__name__, "AllReduceRowsKernel")
