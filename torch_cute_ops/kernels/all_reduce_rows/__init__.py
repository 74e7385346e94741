"""Sum rows of several GPUs and process the sums as ``row_quant`` does, in one launch on each GPU.

Each GPU (*rank*) of a group calls the kernel with its own input. The sum over the ranks is computed in fp32, in the
order of the ranks, and rounded once to the input's dtype. The kernel ``row_quant`` with the source ``"add"`` does the
rest: it adds the residual, normalises and quantises. All ranks get the same bits, for any number of rows.

Data path. Each rank has a *staging* in its memory, into which its peers write over NVLink. The kernel is ``row_quant``
with an ``Exchange``:

1. A row of the input arrives in shared memory, as in ``row_quant``. Each thread sends its blocks of the row to all
   peers, one row ahead of the arithmetic if there are two stages.
2. Each thread loads the peers' blocks of its row from the staging. If they have not arrived, it waits for the last of
   them and then loads all others again, at once. It sets them in the staging to ``ABSENT``, and replaces its own block
   in shared memory by the sum.
3. The row is processed as any other row of ``row_quant``.

With more than two ranks and many rows, a row is exchanged in two shots: each rank sends the row only to its *owner*.
The owner adds up all ranks' rows and sends the rounded sum to all peers, which wait for the sum instead of the rows. So
fewer bytes are sent, with one more trip over NVLink. Rows have owners in turns. A slot of the staging receives one
vector in any case, the peer's or the sum. An owner sends no sum of a vector that did not arrive in time, so its peers'
waits fail too.

There are no flags: the words show if they have arrived. A word of the staging is ``ABSENT``, a pair of NaNs, until the
peer writes it. A peer that would send this word sends another pair of NaNs; all NaNs give the same sum. A store of 16
bytes may arrive in parts, but each of its words arrives as a whole. So neither a fence nor a second message delays a
row: the wait takes one trip over NVLink.

When the staging may be overwritten. The kernel itself counts launches in ``control`` (*epoch*), so that the replay of a
CUDA graph is a launch like any other. Even and odd epochs use different halves. Let rank A send words of epoch n + 2 to
rank B. These words overwrite words of epoch n, which B must have read and cleared. A's kernel n + 2 sends nothing
before A's kernel n + 1 has ended, because launches of a stream follow each other, and because a kernel that is launched
with programmatic dependent launch first waits for the previous kernel. A's kernel n + 1 ended after it had received all
words of B's kernel n + 1, or sums that contain them, and B's kernel n + 1 sent nothing before B's kernel n had ended.
So B has read and cleared the words of epoch n. The rows of the two launches may differ in number: each launch clears
all words that it receives. Ends and starts of kernels order memory accesses at the scope of the system.

Each CTA reads its own copy of the number of launches, after the wait for the previous kernel. After a barrier of the
CTA, its threads increment this copy, and every copy whose index differs from it by a multiple of the number of CTAs. So
all copies are incremented in each launch, without atomic operations, and no CTA reads a copy that another one writes.

No rank waits for a row that a peer sends only after that peer has waited for this rank: all ranks have the same number
of SMs, launch the same CTAs, and each walker sends a row before it waits for this row. In two shots, the owner of a row
waits only for words that its peers send before they wait for the sum, and each walker processes its rows in the same
order on all ranks. CTAs of clusters that are not resident at first are started in the order of their indices on all
ranks.

Waits end ``timeout_ms`` after the start of the kernel. The kernel then reports the peer to the host, marks the exchange
as failed, and finishes with wrong results. After that, launches neither send nor wait, so that the peers' waits end
too, and later words cannot be taken for earlier ones. Only a new staging ends this state.

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
