"""Cuts a recorded forward into pipeline chunks of balanced work and memory.

Of the cuts whose largest chunk is at most a tenth larger than it must be, the one that sends the fewest bytes between
chunks is taken. Work may be less even where memory would otherwise be too uneven. A module whose call costs more than a
small part of a chunk's share is opened: the calls that its code makes are events of their own, at any depth.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, pairwise, product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shardwright.analysis.calls.draw_calls import DrawCall
from shardwright.analysis.chunks.call_graph import CallSite, weights_by_module
from shardwright.analysis.chunks.costs import Cost, measured, total
from shardwright.analysis.chunks.events_chunked import EventsChunked
from shardwright.analysis.chunks.forward_events import record_events
from shardwright.analysis.chunks.forward_record import ForwardEvent, ForwardRecord
from shardwright.analysis.chunks.same_results import modules_keeping_state
from shardwright.analysis.objects.marked_inputs import hint_of_samples
from shardwright.analysis.objects.reached import reached, unregistered_attributes
from shardwright.analysis.on_meta.meta_values import ValueReadError
from shardwright.analysis.traced.batch_norms import derived_batch_norms
from shardwright.analysis.traced.structure import has_backward_hooks, has_hooks, is_inside
from shardwright.analysis.traced.tracer import line_of
from shardwright.errors import LayoutError, PlanError
from shardwright.formatting import first_line
from shardwright.plan.event_stages import UNEVEN, EventStages
from shardwright.strategies.pipeline.balance import FINER, CutCost, StageShares, evened
from shardwright.strategies.pipeline.cut import check_num_names
from shardwright.strategies.pipeline.event_units import is_layer_of_torch, opened_modules, units_of

FINEST = (0.25, 0.06, 0.0)
"""A module is cut inside if its call costs more than this part of an even chunk.

The values are tried in order; a later one is tried only if the cuts so far are uneven or fail.

Chunks begin at units, the modules that are one event for each call. So the largest chunk may exceed its share by about
one unit: by a quarter, and less where smaller units stand at the boundary. Finer units balance better, and each is one
more event that every stage compares with the record.
"""

SLACK = 1.1
"""The largest chunk's work may be this many times the least possible, if fewer bytes then cross between chunks.

