"""Layer overrides: tensor-parallel roles that the user gives to layers by name, which override the analysis.

::

    {"layers.*.mlp.up": "column", "layers.*.mlp.down": "row", "head": "copied"}

Patterns are those of a shell; a star matches dots too, and the last pattern that matches a name counts. "copied" keeps
a module and its children unsharded. "column" and "row" make layers of one module a column- and row-parallel pair, also
if the module's code cannot be traced. Then the user promises that everything between them is elementwise; ``verify``
compares the losses and gradients with those of one device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from shardwright.analysis.traced.callers import called_elsewhere, chain_callers
from shardwright.analysis.traced.known_modules import known_chains
from shardwright.analysis.traced.structure import (
    LayerChain,
    find_chains,
    is_elementwise_module,
    is_exactly,
    owners,
    registered_twice,
    trace,
)
from shardwright.errors import LayoutError, fix_for
from shardwright.plan.plan import Job, Plan

ROLES = ("column", "row", "copied")


class Override(NamedTuple):
    """The tensor-parallel role that the user gave to one module, and the name pattern that matched the module."""

    role: str
    pattern: str

    def __str__(self) -> str:
        return f"roles say {self.pattern} = {self.role}"


@dataclass(frozen=True)
class Overrides:
    """The tensor-parallel role (column-parallel, row-parallel, copied) that the user gave to each module, by name.

    ``chains`` are the column- and row-parallel pairs that these roles make. ``copied`` includes the children of copied
    modules. ``still`` names the row-parallel layers in torch's transformer layers whose samples are not in dim 0; their
    output is not cut along the samples.
    """

    by_module: Mapping[str, Override]
    copied: Mapping[str, Override]
    chains: tuple[LayerChain, ...]
    still: frozenset[str] = frozenset()

    @staticmethod
    def of(model: nn.Module, roles: Mapping[str, str]) -> Overrides:
        """Returns the overrides for a model from ``roles``, the user's table of name patterns and roles.

        Raises: LayoutError: a role is unknown or cannot be that of the module, a pattern matches no module, or column
            and row layers make no pair.
        """
        by_module = _matched(model, roles)
        copied = {}
        for path, _ in model.named_modules():
            parts = path.split(".")  # a module without an override of its own has that of the nearest parent with one
            parents = (by_module.get(".".join(parts[:n])) for n in range(len(parts), 0, -1))
            nearest_override = next(filter(None, parents), None)
            if nearest_override is not None and nearest_override.role == "copied":
                copied[path] = nearest_override
        still = frozenset(chain.row for chain, samples_first in known_chains(model) if not samples_first)
        return Overrides(by_module, copied, tuple(_pairs(model, by_module)), still)

    def all_chains(self, model: nn.Module) -> Iterator[LayerChain]:
        """Yields the pairs of column- and row-parallel layers in a model; no layer is in two of them.

        The user's pairs come first, then those of known modules such as torch's transformer layers, then those found by
        tracing. Of the last two, a pair is left out if other code calls its layers, if a layer is registered twice, or
        if the user gave one of its layers a role.
        """
        traced = find_chains(model)
        allowed_callers = {layer: home for chain in traced for layer, home in chain_callers(model, chain).items()}
        elsewhere = called_elsewhere(model, allowed_callers)
        taken = {*self.copied, *self.by_module}
        twice = registered_twice(model)
        yield from self.chains
        for chain in (*(chain for chain, _ in known_chains(model)), *traced):
            layers = {*chain.columns, chain.row}
            if elsewhere.intersection((*layers, *chain.between)):
                continue  # other code uses these layers too, and would see sharded values
            if not taken & layers and not any(id(model.get_submodule(layer)) in twice for layer in layers):
                taken |= layers
                yield chain

    def speak_of(self, paths: Collection[str]) -> bool:
        """Returns whether the user gave a tensor-parallel role to one of the modules at ``paths``.

        The role "copied" counts for the children of its module too.
        """
        return any(path in self.by_module or path in self.copied for path in paths)

    def whole_parameters(self, model: nn.Module) -> set[str]:
        """Returns the names of the parameters that stay unsharded because the user gave their module the role "copied".

        The children of such a module are included.
        """
        return {name for path, _, _, name in owners(model) if path in self.copied}

    def explained(self, plan: Plan, strategy: str) -> Plan:
        """Returns the plan with the user's overrides added to the reasons for layers' roles, which ``show`` prints.

        ``strategy`` is the name of the strategy that made the plan.

        Raises: LayoutError: the strategy did not shard a pair that the user asked for.
        """
        for chain in self.chains:
            for layer in (*chain.columns, chain.row):
                if layer not in plan.notes:
                    role = plan.roles.get(layer)
                    why = role.why if role else "its parameters are used elsewhere too"
                    raise LayoutError(
                        f"'{layer}' cannot be cut as was asked",
                        given=f"{self.by_module[layer]}; {why}",
                        allowed="layers of their own, with at least as many features between them as ranks cut them",
                        fix=f"leave out {self.by_module[layer].pattern}, or write a smaller tp",
                    )
                role = plan.roles[layer]
                plan = plan.role(layer, role.strategy, role.name, f"{role.why}; {self.by_module[layer]}")
        used = {use.module for use in plan.uses}
        for path, override in self.copied.items():
            if path in used:
                plan = plan.role(path, strategy, "copied", f"{override}: every rank computes it whole")
        return plan


def overrides_of(job: Job) -> Overrides:
    """Returns the tensor-parallel roles that the user gave to layers of the job's model, by module.

    Raises: LayoutError: a role is unknown or cannot be that of the module, a pattern matches no module, or column and
        row layers make no pair.
    """
    return Overrides.of(job.model, job.roles)


def _matched(model: nn.Module, roles: Mapping[str, str]) -> dict[str, Override]:
    """Returns the overrides by module name, from the user's patterns; raises LayoutError for unknown roles or names."""
    names = [name for name, _ in model.named_modules() if name]
    by_module: dict[str, Override] = {}
    if not isinstance(roles, Mapping):
        raise _not_a_table(roles)
    for pattern, role in roles.items():
        if not isinstance(pattern, str):
            raise _not_a_table(pattern)
        if role not in ROLES:
            raise LayoutError(
                f"no such role for '{pattern}'",
                given=f"{pattern} = {role}",
                allowed=", ".join(ROLES),
                fix=fix_for(str(role), ROLES, before=f"write {pattern} = "),
            )
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            some = f"write one of {', '.join(names[:8])}{', ...' * (len(names) > 8)}"
            raise LayoutError(
                f"no module of the model is called '{pattern}'",
                given=f"{pattern} = {role}",
                allowed="the names of modules, or patterns of them: * for anything, dots too",
                fix=fix_for(pattern, names, some) if names else f"leave out {pattern}: the model has no submodules",
            )
        by_module.update(dict.fromkeys(matched, Override(role, pattern)))
    return by_module


