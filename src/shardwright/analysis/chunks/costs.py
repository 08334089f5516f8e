"""Computes the cost of each module call in a model's graph: its work and bytes, by which pipeline stages are balanced.

``work`` counts the forward's floating-point operations of matrix products, convolutions and attention. Any other
operator counts ``WORK_PER_ELEMENT`` for each element that it makes, since memory traffic limits it; a view counts 0.
"""

from __future__ import annotations

import inspect
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright import devices
from shardwright.analysis.calls.flops import flop_formula
from shardwright.analysis.chunks.arguments import bind
from shardwright.analysis.chunks.call_graph import CallSite, ChunkedModel, prepare, run, sites
from shardwright.analysis.objects.alike import likeness
from shardwright.analysis.on_meta.device_moves import OnMeta
from shardwright.analysis.on_meta.meta_device import buffers_put_back, on_meta
from shardwright.analysis.on_meta.meta_values import MetaValues, ValueReadError
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.analysis.on_meta.operator_results import result_of, tensors_of
from shardwright.analysis.recorded.recording import RecordedCall, TensorUse
from shardwright.analysis.traced.batch_norms import ignoring_batch_statistics
from shardwright.analysis.traced.structure import has_hooks
from shardwright.dispatch_mode import DispatchMode
from shardwright.models.eval_mode import eval_mode

WORK_PER_ELEMENT = 16
"""The FLOPs that take as long as reading and writing one element; a guess between the values of CPUs and GPUs.

Work is used only to weigh calls against each other. :func:`time_layers` measures seconds instead.
"""
FLOPS_PER_S = 50e9
"""The FLOPs per second that convert counted work into seconds; a guess for one CPU core.

Pipeline cuts, ``auto`` schedules and bubbles compare works with each other, so they do not depend on it. Seconds are
right only where layers were timed; :meth:`Timeline.at_speed_of` scales a prediction to a run before the two are
compared.
"""


class Cost(NamedTuple):
    """The cost of one call: its forward work, the bytes of its parameters, and the bytes of the activations it makes.

    ``work`` is in floating-point operations of matrix products, convolutions and attention. Any other operator counts
    ``WORK_PER_ELEMENT`` of them for each element that it makes.
    """

    work: float = 0.0
    parameter_bytes: int = 0
    activation_bytes: int = 0


