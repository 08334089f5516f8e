"""Splits a model's parameters into param groups, whose parameters are unsharded, reduced and updated together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from shardwright.analysis.recorded.module_log import UseEvent


class ParamGroup(NamedTuple):
    """One or more neighbouring blocks of a model, whose parameters are unsharded, reduced and updated together.

    ``parameters`` has the names of these parameters. ``num_gathers`` is how often ZeRO-3 unshards the group in a
    forward. ``is_held`` says that it stays unsharded until the forward or backward ends, because it is, or may be, used
    again after other groups. ``is_selected`` says that the samples decide which of its parameters a forward uses, as
    for the experts of a mixture.
    """

    name: str
    parameters: tuple[str, ...]
    num_gathers: int = 1
    is_held: bool = False
    is_selected: bool = False


LISTS = (nn.Sequential, nn.ModuleList)
"""The container classes whose entries are blocks: param groups, checkpointing and ``compile`` treat these as units."""


def split_into_param_groups(model: nn.Module, *, least_bytes: int = 2**20) -> tuple[ParamGroup, ...]:
    """Returns the model's parameters as groups of whole blocks, each of at least ``least_bytes``, in module order.

    A block is an entry of an ``nn.Sequential`` or ``nn.ModuleList``, at any depth; modules outside of such lists count
    as blocks too. Small blocks are joined with their neighbors, so that messages have a useful size. A model with fewer
    bytes in all is one group. A tied parameter belongs to the first block that uses it.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    home: dict[str, int] = {}  # the number of each parameter's group
    modules: list[list[str]] = [[]]
    num_bytes = 0
    for path, module, whole in _entries("", model):
        modules[-1].append(path)
        for parameter in module.parameters(whole):
            name = names[id(parameter)]
            if name not in home:
                home[name] = len(modules) - 1
                num_bytes += parameter.numel() * parameter.element_size()
        if num_bytes >= least_bytes:
            modules.append([])
            num_bytes = 0
    last = len(modules) - 1
    if last > 0 and num_bytes < least_bytes:  # the rest is small: it joins its neighbor
        tail = modules.pop()
        modules[-1] += tail
        home = {name: min(number, last - 1) for name, number in home.items()}
    groups = []
    for number, paths in enumerate(modules):
        if parameters := tuple(name for name, at in home.items() if at == number):
            groups.append(ParamGroup(paths[0] if len(paths) == 1 else f"{paths[0]}..{paths[-1]}", parameters))
    return tuple(groups)


def _entries(path: str, module: nn.Module, *, listed: bool = False) -> Iterable[tuple[str, nn.Module, bool]]:
    """Yields the blocks in order, and the modules beside and around them: path, module, and whether it counts whole.

    The last is False for a container of blocks: only parameters of its own are meant, and not those of the blocks.
    """
    is_list = type(module) in LISTS
    if path and not is_list and (listed or not _holds_blocks(module)):
        yield path, module, True
        return
    if next(module.parameters(recurse=False), None) is not None:
        yield path, module, False
    for name, child in module.named_children():
        yield from _entries(f"{path}.{name}".lstrip("."), child, listed=is_list)


def _holds_blocks(module: nn.Module) -> bool:
    """Returns whether a list or sequence inside has entries that are more than single layers."""
    lists = (submodule for submodule in module.modules() if type(submodule) in LISTS)
    return any(next(entry.children(), None) is not None for container in lists for entry in container.children())


def merge_groups(groups: Sequence[ParamGroup], modules: Collection[str]) -> tuple[ParamGroup, ...]:
    """Returns the param groups; for each of ``modules``, the groups with parameters inside it are joined into one.

    ``is_selected`` is set for a joined group: the samples decide which of its parameters a forward uses. A module is
    left alone if its groups have more than half of all parameter tensors, because one group would hold most of the
    model.

    >>> groups = ParamGroup("a", ("a.w", "a.b")), ParamGroup("m.0", ("m.0.w",)), ParamGroup("m.1", ("m.1.w",))
    >>> [group.parameters for group in merge_groups(groups, ["m"])]
    [('a.w', 'a.b'), ('m.0.w', 'm.1.w')]
    >>> len(merge_groups(groups[1:], ["m"]))
    2
    >>> [group.parameters for group in merge_groups(groups, ["a", "a"])]  # one that was joined before stays
    [('a.w', 'a.b'), ('m.0.w',), ('m.1.w',)]
    """
    all_groups, num_parameters = list(groups), sum(len(group.parameters) for group in groups)
    for path in sorted(modules):
        inside = [g for g in all_groups if any(name.startswith(f"{path}.") for name in g.parameters)]
        if inside and 2 * sum(len(g.parameters) for g in inside) <= num_parameters:
            names = tuple(name for group in inside for name in group.parameters)
            name = inside[0].name if len(inside) == 1 else f"{inside[0].name}..{inside[-1].name}"
            joined = ParamGroup(name, names, is_selected=True)
            all_groups = [joined if group is inside[0] else group for group in all_groups if group not in inside[1:]]
    assert sum(len(g.parameters) for g in all_groups) == num_parameters, "each parameter stays in one group"
    return tuple(all_groups)