With this tenth of a stage's work to spare, a cut falls on the border of a block where one is near, and not inside of
it. Chunks may be as uneven in work as ``UNEVEN`` allows where they would be more uneven in memory otherwise.
"""


def cut_events(
    model: nn.Module, num_chunks: int, example: Any, *, names: Sequence[str] = (),
    seconds: Mapping[str, float] | None = None, closed: Collection[str] = (), stage_of: Sequence[int] = (),
    values: Any = None,
) -> EventStages:  # fmt: skip
    """Returns the contiguous pipeline chunks (:class:`EventStages`) of a model's forward, recorded on ``example``.

    The model is on the meta device, and ``example`` has the inputs of one microbatch. ``values``, the same inputs on
    the CPU, are for code that reads values of inputs, such as a mask of pixels; without them it reads ones. ``names``
    are the modules at which chunks begin, one for each chunk. ``seconds`` are measured times of modules; modules in
    ``closed`` are not cut inside. ``stage_of`` is the stage that holds each chunk, by default one for each. Use it for
    models whose code cannot be traced, else ``cut``.

    Raises: LayoutError: the forward's calls depend on values of parameters or activations, it makes too few calls of
        modules with weights or does not call ``names`` in this order, it changes an attribute in every call, or modules
        exchange tensors otherwise than as arguments and results. TypeError: the example does not fit the forward.

    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
    ...     def forward(self, x):
    ...         assert x.shape[1] == 4
    ...         return self.down(self.up(x).relu()) + x
    >>> stages = cut_events(Model().to("meta"), 2, torch.empty(3, 4, device="meta"))
    >>> stages.chunked.calls_of(0), stages.chunked.calls_of(1), stages.chunked.edges[0].values
    (('up',), ('down',), ('1.0',))
    """
    hooked = {path for path, module in model.named_modules() if path and has_hooks(module)}
    closed = {*closed, *(path for path in hooked if has_backward_hooks(model.get_submodule(path)))}
    closed |= {path for path, _ in derived_batch_norms(model)}  # a subclass's own forward runs whole, under a mode
    registered = {id(module) for module in model.modules()}
    holding = {path for path, module in model.named_modules() if path and _holds_own_parameters(module, registered)}
    closed |= holding
    record, inputs = _recorded(model, example, (), values)
    if uncalled := holding - {scope.path for scope in record.scopes}:
        raise LayoutError(
            f"'{min(uncalled)}' holds its parameters in a plain attribute too, and code runs it without calling it",
            given="a module with a dict or list of its parameters, whose .forward is called, or another method",
            allowed="modules that are called, or read their parameters as attributes",
            fix="write module(x) in place of module.forward(x), or leave out pp",
        )
    if "" in record.selecting:
        raise _decides_by_state(model)
    closed |= record.selecting  # other stages do not have the values that it reads
    closed |= _run_whole(model, record, example, values)  # the backward runs such code in one piece
    if "" in closed:
        raise _own_backward(model)
    if "" in record.writing:
        raise LayoutError(
            f"the code of {type(model).__name__} writes into a buffer, so it cannot be cut into stages",
            given="a buffer of the model's own that each forward changes by what layers compute, or replaces",
            allowed="such code in a module inside, as a block",
            fix="move the buffer and the code that changes it into a module of its own",
        )
    closed |= record.writing  # other stages would not have what it writes
    cut = partial(_cut, model, stage_of or range(num_chunks), record, inputs, names, seconds)
    # If a module with forward hooks is cut inside, its hooks get ghosts (meta tensors) in place of values that a stage
    # lacks. So such modules are cut inside only if no other cut is even.
    ways = dict.fromkeys([frozenset(closed | hooked), frozenset(closed)])
    best: tuple[float, EventStages, Collection[str]] | None = None
    failures: list[LayoutError] = []
    for whole, finest in product(ways, FINEST[:1] if names or seconds else FINEST):
        try:
            uneven, stages = cut(whole, finest)
        except LayoutError as failure:
            failures.append(failure)
            continue
        if best is None or uneven < FINER * best[0]:
            best = uneven, stages, whole
        if best[0] <= UNEVEN:
            break
    if best is None:
        raise failures[0]
    return _closed_again(best[1], record, inputs, best[2], hooked)


def _run_whole(model: nn.Module, record: ForwardRecord, example: Any, values: Any) -> set[str]:
    """Returns the modules whose code one stage runs in one piece, such as calls of autograd functions; "" is the model.

    What such code leaves for the code around it, such as a tensor that it has filled through views, is a result like
    any other once the module is not cut inside. So if code around it is among them, the forward is recorded again with
    the innermost ones as a whole.
    """
    inside = set[str]()
    while True:
        whole = record.checkpointed | record.own_backward
        inner = {path for path in whole if path and not any(is_inside(other, path) for other in whole - {path})}
        if "" not in whole or inner <= inside:
            return whole | inside
        inside |= inner
        record, _ = _recorded(model, example, inside, values)


def _holds_own_parameters(module: nn.Module, registered: Collection[int]) -> bool:
    """Returns whether a module has parameters of its own in a plain attribute too, such as a dict.

    Every stage runs the module's code between calls. On a stage that lacks the parameters, this code would find tensors
    without elements in the plain attribute. ``registered`` are the ids of the model's modules. The answer is False for
    recurrent layers of torch: they keep a list of their weights, but run whole on one stage.
    """
    if isinstance(module, nn.RNNBase):
        return False
    own_ids, seen = {id(parameter) for parameter in module.parameters(recurse=False)}, dict[int, Any]()
    values = (value for _, value in unregistered_attributes(module))
    held = (part for value in values for _, part in reached(value, seen, registered, but=(Optimizer,)))
    return bool(own_ids) and any(id(part) in own_ids for part in held)


def _cut(
    model: nn.Module, stage_of: Sequence[int], record: ForwardRecord, inputs: Any, names: Sequence[str],
    seconds: Mapping[str, float] | None, closed: Collection[str], finest: float,
) -> tuple[float, EventStages]:  # fmt: skip
    """Returns how uneven a cut of the recorded forward is, and the cut: 1.25 if a stage has 1.25 times an even share.

    The share is that of the work or of the parameters, whichever is less even. If the model cannot be cut, the function
    raises LayoutError.
    """
    num_chunks, before = len(stage_of), _settings(model)
    escaped: set[str] = set()
    while True:
        opened = opened_modules(model, record, num_chunks, names, closed, finest) | escaped
        units = units_of(model, record, opened)
        cut_record, _ = _recorded(model, inputs, units)
        out_of = {cut_record.events[number].name for number in cut_record.escaping}
        for path in out_of:
            module = model.get_submodule(path)
            if path in escaped or has_backward_hooks(module) or next(module.children(), None) is None:
                raise _escapes(path)
        # a unit whose code decides by its inputs is opened, so that every stage runs this code and decides alike
        deciding = {cut_record.events[number].name for number in cut_record.deciding} - escaped - {*closed}
        deciding = {path for path in deciding if not is_layer_of_torch(model.get_submodule(path))}
        # a unit that keeps state from one call for the next is opened: the next call may be on another stage
        called = [path for path in sorted(units - escaped - {*closed}) if len(cut_record.calls[path]) > 1]
        keeping = modules_keeping_state(model, inputs, called)
        for path, counter in keeping.items():
            if counter:
                raise _counts(f"{path}.{counter}")
        if not out_of | deciding | keeping.keys():
            break
        escaped |= out_of | deciding | keeping.keys()
    for (path, name), value in _settings(model).items():
        if before.get((path, name), value) != value and path in opened:
            raise _counts(f"{path}.{name}".lstrip("."))
    sizes, uses = _uses(model, cut_record)
    costs = _costs(cut_record, sizes, uses, seconds)
    sites = _sites(cut_record, names)
    if names:
        check_num_names(names, num_chunks)
    if len(sites) < num_chunks:
        inside = sorted(path for path in record.selecting if path)
        why = f"; the code of '{inside[0]}' decides by values that only its stage has" if inside else ""
        raise LayoutError(
            f"the model cannot be cut into {num_chunks} chunks",
            given=f"{type(model).__name__}, whose forward makes {len(sites)} calls of modules with weights{why}",
            allowed=f"1 to {len(sites)} chunks, stages times chunks of each"
            if sites
            else "models that call modules with weights, at which stages begin",
            fix="ask for fewer stages, or fewer chunks on each" if len(sites) > 1 else "leave out pp",
        )
    works = [cost.work for cost in costs]
    starts = [0, *sites[1:]] if names else _balanced(cut_record, works, uses, sizes, sites, stage_of)
    chunked = EventsChunked(cut_record, tuple(_site(cut_record, start) for start in starts), weights_by_module(model))
    _check_together(chunked)
    chunk_costs = tuple(total(costs[first:stop]) for first, stop in pairwise(chunked.bounds))
    uneven = StageShares(works, uses, sizes, stage_of).unevenness(chunked.bounds)
    return uneven, EventStages(model, chunked, chunk_costs, frozenset(units), tuple(sorted(opened)))


def _recorded(model: nn.Module, inputs: Any, units: Collection[str], values: Any = None) -> tuple[ForwardRecord, Any]:
    """Returns the record of a forward, and the inputs that it ran on: ``inputs``, or ``values`` if it reads values.

    If the forward reads values, but ``values`` is None or the forward cannot be recorded on them, it runs on ones. If
    code may skip calls by random numbers, the forward is also recorded with the smallest and with the largest numbers,
    and the record that skips the fewest calls is returned. If the forward cannot be recorded, it raises LayoutError.
    """
    try:
        try:
            record = record_events(model, inputs, units)
        except ValueReadError:
            if values is not None:
                with suppress(LayoutError):
                    return _recorded(model, values, units)
            inputs = tree_map_only(Tensor, lambda t: torch.ones(t.shape, dtype=t.dtype) if t.is_meta else t, inputs)
            record = record_events(model, inputs, units)
        if record.draws and (record.deciding or not record.is_one_path):
            drawn = [partial(_drawn_as, number) for number in (0.0, 0.999)]
            others = [record_events(model, inputs, units, draw) for draw in drawn]
            record = max(record, *others, key=lambda candidate: len(candidate.events))
        return record, inputs
    except (LayoutError, PlanError):
        raise
    except Exception as failure:  # also of the user's own code, which may check values that a record does not have
        if isinstance(failure, TypeError) and not line_of(failure):
            raise  # arguments that the forward does not take
        hint = hint_of_samples(inputs)
        raise LayoutError(
            f"the forward of {type(model).__name__} cannot be recorded, so it cannot be cut into stages",
            given=f"{type(failure).__name__}: {first_line(failure)}{line_of(failure)}",
            allowed="forwards whose calls and shapes do not depend on values of parameters and activations",
            fix="leave out pp, or move what depends on values out of the model; where it looks for values of inputs, "
            f"give a real batch as the example{'; ' * bool(hint)}{hint}",
        ) from failure


def _drawn_as(number: float, path: str, call: int, place: int, draw: DrawCall) -> Tensor:
    """Returns the result of a random draw as if every random number were ``number``, which is between 0 and 1."""
    x = draw.drawn(None)
    if draw.kind not in ("new", "like", "fill") or draw.name == "randperm":
        made: Tensor = draw.without_numbers()
        return made
    made = draw.empty() if x is None else x if draw.kind == "fill" else torch.empty_like(x)
    return made.fill_(number if made.is_floating_point() else int(draw.get("low", 0)))


def _settings(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Returns the plain attributes of all modules, by module and name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
    }


def _counts(attribute: str) -> LayoutError:
    return LayoutError(
        f"each forward changes '{attribute}', and every stage runs the code that does, for every chunk",
        given="an attribute that is another one after each forward, as a count of calls is",
        allowed="forwards that leave attributes as they are, or set them to what follows from the shapes of the inputs",
        fix="move the count into a module with parameters, which one stage calls, or into the training loop",
    )


def _decides_by_state(model: nn.Module) -> LayoutError:
    return LayoutError(
        f"the code of {type(model).__name__} decides by a buffer that each forward changes, and every stage runs it",
        given="a read of a buffer's value, such as a count of calls, in the model's own forward",
        allowed="such code in a module inside, which one stage runs; buffers that stay as they are",
        fix="move the code into a module inside, or leave out pp",
    )


def _own_backward(model: nn.Module) -> LayoutError:
    return LayoutError(
        f"torch runs code of {type(model).__name__} as a whole, so it cannot be cut into stages",
        given="an autograd function, torch.autograd.grad, a checkpoint of several modules or of more than a module, "
        "a function of torch.jit.trace, a transform as torch.vmap, or a hook on the gradient of a tensor, which the "
        "model's own code calls or sets",
        allowed="these in the code of a module inside, as a block; in the model's own, torch.utils.checkpoint of one "
        "module in each call",
        fix="move the call into a module inside, or write recompute:... in the layout in place of a checkpoint",
    )


def _escapes(path: str) -> LayoutError:
    return LayoutError(
        f"code outside of '{path}' reads a tensor that '{path}' makes and does not return",
        given="a tensor kept in an attribute or a list, so that stages without the module would not have it",
        allowed="values that modules take as arguments and return",
        fix="return the tensor from the module's forward",
    )


# ---- units, as large as the chunks allow


def _closed_again(
    stages: EventStages, whole: ForwardRecord, inputs: Any, closed: Collection[str], hooked: Collection[str]
) -> EventStages:
    """Returns the same cut of fewer events: a module is one event again if each of its calls lies in one chunk.

    Other stages then make one ghost (a meta tensor) for the result of the module, and its own stage compares one event.
    ``whole`` is the record in which every module is opened. A module stays open in four cases: it depends on the inputs
    alone; it contains one of the modules ``hooked``, whose hooks of the user run on ghosts too; its code decides by its
    inputs; or its code keeps a tensor for code outside of it.
    """
    model, fine = stages.model, stages.chunked
    spans = [scope for scope in fine.record.scopes if scope.path in stages.opened]
    inside = {
        scope.path
        for scope in spans
        if any(scope.first < start < scope.stop for start in fine.bounds) or scope.is_free or scope.first == scope.stop
    }
    inside |= {path for path in stages.opened for hooked_path in hooked if hooked_path.startswith(f"{path}.")}
    opened = {"", *inside}
    while len(opened) < len(stages.opened):
        units = units_of(model, whole, opened)
        starts = [_start_of(fine, start, units) for start in fine.bounds[1:-1]]
        try:
            record, _ = _recorded(model, inputs, units)
            chunked = EventsChunked(record, (_site(record, 0), *starts), fine.names)
            names = {record.events[number].name for number in record.escaping | record.deciding} & {*stages.opened}
            if not names - {*closed}:
                _check_together(chunked)
                same = _shapes_sent(chunked) == _shapes_sent(fine)
                wider = replace(stages, chunked=chunked, units=frozenset(units), opened=tuple(sorted(opened)))
                return wider if same else stages
        except LayoutError:
            return stages
        opened |= names - {*closed}
    return stages


def _start_of(fine: EventsChunked, start: int, units: Collection[str]) -> CallSite:
    """Returns the call of a unit (a module that is one event) that begins at event ``start`` of a finer record."""
    record = fine.record
    number = next((n for n, s in enumerate(record.scopes) if s.first == start < s.stop and s.path in units), None)
    if number is None:
        return _site(record, start)
    path = record.scopes[number].path
    before = sum(scope.path == path for scope in record.scopes[:number])
    calls = [call for call, unit in enumerate(record.calls[path]) if unit is None]  # not calls inside other units
    return CallSite(path, calls[before])


def _shapes_sent(chunked: EventsChunked) -> list[Any]:
    return [
        (edge, sorted((spec.shape, str(spec.dtype), learns) for spec, learns in values))
        for edge, values in chunked.crossing
    ]


# ---- the cut


def _uses(model: nn.Module, record: ForwardRecord) -> tuple[dict[str, int], list[frozenset[str]]]:
    """Returns the bytes of each parameter, by name, and for each event the names of the parameters that it uses."""
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    inside = weights_by_module(model)
    uses = [e.reads if e.number is None else e.reads.union(inside.get(e.name, ())) for e in record.events]
    return sizes, [frozenset(name for name in names if name in sizes) for names in uses]


def _costs(
    record: ForwardRecord, sizes: Mapping[str, int], uses: Sequence[frozenset[str]],
    seconds: Mapping[str, float] | None,
) -> list[Cost]:  # fmt: skip
    """Returns the cost of each event; a parameter's bytes count where it is used first.

    With ``seconds``, measured times of modules, the work is computed from these.
    """
    costs, seen = [], set[str]()
    for event, used in zip(record.events, uses, strict=True):
        costs.append(event.cost._replace(parameter_bytes=sum(sizes[name] for name in used - seen)))
        seen |= used
    if seconds:
        sites = {CallSite(e.name, e.number): n for n, e in enumerate(record.events) if e.number is not None}
        for site, cost in measured({site: costs[number] for site, number in sites.items()}, seconds).items():
            costs[sites[site]] = cost
    return costs


def _site(record: ForwardRecord, number: int) -> CallSite:
    event = record.events[number]
    return CallSite(event.name, event.number or 0)


def _sites(record: ForwardRecord, names: Sequence[str]) -> list[int]:
    """Returns the events at which a chunk may begin: calls of modules with weights, or the first call inside each name.

    If a name has no call, or the calls come in another order, it raises LayoutError.
    """
    calls = [number for number, event in enumerate(record.events) if event.number is not None]
    if not names:
        return [number for number in calls if record.events[number].reads]
    sites: list[int] = []
    for name in names:
        inside = [number for number in calls if f"{record.events[number].name}.".startswith(f"{name}.")]
        if not inside or (sites and inside[0] <= sites[-1]):
            raise LayoutError(
                f"no stage can begin at '{name}'",
                given=f"cut:{','.join(names)}",
                allowed="modules that the model calls, in the order of the calls: "
                + ", ".join(dict.fromkeys(record.events[number].name for number in calls)),
                fix="name modules in the order in which the model calls them",
            )
        sites.append(inside[0])
    return sites


def _balanced(
    record: ForwardRecord, works: Sequence[float], uses: Sequence[Collection[str]], sizes: Mapping[str, int],
    sites: Sequence[int], stage_of: Sequence[int],
) -> list[int]:  # fmt: skip
    """Returns the events at which chunks begin, so that work and memory are even and few bytes are sent between chunks.

    No chunk begins between two events that exchange a value in a hidden way (``ForwardRecord.together``). If too few
    places are left for the chunks, the function raises LayoutError.
    """
    inner = [site for site in sites[1:] if not any(a < site <= b for a, b in record.together)]
    places, bytes_at, num_chunks = [0, *inner, len(record.events)], _crossing_bytes(record), len(stage_of)
    sent = [bytes_at[place] for place in places]
    if len(places) <= num_chunks:
        a, b = next(iter(record.together))
        raise LayoutError(
            f"the model cannot be cut into {num_chunks} chunks: its modules exchange values on hidden ways",
            given=f"a tensor of {record.events[a]} that {_at_most(record, b)} reads, from a list "
            "or an attribute, or after a write through a view of it",
            allowed="values that modules take as arguments and return",
            fix="return the tensor from the module's forward and pass it on; write in place of a view a new tensor",
        )
    works = [sum(works[first:stop]) for first, stop in pairwise(places)]
    uses = [frozenset[str]().union(*uses[first:stop]) for first, stop in pairwise(places)]
    shares = StageShares(works, uses, sizes, stage_of)

    @cache
    def loads(first: int, stop: int) -> tuple[float, float]:
        work, held = shares.of_run(first, stop)
        # memory counts only where its share is more than UNEVEN times the share of the work
        return work / shares.num_stages, held / shares.num_stages / UNEVEN

    def best(price: Callable[[float, float, int], CutCost]) -> tuple[CutCost, list[int]]:
        return _best(len(places) - 1, num_chunks, lambda first, stop: price(*loads(first, stop), first))

    def held_within(most_work: float) -> float:
        return best(lambda work, held, _: (0.0 if work <= most_work else float("inf"), held))[0][1]

    most_work = best(lambda work, held, _: (0.0, max(work, held)))[0][1] * SLACK
    least_held = held_within(most_work)
    if least_held * num_chunks > 1 and most_work * num_chunks < UNEVEN:
        most_work = UNEVEN / num_chunks
        least_held = held_within(most_work)
    most_held = max(least_held * (1 + 1e-9), 1 / num_chunks)
    if most_work * num_chunks > UNEVEN:  # e.g. if all stages hold a loop's weights
        loose = most_held * UNEVEN  # a small gain in memory is not worth uneven work
        least_work = best(lambda work, held, _: (0.0 if held <= loose else float("inf"), work))[0][1]
        most_work = min(most_work, max(least_work * SLACK, UNEVEN / num_chunks))
        most_held = max(held_within(most_work) * (1 + 1e-9), 1 / num_chunks)

    def sent_bytes(work: float, held: float, first: int) -> CutCost:
        fits = work <= most_work and held <= most_held
        return (float(sent[first]) if fits else float("inf")), max(work, held)

    starts = best(sent_bytes)[1]
    if shares.num_stages < num_chunks:  # a stage's load is the sum of its chunks
        starts = evened([starts, *(best(lambda *load, n=n: (0.0, load[n]))[1] for n in (0, 1))], shares, sent)
    return [places[at] for at in starts]


def _best(num: int, num_chunks: int, price: Callable[[int, int], CutCost]) -> tuple[CutCost, list[int]]:
    """Cuts ``num`` items into ``num_chunks`` non-empty runs at the least price; returns that price and the starts.

    ``price(first, stop)`` is the price of one run: two numbers. The price of a cut is the sum of the runs' first
    numbers and the largest of their second numbers.
    """
    worst = float("inf"), float("inf")
    best: list[tuple[CutCost, list[int]]] = [(price(0, stop) if stop else worst, [0]) for stop in range(num + 1)]
    for chunk in range(1, num_chunks):
        row: list[tuple[CutCost, list[int]]] = [(worst, [])] * (num + 1)
        for stop in range(chunk + 1, num + 1) if chunk + 1 < num_chunks else [num]:  # the last run takes all the rest
            options = []
            for at in range(chunk, stop):
                (added, largest), (more, size) = best[at][0], price(at, stop)
                options.append(((added + more, max(largest, size)), at))
            cost, at = min(options)
            row[stop] = cost, [*best[at][1], at]
        best = row
    return best[num]


def _crossing_bytes(record: ForwardRecord) -> list[int]:
    """Returns, for each event, the bytes of the earlier events' values that this event or a later one takes.

    One more entry, the last, is for a cut behind all events: the bytes of the values that the forward returns.
    """
    last_use = {value: number for number, event in enumerate(record.events) for value in event.takes}
    last_use |= dict.fromkeys(record.outputs, len(record.events))
    change = [0] * (len(record.events) + 2)
    for value, last in last_use.items():
        if isinstance(value, tuple) and value in record.specs:
            spec = record.specs[value]
            change[value[0] + 1] += prod(spec.shape) * spec.dtype.itemsize
            change[last + 1] -= prod(spec.shape) * spec.dtype.itemsize
    return list(accumulate(change))[: len(record.events) + 1]


def _at_most(record: ForwardRecord, number: int) -> ForwardEvent:
    """Returns the event of this number, or the last one if the number is that of code behind all events."""
    return record.events[min(number, len(record.events) - 1)]


def _check_together(chunked: EventsChunked) -> None:
    for a, b in sorted(chunked.record.together):
        if chunked.chunk_of[a] != chunked.chunk_of[b]:
            raise LayoutError(
                "a stage would read a tensor that stays on another stage",
                given=f"a tensor of {chunked.record.events[a]} that {_at_most(chunked.record, b)} reads",
                allowed="values that modules take as arguments and return",
                fix="return the tensor from the module's forward and pass it on, or cut elsewhere",
            )