class CostCounting(DispatchMode):
    """A dispatch mode that adds up the work of all operators that run inside it, and the bytes of their results.

    A view adds no work and no bytes. Parameters are not counted, so ``parameter_bytes`` of the results is 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work, self.result_bytes = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = tensors_of(out)
        flops = flop_formula(func._overloadpacket)
        if flops is not None:
            self.work += flops(*args, **(kwargs or {}), out_val=out)
        elif not func.is_view:
            self.work += WORK_PER_ELEMENT * sum(t.numel() for t in results)
        if flops is not None or not func.is_view:
            self.result_bytes += sum(t.nbytes for t in results)
        return out

    def now(self) -> Cost:
        """Returns the cost of all operators that have run inside the mode so far."""
        return Cost(self.work, 0, self.result_bytes)

    def since(self, before: Cost) -> Cost:
        """Returns the cost of the operators that ran after ``before``, an earlier result of :meth:`now`."""
        return Cost(self.work - before.work, 0, self.result_bytes - before.activation_bytes)


def flops_of(call: RecordedCall) -> int:
    """Returns the floating-point operations of a recorded matrix product, convolution or attention, else 0.

    >>> from shardwright.analysis.recorded.record_forward import record_forward
    >>> recording = record_forward(nn.Linear(4, 8).to("meta"), torch.empty(2, 4, device="meta"))
    >>> [flops_of(call) for call in recording.calls]
    [128]
    """
    shapes = [operand.shape for operand in call.operands]
    if call.function is functional.linear:
        return 2 * prod(shapes[0]) * prod(shapes[1][:-1])
    if call.function is functional.scaled_dot_product_attention:
        query, key, value = shapes[:3]
        return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    flops = flop_formula(getattr(call.function, "overloadpacket", None))
    if flops is None:
        return 0
    args, named = tree_map_only(TensorUse, lambda use: torch.Size(use.shape), (call.args, call.named))
    return int(flops(*args, **named, out_val=torch.Size(call.results[0].shape)))


def by_example(model: nn.Module, graph: fx.Graph, inputs: Any) -> dict[CallSite, Cost]:
    """Returns the cost of each module call, counted in a run of the model on the meta device.

    ``inputs`` are the model's inputs, on the meta device too. ``graph`` is the model's graph, from :func:`read_graph`.

    Raises: RuntimeError: the model's code reads tensor values, which the meta device lacks.

    >>> from shardwright.analysis.chunks.call_graph import read_graph
    >>> model = nn.Sequential(nn.Linear(4, 8)).to("meta")
    >>> by_example(model, read_graph(model), torch.empty(2, 4, device="meta"))
    {CallSite(module='0', number=0): Cost(work=128.0, parameter_bytes=160, activation_bytes=64)}
    """
    costs: dict[CallSite, Cost] = {}
    by_key: dict[object, tuple[Cost, Any]] = {}  # modules that are alike are run once
    call_sites = {node: site for node, site in sites(graph) if site is not None}
    chunked = ChunkedModel(graph, dict.fromkeys(call_sites.values(), 0), 1)

    def counted_call(site: CallSite, call: Any, *args: Any, **named: Any) -> Any:
        key = _key_of(call, args, named, values)
        if key is not None and key in by_key:
            costs[site], result = by_key[key]
            return result.tensor()
        with CostCounting() as counting:
            out = call(*args, **named)
        costs[site] = Cost(counting.work, _bytes(call), counting.result_bytes)
        result = result_of(out)
        if result is not None and key == _key_of(call, (*args, out), named, values, num_given=len(args)):
            by_key[key] = costs[site], result
        return out

    ready = [
        step._replace(call=partial(counted_call, call_sites[step.node], step.call)) if step.node in call_sites else step
        for step in prepare(model, chunked, 0)
    ]
    with torch.no_grad(), buffers_put_back(model), on_meta(model) as values, OnMeta(), ignoring_batch_statistics(model):
        run(ready, bind(chunked, inputs))
    return costs


def _key_of(
    call: Any, args: tuple[Any, ...], named: Mapping[str, Any], values: MetaValues | None, num_given: int | None = None
) -> object:
    """Returns a cache key that is equal for module calls of equal cost, or None for a call that cannot be compared.

    A call cannot be compared if its module has hooks, or if values of its tensors are known, which its code may read.
    Only the first ``num_given`` of ``args`` are part of the key.
    """
    if not isinstance(call, nn.Module) or has_hooks(call, inside=True):
        return None
    tensors = tensors_of((args, named))
    if values is None or any(values.values(tensor) is not None for tensor in tensors):
        return None
    arguments = [result_of(argument) or _setting(argument) for argument in (*args[:num_given], *named.values())]
    if None in arguments:
        return None
    return (*likeness(call), *arguments, *named)


def _setting(value: Any) -> object:
    return repr(value) if isinstance(value, bool | int | float | str | None) else None


def by_weights(model: nn.Module, graph: fx.Graph, num_tokens: int) -> dict[CallSite, Cost]:
    """Estimates the cost of each module call from the sizes of its weights, for a model without example inputs.

    Each entry of a weight of two or more dims, embeddings excepted, is assumed to cost two floating-point operations
    for each of ``num_tokens`` tokens. ``activation_bytes`` are 0.

    >>> from shardwright.analysis.chunks.call_graph import read_graph
    >>> model = nn.Sequential(nn.Linear(4, 8))
    >>> by_weights(model, read_graph(model), 2)[CallSite("0")].work
    128.0
    """
    costs = {}
    for _, site in sites(graph):
        if site is None:
            continue
        module = model.get_submodule(site.module)
        size = 0
        for layer in module.modules():
            if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                size += sum(p.numel() for p in layer.parameters(recurse=False) if p.dim() > 1)
        costs[site] = Cost(2.0 * size * num_tokens, _bytes(module), 0)
    return costs


def counted(model: nn.Module, graph: fx.Graph, example: Any, num_tokens: int) -> dict[CallSite, Cost]:
    """Returns the cost of each module call, counted by running ``example`` or else estimated from weight sizes.

    The estimate is used if ``example`` is None, or if the model's code reads tensor values, which the meta device
    lacks.

    >>> from shardwright.analysis.chunks.call_graph import read_graph
    >>> model = nn.Sequential(nn.Linear(4, 8)).to("meta")
    >>> counted(model, read_graph(model), None, 2)[CallSite("0")].work
    128.0
    """
    if example is None:
        return by_weights(model, graph, num_tokens)
    try:
        return by_example(model, graph, example)
    except RuntimeError as failure:  # code that reads values, such as a router of experts, fails on meta
        if "meta" not in str(failure).lower() and not isinstance(failure, ValueReadError):
            raise
        return by_weights(model, graph, num_tokens)


def measured(costs: Mapping[CallSite, Cost], seconds: Mapping[str, float]) -> dict[CallSite, Cost]:
    """Returns ``costs`` with the work of each call computed from the measured time of its module.

    ``seconds`` gives the seconds spent in modules, by name. The time of a module is its own entry in ``seconds``, or
    else the sum of the entries of modules inside it; its calls get equal shares of that time. Work is seconds times
    ``FLOPS_PER_S``. The work of calls without a time is multiplied by one factor: the measured work of the calls with a
    time, divided by the work that was counted for them.

    >>> costs = {CallSite("a"): Cost(10.0), CallSite("b"): Cost(20.0), CallSite("c"): Cost(30.0)}
    >>> found = measured(costs, {"a": 1.0, "b.x": 1.5, "b.y": 0.5})
    >>> [cost.work / FLOPS_PER_S for cost in found.values()]
    [1.0, 2.0, 3.0]
    """
    timed: dict[CallSite, float] = {}
    num_calls = Counter(site.module for site in costs)
    for site in costs:
        inside = [s for name, s in seconds.items() if name.startswith(f"{site.module}.")]
        if site.module in seconds or inside:
            timed[site] = seconds.get(site.module, sum(inside)) * FLOPS_PER_S / num_calls[site.module]
    counted_work = sum(costs[site].work for site in timed)
    scale = sum(timed.values()) / counted_work if counted_work else 1.0
    return {site: cost._replace(work=timed.get(site, cost.work * scale)) for site, cost in costs.items()}


def time_layers(model: nn.Module, inputs: Any, repeats: int = 5) -> dict[str, float]:
    """Returns the median seconds that one forward spends in all calls of each submodule together, by its name.

    Pass the result to ``parallelize`` as ``seconds``. ``model`` must have values; it runs ``repeats`` times after a
    warm-up, in this process and in eval mode, and is not changed. ``inputs`` should be as large as one microbatch.
    Measure once and pass the same numbers on every rank: all ranks must cut the model alike.

    >>> sorted(time_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(1, 2)))
    ['0', '1']
    """
    device = next((leaf.device for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), torch.device("cpu"))
    began: list[devices.Moment] = []
    calls: list[tuple[str, devices.Moment, devices.Moment]] = []
    times: dict[str, list[float]] = {}

    def before(*_: Any) -> None:
        began.append(devices.moment(device))

    def after(path: str, *_: Any) -> None:
        calls.append((path, began.pop(), devices.moment(device)))

    named = [(path, module) for path, module in model.named_modules() if path]
    handles = [module.register_forward_pre_hook(before) for _, module in named]
    handles += [module.register_forward_hook(partial(after, path)) for path, module in named]
    try:
        with eval_mode(model), torch.no_grad():
            for _ in range(repeats + 1):  # the first is a warm-up, dropped below
                calls.clear()
                call_model(model, inputs)
                spent: dict[str, float] = {}
                for path, start, end in calls:
                    spent[path] = spent.get(path, 0.0) + devices.seconds_between(start, end)
                for path, seconds in spent.items():
                    times.setdefault(path, []).append(seconds)
    finally:
        for handle in handles:
            handle.remove()
    return {path: statistics.median(seconds[1:]) for path, seconds in times.items()}


def _bytes(call: Any) -> int:
    """Returns the bytes of the parameters of a called module, also if ``call`` is a wrapper without gradients."""
    module = inspect.unwrap(call)
    return sum(p.numel() * p.element_size() for p in module.parameters()) if isinstance(module, nn.Module) else 0


def total(costs: Sequence[Cost]) -> Cost:
    """Returns the total work, parameter bytes and activation bytes of ``costs``."""
    return Cost(*map(sum, zip(*costs, strict=True)))