MOST_HELD = 2
"""Groups that are used again stay unsharded if together they have at most this many times the bytes of the largest."""


def count_gathers(
    groups: Sequence[ParamGroup], forwards: Iterable[Iterable[UseEvent]], num_bytes: Mapping[str, int], *,
    shared: Collection[str] = (), holds: bool = False,
) -> tuple[ParamGroup, ...]:  # fmt: skip
    """Returns the param groups with ``num_gathers`` set: how often ZeRO-3 all-gathers each of them in a forward.

    ``is_held`` is set for groups that stay unsharded until the forward ends. There are three kinds:

    - groups with a parameter in ``shared``, the parameters that several modules use;
    - groups that a module may still use (``hold``) while another group is gathered;
    - groups that are used again after other groups, if all of these together have at most twice the bytes of the
      largest group, or if ``holds`` is set.

    ``forwards`` lists, for each part of the model, its uses of parameters in order; ``num_bytes`` gives the bytes of
    each parameter.

    >>> groups = ParamGroup("a", ("a.w", "a.b")), ParamGroup("b", ("b.w",))
    >>> forward = [("use", name) for name in ("a.w", "a.b", "b.w", "a.w")]
    >>> for group in count_gathers(groups, [forward], {"a.w": 8, "a.b": 2, "b.w": 8}):
    ...     print(group.name, group.num_gathers, group.is_held)
    a 1 True
    b 1 False
    """
    group_of = {name: group.name for group in groups for name in group.parameters}
    sizes = {group.name: sum(num_bytes.get(name, 0) for name in group.parameters) for group in groups}
    events = [[(kind, group_of[name]) for kind, name in forward if name in group_of] for forward in forwards]
    kept = {group_of[name] for name in shared if name in group_of}
    # repeated, because a group that stays unsharded no longer makes other groups be gathered again
    while True:
        times, spanning = _times_gathered(events, kept)
        again = {name for name, number in times.items() if number > 1}
        few = sum(sizes[name] for name in again) <= MOST_HELD * max(sizes.values(), default=0)
        if kept >= (more := spanning | (again if holds or few else set())):
            break
        kept |= more
    return tuple(g._replace(num_gathers=max(1, times[g.name]), is_held=g.name in kept) for g in groups)


def _times_gathered(forwards: Sequence[Sequence[UseEvent]], kept: Collection[str]) -> tuple[Counter[str], set[str]]:
    """Returns how often a forward all-gathers each group, and the groups that a module holds while others are used.

    ``forwards`` are events of groups; the groups in ``kept`` stay unsharded.
    """
    times, spanning = Counter[str](), set[str]()
    for events in forwards:
        number, held = Counter[str](), Counter[str]()
        unsharded: set[str] = set()
        for kind, name in events:
            if kind != "use":
                held[name] += 1 if kind == "hold" else -1
            elif name not in unsharded:
                read = {other for other in unsharded if held[other] > 0}
                spanning |= read
                number[name] += 1
                unsharded = {name, *read, *unsharded.intersection(kept)}
        times |= number
    return times, spanning


def held_param_groups(groups: Sequence[ParamGroup], held: Collection[str]) -> tuple[ParamGroup, ...]:
    """Returns the param groups with only those of their parameters that are in ``held``; empty groups are left out."""
    held_groups = (group._replace(parameters=tuple(n for n in group.parameters if n in held)) for group in groups)
    return tuple(group for group in held_groups if group.parameters)
