"""Writes and reads, as JSON, the values that plans keep in files: plain data, and a few classes of this library.

Reading calls only the constructors of these classes, which hold nothing but data. So a file from another source cannot
run code or change a class.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from shardwright.cost.operators import OperatorRecord
from shardwright.errors import ExplainedError, GridError, LayoutError, NoValuesError, PlanError
from shardwright.layout import Factor, Layout, Option
from shardwright.plan.schedule import Action, Schedule
from shardwright.planner.layout_records import ActionShape, LayoutRecords, StageRecord, StageRecords
from shardwright.planner.places import ActionClass
from shardwright.planner.rehearse import MessageRecord, WaitRecord
from shardwright.planner.schedule_cost import ScheduleCost
from shardwright.planner.state_shares import StateShares

_ERRORS: Mapping[str, type[ExplainedError]] = {
    error_type.__name__: error_type for error_type in (LayoutError, GridError, PlanError, NoValuesError)
}

_ATOMS = (type(None), bool, int, float, str)


class StoredMisfit(NamedTuple):
    """A LayoutError or PlanError that was raised in place of a result: the name of its class, and its parts."""

    kind: str
    what: str
    given: str | None
    allowed: str | None
    fix: str | None

    @classmethod
    def of(cls, error: LayoutError | PlanError) -> StoredMisfit:
        """Returns the parts of an error, and the name of its class or of the nearest base in ``_ERRORS``."""
        kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _ERRORS)
        parts = (part if part is None else str(part) for part in (error.given, error.allowed, error.fix))
        return cls(kind, error.what, *parts)

    def error(self) -> ExplainedError:
        """Returns the error, to be raised."""
        return _ERRORS[self.kind](self.what, given=self.given, allowed=self.allowed, fix=self.fix)


def to_text(value: Any) -> str:
    """Returns a container as JSON: a list of nodes, each ``[kind, item, ...]``, the last of them the container.

    An item is a plain value, or ``[n]`` for the n-th node. Equal immutable nodes, such as the records of equal
    operators, are written once.

    Raises: TypeError: something in it is of another class than those that can be kept.

    >>> to_text({"a": (1, 2.5), "b": (1, 2.5)})
    '[["tuple",1,2.5],["dict","a",[0],"b",[0]]]'
    >>> from_nodes(json.loads(_))
    {'a': (1, 2.5), 'b': (1, 2.5)}
    """
    nodes = list[str]()
    numbers, by_text = dict[int, int](), dict[str, int]()
    dumps = json.JSONEncoder(separators=(",", ":")).encode

    def item(value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if id(value) not in numbers:
            text = dumps([kind.__name__, *map(item, _parts(value))])
            number = len(nodes) if issubclass(kind, dict) else by_text.setdefault(text, len(nodes))
            if number == len(nodes):
                nodes.append(text)
            numbers[id(value)] = number
        return [numbers[id(value)]]

    item(value)
    return f"[{','.join(nodes)}]"


def from_nodes(nodes: list[list[Any]]) -> Any:
    """Returns the container that :func:`to_text` has written as these nodes.

    Nodes from another source may raise any exception.
    """
    values, makers = list[Any](), _makers()
    for kind, *items in nodes:
        values.append(makers[kind]([values[entry[0]] if type(entry) is list else entry for entry in items]))
    return values[-1]


def _parts(value: Any) -> Iterable[Any]:
    kind = type(value)
    if kind in (dict, Counter):
        return chain.from_iterable(value.items())
    if kind not in (tuple, *_classes()):
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is no class of what is kept")
    return [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else value


@cache
def _classes() -> tuple[type, ...]:
    """Returns the classes of this library whose values can be written."""
    return (
        Action, ActionClass, ActionShape, Factor, Layout, LayoutRecords, MessageRecord, OperatorRecord, Option,
        Schedule, ScheduleCost, StageRecord, StageRecords, StateShares, StoredMisfit, WaitRecord,
    )  # fmt: skip


@cache
def _makers() -> Mapping[str, Callable[[list[Any]], Any]]:
    """Returns, by kind of node, the function that makes a value of the node's items."""

    def dict_of(items: list[Any]) -> dict[Any, Any]:
        return dict(zip(items[::2], items[1::2], strict=True))

    def misfit_of(items: list[Any]) -> StoredMisfit:
        misfit = StoredMisfit(*items)
        misfit.error()
        return misfit

    def maker(kind: Any) -> Callable[[list[Any]], Any]:
        return kind._make if hasattr(kind, "_make") else lambda items: kind(*items)

    return {
        **{kind.__name__: maker(kind) for kind in _classes()},
        "StoredMisfit": misfit_of, "dict": dict_of, "Counter": lambda items: Counter(dict_of(items)), "tuple": tuple,
    }  # fmt: skip
