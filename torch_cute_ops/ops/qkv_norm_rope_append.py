"""``qkv_norm_rope_append``: normalise and rotate q and k, and append k and v to a paged cache, in one pass."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._call import KernelLauncher, KernelPath
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._operands import aligned, readable_rows
from torch_cute_ops.ops._properties import REQUIRED, Property, dtype, flag, size
from torch_cute_ops.ops._signature import UpdatedTensor
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
"""Supported numbers of elements of a head."""
VECTOR = 8
"""Number of elements that a thread stores at once. It must divide the strides of a cache."""
MOST_SLOTS = 2**31 - 1
"""Largest number of slots of a cache: the kernel divides slots by the page size in 32 bits."""
FP8 = torch.float8_e4m3fn
QKV_DTYPES = (torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)
_VECTORS = ("positions", "slots", "q_norm", "k_norm", "q_scale", "k_scale", "v_scale")
"""Arguments that the kernel reads as contiguous vectors."""


class _Call(NamedTuple):
    qkv: Tensor
    cos_sin: Tensor
    positions: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor
    q_heads: int
    kv_heads: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    norm_plus_one: bool
    interleaved: bool
    rotary_dim: int | None
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    key_block_scale: Tensor | None
    value_block_scale: Tensor | None
    q_dtype: torch.dtype | None


class _Launcher(KernelLauncher[_Call]):
    def run(self, call: _Call, out: Any) -> Any:
        rows = call.qkv.shape[0]
        # The compiled function compares neither the number of slots with the number of rows, nor the numbers of scales
        # with the numbers of heads. So check them here.
        if not rows or call.slots.shape[0] > rows or not 0.0 <= call.eps < float("inf"):
            return None
        scales = (call.q_scale, call.q_heads), (call.k_scale, call.kv_heads), (call.v_scale, call.kv_heads)
        if any(scale is not None and scale.numel() not in (1, heads) for scale, heads in scales):
            return None
        if out is None:
            spec = self.config.spec
            shape = (rows, spec.q_heads, spec.head_dim)
            out = allocator(self.device)(shape, (shape[1] * shape[2], shape[2], 1), spec.q_dtype)
        self._call(call, out)
        return out

    def launch(self, call: _Call, out: Tensor) -> None:
        for name in ("key_cache", "value_cache"):
            _check_address(name, getattr(call, name))
        kept: dict[str, Any] = {name: getattr(call, name) for name in _VECTORS}
        kept = {name: None if vector is None else aligned(vector) for name, vector in kept.items()}
        table = self._readable_table(call.cos_sin)
        self._call(call._replace(qkv=readable_rows(call.qkv), cos_sin=table, **kept), out)

    def _readable_table(self, table: Tensor) -> Tensor:
        """Return the table itself if the kernel can read its rows with vector loads, or else a contiguous copy."""
        step = table.stride(0) * table.element_size() if table.shape[0] > 1 else 0
        align = self.config.spec.table_align
        if table.stride(1) == 1 and table.data_ptr() % align == 0 and step % align == 0:
            return table
        return table.clone(memory_format=torch.contiguous_format)

    def _call(self, call: _Call, out: Tensor) -> None:
        q_scale, k_scale, v_scale = (
            scale.reshape(1) if scale is not None and scale.dim() != 1 else scale
            for scale in (call.q_scale, call.k_scale, call.v_scale)
        )
        self.function(
            *(call.qkv, call.cos_sin, call.positions, call.key_cache, call.value_cache, call.slots),
            *(call.q_norm, call.k_norm, q_scale, k_scale, v_scale),
            *(call.key_block_scale, call.value_block_scale, out, call.eps),
        )


class _QkvNormRopeAppend(KernelPath[_Call]):
    call_type = _Call
    launcher_type = _Launcher

    def key(self, call: _Call, device: int) -> tuple[Any, ...]:
        tensors = (call.q_norm, call.k_norm, call.key_cache, call.value_cache, call.cos_sin, call.positions, call.slots)
        optional = (call.q_scale, call.k_scale, call.v_scale, call.key_block_scale, call.value_block_scale)
        return (
            *(call.qkv.dtype, call.qkv.shape[1], call.q_heads, call.kv_heads, call.cos_sin.shape[1], call.rotary_dim),
            *(None if tensor is None else tensor.dtype for tensor in tensors),
            *(tensor is None for tensor in optional),
            *(call.norm_plus_one, call.interleaved, call.q_dtype, device),
        )

    def check(self, call: _Call) -> None:
        op, qkv, device = self.op, call.qkv, call.qkv.device
        _checks.check_dtype(op, "qkv", qkv, QKV_DTYPES)
        _checks.check_matrix(op, "qkv", qkv, "(M, (q_heads + 2 · kv_heads) · D)")
        for name, heads in (("q_heads", call.q_heads), ("kv_heads", call.kv_heads)):
            if heads < 1:
                raise ValueError(f"cute::{op}: {name} is {heads}; expected at least 1")
        rows, width, heads = qkv.shape[0], qkv.shape[1], call.q_heads + 2 * call.kv_heads
        head_dim = width // heads
        if width % heads or head_dim not in HEAD_DIMS:
            raise ValueError(
                f"cute::{op}: qkv has rows of {width} elements; expected {heads} heads (q_heads + 2 · kv_heads) of "
                f"{', '.join(map(str, HEAD_DIMS[:-1]))} or {HEAD_DIMS[-1]} elements"
            )
        self._check_table(call, head_dim)
        for name, expected in (("positions", (rows,)), ("slots", None)):
            tensor = getattr(call, name)
            _checks.check_dtype(op, name, tensor, INTEGERS)
            if expected is not None:
                _checks.check_shape(op, name, tensor, expected, "one for each row of qkv")
            elif tensor.dim() != 1 or tensor.shape[0] > rows:
                raise ValueError(
                    f"cute::{op}: got slots with shape {tuple(tensor.shape)}; expected (S,) with S at most {rows}, the "
                    "rows of qkv"
                )
            _checks.check_device(op, name, tensor, "qkv", device)
        self._check_caches(call, head_dim)
        for name in ("q_norm", "k_norm"):
            weight = getattr(call, name)
            if weight is not None:
                _checks.check_dtype(op, name, weight, (qkv.dtype, torch.float32))
                _checks.check_shape(op, name, weight, (head_dim,), "one element for each element of a head")
                _checks.check_device(op, name, weight, "qkv", device)
        _checks.check_finite(op, "eps", call.eps, " of at least 0", call.eps >= 0)
        if call.q_dtype not in (None, qkv.dtype, FP8):
            raise TypeError(f"cute::{op}: q_dtype is {call.q_dtype}; expected {qkv.dtype}, the dtype of qkv, or {FP8}")
        if call.q_scale is not None:
            if call.q_dtype != FP8:
                raise ValueError(
                    f"cute::{op}: q_scale is given; only q in FP8 has a scale: pass q_dtype={FP8}, or None"
                )
            _checks.check_scalar_or_heads(op, "q_scale", call.q_scale, call.q_heads, "qkv", device)

    def _check_table(self, call: _Call, head_dim: int) -> None:
        """Check the table of cosines and sines, and the number of rotated elements."""
        op, table = self.op, call.cos_sin
        _checks.check_dtype(op, "cos_sin", table, _checks.INPUT_DTYPES)
        _checks.check_matrix(op, "cos_sin", table, "(positions, rotary_dim)")
        width = table.shape[1]
        if not 0 < width <= head_dim or width % 2:
            raise ValueError(
                f"cute::{op}: got cos_sin with shape {tuple(table.shape)}; expected rows of an even number of elements "
                f"(cosines, then sines), at most {head_dim}, the elements of a head"
            )
        if call.rotary_dim is not None and call.rotary_dim != width:
            raise ValueError(
                f"cute::{op}: rotary_dim is {call.rotary_dim}; expected {width}, the length of the rows of cos_sin"
            )
        _checks.check_device(op, "cos_sin", table, "qkv", call.qkv.device)

    def _check_caches(self, call: _Call, head_dim: int) -> None:
        """Check both caches, with their scales."""
        op = self.op
        for kind, scale_name in (("key", "k_scale"), ("value", "v_scale")):
            name, cache = f"{kind}_cache", getattr(call, f"{kind}_cache")
            block_scale, scale = getattr(call, f"{kind}_block_scale"), getattr(call, scale_name)
            _checks.check_dtype(op, name, cache, (call.qkv.dtype, FP8, torch.uint8))
            is_fp4, is_16_bit = cache.dtype == torch.uint8, cache.dtype == call.qkv.dtype
            if is_fp4 and block_scale is None:
                raise ValueError(
                    f"cute::{op}: {name} is uint8, which holds NVFP4 codes, and {kind}_block_scale is None; pass "
                    f"{kind}_block_scale, or pass {name}.view(torch.float8_e4m3fn) if the cache is FP8"
                )
            if not is_fp4 and block_scale is not None:
                shown = str(cache.dtype).removeprefix("torch.")
                raise ValueError(
                    f"cute::{op}: {kind}_block_scale is given and {name} is {shown}; only NVFP4 caches, uint8, have "
                    "block scales"
                )
            width = head_dim // 2 if is_fp4 else head_dim
            self._check_cache(name, cache, call, width)
            if block_scale is not None:
                _checks.check_dtype(op, f"{kind}_block_scale", block_scale, (NVFP4.scale_dtype,))
                self._check_cache(f"{kind}_block_scale", block_scale, call, head_dim // NVFP4.block_size)
            if scale is not None:
                if is_16_bit:
                    raise ValueError(
                        f"cute::{op}: {scale_name} is given and {name} has 16 bits; only FP8 and NVFP4 caches have a "
                        "scale, so pass None"
                    )
                _checks.check_scalar_or_heads(op, scale_name, scale, call.kv_heads, "qkv", call.qkv.device)

    def _check_cache(self, name: str, cache: Tensor, call: _Call, width: int) -> None:
        """Check the shape, the device and the strides of a cache, or of its block scales."""
        op, like = self.op, call.key_cache
        if cache.dim() != 4:
            raise ValueError(
                f"cute::{op}: got {name} with shape {tuple(cache.shape)}; expected (blocks, page, {call.kv_heads}, "
                f"{width})"
            )
        shape = (like.shape[0], like.shape[1], call.kv_heads, width)
        _checks.check_shape(op, name, cache, shape, "(blocks, page, kv_heads, elements of a head)")
        _checks.check_device(op, name, cache, "qkv", call.qkv.device)
        sizes = (*cache.shape, *cache.stride())
        if any(isinstance(one, torch.SymInt) for one in sizes):
            return
        if shape[0] * shape[1] > MOST_SLOTS:
            raise ValueError(f"cute::{op}: {name} has {shape[0] * shape[1]} slots; expected at most {MOST_SLOTS}")
        shown = f"got {name} with shape {tuple(cache.shape)} and strides {tuple(cache.stride())}"
        if _checks.overlaps_itself(cache):
            raise ValueError(
                f"cute::{op}: {shown}, by which it overlaps itself, and it is updated in place; pass a cache of its own"
            )
        if name.endswith("block_scale"):
            return
        unit = VECTOR // 2 if cache.dtype == torch.uint8 else VECTOR
        steps = [stride for stride, extent in zip(cache.stride()[:-1], cache.shape, strict=False) if extent > 1]
        if cache.stride(-1) != 1 or any(step % unit for step in steps):
            raise ValueError(
                f"cute::{op}: {shown}; expected stride(-1) == 1 and other strides that are multiples of {unit}: the "
                "kernel writes a cache in place, with vector stores"
            )

    def check_values(self, call: _Call) -> None:
        count = call.key_cache.shape[0] * call.key_cache.shape[1]
        _checks.check_indices(self.op, "slots", call.slots, count, "slots of the caches; -1 stands for no slot")
        used = call.slots[call.slots >= 0]
        ordered = used.sort().values
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise ValueError(
                f"cute::{self.op}: slots holds {int(twice[0])} twice; expected a slot of its own for each row, or -1"
            )
        positions = call.positions
        if positions.numel() and int(positions.min()) < 0:
            raise ValueError(
                f"cute::{self.op}: positions holds {int(positions.min())}, out of range; expected at least 0"
            )
        _checks.check_indices(self.op, "positions", positions, call.cos_sin.shape[0], "rows of cos_sin")

    def kernel(self, call: _Call, arch: Arch) -> KernelSpec:
        from torch_cute_ops.kernels import qkv_rope as family

        norms = [None if weight is None else weight.dtype for weight in (call.q_norm, call.k_norm)]
        spec = family.QkvRopeSpec(
            dtype=call.qkv.dtype,
            head_dim=call.qkv.shape[1] // (call.q_heads + 2 * call.kv_heads),
            q_heads=call.q_heads,
            kv_heads=call.kv_heads,
            rotary_dim=call.cos_sin.shape[1],
            interleaved=bool(call.interleaved),
            table_dtype=call.cos_sin.dtype,
            position_dtype=call.positions.dtype,
            slot_dtype=call.slots.dtype,
            q_norm_dtype=norms[0],
            k_norm_dtype=norms[1],
            norm_plus_one=bool(call.norm_plus_one) and norms != [None, None],
            q_dtype=call.qkv.dtype if call.q_dtype is None else call.q_dtype,
            key_dtype=call.key_cache.dtype,
            value_dtype=call.value_cache.dtype,
            has_q_scale=call.q_scale is not None,
            has_k_scale=call.k_scale is not None,
            has_v_scale=call.v_scale is not None,
        )
        return KernelSpec(family.KERNEL, family.plan(spec, arch, pdl=settings.PDL))

    def declare(self) -> dict[str, Property]:
        def of_optional(name: str) -> Property:
            return dtype(lambda call: None if getattr(call, name) is None else getattr(call, name).dtype)

        def other_dtype(name: str, usual: Any) -> Property:
            def of(call: _Call) -> torch.dtype | None:
                found: torch.dtype = getattr(call, name).dtype
                return None if found == (call.qkv.dtype if usual is None else usual) else found

            return dtype(of)

        return {
            "head_dim": size(lambda call: call.qkv.shape[1] // (call.q_heads + 2 * call.kv_heads)),
            "dtype": dtype(lambda call: call.qkv.dtype, REQUIRED),
            **self.arguments_as_properties("q_heads", "kv_heads", "norm_plus_one", "interleaved", "q_dtype"),
            "rotary_dim": Property(int, None, True, (), lambda call: call.cos_sin.shape[1]),
            "table_dtype": other_dtype("cos_sin", None),
            "position_dtype": other_dtype("positions", torch.int64),
            "slot_dtype": other_dtype("slots", torch.int64),
            "key_dtype": other_dtype("key_cache", None),
            "value_dtype": other_dtype("value_cache", None),
            "q_norm_dtype": of_optional("q_norm"),
            "k_norm_dtype": of_optional("k_norm"),
            **{
                name: flag(lambda call, name=name: getattr(call, name) is not None)  # type: ignore[misc]
                for name in ("q_scale", "k_scale", "v_scale")
            },
        }

    def make_example(self, given: Any, device: torch.device) -> dict[str, Any]:
        heads, dim, rotary = given.q_heads + 2 * given.kv_heads, given.head_dim, given.rotary_dim or given.head_dim

        def zeros(*shape: int, dtype: torch.dtype | None, usual: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype or usual, device=device)

        def cache(dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
            is_fp4 = dtype == torch.uint8
            codes = zeros(1, 1, given.kv_heads, dim // 2 if is_fp4 else dim, dtype=dtype, usual=given.dtype)
            if not is_fp4:
                return codes, None
            return codes, zeros(1, 1, given.kv_heads, dim // NVFP4.block_size, dtype=None, usual=NVFP4.scale_dtype)

        def weight(dtype: torch.dtype | None) -> Tensor | None:
            return None if dtype is None else zeros(dim, dtype=dtype, usual=dtype)

        (keys, key_scales), (values, value_scales) = cache(given.key_dtype), cache(given.value_dtype)
        one = torch.ones(1, dtype=torch.float32, device=device)
        return {
            "qkv": zeros(1, heads * dim, dtype=None, usual=given.dtype),
            "cos_sin": zeros(1, rotary, dtype=given.table_dtype, usual=given.dtype),
            "positions": zeros(1, dtype=given.position_dtype, usual=torch.int64),
            "key_cache": keys,
            "value_cache": values,
            "slots": zeros(1, dtype=given.slot_dtype, usual=torch.int64),
            "q_heads": given.q_heads,
            "kv_heads": given.kv_heads,
            "q_norm": weight(given.q_norm_dtype),
            "k_norm": weight(given.k_norm_dtype),
            "norm_plus_one": given.norm_plus_one,
            "interleaved": given.interleaved,
            "rotary_dim": given.rotary_dim,
            **{name: one if getattr(given, name) else None for name in ("q_scale", "k_scale", "v_scale")},
            "key_block_scale": key_scales,
            "value_block_scale": value_scales,
            "q_dtype": given.q_dtype,
        }


def _check_address(name: str, cache: Tensor) -> None:
    """Check that a cache starts at an address to which the kernel can write vectors."""
    align = VECTOR // 2 if cache.dtype == torch.uint8 else VECTOR * cache.element_size()
    if cache.data_ptr() % align:
        raise ValueError(
            f"cute::qkv_norm_rope_append: {name} starts at an address that is no multiple of {align} bytes; the kernel "
            "writes a cache in place, so allocate it at a multiple"
        )


@define(_QkvNormRopeAppend(), "out")
def qkv_norm_rope_append(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: UpdatedTensor,
    value_cache: UpdatedTensor,
    slots: Tensor,
    q_heads: int,
    kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    norm_plus_one: bool = False,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    key_block_scale: UpdatedTensor | None = None,
    value_block_scale: UpdatedTensor | None = None,
    q_dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise and rotate the heads of q and k, write k and v to a paged cache, and return q, in one pass.

    A row of ``qkv`` contains the heads of q, then of k, then of v, as a merged projection computes them. For each head
    x of q and k, in fp32 and with a single rounding at the end::

        x = x / sqrt(mean(x²) + eps) · weight  # if q_norm or k_norm is given
        x[i], x[j] = x[i] · cos - x[j] · sin, x[j] · cos + x[i] · sin  # for each rotated pair (i, j)

    q is returned. k and v of row m are written to slot ``slots[m]`` of the caches, that is to
    ``cache[slots[m] // page, slots[m] % page]``. v is neither normalised nor rotated. All other slots are unchanged.
    CPU and GPU results are equal bit for bit.

    Args:
        qkv: (M, (q_heads + 2 · kv_heads) · D) bfloat16 or float16, with heads of D = 64, 80, 96, 128, 192 or 256
            elements. Rows may be strided. If they do not start at multiples of 16 bytes, the op first copies them.
        cos_sin: (positions, rotary_dim) bfloat16, float16 or float32: in each row the cosines of a position, then the
            sines.
        positions: (M,) int32 or int64, index into ``cos_sin`` for each row of ``qkv``. A position out of range is
            refused on a CPU; on a GPU the rotated elements become NaN.
        key_cache: (blocks, page, kv_heads, D), updated in place: the dtype of ``qkv``, or float8_e4m3fn; or, in NVFP4,
            (blocks, page, kv_heads, D/2) uint8. The strides say how the cache is stored: ``stride(-1)`` is 1, and the
            others are multiples of 8 (NVFP4: 4). Pass a cache that is stored as (blocks, kv_heads, page, D) as
            ``key_cache.transpose(1, 2)``.
        value_cache: (blocks, page, kv_heads, D), updated in place, like ``key_cache``. The two caches may alternate in
            memory, as ``kv[:, 0]`` and ``kv[:, 1]`` do, and may differ in dtype.
        slots: (S,) int32 or int64 with S at most M: the slot of each of the first S rows, or -1 for a row that is not
            written. Rows from row S on are not written either. A slot out of range is refused on a CPU; on a GPU it is
            not written. No slot may occur twice; a repeated slot is refused on a CPU and in debug mode.
        q_heads: number of heads of q.
        kv_heads: number of heads of k, and of v.
        q_norm: (D,) in the dtype of ``qkv`` or float32: weight of q's RMSNorm. ``None`` means that q is not normalised.
        k_norm: (D,) in the dtype of ``qkv`` or float32: weight of k's RMSNorm. ``None`` means that k is not normalised.
        eps: number added to the mean square.
        norm_plus_one: True if the weights of the RMSNorms are ``1 + q_norm`` and ``1 + k_norm``, as in Gemma.
        interleaved: False if the pairs are (i, i + rotary_dim/2), as in Llama and GPT-NeoX; True if they are
            (2i, 2i + 1), as in GPT-J.
        rotary_dim: number of elements at the start of a head that are rotated. It must equal the length of the rows of
            ``cos_sin``; ``None`` means this length.
        q_scale: (1,) or (q_heads,) float32, if ``q_dtype`` is float8_e4m3fn: q is divided by it. ``None`` means 1.
        k_scale: (1,) or (kv_heads,) float32: k is divided by it before it is written to an FP8 cache, or quantised to
            NVFP4. ``None`` means 1.
        v_scale: (1,) or (kv_heads,) float32: scale for v, used as ``k_scale`` is for k.
        key_block_scale: (blocks, page, kv_heads, D/16) float8_e4m3fn with any strides, updated in place: block scales
            of an NVFP4 ``key_cache``, otherwise ``None``.
        value_block_scale: block scales of an NVFP4 ``value_cache``, like ``key_block_scale``.
        q_dtype: dtype of the returned q: ``None`` or the dtype of ``qkv``, or float8_e4m3fn.
        out: contiguous tensor to write q into.

    Returns:
        q, (M, q_heads, D), in ``q_dtype``.

    Raises:
        ValueError: If a shape, device, stride or number is wrong, if tensors overlap, if a slot or a position is out of
            range (on a CPU), or if an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import qkv_norm_rope_append
        >>> qkv = torch.ones(2, 3 * 64, dtype=torch.bfloat16)  # 1 head of q, k and v; 2 rows
        >>> cos_sin = torch.tensor([[1.0] * 32 + [0.0] * 32, [0.0] * 32 + [1.0] * 32])  # by 0 and by 90 degrees
        >>> cache = torch.zeros(4, 2, 16, 1, 64, dtype=torch.bfloat16)  # 4 blocks of 16 slots, keys and values
        >>> positions, slots = torch.tensor([0, 1]), torch.tensor([17, -1])
        >>> q = qkv_norm_rope_append(qkv, cos_sin, positions, cache[:, 0], cache[:, 1], slots, 1, 1)
        >>> q[1, 0, 31:33].tolist(), cache[1, 0, 1, 0].sum().item(), cache.sum().item()
        ([-1.0, 1.0], 64.0, 128.0)

    References:
        J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34. B. Zhang and
        R. Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4. Roundings and special values:
        docs/numerics.md, "Queries, keys and values".
    """
