"""Compile and load the kernels that a model's quantised layers need.

The layers are called twice with zeros. In the first pass nothing is launched: it collects the kernels of all calls,
which are then compiled in parallel processes. The second pass loads and launches them.
"""

import contextlib
import inspect
import itertools
import re
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from torch_cute_ops.collecting import CollectKernels
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.nn._base import QuantizedRows, QuantLinear, following_of, link
from torch_cute_ops.nn._qkv_steps import QkvSteps, steps_of
from torch_cute_ops.nn.expert_layer import ExpertLayer, GatedMLP
from torch_cute_ops.nn.experts import QuantExperts
from torch_cute_ops.ops._with_gemm import gates_with_gemm, prefetches_with_gemm
from torch_cute_ops.runtime import tuning
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compile_pool import EarlyPool

_ACTIVATIONS: Final[Mapping[str, Gate]] = {
    "GELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
    "ReLUSquaredActivation": "relu2",
}
"""Gates, keyed by the name of the class of activation functions in transformers."""


@torch.no_grad()
def warmup(
    model: nn.Module,
    rows: int | Iterable[int] = (1,),
    *,
    dtype: torch.dtype = torch.bfloat16,
    tune: bool = False,
    fused: bool = True,
    workers: int | None = None,
) -> None:
    """Compile and load the kernels of a model's quantised layers, gated MLPs and experts, and of attention blocks that
    call ``qkv_norm_rope_append``. Layers are called with zeros as input; if several layers need the same kernels, only
    one of them is called.

    Kernels that the cache on disk lacks are compiled in parallel processes; a progress bar shows the kernels done and
    the seconds left. Afterwards calls with these numbers of rows compile nothing and can be captured in a CUDA graph.
    The model's own norms, gates and attention are not called: call the model once before a capture. If layers are
    divided among ranks, all ranks must call ``warmup``.

    Args:
        model: model with layers of this package at any depth, on the serving device.
        rows: numbers of rows that will be served, or one number. A number of rows is the number of sequences in a
            decode step, or of tokens in a prefill, summed over all ranks. Numbers in the same bucket share kernels, so
            only one number per bucket is called.
        dtype: dtype of the activations.
        tune: True to select backends by timing them, as in an :func:`torch_cute_ops.autotune` block.
        fused: True to also call the fused ops that the pass of ``integrations.inductor`` may insert: norms and gates
            with quantised results; for one row, GEMMs that compute a gate and the quantisation in their prologue; for
            few rows, GEMMs that prefetch the next layer's weight. A module counts as a norm if it is torch's RMSNorm or
            LayerNorm of rows, or if its only parameters are a ``weight`` (K,) and perhaps a ``bias`` (K,). Norms are
            called for a residual in ``dtype`` and for a float32 residual. Gates are SiLU, GELU if the model contains a
            module that computes GELU, and squared ReLU if it contains a module that computes squared ReLU, or torch's
            ``ReLU``, whose result may be squared elsewhere. A gate is expected before a layer with K input features if
            another layer has 2 · K columns.
        workers: number of processes; None for one per processor, at most 32, divided among the ranks of the machine.

    Raises:
        ValueError: for a number of rows that is not positive, or for experts with an unknown ``topk``.
        TypeError: for a number of rows that is not an integer.
    """
    calls = _calls_of(model, _numbers_of(rows), dtype, tune, fused)
    if any(each.is_cuda for each in (*model.parameters(), *model.buffers())):
        with EarlyPool(workers) as pool:
            with CollectKernels(found=pool.expect) as collected:
                calls()
            for arch, kernels in collected.kernels.items():
                pool.compile_ahead(kernels, arch)
    calls()


@torch.no_grad()
def collect(
    model: nn.Module, rows: int | Iterable[int], arch: Arch, dtype: torch.dtype = torch.bfloat16
) -> CollectKernels:
    """Collect the kernels that :func:`warmup` would load on GPUs of ``arch``, and the calls that ``arch`` does not
    support, without a GPU. Arguments and errors are as for :func:`warmup`; the model may consist of fake tensors
    (``FakeTensorMode``) on a CPU."""
    with CollectKernels(arch) as collected:
        _calls_of(model, _numbers_of(rows), dtype, tune=False, fused=True)()
    return collected


