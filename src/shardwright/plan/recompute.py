"""Finds the modules under activation checkpointing or activation offload, for a layout's ``recompute`` option."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from shardwright.analysis.module_calls import ModuleCall, ModuleCalls
from shardwright.errors import LayoutError, nearest
from shardwright.layout import Layout
from shardwright.plan.param_groups import LISTS

OFFLOADS: Mapping[str, Literal["host", "disk"]] = {"offload": "host", "offload:disk": "disk"}
"""The words for activation offload, which recomputes nothing, and the place of the saved activations."""

WORDS = ("full", "selective", *OFFLOADS)


def activation_offload_target(layout: Layout) -> Literal["host", "disk"] | None:
    """Returns where the layout offloads saved activations, ``host`` or ``disk``; None if it does not."""
    return OFFLOADS.get(layout.recompute or "")


def recomputed_blocks(model: nn.Module, layout: Layout) -> tuple[str, ...]:
    """Returns the modules that the layout's ``recompute`` option selects, none inside another.

    A pattern selects by name. A word selects the entries of lists and sequences of modules; single layers among them
    only if there are no blocks, since recomputing one frees no memory. Raises: LayoutError: it selects nothing.

    >>> model = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2))])
    >>> recomputed_blocks(model, Layout.parse("recompute:full"))
    ('0', '1')
    >>> lines = ("recompute:*.0", "recompute:0,1.0")
    >>> tuple(recomputed_blocks(model, Layout.parse(line)) for line in lines)
    (('0.0', '1.0'), ('0', '1.0'))
    """
    word = layout.recompute
    if word is None:
        return ()
    names = [name for name, _ in model.named_modules() if name]
    if word not in WORDS:
        patterns = word.split(",")
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise _no_match(f"no module of the model is called '{pattern}'", layout, names, nearest(pattern, names))
        return _outermost([name for name in names if any(fnmatchcase(name, each) for each in patterns)])
    entries = dict(_entries("", model))
    found = [path for path, module in entries.items() if next(module.children(), None) is not None] or list(entries)
    if not found:
        raise _no_match("the model has no blocks", layout, names, names[0] if names else "")
    return _outermost(found)


def _entries(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the entries of lists and sequences, except those that hold blocks of their own."""
    for name, child in module.named_children():
        inner = f"{path}.{name}".lstrip(".")
        holds = type(child) in LISTS and any(next(each.children(), None) is not None for each in child.children())
        if type(module) in LISTS and not holds and type(child) is not nn.ModuleList:
            yield inner, child
        else:
            yield from _entries(inner, child)


def _outermost(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(path for path in paths if not any(path.startswith(f"{other}.") for other in paths))


def _no_match(what: str, layout: Layout, names: Sequence[str], like: str) -> LayoutError:
    without = str(replace(layout, recompute=None))
    if activation_offload_target(layout) is not None:  # a pattern is no way out: it would recompute, not offload
        return LayoutError(
            f"{what}, so there is nothing whose activations could be offloaded",
            given=str(layout),
            allowed=f"recompute:{' or recompute:'.join(OFFLOADS)} for models with lists or sequences of modules",
            fix=f"put the layers into an nn.Sequential or nn.ModuleList, or leave it out: {without}",
        )
    return LayoutError(
        f"{what}, so there is nothing to recompute",
        given=str(layout),
        allowed="recompute:full or recompute:selective for models with lists or sequences of modules, "
        "recompute:PATTERN for names of modules, * for anything, several with commas",
        fix=f"write recompute:{like}" if names else f"leave it out: {without}",
    )


def called_modules(model: nn.Module, paths: Sequence[str], opened: Collection[str]) -> tuple[str, ...]:
    """Returns the modules that pipeline stages call for ``paths``: the children in place of ``opened`` or list modules.

    >>> called_modules(nn.Sequential(nn.Sequential(nn.ReLU())), ["0"], ["0"])
    ('0.0',)
    """
    found: list[str] = []
    for path in paths:
        module = model.get_submodule(path)
        if path in opened or type(module) is nn.ModuleList or (opened and type(module) is nn.Sequential):
            inside = [f"{path}.{name}" for name, _ in module.named_children()]
            found += called_modules(model, inside, opened)
        else:
            found.append(path)
    return tuple(found)


def count_recomputation(module_calls: ModuleCalls, paths: Sequence[str], trained: Collection[str]) -> ModuleCalls:
    """Returns a forward's module calls, with ``num_forwards=2`` where activation checkpointing recomputes them.

    A block is recomputed if gradients flow into it; ``trained`` are the modules with trained parameters.
    """
    found: Mapping[str, tuple[ModuleCall, ...]] = module_calls
    for path in paths:
        inside = [each for each in module_calls if f"{each}.".startswith(f"{path}.")]
        if any(each in trained or any(call.needs_gradient for call in module_calls[each]) for each in inside):
            twice = {each: tuple(replace(call, num_forwards=2) for call in module_calls[each]) for each in inside}
            found = {**found, **twice}
    return found
