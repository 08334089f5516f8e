"""Cuts a model's call graph into pipeline chunks: at named modules, or with the slowest chunk as fast as possible.

Calls are weighed by their cost. Among cuts whose slowest chunk is equally fast, the one whose largest chunk holds the
fewest bytes is taken. A module that alone costs more than a chunk's fair share is opened: its inner calls are weighed
instead, if its code can be followed. Modules are also opened while there are fewer calls than chunks, and where stages
are uneven otherwise. Where stages have several chunks each, boundaries are moved until stages are even (``balance``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from torch import fx, nn

from shardwright.analysis.chunks.arguments import arguments_given
from shardwright.analysis.chunks.call_graph import CallSite, ChunkedModel, read_graph, sites, weights_by_module
from shardwright.analysis.chunks.costs import Cost, counted, measured, total
from shardwright.analysis.chunks.in_place_writes import check_writes
from shardwright.analysis.traced.structure import trace
from shardwright.analysis.traced.torch_loops import KNOWN_LOOPS
from shardwright.errors import LayoutError, UnknownCodeError, fix_for
from shardwright.plan.event_stages import UNEVEN
from shardwright.plan.stages import DROPOUTS, Stages, is_stateless
from shardwright.strategies.pipeline.balance import FINER, MOST_EVENED, StageShares, evened

FINEST = (1.0, 0.25, 0.0)
"""A module is opened if its call costs more than this part of an even chunk; later values where stages are uneven."""


def cut(
    model: nn.Module,
    num_chunks: int,
    *,
    names: Sequence[str] = (),
    example: Any = None,
    num_tokens: int = 1,
    seconds: Mapping[str, float] | None = None,
    closed: Collection[str] = (),
    whole: Collection[str] = (),
    stage_of: Sequence[int] = (),
) -> Stages:
    """Returns the contiguous pipeline chunks (:class:`Stages`) of a model, balanced by cost or cut at named modules.

    ``names`` are the modules at which the chunks begin. Without names costs decide. They are counted on ``example``, a
    microbatch's inputs on the meta device, or estimated from the weights and ``num_tokens``, the tokens of a
    microbatch; ``seconds`` are measured times of single modules. Modules in ``closed`` are not cut inside; ``whole``
    are containers that stay one call, because they are recomputed or compiled as one. ``stage_of`` is the stage that
    holds each chunk, by default one for each.

    Raises: LayoutError: the model makes fewer calls than chunks, or its code cannot be followed; ``names`` are unknown,
        are not as many as chunks, are inside a closed module, or are not called in this order; ``seconds`` has an
        unknown module, or a time that is negative or infinite; chunks share memory that one of them writes in place, or
        a module whose dropout is not called once in each call. PlanError: the example does not fit the forward.

    >>> stages = cut(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 64)), 2)
    >>> [stages.chunked.calls_of(chunk) for chunk in range(2)]
    [('0', '1'), ('2',)]
    """
    if seconds:
        _check_seconds(model, seconds)
    if names:
        return _by_hand(model, num_chunks, names, example, num_tokens, seconds, closed, whole)
    opened: set[str] = set()
    kept_closed: set[str] = set(closed)
    arguments = arguments_given(model, example) if example is not None else ()
    graph = read_graph(model, opened, arguments, whole)
    best: tuple[float, Stages] | None = None
    for finest in FINEST[:1] if seconds or num_chunks > MOST_EVENED else FINEST:
        costs, movable = _costs(model, graph, example, num_tokens, seconds), _movable(graph, model)
        while large := _to_open(model, movable, costs, num_chunks, kept_closed, finest):
            together = _read_opened(model, opened, large, arguments, whole)
            for modules in [large] if together is not None else [{module} for module in sorted(large)]:
                new_graph = together if modules == large else _read_opened(model, opened, modules, arguments, whole)
                if new_graph is None:
                    kept_closed |= modules
                else:
                    graph = new_graph
                    opened |= modules
            costs, movable = _costs(model, graph, example, num_tokens, seconds), _movable(graph, model)
        unread = kept_closed.difference(closed)
        if len(movable) < num_chunks:
            raise (UnknownCodeError if unread else LayoutError)(
                f"the model cannot be cut into {num_chunks} chunks",
                given=f"{type(model).__name__}, whose code makes {len(movable)} separate calls: "
                + _list_modules(movable),
                allowed=f"1 to {len(movable)} chunks, stages times chunks of each",
                fix="ask for fewer stages, or fewer chunks on each" if len(movable) > 1 else "leave out pp",
            )
        uneven, starts = _evenly(model, graph, movable, costs, stage_of or range(num_chunks))
        if best is None or uneven < FINER * best[0]:
            try:
                stages = _stages(model, graph, movable, starts, costs, tuple(sorted(opened)))
            except LayoutError:
                if best is None:
                    raise
                break
            best = uneven, replace(stages, whole=tuple(whole), unread=tuple(sorted(unread)))
        if best[0] <= UNEVEN:
            break
    assert best is not None, "cut, or raised"
    return best[1]


def _check_seconds(model: nn.Module, seconds: Mapping[str, float]) -> None:
    """Raises LayoutError for times of modules that the model does not have, and for negative or infinite times."""
    known = [name for name, _ in model.named_modules() if name]
    for name, taken in seconds.items():
        if name not in known:
            what = f"the model has no module '{name}', whose seconds are given"
            fix = fix_for(name, known, "give what time_layers() returns")
        elif not 0 <= taken < float("inf"):
            what, fix = f"the seconds of '{name}' are no time", "give what time_layers() returns"
        else:
            continue
        allowed = "names of the model's modules, and zero seconds or more: what time_layers() returns"
        raise LayoutError(what, given=f"{name}: {taken}", allowed=allowed, fix=fix)


def _costs(
    model: nn.Module, graph: fx.Graph, example: Any, num_tokens: int, seconds: Mapping[str, float] | None
) -> dict[CallSite, Cost]:
    costs = counted(model, graph, example, num_tokens)
    seen: set[str] = set()
    for site in costs:  # the weights of a module that is called several times are counted once
        if site.module in seen:
            costs[site] = costs[site]._replace(parameter_bytes=0)
        seen.add(site.module)
    return measured(costs, seconds) if seconds else costs


def _movable(graph: fx.Graph, model: nn.Module) -> list[CallSite]:
    """Returns the calls that are distributed over chunks.

    Left out are stateless calls that depend on the model's inputs alone: every chunk that needs them repeats them.
    """
    free: set[fx.Node] = set()
    movable = []
    for node, site in sites(graph):
        stateless = site is None or is_stateless(model.get_submodule(site.module))
        if node.op != "get_attr" and stateless and all(input_node in free for input_node in node.all_input_nodes):
            free.add(node)
        elif site is not None:
            movable.append(site)
    return movable


def _to_open(
    model: nn.Module, movable: Sequence[CallSite], costs: Mapping[CallSite, Cost], num_chunks: int,
    closed: Collection[str], finest: float,
) -> set[str]:  # fmt: skip
    """Returns the modules whose calls cost more than ``finest`` of an even chunk, or the costliest if calls are few.

    It returns none if there are as many calls as chunks and none exceeds that part.
    """
    share = finest * total([costs[site] for site in movable]).work / num_chunks
    paths, costliest = set[str](), set[str]()
    for site in sorted(movable, key=lambda site: -costs[site].work):
        module = model.get_submodule(site.module)
        from_torch = type(module).__module__.startswith("torch.nn.") and type(module) not in KNOWN_LOOPS
        if next(module.children(), None) is None or site.module in closed or from_torch:
            continue
        costliest = costliest or {site.module}
        if costs[site].work > share * (1 + 1e-9):
            paths.add(site.module)
    return paths or (costliest if len(movable) < num_chunks else set())


def _read_opened(
    model: nn.Module, opened: set[str], names: set[str], arguments: Collection[str], whole: Collection[str]
) -> fx.Graph | None:
    """Returns the graph of a model with the modules ``names`` opened too; None if their code cannot be followed.

    The result is also None if one of ``names`` is in ``opened`` already: opening that module had no effect (it stayed
    one call, as a module with a hook does), so opening it again would have none.
    """
    if not opened.isdisjoint(names):
        return None
    try:
        return read_graph(model, opened | names, arguments, whole)
    except LayoutError:
        return None


def _beginnings(model: nn.Module, movable: Sequence[CallSite], num_chunks: int) -> list[int]:
    """Returns the indices of the calls at which a chunk may begin.

    These are the calls with weights, so that no chunk is only an activation function or a dropout; with too few, all
    calls.
    """
    weighted = [
        i for i, site in enumerate(movable) if next(model.get_submodule(site.module).parameters(), None) is not None
    ]
    places = sorted({0, *weighted[1:]})
    return places if len(places) >= num_chunks else list(range(len(movable)))


def _evenly(
    model: nn.Module, graph: fx.Graph, movable: Sequence[CallSite], costs: Mapping[CallSite, Cost],
    stage_of: Sequence[int],
) -> tuple[float, list[int]]:  # fmt: skip
    """Returns the largest share of a stage (1.0 is even), and the call at which each chunk begins."""
    places = _beginnings(model, movable, len(stage_of))
    runs = [total([costs[site] for site in movable[first:stop]]) for first, stop in pairwise([*places, len(movable)])]
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    uses: list[set[str]] = [set() for _ in runs]
    for name, call in _reads(model, graph, movable):
        if name in sizes:
            uses[bisect_right(places, call) - 1].add(name)
    shares = StageShares([run.work for run in runs], uses, sizes, stage_of)
    starts = _balance(runs, len(stage_of))
    if shares.num_stages < len(stage_of):  # a stage's load is the sum of its chunks
        starts = evened([starts], shares, [0] * (len(runs) + 1))
    return shares.unevenness((*starts, len(runs))), [places[run] for run in starts]


def _reads(model: nn.Module, graph: fx.Graph, movable: Sequence[CallSite]) -> Iterator[tuple[str, int]]:
    """Yields each weight that the code reads, with the number of the call that reads it.

    For code between calls it is the number of the call before.
    """
    inside, numbers = weights_by_module(model), {site: number for number, site in enumerate(movable)}
    call = 0
    for node, site in sites(graph):
        call = numbers.get(site, call) if site is not None else call
        yield from (
            (str(input_node.target), call) for input_node in node.all_input_nodes if input_node.op == "get_attr"
        )
        if site is not None and site in numbers:
            yield from ((name, call) for name in inside.get(site.module, ()))


def _balance(costs: Sequence[Cost], num_chunks: int) -> list[int]:
    """Returns the call at which each chunk begins: the slowest chunk is fastest, then the largest chunk smallest."""
    works = [cost.work for cost in costs]
    least, _ = partition(works, num_chunks, works, float("inf"))
    num_bytes = [cost.parameter_bytes * 4 + cost.activation_bytes for cost in costs]  # weights, gradients, 2 states
    return partition(num_bytes, num_chunks, works, least * (1 + 1e-9))[1]


def partition(
    loads: Sequence[float], num_chunks: int, works: Sequence[float], most_work: float
) -> tuple[float, list[int]]:
    """Returns the cut of a sequence into ``num_chunks`` non-empty runs whose largest load is as small as possible.

    The result is that largest load (infinite if no such cut exists), and the index at which each run begins. The load
    of a run is the sum of its items' ``loads``; the sum of its items' ``works`` may not exceed ``most_work``. The
    method is dynamic programming over how many items the first chunks take.

    >>> partition([1, 1, 4, 1], 2, [1, 1, 1, 3], 4)
    (5, [0, 2])
    """
    sums, work_sums = [0.0, *accumulate(loads)], [0.0, *accumulate(works)]
    # best[stop]: the smallest largest load of the first `stop` items in `chunk` runs, and where the last run begins
    best: list[tuple[float, int]] = [(0.0, 0)] + [(float("inf"), 0)] * len(loads)
    began: list[list[int]] = []
    for chunk in range(1, num_chunks + 1):
        row: list[tuple[float, int]] = [(float("inf"), 0)] * (len(loads) + 1)
        for stop in range(chunk, len(loads) + 1):
            for start in range(stop - 1, chunk - 2, -1):
                load = sums[stop] - sums[start]
                # From here on the last run only grows.
                if work_sums[stop] - work_sums[start] > most_work or load > row[stop][0]:
                    break
                row[stop] = min(row[stop], (max(best[start][0], load), start))
        best = row
        began.append([start for _, start in row])
    starts, stop = [], len(loads)
    for starts_of_last in reversed(began):
        stop = starts_of_last[stop]
        starts.append(stop)
    return best[-1][0], starts[::-1]


def _stages(
    model: nn.Module, graph: fx.Graph, movable: Sequence[CallSite], starts: Sequence[int],
    costs: Mapping[CallSite, Cost], opened: tuple[str, ...],
) -> Stages:  # fmt: skip
    bounds = [0, *starts[1:], len(movable)]
    chunk_of = {site: chunk for chunk, (a, b) in enumerate(pairwise(bounds)) for site in movable[a:b]}
    chunked = ChunkedModel(graph, chunk_of, len(starts), weights_by_module(model))
    check_writes(graph, chunked.nodes, model)
    for module in {site.module for site in movable}:
        _check_draws(model, module, {chunk_of[site] for site in movable if site.module == module})
    chunk_costs = tuple(total([costs[site] for site in movable[a:b]]) for a, b in pairwise(bounds))
    return Stages(model, chunked, chunk_costs, opened)


def _check_draws(model: nn.Module, path: str, chunks: Collection[int]) -> None:
    """Raises UnknownCodeError if several chunks call a module that calls one dropout more than once, or never.

    A dropout's masks are numbered over all calls of the dropout. A chunk only knows how often earlier chunks have
    called the shared module. That number tells how often its dropout was called only if each call of the module makes
    exactly one call of the dropout.
    """
    module = model.get_submodule(path)
    drops = [name for name, layer in module.named_modules() if name and isinstance(layer, DROPOUTS) and layer.p > 0]
    if len(chunks) < 2 or not drops or type(module).__module__.startswith("torch.nn."):
        return
    graph = trace(module, deep=True, shows_weights=True)
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"] if graph is not None else []
    for drop in drops:
        if calls.count(drop) != 1:
            raise UnknownCodeError(
                f"several stages call '{path}', and its dropout '{drop}' is not called exactly once in each call",
                given=f"{calls.count(drop)} calls of it in the code of {type(module).__name__}",
                allowed="dropouts that are each called once in a forward",
                fix=f"give '{path}' a dropout of its own for each call",
            )


def check_num_names(names: Sequence[str], num_chunks: int) -> None:
    """Raises LayoutError unless the option ``cut`` names as many modules as there are pipeline chunks."""
    if len(names) != num_chunks:
        raise LayoutError(
            f"{num_chunks} stages begin at {len(names)} names",
            given=f"cut:{','.join(names)}",
            allowed=f"{num_chunks} names, the first of them where the model begins",
            fix=f"name {num_chunks} modules, or ask for {len(names)} chunks in all",
        )


def _by_hand(
    model: nn.Module, num_chunks: int, names: Sequence[str], example: Any, num_tokens: int,
    seconds: Mapping[str, float] | None, closed: Collection[str], whole: Collection[str],
) -> Stages:  # fmt: skip
    names_text = ",".join(names)
    for name in names:
        around = next((path for path in sorted(closed) if name.startswith(f"{path}.")), None)
        if around is not None:
            raise LayoutError(
                f"no stage can begin at '{name}'",
                given=f"cut:{names_text}, under a layout that treats '{around}' as one layer",
                allowed=f"'{around}', and names outside of it",
                fix="write cut:" + ",".join(around if stage_name == name else stage_name for stage_name in names),
            )
    module_names = [name for name, _ in model.named_modules() if name]
    for name in names:
        if name not in module_names:
            raise LayoutError(
                f"the model has no module '{name}' to cut at",
                given=f"cut:{names_text}",
                allowed="names of modules: " + ", ".join(name for name in module_names if name.count(".") < 2),
                fix=fix_for(name, module_names),
            )
    check_num_names(names, num_chunks)
    opened = {".".join(parts[:n]) for name in names for parts in [name.split(".")] for n in range(1, len(parts))}
    graph = read_graph(model, opened, arguments_given(model, example) if example is not None else (), whole)
    movable = _movable(graph, model)
    starts: list[int] = []
    for name in names:
        call_numbers = [i for i, site in enumerate(movable) if f"{site.module}.".startswith(f"{name}.")]
        if not call_numbers:
            raise LayoutError(
                f"no stage can begin at '{name}'",
                given=f"cut:{names_text}",
                allowed="modules that the model's code calls itself: " + _list_modules(movable),
                fix=fix_for(name, [site.module for site in movable]),
            )
        starts.append(call_numbers[0])
    if sorted(set(starts)) != starts:
        order = sorted(zip(starts, names, strict=True))
        raise LayoutError(
            "the stages are not in the order in which the model runs them",
            given=f"cut:{names_text}",
            allowed="each name once, in the order of the calls: " + _list_modules(movable),
            fix="write cut:" + ",".join(dict.fromkeys(name for _, name in order)) + " with as many stages",
        )
    starts[0] = 0  # calls before the first name belong to the first chunk
    costs = _costs(model, graph, example, num_tokens, seconds)
    return replace(_stages(model, graph, movable, starts, costs, tuple(opened)), whole=tuple(whole))


def _list_modules(movable: Sequence[CallSite]) -> str:
    names = list(dict.fromkeys(site.module for site in movable))
    return ", ".join(names if len(names) < 12 else [*names[:6], "...", *names[-5:]])


def stages_by_device(model: nn.Module) -> tuple[str, ...]:
    """Returns the modules at which the parameters' device changes from call to call, as names for the option ``cut:``.

    A model whose parts a user has moved to devices with ``.to`` is cut there. The first name is that of the first
    called module with parameters. The tuple is empty if all parameters are on one device.

    Raises: LayoutError: the parameters of one called module are on several devices, or the model's code cannot be
        traced.

    >>> stages_by_device(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")))
    ('0', '1')
    """
    if len({p.device for p in model.parameters()}) < 2:
        return ()
    starts: list[tuple[str, object]] = []
    for site in _movable(read_graph(model), model):
        devices = {p.device for p in model.get_submodule(site.module).parameters()}
        if len(devices) > 1:
            raise LayoutError(
                f"the parameters of '{site.module}' are on several devices",
                given=", ".join(sorted(map(str, devices))),
                allowed="one device for each module that the model's code calls",
                fix="move the module to one device, or name the stages by hand: pp2/cut:first,second",
            )
        if devices and (not starts or starts[-1][1] not in devices):
            starts.append((site.module, devices.pop()))
    return tuple(name for name, _ in starts) if len(starts) > 1 else ()