def _calls_of(model: nn.Module, numbers: list[int], dtype: torch.dtype, tune: bool, fused: bool) -> Callable[[], None]:
    """Return a function that calls one layer of each form with zeros.

    Raises:
        ValueError: for experts with an unknown ``topk``.
    """
    forms: dict[object, QuantLinear] = {}
    experts: dict[object, QuantExperts | ExpertLayer] = {}
    gated: dict[object, GatedMLP] = {}
    attention: dict[object, tuple[QkvSteps, nn.Module]] = {}
    within: set[nn.Module] = set()  # modules inside experts or expert layers; these are not called directly
    for name, module in model.named_modules():
        if module in within:
            continue
        if isinstance(module, ExpertLayer):
            within.update((module.experts, *module.experts.children()))
            experts.setdefault(_form(module), module)
        elif isinstance(module, QuantExperts):
            if module.topk is None:
                raise ValueError(f"warmup: {name}.topk is None; set it to the number of experts per token")
            within.update(module.children())
            experts.setdefault(_form(module), module)
        elif isinstance(module, GatedMLP):
            gated.setdefault(_form(module), module)
        elif isinstance(module, QuantLinear):
            forms.setdefault(_form(module), module)
        elif (steps := steps_of(module)) is not None:
            attention.setdefault(steps.form(module), (steps, module))
    counts, gates = {bucket(number): number for number in numbers}.values(), _gates_of(model)

    def calls() -> None:
        with tuning.autotune() if tune else contextlib.nullcontext():
            for module in experts.values():
                _call_experts(module, numbers, dtype)
            called = [(layer, layer) for layer in forms.values()] + [(mlp, mlp.gate_up_proj) for mlp in gated.values()]
            for call, first in called:
                has_fp8 = first.weight.dtype == torch.float8_e4m3fn
                for count in counts:
                    x = torch.zeros(first.rows_for(count), first.in_features, dtype=dtype, device=first.weight.device)
                    if call is not first:
                        call(x)
                        continue
                    _call_layer(first, x, None)
                    few = fused and prefetches_with_gemm(count, x.device, has_fp8_weight=has_fp8)
                    if first.can_prefetch and (few or following_of(first) is not None):
                        _call_layer(first, x, first)
            if fused:
                _call_gated(forms.values(), numbers, dtype, gates)
        for steps, block in attention.values():
            steps.call(block, dtype)
        if fused:
            _call_fused(model, forms.values(), dtype, gates)

    return calls


def _numbers_of(rows: int | Iterable[int]) -> list[int]:
    """Return the distinct numbers of rows in ascending order.

    Raises:
        TypeError, ValueError: for a value that is not a positive integer.
    """
    given = rows if isinstance(rows, Iterable) and not isinstance(rows, str) else (rows,)
    numbers: set[int] = set()
    for number in given:
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise TypeError(f"warmup: rows contains {number!r}, a {type(number).__name__}; expected positive integers")
        if number < 1:
            raise ValueError(f"warmup: rows contains {number}; expected positive numbers")
        numbers.add(int(number))
    return sorted(numbers)


def _form(module: QuantExperts | ExpertLayer | GatedMLP | QuantLinear) -> object:
    """Return a key that is equal for modules whose calls use the same kernels."""
    if isinstance(module, QuantLinear):
        bias = None if module.bias is None else module.bias.dtype
        merged, static = len(module.parts) > 1, (module.has_input_scale, getattr(module, "fast_accum", False))
        size = (module.out_features, module.in_features)
        prefetches = module.can_prefetch and following_of(module) is not None
        return (type(module), size, module.activations, static, bias, merged, module.weight.device, prefetches)
    if isinstance(module, GatedMLP):
        return (_form(module.gate_up_proj), _form(module.down_proj), module.swiglu)
    if isinstance(module, ExpertLayer):
        shared = None if module.shared is None else repr(module.shared)
        router = module.router.dtype, module.router_bias is not None, module.bias is not None
        return (_form(module.experts), module.topk, (*module.scoring.values(),), router, shared)
    bias = None if module.down_proj.bias is None else module.down_proj.bias.dtype
    width = (module.experts, module.topk, module.hidden_size, module.intermediate_size)
    few = None if module.side_by_side is None else (module.side_by_side.activations, module.tokens_of_expert)
    return (module.scheme, module.has_token_scales, width, module.swiglu, bias, few, module.down_proj.weight.device)


