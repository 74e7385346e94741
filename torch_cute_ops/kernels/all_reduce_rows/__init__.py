"""Sum the rows of several GPUs, and process the sums as ``row_quant`` does, with one launch on each GPU.

Each GPU (*rank*) of a group calls the kernel with its own input. The sum over the ranks is computed in fp32, in the
order of the ranks, and rounded once to the input's dtype. The remaining steps are the steps of ``row_quant`` with the
source ``"add"``: add the residual, normalise and quantise. All ranks get the same bits, for any number of rows.

Data path. Each rank keeps a buffer in its memory, the *staging*, into which its peers write over NVLink. The kernel is
``row_quant`` with an ``Exchange``:

1. A row of the input arrives in shared memory, as in ``row_quant``. Each thread sends its 16-byte vectors of the row to
   all peers. With two stages, a thread sends each row before it processes the previous row.
2. Each thread loads the peers' vectors of its row from the staging. If some have not arrived, the thread waits for the
   vector that peers send last, and then loads all missing vectors again, without waiting between the loads. The thread
   overwrites the vectors in the staging with ``ABSENT``, and replaces its own vectors in shared memory by the sum.
3. From here on, the row is processed like any row of ``row_quant``.

With more than two ranks and many rows, a row is exchanged in two steps, called *shots*: each rank sends the row only to
the row's *owner*. The owner adds up the rows of all ranks and sends the rounded sum to all peers, which wait for the
sum instead of the rows. Two shots send fewer bytes than one shot, but take one more trip over NVLink. The ranks take
turns as owners. In both cases, a place in the staging receives at most one vector per launch, either of a peer's row or
of the sum. If a vector does not reach the owner in time, the owner does not send its sum, so the peers' waits fail too.

The kernel needs no flags, because the value of a word shows whether it has arrived. A word of the staging is
``ABSENT``, a pair of NaNs, until a peer writes it. If a word of a peer's data equals ``ABSENT``, the peer sends a
different pair of NaNs instead, which gives the same sum. A store of 16 bytes may arrive in parts, but each of its
32-bit words arrives as a whole. So a row needs neither a fence nor a second message: its wait takes one trip over
NVLink.

When the staging may be overwritten. The kernel counts its own launches in ``control``, so that replays of a CUDA graph
are counted too. The count is called the *epoch*. Even and odd epochs use different halves of the staging. Suppose that
rank A sends words of epoch n + 2 to rank B. These words overwrite words of epoch n, so B must have read and cleared the
words of epoch n before. This holds for three reasons:

- A's kernel n + 2 sends nothing before the end of A's kernel n + 1: launches of a stream follow each other, and a
  kernel that is launched with programmatic dependent launch first waits for the previous kernel.
- A's kernel n + 1 ends only after it receives all words of B's kernel n + 1, or sums that contain these words.
- B's kernel n + 1 sends nothing before the end of B's kernel n.

Launches may have different numbers of rows, because each launch clears all words that it receives. The end and the
start of a kernel order memory accesses at system scope.

``control`` contains many copies of the number of launches, and each CTA reads its own copy, after the wait for the
previous kernel. After a barrier of the CTA, its threads increment this copy, and every copy whose index differs from
the CTA's index by a multiple of the number of CTAs. So each launch increments all copies without atomic operations, and
no CTA reads a copy that another CTA writes.

The waits cannot deadlock, because all ranks have the same number of SMs, launch the same CTAs, and process rows in the
same order. Each *walker* (a group of threads that processes whole rows in sequence) sends a row before it waits for
this row. In two shots, the owner of a row waits only for words that its peers send before they wait for the sum. If
some clusters are not resident at first, they start later, in the order of their indices, on all ranks.

Waits end ``timeout_ms`` after the start of the kernel. If a wait ends without its words, the kernel reports the peer to
the host, marks the exchange as failed, and finishes with wrong results. Later launches then neither send nor wait. So
the peers' waits end too, and no kernel mistakes late words for words of a later launch. This state ends only when a new
staging is created.

Bytes moved per row of H elements and rank, in addition to the bytes of ``row_quant``: with one shot, each rank sends H
· itemsize bytes to each peer. With two shots, each of n ranks sends 2 · (n - 1) / n · H · itemsize bytes on average.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.all_reduce_rows.config import Arguments, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.all_reduce_rows.kernel import AllReduceRowsKernel

__all__ = ["KERNEL", "AllReduceRowsKernel", "Arguments", "Config", "plan"]

KERNEL = f"{__name__}.kernel.AllReduceRowsKernel"
__getattr__ = on_demand(__name__, "AllReduceRowsKernel")
