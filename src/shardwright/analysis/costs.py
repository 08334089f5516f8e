"""What a call costs: floating-point operations and bytes, counted while the model runs on the meta device.

``work`` is what a call takes forward, in operations: those of matrix products and convolutions, and for every other
operator as many as a device could do while it moves the elements.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from shardwright.analysis.arguments import bind
from shardwright.analysis.batch_norms import ignoring_batch_statistics
from shardwright.analysis.call_graph import CallSite, Chunked, prepare, run, sites
from shardwright.analysis.meta_device import on_meta
from shardwright.analysis.module_calls import call_model
from shardwright.models.eval_mode import eval_mode

WORK_PER_ELEMENT = 16
"""Operations of a matrix product that a device does while it reads and writes one element.

A guess, between what a core and what a GPU does, used to weigh one call against another and for nothing else. Where it
matters, time the layers: :func:`time_layers`.
"""
FLOPS_PER_S = 50e9
"""Operations a second, to write work as seconds. A guess of one core, and no promise.

A cut, an ``auto`` schedule, a bubble and the shares of a drawing compare works with each other, and are the same for
any number here. Seconds that are drawn are right only where layers were timed, whose seconds come out as they went in;
and :meth:`Timeline.at_speed_of` scales a prediction to what a run took before the two stand side by side.
"""


class Cost(NamedTuple):
    """What one call takes forward, and how many bytes of parameters it holds and of activations it keeps."""

    work: float = 0.0
    parameter_bytes: int = 0
    activation_bytes: int = 0


class _Counting(TorchDispatchMode):
    """Adds up the work of every operator, and the bytes of what it makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work, self.made_bytes = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        packet = func._overloadpacket
        if packet in flop_registry:
            self.work += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            self.made_bytes += sum(t.numel() * t.element_size() for t in made)
        elif not func.is_view:
            self.work += WORK_PER_ELEMENT * sum(t.numel() for t in made)
            self.made_bytes += sum(t.numel() * t.element_size() for t in made)
        return out


def by_example(model: nn.Module, graph: fx.Graph, inputs: Any) -> dict[CallSite, Cost]:
    """The cost of each call when the model, on the meta device, is run on ``inputs`` of that device.

    >>> from shardwright.analysis.call_graph import read_graph
    >>> model = nn.Sequential(nn.Linear(4, 8)).to("meta")
    >>> by_example(model, read_graph(model), torch.empty(2, 4, device="meta"))
    {CallSite(module='0', number=0): Cost(work=128.0, parameter_bytes=160, activation_bytes=64)}
    """
    found: dict[CallSite, Cost] = {}
    counted = {node: site for node, site in sites(graph) if site is not None}
    chunked = Chunked(graph, dict.fromkeys(counted.values(), 0), 1)
    values = bind(chunked, inputs)

    def counting(node: fx.Node, call: Any) -> Any:
        def counted_call(*args: Any, **named: Any) -> Any:
            with _Counting() as counting:
                out = call(*args, **named)
            weights = _bytes(call)
            found[counted[node]] = Cost(counting.work, weights, counting.made_bytes)
            return out

        return counted_call

    ready = [
        each._replace(call=counting(each.node, each.call)) if each.node in counted else each
        for each in prepare(model, chunked, 0)
    ]
    with torch.no_grad(), on_meta(model), ignoring_batch_statistics(model):
        run(ready, values)
    return found


def by_weights(model: nn.Module, graph: fx.Graph, num_tokens: int) -> dict[CallSite, Cost]:
    """A guess where no example is known: every entry of a matrix is used once for each token, a table's are not.

    >>> from shardwright.analysis.call_graph import read_graph
    >>> model = nn.Sequential(nn.Linear(4, 8))
    >>> by_weights(model, read_graph(model), 2)[CallSite("0")].work
    128.0
    """
    found = {}
    for _, site in sites(graph):
        if site is None:
            continue
        module = model.get_submodule(site.module)
        size = 0
        for layer in module.modules():
            if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                size += sum(p.numel() for p in layer.parameters(recurse=False) if p.dim() > 1)
        found[site] = Cost(2.0 * size * num_tokens, _bytes(module), 0)
    return found


