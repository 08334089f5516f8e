"""Sorts the actions of a pipeline schedule into classes, and finds a schedule of few stages that stands for many."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardwright.plan.schedule import Action, Schedule


class ActionClass(NamedTuple):
    """The class of an action in the schedule of its stage; actions of one class are taken to do the same.

    ``slot`` is the number of the action's chunk on its stage, and ``kind`` is F, B, I or W. ``order`` says whether the
    action is the first, the last or the only one of this slot and kind, or between. ``after`` names the previous action
    of the stage by slot and kind, such as "0B", and ``before`` the next one; "" if there is none. What an action
    allocates and frees depends on them, since a stage begins to receive for the next action.
    """

    slot: int
    kind: str
    order: str
    after: str = ""
    before: str = ""


def places(schedule: Schedule, stage: int) -> dict[Action, ActionClass]:
    """Returns the :class:`ActionClass` of each action of a stage: its chunk, kind, order and neighbours."""
    slots = {chunk: slot for slot, chunk in enumerate(schedule.chunks_of(stage))}
    seen: dict[tuple[int, str], list[Action]] = {}
    for action in schedule.actions[stage]:
        seen.setdefault((slots[action.chunk], action.kind), []).append(action)
    kinds = ["", *(f"{slots[action.chunk]}{action.kind}" for action in schedule.actions[stage]), ""]
    around = dict(zip(schedule.actions[stage], zip(kinds, kinds[2:], strict=False), strict=True))
    found = {}
    for (slot, kind), actions in seen.items():
        for number, action in enumerate(actions):
            order = "first" if number == 0 else "last" if action is actions[-1] else "between"
            order = "only" if len(actions) == 1 else order
            found[action] = ActionClass(slot, kind, order, *around[action])
    return found


def like(place: ActionClass, actions: Iterable[ActionClass]) -> ActionClass | None:
    """Returns the one of the classes ``actions`` that is most like the class ``place``, or None if none is like it.

    Like it are those of the same chunk of their stage, kind (F, B, I or W) and order, except that "between" and "last"
    may stand for each other. Of these, the one with the most equal order and neighbours is returned.
    """
    orders = {"between": ("between", "last"), "last": ("last", "between")}.get(place.order, (place.order,))
    known = [each for each in actions if each[:2] == place[:2] and each.order in orders]
    if not known:
        return None
    own = place.kind != "F"  # a backward's last one sums gradients; the last forward is like others

    def likeness(each: ActionClass) -> tuple[bool, ...]:
        same = each.after == place.after, each.before == place.before
        return (each.order == place.order, all(same), *same) if own else (all(same), *same, each.order == place.order)

    return max(known, key=likeness)


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
    found: list[int] = []
    for turn in range(schedule.num_chunks // schedule.num_stages):
        onward = schedule.stage_of[turn * schedule.num_stages] == 0
        found += range(few) if onward else reversed(range(few))
    return tuple(found)


def sample_chunks(schedule: Schedule, few: int) -> tuple[int, ...]:
    """Returns, for each chunk of the schedule on ``few`` stages, the chunk of ``schedule`` that it stands for."""
    slots = dict[int, int]()
    found = []
    for kind in stage_of(schedule, few):
        stage, slot = representative(kind, schedule.num_stages, few), slots.get(kind, 0)
        slots[kind] = slot + 1
        found.append(schedule.chunks_of(stage)[slot])
    return tuple(found)


def has_all_actions(few: Schedule, schedule: Schedule) -> bool:
    """Returns whether ``few``, a schedule on few stages, has an action like (:func:`like`) each one of ``schedule``."""
    known = [set(places(few, stage).values()) for stage in range(few.num_stages)]
    kinds = (kind_of(stage, schedule.num_stages, few.num_stages) for stage in range(schedule.num_stages))
    return all(
        like(place, known[kind]) for stage, kind in enumerate(kinds) for place in set(places(schedule, stage).values())
    )
