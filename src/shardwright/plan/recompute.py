"""Which modules a layout computes again in the backward, found by their names or as blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from shardwright.analysis.module_calls import ModuleCall, ModuleCalls
from shardwright.errors import LayoutError, nearest
from shardwright.layout import Layout

ELSEWHERE: Mapping[str, Literal["host", "disk"]] = {"offload": "host", "offload:disk": "disk"}
"""The words that compute nothing again, but keep what the backward needs elsewhere; and where."""

WORDS = ("full", "selective", *ELSEWHERE)
_LISTS = (nn.Sequential, nn.ModuleList)


def activation_offload_target(layout: Layout) -> Literal["host", "disk"] | None:
    """Where the layout keeps what the backward needs of blocks, if that is not where they compute.

    >>> lines = ("recompute:offload:disk", "recompute:full")
    >>> tuple(activation_offload_target(Layout.parse(line)) for line in lines)
    ('disk', None)
    """
    return ELSEWHERE.get(layout.recompute or "")


def recomputed_blocks(model: nn.Module, layout: Layout) -> tuple[str, ...]:
    """The modules that the layout's ``recompute`` means, none inside another; none where it does not ask for any.

    All words mean the entries of lists and sequences of modules, and among these leave single layers
    alone where there are blocks: to compute one again frees nothing. Raises LayoutError for a word that means nothing.

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
                raise _nothing(f"no module of the model is called '{pattern}'", layout, names, nearest(pattern, names))
        return _outermost([name for name in names if any(fnmatchcase(name, each) for each in patterns)])
    entries = dict(_entries("", model))
    found = [path for path, module in entries.items() if next(module.children(), None) is not None] or list(entries)
    if not found:
        raise _nothing("the model has no blocks", layout, names, names[0] if names else "")
    return _outermost(found)


def _entries(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The entries of lists and sequences, but for those that hold blocks of their own."""
    for name, child in module.named_children():
        inner = f"{path}.{name}".lstrip(".")
        holds = type(child) in _LISTS and any(next(each.children(), None) is not None for each in child.children())
        if type(module) in _LISTS and not holds and type(child) is not nn.ModuleList:
            yield inner, child
        else:
            yield from _entries(inner, child)


def _outermost(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(path for path in paths if not any(path.startswith(f"{other}.") for other in paths))


def _nothing(what: str, layout: Layout, names: Sequence[str], like: str) -> LayoutError:
    without = str(replace(layout, recompute=None))
    if activation_offload_target(layout) is not None:  # a pattern would compute again, and keep nothing elsewhere
        return LayoutError(
            f"{what}, so there is nothing whose activations could be kept elsewhere",
            given=str(layout),
            allowed=f"recompute:{' or recompute:'.join(ELSEWHERE)} for models with lists or sequences of modules",
            fix=f"put the layers into an nn.Sequential or nn.ModuleList, or leave it out: {without}",
        )
    return LayoutError(
        f"{what}, so there is nothing to compute again",
        given=str(layout),
        allowed="recompute:full or recompute:selective for models with lists or sequences of modules, "
        "recompute:PATTERN for names of modules, * for anything, several with commas",
        fix=f"write recompute:{like}" if names else f"leave it out: {without}",
    )


def called_modules(model: nn.Module, paths: Sequence[str], opened: Collection[str]) -> tuple[str, ...]:
    """The modules that stages really call: of one whose code they run call by call, those inside.

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
    """The calls of one forward, those marked that the backward makes again.

    A block is computed again where gradients flow into it: ``trained`` are the modules with parameters that learn.
    """
    found: Mapping[str, tuple[ModuleCall, ...]] = module_calls
    for path in paths:
        inside = [each for each in module_calls if f"{each}.".startswith(f"{path}.")]
        learns = any(each in trained or any(visit.needs_gradient for visit in module_calls[each]) for each in inside)
        if learns:
            twice = {each: tuple(replace(visit, num_forwards=2) for visit in module_calls[each]) for each in inside}
            found = {**found, **twice}
    return found
