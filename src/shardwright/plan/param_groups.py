"""Cuts a model's parameters into units: blocks that are gathered, summed and updated together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from torch import nn


class ParamGroup(NamedTuple):
    """A block of parameters that are gathered, summed and updated together, by name."""

    name: str
    parameters: tuple[str, ...]


_LISTS = (nn.Sequential, nn.ModuleList)


def split_into_param_groups(model: nn.Module, *, least_bytes: int = 2**20) -> tuple[ParamGroup, ...]:
    """Returns the model's parameters in units of whole blocks, each of at least ``least_bytes``, in forward order.

    A block is an entry of a list or sequence of modules, however deep in the model. Small neighbours are joined. A tied
    parameter belongs to the first block that uses it.

    >>> model = nn.Sequential(nn.Linear(600, 600), nn.Linear(2, 2), nn.Linear(900, 900))
    >>> [group.name for group in split_into_param_groups(model)]
    ['0', '1..2']
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    home: dict[str, int] = {}  # by parameter, the unit it belongs to
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
    if last > 0 and num_bytes < least_bytes:  # what is left is small: it goes with its neighbour
        tail = modules.pop()
        modules[-1] += tail
        home = {name: min(number, last - 1) for name, number in home.items()}
    units = []
    for number, paths in enumerate(modules):
        if not paths:
            continue
        name = paths[0] if len(paths) == 1 else f"{paths[0]}..{paths[-1]}"
        parameters = tuple(n for n, at in home.items() if at == number)
        units.append(ParamGroup(name, parameters))
    return tuple(unit for unit in units if unit.parameters)


def _entries(path: str, module: nn.Module, *, listed: bool = False) -> Iterable[tuple[str, nn.Module, bool]]:
    """The blocks in order: entries of lists and sequences of modules, and what lies beside these and those around them.

    Each with whether all its parameters are meant, or those alone that a container of blocks holds itself.
    """
    is_list = type(module) in _LISTS
    if path and not is_list and (listed or not _holds_blocks(module)):
        yield path, module, True
        return
    if next(module.parameters(recurse=False), None) is not None:
        yield path, module, False
    for name, child in module.named_children():
        yield from _entries(f"{path}.{name}".lstrip("."), child, listed=is_list)


def _holds_blocks(module: nn.Module) -> bool:
    """Whether a list or sequence inside has entries that are more than single layers."""
    lists = (each for each in module.modules() if type(each) in _LISTS)
    return any(next(entry.children(), None) is not None for each in lists for entry in each.children())


def held_param_groups(groups: Sequence[ParamGroup], held: Collection[str]) -> tuple[ParamGroup, ...]:
    """Returns the groups, each with those of its parameters that a rank holds; groups without any are left out.

    >>> held_param_groups([ParamGroup("a", ("a.w",)), ParamGroup("b", ("b.w",))], {"b.w"})
    (ParamGroup(name='b', parameters=('b.w',)),)
    """
    found = (group._replace(parameters=tuple(n for n in group.parameters if n in held)) for group in groups)
    return tuple(group for group in found if group.parameters)
