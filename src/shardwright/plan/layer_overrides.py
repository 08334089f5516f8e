"""What a person says of single layers: a table of name patterns and roles, which goes before what is found out.

::

    {"layers.*.mlp.up": "column", "layers.*.mlp.down": "row", "head": "copied"}

Patterns are those of a shell, a star crosses dots, and of several that match a name the last one counts. "copied" keeps
a module and all inside it whole. "column" and "row" pair layers of one module whose code cannot be followed: the person
answers for what lies between them being elementwise, and ``verify`` proves it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from shardwright.analysis.callers import called_elsewhere, chain_callers
from shardwright.analysis.known_modules import known_chains
from shardwright.analysis.structure import (
    LayerChain,
    find_chains,
    is_elementwise_module,
    is_exactly,
    owners,
    registered_twice,
    trace,
)
from shardwright.errors import LayoutError, nearest
from shardwright.plan.plan import Job, Plan

ROLES = ("column", "row", "copied")


class Said(NamedTuple):
    """What was said of one module, and by which pattern."""

    role: str
    pattern: str

    def __str__(self) -> str:
        return f"roles say {self.pattern} = {self.role}"


@dataclass(frozen=True)
class Overrides:
    """What was said of the modules of one model, by name; and the pairs of layers that follow.

    ``still`` are the last layers of known pairs whose activations do not have the samples in dim 0.
    """

    said: Mapping[str, Said]
    copied: Mapping[str, Said]
    chains: tuple[LayerChain, ...]
    still: frozenset[str] = frozenset()

    @staticmethod
    def of(model: nn.Module, roles: Mapping[str, str]) -> Overrides:
        """Finds the modules that ``roles`` mean.

        Raises: LayoutError: an unknown role, a pattern that matches nothing, layers that make no pair.

        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Softmax(-1), nn.Linear(8, 2))
        >>> Overrides.of(model, {"0": "column", "2": "row"}).chains
        (Chain(columns=('0',), between=(), row='2', entry=None, owner=None),)
        """
        said = _said(model, roles)
        still = frozenset(chain.row for chain, samples_first in known_chains(model) if not samples_first)
        return Overrides(said, dict(_copied(model, said)), tuple(_pairs(model, said)), still)

    def all_chains(self, model: nn.Module) -> Iterator[LayerChain]:
        """The pairs asked for, then those known and those found in what is left; a layer is in one at most."""
        known = [chain for chain, _ in known_chains(model)]
        seen = find_chains(model)
        allowed_callers = {layer: home for chain in seen for layer, home in chain_callers(model, chain).items()}
        elsewhere = called_elsewhere(model, allowed_callers)
        taken = {*self.copied, *self.said}
        twice = registered_twice(model)
        yield from self.chains
        for chain in (*known, *seen):
            layers = {*chain.columns, chain.row}
            if elsewhere.intersection((*layers, *chain.between)):
                continue  # somebody looks inside
            if not taken & layers and not any(id(model.get_submodule(layer)) in twice for layer in layers):
                taken |= layers
                yield chain

    def speak_of(self, paths: Collection[str]) -> bool:
        """Whether anything was said of one of these modules."""
        return any(path in self.said or path in self.copied for path in paths)

    def whole_parameters(self, model: nn.Module) -> set[str]:
        """The parameters that stay whole."""
        return {name for path, _, _, name in owners(model) if path in self.copied}

    def explained(self, plan: Plan, strategy: str) -> Plan:
        """The plan with what was said in the reasons that ``show`` prints.

        Raises: LayoutError: a pair that was asked for and cannot be cut.
        """
        for chain in self.chains:
            for layer in (*chain.columns, chain.row):
                if layer not in plan.notes:
                    role = plan.roles.get(layer)
                    why = role.why if role else "its parameters are used elsewhere too"
                    raise _cannot(layer, self.said[layer], why)
                role = plan.roles[layer]
                plan = plan.role(layer, role.strategy, role.name, f"{role.why}; {self.said[layer]}")
        used = {use.module for use in plan.uses}
        for path, said in self.copied.items():
            if path in used:
                plan = plan.role(path, strategy, "copied", f"{said}: every rank computes it whole")
        return plan


def overrides_of(job: Job) -> Overrides:
    """What was said of the job's model."""
    return Overrides.of(job.model, job.roles)


def _said(model: nn.Module, roles: Mapping[str, str]) -> dict[str, Said]:
    names = [name for name, _ in model.named_modules() if name]
    said: dict[str, Said] = {}
    if not isinstance(roles, Mapping):
        raise _no_name(roles)
    for pattern, role in roles.items():
        if not isinstance(pattern, str):
            raise _no_name(pattern)
        if role not in ROLES:
            raise LayoutError(
                f"no such role for '{pattern}'",
                given=f"{pattern} = {role}",
                allowed=", ".join(ROLES),
                fix=f"write {pattern} = {nearest(str(role), ROLES)}",
            )
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise LayoutError(
                f"no module of the model is called '{pattern}'",
                given=f"{pattern} = {role}",
                allowed="the names of modules, or patterns of them: * for anything, dots too",
                fix=_meant(pattern, names) if names else f"leave out {pattern}: nothing is inside",
            )
        said.update(dict.fromkeys(matched, Said(role, pattern)))
    return said