def _call_experts(module: QuantExperts | ExpertLayer, numbers: Iterable[int], dtype: torch.dtype) -> None:
    """Call experts or an expert layer with zeros. Of the numbers of tokens, one per bucket and code path is enough."""
    experts = module.experts if isinstance(module, ExpertLayer) else module
    topk, device = module.topk or 1, experts.down_proj.weight.device
    served = {}
    for number in numbers:
        # The experts' GEMMs multiply one row per (token, expert) pair, or one row per token if only routed pairs are
        # computed.
        few = experts.are_routed(number, topk, dtype)
        served[few, bucket(number if few else number * topk)] = number
    for count in served.values():
        tokens = torch.zeros(count, experts.hidden_size, dtype=dtype, device=device)
        if isinstance(module, ExpertLayer):
            module(tokens)
        else:
            ids = torch.arange(count * topk, device=device).view(count, -1) % experts.experts
            module(tokens, ids, torch.ones(ids.shape, device=device))


def _call_gated(
    layers: Collection[QuantLinear], numbers: Iterable[int], dtype: torch.dtype, gates: Sequence[Gate]
) -> None:
    """Call layers whose input is gate and up of one row, with each gate, because ``integrations.inductor`` may move
    this gate into their GEMM's prologue. A layer is called if another layer's width suggests a gate before it."""
    widths = _gated_widths(layers)
    for layer in layers:
        device = layer.weight.device
        if layer.in_features in widths:
            for count in {bucket(number): number for number in numbers if gates_with_gemm(number, device)}.values():
                rows = torch.zeros(layer.rows_for(count), 2 * layer.in_features, dtype=dtype, device=device)
                if layer.prologue_gates(rows):
                    for gate, following in itertools.product(gates, (None, layer)):
                        with _linked(layer, following):
                            layer(QuantizedRows((rows,), (len(rows),), dtype, gate))


def _call_layer(layer: QuantLinear, x: Tensor, following: QuantLinear | None) -> None:
    """Call a layer as a model would if ``following`` is called next. If the layer's GEMM quantises rows, also call it
    with quantised rows, as compiled models and layers with a shared input do."""
    with _linked(layer, following):
        layer(x)
        if layer.prologue_quantises(x):
            layer(layer.quantize(x))


@contextlib.contextmanager
def _linked(layer: QuantLinear, following: QuantLinear | None) -> Iterator[None]:
    """Make calls of ``layer`` in this block prefetch the weight of ``following`` into L2, as in a model that uses
    ``prefetch_`` or ``integrations.inductor``. None prefetches nothing."""
    before = following_of(layer)
    link(layer, following)
    try:
        yield
    finally:
        link(layer, before)


def _gates_of(model: nn.Module) -> list[Gate]:
    """Return the gates that the activation functions of a model's modules suggest, and SiLU, in alphabetical order."""
    types = {type(module) for module in model.modules()}
    squared: set[Gate] = {"relu2"} if any(_squares_relu(each) for each in types) else set()
    return sorted({"silu", *squared, *map(_gate_of, model.modules())})


def _gate_of(module: nn.Module) -> Gate:
    """Return the gate that a module may compute as its activation function."""
    if isinstance(module, nn.GELU):
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    if isinstance(module, nn.ReLU):
        return "relu2"
    return _ACTIVATIONS.get(type(module).__name__, "silu")


class _Norm(NamedTuple):
    """Norm that a module may compute.

    Attributes:
        width: number of elements of a row.
        weight_dtype: dtype of the weight and of the bias, or None without a weight.
        weight_plus_one: True if the norm multiplies by 1 + weight.
        subtract_mean: True for LayerNorm, False for RMSNorm.
        has_bias: True if the norm adds a bias.
    """

    width: int
    weight_dtype: torch.dtype | None
    weight_plus_one: bool = False
    subtract_mean: bool = False
    has_bias: bool = False


