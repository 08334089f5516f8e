"""Sorts the actions of a pipeline schedule into classes, and finds a schedule of few stages that stands for many."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwright.plan.schedule import Schedule


class ActionClass(NamedTuple):
    """The class of an action in the schedule of its stage; actions of one class are taken to do the same.

    ``slot`` is the number of the action's chunk on its stage, and ``kind`` is F, B, I or W. ``order`` is the action's
    place among those of its slot and kind: "first", "last", "only" or "between". If they are not forwards, the second
    one is "second": only in later ones may the sums of gradients that two earlier ones began be under way. ``after``
    names the previous action of the stage by slot and kind, such as "0B", and ``before`` the next one; "" if there is
    none. They are part of the class because a stage posts the receives of its next action early, which takes memory.
    """

    slot: int
    kind: str
    order: str
    after: str = ""
    before: str = ""


@dataclass(frozen=True)
class ActionOrder:
    """The classes of a stage's actions, each once, and the index in ``classes`` of each action of its schedule."""

    classes: tuple[ActionClass, ...]
    order: npt.NDArray[np.intp]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many actions of each class the stage has, in the order of ``classes``."""
        return tuple(np.bincount(self.order, minlength=len(self.classes)).tolist())


@lru_cache(maxsize=32)
def action_orders(schedule: Schedule) -> tuple[ActionOrder, ...]:
    """Returns, for each stage, the classes of its actions and the class of each action (:class:`ActionOrder`).

    The classes of one chunk and kind stand together, in the order in which they first occur in the schedule. Such
    groups are in the order of their first actions.
    """
    return tuple(_action_order(schedule, stage) for stage in range(schedule.num_stages))


def _action_order(schedule: Schedule, stage: int) -> ActionOrder:
    # whole lists are handled at once, which runs in C: all stages of a step may have ten thousand actions
    slots = {chunk: slot for slot, chunk in enumerate(schedule.chunks_of(stage))}
    code_of = {(kind, chunk): code for code, (chunk, kind) in enumerate(product(slots, _KINDS))}
    codes = [code_of[kind, chunk] for kind, _, chunk in schedule.actions[stage]]
    around = [*zip([_NONE, *codes], codes, [*codes[1:], _NONE], strict=False)]
    keys: list[tuple[tuple[int, int, int], str]] = []
    index_of = {triple: index for index, triple in enumerate(dict.fromkeys(around))}
    keys += [(triple, "between") for triple in index_of]
    order = [index_of[triple] for triple in around]
    begins = {code: codes.index(code) for code in dict.fromkeys(codes)}
    for code, first in begins.items():
        for at, name in _ends(codes, code, first).items():
            order[at] = len(keys)
            keys.append((around[at], name))
    pairs = sorted(dict(zip(reversed(order), range(len(order) - 1, -1, -1), strict=True)).items(),
                   key=lambda pair: (begins[keys[pair[0]][0][1]], pair[1]))  # fmt: skip
    names = {code: f"{slots[chunk]}{kind}" for (kind, chunk), code in code_of.items()} | {_NONE: ""}
    classes = (
        ActionClass(int(names[own][:-1]), names[own][-1], name, names[after], names[before])
        for (after, own, before), name in (keys[index] for index, _ in pairs)
    )
    renumbered = {index: number for number, (index, _) in enumerate(pairs)}
    return ActionOrder(tuple(classes), np.array([renumbered[index] for index in order], dtype=np.intp))


_KINDS, _NONE = "FBIW", -1


def _ends(codes: list[int], code: int, first: int) -> dict[int, str]:
    """Returns, by index, the order of the first, second, last or only action of one chunk and kind."""
    number = codes.count(code)
    if number == 1:
        return {first: "only"}
    last = len(codes) - 1 - codes[::-1].index(code)
    second = {} if _KINDS[code % len(_KINDS)] == "F" else {codes.index(code, first + 1): "second"}
    return {first: "first", **second, last: "last"}


def nearest_class(place: ActionClass, actions: Collection[ActionClass]) -> ActionClass | None:
    """Returns the class of actions among ``actions`` that stands for the class ``place``, or None if none does.

    It has the same chunk of its stage, kind (F, B, I or W) and order, except that "second", "between" and "last" may
    stand for each other. Of several, the one with the most equal order and neighbours is returned.
    """
    if place in actions:
        return place
    orders = _LATER if place.order in _LATER else (place.order,)
    candidates = sorted((other for other in actions if other[:2] == place[:2] and other.order in orders), key=_is_last)
    if not candidates:
        return None
    is_backward = place.kind != "F"  # the last backward sums gradients, so its order counts most; no forward does
    middle = [order for order in _LATER if (order == "last") == (place.order == "last")]

    def likeness(other: ActionClass) -> tuple[bool, ...]:
        same = other.after == place.after, other.before == place.before
        order = other.order == place.order
        return (order or other.order in middle, all(same), *same, order) if is_backward else (all(same), *same, order)

    return max(candidates, key=likeness)


_LATER = ("second", "between", "last")


def _is_last(place: ActionClass) -> bool:
    return place.order == "last"


def kind_of(stage: int, num_stages: int, few: int) -> int:
    """Returns which stage of a pipeline with only ``few`` stages represents ``stage`` of one with ``num_stages``.

    The last represents the last, those before it the stages of their own numbers, and the last but one all others.
    """
    return stage if stage < few - 1 else few - 1 if stage == num_stages - 1 else few - 2


def representative(kind: int, num_stages: int, few: int) -> int:
    """Returns the first stage, of ``num_stages``, that stage ``kind`` of a pipeline with only ``few`` represents."""
    return num_stages - 1 if kind == few - 1 else kind


def stage_of(schedule: Schedule, few: int) -> tuple[int, ...]:
    """Returns the stage of each chunk of a schedule like ``schedule`` but on only ``few`` stages.

    Each pass over the stages keeps its direction: from the first to the last, or back, as in a V.
    """
    stages: list[int] = []
    for turn in range(schedule.num_chunks // schedule.num_stages):
        onward = schedule.stage_of[turn * schedule.num_stages] == 0
        stages += range(few) if onward else reversed(range(few))
    return tuple(stages)


def sample_chunks(schedule: Schedule, few: int) -> tuple[int, ...]:
    """Returns, for each chunk of the schedule on ``few`` stages, the chunk of ``schedule`` that it stands for."""
    slots = dict[int, int]()
    chunks = []
    for kind in stage_of(schedule, few):
        stage, slot = representative(kind, schedule.num_stages, few), slots.get(kind, 0)
        slots[kind] = slot + 1
        chunks.append(schedule.chunks_of(stage)[slot])
    return tuple(chunks)


def has_all_actions(few: Schedule, schedule: Schedule) -> bool:
    """Returns whether ``few``, a schedule on few stages, has an action that can stand for each action of ``schedule``.

    The action is looked for on the stage that stands for the action's stage (:func:`kind_of`).
    """
    classes = [order.classes for order in action_orders(few)]
    kinds = (kind_of(stage, schedule.num_stages, few.num_stages) for stage in range(schedule.num_stages))
    return all(
        nearest_class(place, classes[kind])
        for kind, order in zip(kinds, action_orders(schedule), strict=True)
        for place in order.classes
    )
