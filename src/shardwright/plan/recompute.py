"""Finds the modules under activation checkpointing or offload from the ``recompute`` option of a layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from shardwright.analysis.on_meta.module_calls import ModuleCall, ModuleCalls
from shardwright.errors import LayoutError, nearest
from shardwright.layout import Layout
from shardwright.plan.param_groups import LISTS

OFFLOADS: Mapping[str, Literal["host", "disk"]] = {"offload": "host", "offload:disk": "disk"}
"""The values of ``recompute`` that mean activation offload without recomputation, each with the offload target."""

WORDS = ("full", "selective", *OFFLOADS)


def activation_offload_target(layout: Layout) -> Literal["host", "disk"] | None:
    """Returns where a layout offloads saved activations, ``host`` or ``disk``, or None if it does not offload them."""
    return OFFLOADS.get(layout.recompute or "")


def recomputed_blocks(model: nn.Module, layout: Layout) -> tuple[str, ...]:
    """Returns the names of the modules that the layout's ``recompute`` option selects; none is inside another.

    The option is either a list of name patterns, or a word such as ``full``. A word selects the entries of
    ``nn.Sequential`` and ``nn.ModuleList``; single layers among them are selected only if there are no larger blocks,
    since recomputing one layer frees no memory. A selected module without a forward, such as a ``ModuleDict``, stands
    for the modules in it. Without the option nothing is selected.

    Raises: LayoutError: a pattern matches no module, or the model has no blocks for a word to select.

    >>> model = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2))])
    >>> recomputed_blocks(model, Layout.parse("recompute:full"))
    ('0', '1')
    >>> lines = ("recompute:*.0", "recompute:0,1.0")
    >>> tuple(recomputed_blocks(model, Layout.parse(line)) for line in lines)
    (('0.0', '1.0'), ('0', '1.0'))
    >>> recomputed_blocks(nn.ModuleList([nn.ModuleDict({"up": nn.Linear(2, 2)})]), Layout.parse("recompute:full"))
    ('0.up',)
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
        paths = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
        return _that_run(model, _outermost(paths), layout)
    paths = blocks_of(model) or [path for path, _ in _entries("", model)]
    if not paths:
        raise _no_match("the model has no blocks", layout, names, names[0] if names else "")
    return _that_run(model, _outermost(paths), layout)


def _that_run(model: nn.Module, paths: Sequence[str], layout: Layout) -> tuple[str, ...]:
    """Returns the modules at ``paths``, each once; one without a forward is replaced by the modules in it.

    Raises: LayoutError: no module at ``paths`` or in it has a forward.
    """
    waiting, run_paths, seen = [*paths], list[str](), set[int]()
    while waiting:
        path = waiting.pop(0)
        module = model.get_submodule(path)
        if type(module).forward is nn.Module.forward and "forward" not in vars(module):
            waiting[:0] = [f"{path}.{name}" for name, _ in module.named_children()]
        elif id(module) not in seen:
            seen.add(id(module))
            run_paths.append(path)
    if not run_paths:
        raise _no_match(f"no module at {', '.join(paths)} has a forward", layout, [], "")
    return tuple(run_paths)


def blocks_of(model: nn.Module) -> list[str]:
    """Returns the names of a model's blocks: entries of ``nn.Sequential`` and ``nn.ModuleList`` that have submodules.

    An entry that is itself a list of blocks is replaced by these.

    >>> blocks_of(nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.ReLU()]))
    ['0']
    """
    return [path for path, module in _entries("", model) if next(module.children(), None) is not None]


def _entries(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the entries of lists and sequences, except those that hold blocks of their own."""
    for name, child in module.named_children():
        inner = f"{path}.{name}".lstrip(".")
        holds = type(child) in LISTS and any(next(entry.children(), None) is not None for entry in child.children())
        if type(module) in LISTS and not holds and type(child) is not nn.ModuleList:
            yield inner, child
        else:
            yield from _entries(inner, child)


def _outermost(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(path for path in paths if not any(path.startswith(f"{other}.") for other in paths))


def _no_match(what: str, layout: Layout, names: Sequence[str], like: str) -> LayoutError:
    without = str(replace(layout, recompute=None))
    some = f"; or write one of {', '.join(names[:8])}{', ...' * (len(names) > 8)}" if names else ""
    if activation_offload_target(layout) is not None:  # no hint to patterns: they recompute and do not offload
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
        fix=f"write recompute:{like}" if like else f"leave it out: {without}{some}",
    )


def called_modules(model: nn.Module, paths: Sequence[str], called: Collection[str]) -> tuple[str, ...]:
    """Returns the modules at ``paths``, with each one that pipeline stages call only in parts replaced by its children.

    ``called`` has the modules that the stages call.

    >>> called_modules(nn.Sequential(nn.Sequential(nn.ReLU()), nn.ReLU()), ["0", "1"], ["0.0", "1"])
    ('0.0', '1')
    """
    module_paths: list[str] = []
    for path in paths:
        if path not in called and any(name.startswith(f"{path}.") for name in called):
            inside = [f"{path}.{name}" for name, _ in model.get_submodule(path).named_children()]
            module_paths += called_modules(model, inside, called)
        else:
            module_paths.append(path)
    return tuple(module_paths)


def blocks_kept_whole(model: nn.Module, layout: Layout) -> tuple[str, ...]:
    """Returns the names of the ``nn.Sequential`` blocks that a pipeline stage calls as one module.

    These are the blocks that the layout recomputes or compiles. Stages call the layers of any other ``nn.Sequential``
    one by one.

    >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    >>> [blocks_kept_whole(model, Layout.parse(line)) for line in ("pp2", "pp2 recompute:full")]
    [(), ('0',)]
    """
    blocks = (*recomputed_blocks(model, layout), *(blocks_of(model) if layout.compile is not None else ()))
    return tuple(path for path in dict.fromkeys(blocks) if type(model.get_submodule(path)) is nn.Sequential)


def count_recomputation(module_calls: ModuleCalls, paths: Sequence[str], trained: Collection[str]) -> ModuleCalls:
    """Returns a forward's module calls with ``num_forwards=2`` where activation checkpointing recomputes them.

    ``paths`` names the checkpointed blocks. A block is recomputed if gradients flow into it; ``trained`` names the
    modules with trained parameters.
    """
    calls: Mapping[str, tuple[ModuleCall, ...]] = module_calls
    for path in paths:
        inside = [name for name in module_calls if f"{name}.".startswith(f"{path}.")]
        if any(name in trained or any(call.needs_gradient for call in module_calls[name]) for name in inside):
            twice = {name: tuple(replace(call, num_forwards=2) for call in module_calls[name]) for name in inside}
            calls = {**calls, **twice}
    return calls