def counted(model: nn.Module, graph: fx.Graph, example: Any, num_tokens: int) -> dict[CallSite, Cost]:
    """The cost of each call: by the example, or by the weights where there is none or a layer looks at its values.

    >>> from shardwright.analysis.call_graph import read_graph
    >>> model = nn.Sequential(nn.Linear(4, 8)).to("meta")
    >>> counted(model, read_graph(model), None, 2)[CallSite("0")].work
    128.0
    """
    if example is None:
        return by_weights(model, graph, num_tokens)
    try:
        return by_example(model, graph, example)
    except RuntimeError as failure:  # an expert that asks which samples are its own: there are none on meta
        if "meta" not in str(failure).lower():
            raise
        return by_weights(model, graph, num_tokens)


def measured(costs: Mapping[CallSite, Cost], seconds: Mapping[str, float]) -> dict[CallSite, Cost]:
    """The same costs with the seconds that were measured of single modules as their work, in operations.

    A module's seconds are its own or the sum of those inside it; work of modules that were not measured is scaled
    alike.

    >>> costs = {CallSite("a"): Cost(10.0), CallSite("b"): Cost(20.0), CallSite("c"): Cost(30.0)}
    >>> found = measured(costs, {"a": 1.0, "b.x": 1.5, "b.y": 0.5})
    >>> [cost.work / FLOPS_PER_S for cost in found.values()]
    [1.0, 2.0, 3.0]
    """
    taken: dict[CallSite, float] = {}
    for site in costs:
        inside = [s for name, s in seconds.items() if name.startswith(f"{site.module}.")]
        if site.module in seconds or inside:
            taken[site] = seconds.get(site.module, sum(inside)) * FLOPS_PER_S
    known = sum(costs[site].work for site in taken)
    scale = sum(taken.values()) / known if known else 1.0
    return {site: cost._replace(work=taken.get(site, cost.work * scale)) for site, cost in costs.items()}


def time_layers(model: nn.Module, inputs: Any, repeats: int = 5) -> dict[str, float]:
    """By module, the seconds that one forward spends in it, the median of some: for the ``seconds`` of ``parallelize``.

    ``model`` has values and runs here, on ``inputs`` as large as one microbatch; nothing in it is changed but what its
    own forward changes in evaluation, which is nothing in torch's layers. Measure once and give every rank the same.

    >>> sorted(time_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(1, 2)))
    ['0', '1']
    """
    began: list[float] = []
    found: dict[str, list[float]] = {}

    def before(*_: Any) -> None:
        began.append(_now_s(inputs))

    def after(path: str, *_: Any) -> None:
        spent[path] = spent.get(path, 0.0) + _now_s(inputs) - began.pop()

    named = [(path, module) for path, module in model.named_modules() if path]
    handles = [module.register_forward_pre_hook(before) for _, module in named]
    handles += [module.register_forward_hook(partial(after, path)) for path, module in named]
    try:
        with eval_mode(model), torch.no_grad():
            for _ in range(repeats + 1):  # the first one warms up
                spent: dict[str, float] = {}
                call_model(model, inputs)
                for path, seconds in spent.items():
                    found.setdefault(path, []).append(seconds)
    finally:
        for handle in handles:
            handle.remove()
    return {path: statistics.median(seconds[1:]) for path, seconds in found.items()}


def _now_s(inputs: Any) -> float:
    """The time, when all that was asked of the inputs' device is done."""
    devices = {leaf.device for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()


def _bytes(module: Any) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters()) if isinstance(module, nn.Module) else 0


def total(costs: Sequence[Cost]) -> Cost:
    """The sum of costs."""
    return Cost(
        sum(cost.work for cost in costs),
        sum(cost.parameter_bytes for cost in costs),
        sum(cost.activation_bytes for cost in costs),
    )
