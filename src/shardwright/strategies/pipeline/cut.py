"""Where a model is cut into chunks: by hand, or so that the slowest chunk is as fast as can be.

Calls are weighed by what they cost, not counted; among cuts that are equally fast, the one whose largest chunk holds
the fewest bytes is taken. A module is looked into when it alone costs more than a chunk's fair share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import fx, nn

from shardwright.analysis.arguments import arguments_given
from shardwright.analysis.call_graph import CallSite, Chunked, read_graph, sites, weights_by_module
from shardwright.analysis.costs import Cost, counted, measured, total
from shardwright.analysis.in_place_writes import check_writes
from shardwright.analysis.structure import trace
from shardwright.analysis.torch_loops import KNOWN_LOOPS
from shardwright.errors import LayoutError, nearest
from shardwright.plan.stages import DROPOUTS, Stages, is_stateless


def cut(
    model: nn.Module,
    num_chunks: int,
    *,
    names: Sequence[str] = (),
    example: Any = None,
    num_tokens: int = 1,
    seconds: Mapping[str, float] | None = None,
    closed: Collection[str] = (),
) -> Stages:
    """Cuts a model, on the meta device, into chunks.

    ``names`` are the modules at which chunks begin, all of them, by hand. Otherwise costs decide: counted on
    ``example``, a microbatch's inputs on the meta device, or guessed from the weights and ``num_tokens``; ``seconds``
    are those measured of single modules. Modules in ``closed`` are not looked into.

    Raises: LayoutError: fewer calls than chunks, names that the model does not call or in another order, or inside
        a closed module; code that cannot be followed.

    >>> stages = cut(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 64)), 2)
    >>> [stages.chunked.calls_of(chunk) for chunk in range(2)]
    [('0', '1'), ('2',)]
    """
    if seconds:
        _check_seconds(model, seconds)
    if names:
        _check_open(names, closed)
        return _by_hand(model, num_chunks, names, example, num_tokens, seconds)
    opened: set[str] = set()
    refused: set[str] = set(closed)
    given = arguments_given(model, example) if example is not None else ()
    graph = read_graph(model, opened, given)
    costs, movable = _costs(model, graph, example, num_tokens, seconds), _movable(graph, model)
    while (site := _worth_opening(model, movable, costs, num_chunks, refused)) is not None:
        try:
            graph = read_graph(model, opened | {site.module}, given)
        except LayoutError:
            refused.add(site.module)
            continue
        opened.add(site.module)
        costs, movable = _costs(model, graph, example, num_tokens, seconds), _movable(graph, model)
    if len(movable) < num_chunks:
        raise _too_many(model, num_chunks, movable)
    places = _beginnings(model, movable, num_chunks)
    groups = [total([costs[site] for site in movable[a:b]]) for a, b in pairwise([*places, len(movable)])]
    starts = [places[group] for group in _balance(groups, num_chunks)]
    return _stages(model, graph, movable, starts, costs, tuple(sorted(opened)))


def _check_seconds(model: nn.Module, seconds: Mapping[str, float]) -> None:
    """Raises LayoutError for times of modules that the model does not have, or that no clock shows."""
    known = [name for name, _ in model.named_modules() if name]
    for name, taken in seconds.items():
        if name not in known:
            what, fix = f"the model has no module '{name}', whose seconds are given", f"write {nearest(name, known)}"
        elif not 0 <= taken < float("inf"):
            what, fix = f"the seconds of '{name}' cannot be", "give what time_layers() returns"
        else:
            continue
        given = f"{name}: {taken}"
        allowed = "names of the model's modules, and zero seconds or more: what time_layers() returns"
        raise LayoutError(what, given=given, allowed=allowed, fix=fix)


def _costs(
    model: nn.Module, graph: fx.Graph, example: Any, num_tokens: int, seconds: Mapping[str, float] | None
) -> dict[CallSite, Cost]:
    costs = counted(model, graph, example, num_tokens)
    seen: set[str] = set()
    for site in costs:  # a module that is called again holds its weights once
        if site.module in seen:
            costs[site] = costs[site]._replace(parameter_bytes=0)
        seen.add(site.module)
    return measured(costs, seconds) if seconds else costs


def _movable(graph: fx.Graph, model: nn.Module) -> list[CallSite]:
    """The calls that belong to one chunk: all but those of modules without state that see inputs alone."""
    free: set[fx.Node] = set()
    found = []
    for node, site in sites(graph):
        stateless = site is None or is_stateless(model.get_submodule(site.module))
        if node.op != "get_attr" and stateless and all(each in free for each in node.all_input_nodes):
            free.add(node)
        elif site is not None:
            found.append(site)
    return found


def _worth_opening(
    model: nn.Module, movable: Sequence[CallSite], costs: Mapping[CallSite, Cost], num_chunks: int,
    refused: Collection[str],
) -> CallSite | None:  # fmt: skip
    """The costliest call that is more than a chunk's share, or any while there are too few calls."""
    share = total([costs[site] for site in movable]).work / num_chunks
    for site in sorted(movable, key=lambda site: -costs[site].work):
        module = model.get_submodule(site.module)
        theirs = type(module).__module__.startswith("torch.nn.") and type(module) not in KNOWN_LOOPS
        if next(module.children(), None) is None or site.module in refused or theirs:
            continue
        if costs[site].work > share * (1 + 1e-9) or len(movable) < num_chunks:
            return site
    return None