def _norms_of(module: nn.Module) -> Iterator[_Norm]:
    """Yield the norms of rows that a module may compute. Yield nothing unless the module is a norm of torch, or its
    only parameters are a ``weight`` (K,) and perhaps a ``bias`` (K,)."""
    own = dict(module.named_parameters(recurse=False))
    shape: Sequence[int] = ()
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        shape = module.normalized_shape
    elif not isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm)):
        vectors = {(each.shape, each.dtype) for each in own.values()}
        if "weight" in own and own.keys() <= {"weight", "bias"} and len(vectors) == 1:
            shape = own["weight"].shape
    if len(shape) != 1:
        return
    dtype, has_bias = own["weight"].dtype if "weight" in own else None, "bias" in own
    if isinstance(module, nn.LayerNorm):
        yield _Norm(shape[0], dtype, subtract_mean=True, has_bias=has_bias)
        return
    for plus_one in dict.fromkeys((False, _adds_one(type(module)))):
        yield _Norm(shape[0], dtype, plus_one, has_bias=has_bias)


# The following two functions guess. A wrong guess costs only the time to compile a kernel, at warm-up or at the first
# call.


def _adds_one(norm: type[nn.Module]) -> bool:
    """Return True if the source of a norm adds 1 to its weight, as Gemma's norm does."""
    source = _source_of(norm)
    return re.search(r"\b1(\.0)? \+ self\.weight\b|\bself\.weight(\.float\(\))? \+ 1\b", source) is not None


def _squares_relu(module: type[nn.Module]) -> bool:
    """Return True if the source of a module calls ReLU, and contains ``** 2``, ``square`` or ``pow``."""
    source = _source_of(module)
    is_squared = re.search(r"\*\* ?2\b|\bsquare\(|\bpow\((.*,\s*)?2(\.0)?\)", source) is not None
    return is_squared and re.search(r"\brelu\(", source) is not None


def _source_of(module: type[nn.Module]) -> str:
    """Return the source of a module's ``forward``, or an empty string if it is unknown."""
    try:
        return inspect.getsource(module.forward)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # the last two if the file changed after its import
        return ""


def _gated_widths(layers: Iterable[QuantLinear]) -> set[int]:
    """Return the possible widths of a gate's result: half the number of columns of each layer."""
    return {layer.out_features // 2 for layer in layers if layer.out_features % 2 == 0}


def _call_fused(model: nn.Module, layers: Collection[QuantLinear], dtype: torch.dtype, gates: Sequence[Gate]) -> None:
    """Call the fused ops that ``integrations.inductor`` may insert before layers.

    One row is enough, because the kernels do not depend on the number of rows.
    """
    norms = dict.fromkeys(norm for module in model.modules() for norm in _norms_of(module))
    gated = _gated_widths(layers)
    done = set()
    for layer in layers:
        width, device, quantization = layer.in_features, layer.weight.device, layer.quantization()
        ending, arguments = ("", {}) if quantization is None else (f"_{quantization.suffix}", quantization.arguments)
        form = (width, device, ending, *((k, None if isinstance(v, Tensor) else v) for k, v in arguments.items()))
        if form in done:
            continue
        done.add(form)
        x = torch.zeros(1, width, dtype=dtype, device=device)
        # The modules of a model do not determine the dtype of its residual, so call both.
        for norm, residual_dtype in itertools.product(norms, dict.fromkeys((dtype, torch.float32))):
            if norm.width != width:
                continue
            columns = 0 if norm.weight_dtype is None else width
            weight = torch.ones(columns, dtype=norm.weight_dtype or residual_dtype, device=device)
            residual = torch.zeros(1, width, dtype=residual_dtype, device=device)
            named = {**arguments, "weight_plus_one": norm.weight_plus_one, "subtract_mean": norm.subtract_mean}
            if norm.has_bias:
                named["bias"] = torch.zeros_like(weight)
            # Before the first addition, the norm's input is the residual alone. If it is float32, the ops take only a
            # float32 weight, and before a GEMM of 16-bit activations the norm stays as it is.
            if residual_dtype == dtype or (quantization is not None and weight.dtype == torch.float32):
                getattr(torch.ops.cute, f"rmsnorm{ending}")(residual, weight, **named)
            getattr(torch.ops.cute, f"add_rmsnorm{ending}")(x, residual, weight, **named)
        if quantization is not None and width in gated:
            for gate in gates:
                getattr(torch.ops.cute, f"silu_mul{ending}")(torch.cat([x, x], 1), **arguments, gate=gate)