def _not_a_table(given: object) -> LayoutError:
    return LayoutError(
        "roles are a table of names and roles",
        given=repr(given),
        allowed="names of modules, or patterns of them, each with " + ", ".join(ROLES),
        fix='write {"layers.*.up": "column", "layers.*.down": "row"}',
    )


def _pairs(model: nn.Module, overrides: Mapping[str, Override]) -> Iterator[LayerChain]:
    """Yields the user's pairs, module by module: each row-parallel layer with its column-parallel ones."""
    by_parent: dict[str, list[str]] = {}
    for path, override in overrides.items():
        module = model.get_submodule(path)
        if override.role == "copied":
            continue
        if not is_exactly(module, nn.Linear) and not (override.role == "column" and is_elementwise_module(module)):
            raise LayoutError(
                f"'{path}' cannot be a {override.role}",
                given=f"{type(module).__name__}; {override}",
                allowed="Linear as column or row; elementwise modules as column; any module as copied",
                fix=f"give the layers inside it roles, or write {override.pattern} = copied",
            )
        by_parent.setdefault(path.rpartition(".")[0], []).append(path)
    for paths in by_parent.values():
        yield from _pairs_of(model, overrides, paths)


def _pairs_of(model: nn.Module, overrides: Mapping[str, Override], paths: list[str]) -> Iterator[LayerChain]:
    # without a trace of the code, widths are the only hint: a column belongs to the row with as many in-features
    layers = {path: layer for path in paths if isinstance(layer := model.get_submodule(path), nn.Linear)}
    between = tuple(path for path in paths if path not in layers)
    columns = [path for path in layers if overrides[path].role == "column"]
    rows = [path for path in layers if overrides[path].role == "row"]
    columns_of: dict[str, list[str]] = {
        row: [c for c in columns if layers[c].out_features == layers[row].in_features] for row in rows
    }
    for row, fitting in columns_of.items():
        if len({layers[c].in_features for c in fitting}) != 1:
            raise _no_pair(row, overrides[row], layers, fitting or columns)
    for column in columns:
        taken_by = [row for row in rows if column in columns_of[row]]
        if len(taken_by) != 1:
            raise _no_pair(column, overrides[column], layers, taken_by or rows)
    if between and len(rows) != 1:
        raise _no_pair(between[0], overrides[between[0]], layers, rows)
    for row, fitting in columns_of.items():
        traced = _between(model, overrides, row, fitting)
        yield LayerChain(tuple(fitting), tuple(dict.fromkeys((*between, *traced))), row, None)


def _between(model: nn.Module, overrides: Mapping[str, Override], row: str, columns: list[str]) -> Iterator[str]:
    """Yields the elementwise modules between the columns and the row, if a trace of their parent shows them.

    Raises: LayoutError: it shows that the row's input does not come from a column.
    """
    parent = row.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    graph = trace(model.get_submodule(parent))
    waiting = [node for node in graph.nodes if f"{prefix}{node.target}" == row] if graph is not None else []
    seen, missed = set(waiting), set(columns) if waiting else set()
    # walks back from the row's call; a column that the walk does not meet does not feed the row
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
            given=f"{overrides[row]}; {overrides[column]}",
            allowed="a column before its row, with only elementwise modules between them",
            fix=f"write {overrides[row].pattern} = column and {overrides[column].pattern} = row, if they run so",
        )


def _no_pair(path: str, override: Override, layers: Mapping[str, nn.Linear], others: list[str]) -> LayoutError:
    def spelled(name: str) -> str:
        return f"'{name}' {layers[name].in_features} -> {layers[name].out_features}" if name in layers else f"'{name}'"

    return LayoutError(
        f"'{path}' makes no pair with the layers beside it",
        given=f"{spelled(path)}; {override}; beside it {', '.join(map(spelled, others)) or 'nothing'}",
        allowed="in one module, columns of the same input and a row that takes as many features as each gives",
        fix="name both layers of the pair, and no others",
    )