def _beginnings(model: nn.Module, movable: Sequence[CallSite], num_chunks: int) -> list[int]:
    """Where a chunk may begin: at calls with weights, so that what is cheap to redo nowhere stands alone.

    At any call where there are too few of these.
    """
    weighted = [
        i for i, site in enumerate(movable) if next(model.get_submodule(site.module).parameters(), None) is not None
    ]
    places = sorted({0, *weighted[1:]})
    return places if len(places) >= num_chunks else list(range(len(movable)))


def _balance(costs: Sequence[Cost], num_chunks: int) -> list[int]:
    """Where each chunk begins, so that the most work of any is least, and then the most bytes.

    Chunks are runs of calls, none empty. By bisection on the answer's candidates: the work of all runs.
    """
    least = _least_of_most([cost.work for cost in costs], num_chunks)
    weight_bytes = [cost.parameter_bytes * 4 + cost.activation_bytes for cost in costs]  # with optimizer state
    works = [0.0, *accumulate(cost.work for cost in costs)]
    sizes = [0, *accumulate(weight_bytes)]
    bound = least * (1 + 1e-9)
    # best[i]: the least possible most of bytes for the first i calls in some number of chunks, and where the last began
    best: list[tuple[float, int]] = [(0.0, 0)] + [(float("inf"), 0)] * len(costs)
    began: list[list[int]] = []
    for chunk in range(1, num_chunks + 1):
        row: list[tuple[float, int]] = [(float("inf"), 0)] * (len(costs) + 1)
        for stop in range(chunk, len(costs) + 1):
            for start in range(stop - 1, chunk - 2, -1):
                if works[stop] - works[start] > bound:
                    break
                most = max(best[start][0], float(sizes[stop] - sizes[start]))
                row[stop] = min(row[stop], (most, start))
        best = row
        began.append([start for _, start in row])
    starts, stop = [], len(costs)
    for row_of_chunk in reversed(began):
        stop = row_of_chunk[stop]
        starts.append(stop)
    return starts[::-1]


def _least_of_most(works: Sequence[float], num_chunks: int) -> float:
    """The least that the most work of a chunk can be, none of them empty."""
    sums = [0.0, *accumulate(works)]
    best = [float("inf")] * (len(works) + 1)
    best[0] = 0.0
    for chunk in range(1, num_chunks + 1):
        row = [float("inf")] * (len(works) + 1)
        for stop in range(chunk, len(works) + 1):
            for start in range(stop - 1, chunk - 2, -1):
                here = sums[stop] - sums[start]
                if here >= row[stop]:
                    break
                row[stop] = min(row[stop], max(best[start], here))
        best = row
    return best[-1]


def _stages(
    model: nn.Module, graph: fx.Graph, movable: Sequence[CallSite], starts: Sequence[int],
    costs: Mapping[CallSite, Cost], opened: tuple[str, ...],
) -> Stages:  # fmt: skip
    bounds = [0, *starts[1:], len(movable)]
    chunk_of = {site: chunk for chunk, (a, b) in enumerate(pairwise(bounds)) for site in movable[a:b]}
    chunked = Chunked(graph, chunk_of, len(starts), weights_by_module(model))
    check_writes(graph, chunked.nodes, model)
    for module in {site.module for site in movable}:
        _check_draws(model, module, {chunk_of[site] for site in movable if site.module == module})
    each = tuple(total([costs[site] for site in movable[a:b]]) for a, b in pairwise(bounds))
    return Stages(model, chunked, each, opened)


def _check_open(names: Sequence[str], closed: Collection[str]) -> None:
    for name in names:
        around = next((path for path in sorted(closed) if name.startswith(f"{path}.")), None)
        if around is not None:
            raise LayoutError(
                f"no stage can begin at '{name}'",
                given=f"cut:{','.join(names)}, under a layout that treats '{around}' as one layer",
                allowed=f"'{around}', and names outside of it",
                fix="write cut:" + ",".join(around if each == name else each for each in names),
            )