def _no_name(given: object) -> LayoutError:
    return LayoutError(
        "roles are a table of names and roles",
        given=repr(given),
        allowed="names of modules, or patterns of them, each with " + ", ".join(ROLES),
        fix='write {"layers.*.up": "column", "layers.*.down": "row"}',
    )


def _meant(pattern: str, names: list[str]) -> str:
    """What to write for a name that there is not: the one like it, or those there are."""
    like = get_close_matches(pattern, names, n=1)
    return f"write {like[0]}" if like else f"write one of {', '.join(names[:8])}{', ...' * (len(names) > 8)}"


def _copied(model: nn.Module, said: Mapping[str, Said]) -> Iterator[tuple[str, Said]]:
    """The modules to keep whole: what was said of a module holds for all inside, of which nothing was said."""
    for path, _ in model.named_modules():
        parts = path.split(".")
        nearest_said = next((s for n in range(len(parts), 0, -1) if (s := said.get(".".join(parts[:n])))), None)
        if nearest_said is not None and nearest_said.role == "copied":
            yield path, nearest_said


def _pairs(model: nn.Module, said: Mapping[str, Said]) -> Iterator[LayerChain]:
    """The pairs by parent: each row with the columns as wide as its input."""
    by_parent: dict[str, list[str]] = {}
    for path, (role, _) in said.items():
        module = model.get_submodule(path)
        if role == "copied":
            continue
        if not is_exactly(module, nn.Linear) and not (role == "column" and is_elementwise_module(module)):
            raise _no_layer(path, said[path], module)
        by_parent.setdefault(path.rpartition(".")[0], []).append(path)
    for paths in by_parent.values():
        yield from _pairs_of(model, said, paths)


def _pairs_of(model: nn.Module, said: Mapping[str, Said], paths: list[str]) -> Iterator[LayerChain]:
    layers = {path: layer for path in paths if isinstance(layer := model.get_submodule(path), nn.Linear)}
    between = tuple(path for path in paths if path not in layers)
    columns = [path for path in layers if said[path].role == "column"]
    rows = [path for path in layers if said[path].role == "row"]
    found: dict[str, list[str]] = {
        row: [c for c in columns if layers[c].out_features == layers[row].in_features] for row in rows
    }
    for row, mine in found.items():
        if not mine:
            raise _no_pair(row, said[row], layers, columns)
        if len({layers[c].in_features for c in mine}) > 1:
            raise _no_pair(row, said[row], layers, mine)
    for column in columns:
        mine = [row for row in rows if column in found[row]]
        if len(mine) != 1:
            raise _no_pair(column, said[column], layers, mine or rows)
    if between and len(rows) != 1:
        raise _no_pair(between[0], said[between[0]], layers, rows)
    for row, mine in found.items():
        seen = _between(model, said, row, mine)
        yield LayerChain(tuple(mine), tuple(dict.fromkeys((*between, *seen))), row, None)


def _between(model: nn.Module, said: Mapping[str, Said], row: str, columns: list[str]) -> Iterator[str]:
    """What treats each element alone on the way from the columns to the row, where a trace shows a way.

    Raises: LayoutError: it shows that the row does not take what a column gives.
    """
    parent = row.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    graph = trace(model.get_submodule(parent))
    waiting = [node for node in graph.nodes if f"{prefix}{node.target}" == row] if graph is not None else []
    seen, missed = set(waiting), set(columns) if waiting else set()
    while waiting:
        for node in waiting.pop().all_input_nodes:
            path = f"{prefix}{node.target}"
            if node in seen or path in columns:
                missed.discard(path)
                continue
            seen.add(node)
            waiting.append(node)
            if node.op == "call_module" and is_elementwise_module(model.get_submodule(path)):
                yield path
    if missed:
        column = min(missed)
        raise LayoutError(
            f"'{row}' does not take what '{column}' gives",
            given=f"{said[row]}; {said[column]}",
            allowed="a column before its row, with nothing between but what treats each element alone",
            fix=f"write {said[row].pattern} = column and {said[column].pattern} = row, if that is their order",
        )


def _no_layer(path: str, said: Said, module: nn.Module) -> LayoutError:
    return LayoutError(
        f"'{path}' cannot be a {said.role}",
        given=f"{type(module).__name__}; {said}",
        allowed="Linear as column or row; what treats each element alone as column; any module as copied",
        fix=f"give the layers inside it roles, or write {said.pattern} = copied",
    )


def _no_pair(path: str, said: Said, layers: Mapping[str, nn.Linear], others: list[str]) -> LayoutError:
    def spelled(name: str) -> str:
        return f"'{name}' {layers[name].in_features} -> {layers[name].out_features}" if name in layers else f"'{name}'"

    beside = ", ".join(map(spelled, others)) or "nothing"
    return LayoutError(
        f"'{path}' makes no pair with the layers beside it",
        given=f"{spelled(path)}; {said}; beside it {beside}",
        allowed="in one module, columns of the same input and a row that takes as many features as each gives",
        fix="name both layers of the pair, and no others",
    )


def _cannot(path: str, said: Said, why: str) -> LayoutError:
    return LayoutError(
        f"'{path}' cannot be cut as was asked",
        given=f"{said}; {why}",
        allowed="layers of their own, with at least as many features between them as ranks cut them",
        fix=f"leave out {said.pattern}, or write a smaller tp",
    )


__all__ = ["ROLES", "Overrides", "Said", "overrides_of"]