def _check_draws(model: nn.Module, path: str, chunks: Collection[int]) -> None:
    """Raises LayoutError for a shared module inside which a dropout is called more than once.

    Masks are numbered over all calls, and a chunk knows of those before it how often the shared module was called.
    """
    module = model.get_submodule(path)
    drops = [name for name, each in module.named_modules() if name and isinstance(each, DROPOUTS) and each.p > 0]
    if len(chunks) < 2 or not drops or type(module).__module__.startswith("torch.nn."):
        return
    graph = trace(module, deep=True, shows_weights=True)
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"] if graph is not None else []
    for drop in drops:
        if calls.count(drop) != 1:
            raise LayoutError(
                f"several stages call '{path}', and nobody knows how often its dropout '{drop}' drops in each call",
                given=f"{calls.count(drop)} calls that can be seen in the code of {type(module).__name__}",
                allowed="a dropout for each place, called once each time",
                fix=f"give '{path}' a dropout of its own for each call",
            )


def _by_hand(
    model: nn.Module, num_chunks: int, names: Sequence[str], example: Any, num_tokens: int,
    seconds: Mapping[str, float] | None,
) -> Stages:  # fmt: skip
    given = ",".join(names)
    known = [name for name, _ in model.named_modules() if name]
    for name in names:
        if name not in known:
            raise LayoutError(
                f"the model has no module '{name}' to cut at",
                given=f"cut:{given}",
                allowed="names of modules: " + ", ".join(name for name in known if name.count(".") < 2),
                fix=f"write {nearest(name, known)}",
            )
    if len(names) != num_chunks:
        raise LayoutError(
            f"{num_chunks} stages begin at {len(names)} names",
            given=f"cut:{given}",
            allowed=f"{num_chunks} names, the first of them where the model begins",
            fix=f"name {num_chunks} modules, or ask for {len(names)} chunks in all",
        )
    opened = {".".join(parts[:n]) for name in names for parts in [name.split(".")] for n in range(1, len(parts))}
    graph = read_graph(model, opened, arguments_given(model, example) if example is not None else ())
    movable = _movable(graph, model)
    starts: list[int] = []
    for name in names:
        found = [i for i, site in enumerate(movable) if f"{site.module}.".startswith(f"{name}.")]
        if not found:
            raise LayoutError(
                f"no stage can begin at '{name}'",
                given=f"cut:{given}",
                allowed="modules that the model's code calls itself: " + _words(movable),
                fix=f"write {nearest(name, [site.module for site in movable])}",
            )
        starts.append(found[0])
    if sorted(set(starts)) != starts:
        order = sorted(zip(starts, names, strict=True))
        raise LayoutError(
            "the stages are not in the order in which the model runs them",
            given=f"cut:{given}",
            allowed="each name once, in the order of the calls: " + _words(movable),
            fix="write cut:" + ",".join(dict.fromkeys(name for _, name in order)) + " with as many stages",
        )
    starts[0] = 0  # what comes before the first name belongs to it
    return _stages(model, graph, movable, starts, _costs(model, graph, example, num_tokens, seconds), tuple(opened))


def _words(movable: Sequence[CallSite]) -> str:
    names = list(dict.fromkeys(site.module for site in movable))
    return ", ".join(names if len(names) < 12 else [*names[:6], "...", *names[-5:]])


def _too_many(model: nn.Module, num_chunks: int, movable: Sequence[CallSite]) -> LayoutError:
    return LayoutError(
        f"the model cannot be cut into {num_chunks} chunks",
        given=f"{type(model).__name__}, whose code makes {len(movable)} calls that can be told apart: "
        + _words(movable),
        allowed=f"1 to {len(movable)} chunks, stages times chunks of each",
        fix="ask for fewer stages, or fewer chunks on each" if len(movable) > 1 else "leave out pp",
    )


def stages_by_device(model: nn.Module) -> tuple[str, ...]:
    """Where the device of the parameters changes from call to call: the cut that a person made with ``.to``.

    Names for ``cut:``, the first call's first; empty where all parameters are on one device.

    >>> stages_by_device(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")))
    ('0', '1')
    """
    if len({p.device for p in model.parameters()}) < 2:
        return ()
    found: list[tuple[str, object]] = []
    for site in _movable(read_graph(model), model):
        devices = {p.device for p in model.get_submodule(site.module).parameters()}
        if len(devices) > 1:
            raise LayoutError(
                f"the parameters of '{site.module}' are on several devices",
                given=", ".join(sorted(map(str, devices))),
                allowed="one device for each module that the model's code calls",
                fix="move it whole, or name the stages by hand: pp2/cut:first,second",
            )
        if devices and (not found or found[-1][1] not in devices):
            found.append((site.module, devices.pop()))
    return tuple(name for name, _ in found) if len(found) > 1 else ()


Cutter = Callable[[int], Stages]
"""A model's cut into so many chunks."""
