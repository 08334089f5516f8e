"""Checks that a schedule can run: complete, in order and free of deadlock. Errors name the actions and a remedy."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from shardwright.errors import LayoutError
from shardwright.plan.schedule import Action, ActionKind, Schedule, needs

# A byte for each chunk and microbatch collects a bit for each kind of action seen; F and B, or F, I and W, complete it.
_BIT = {"F": 1, "B": 2, "I": 4, "W": 8}
_COMPLETE = (1 | 2, 1 | 4 | 8)
_EXCLUDES = {"F": 0, "B": 4 | 8, "I": 2, "W": 2}
_NEEDS = {"F": 0, "B": 1, "I": 1, "W": 4}


def check_schedule(schedule: Schedule, num_microbatches: int | None = None) -> None:
    """Raises LayoutError unless each chunk runs every microbatch's forward and backward once, without deadlock.

    Raises: LayoutError: a number out of range, a chunk on two stages, an action that is missing, comes twice or
        comes before an action that it needs, a deadlock; a schedule for another number of microbatches.
    """
    _check_sizes(schedule, num_microbatches)
    seen, early = _count_actions(schedule)
    if seen.count(_COMPLETE[0]) + seen.count(_COMPLETE[1]) < len(seen):
        _raise_missing(schedule, seen)
    if early is not None:
        stage, action = early
        first = Action("I" if action.kind == "W" else "F", action.microbatch, action.chunk)
        raise LayoutError(
            f"schedule '{schedule.name}' is out of order",
            given=f"stage {stage} runs {action} before {first}",
            allowed="F before B or I, and I before W",
            fix=f"on stage {stage}, move {first} before {action}",
        )
    deque(run_order(schedule), maxlen=0)


def check_order(schedule: Schedule) -> None:
    """Raises LayoutError unless every chunk runs its forwards in microbatch order, as running statistics need it."""
    for stage, actions in enumerate(schedule.actions):
        last: dict[int, Action] = {}
        for action in actions:
            if action.kind != "F":
                continue
            before = last.get(action.chunk)
            if before is not None and before.microbatch > action.microbatch:
                raise LayoutError(
                    f"schedule '{schedule.name}' runs microbatches out of order, and the model keeps statistics",
                    given=f"stage {stage} runs {action} after {before}",
                    allowed="on every chunk F of microbatch 0 first, then of 1, and so on: later ones weigh more",
                    fix=f"on stage {stage}, move {action} before {before}",
                )
            last[action.chunk] = action


def num_results(schedule: Schedule) -> int:
    """Returns how many results a schedule's actions need and give, as :func:`run_order` numbers them from 0.

    First come the outputs of forwards, chunk by chunk, and then the input gradients. Two more stand for the inputs of
    the model, which are always there, and for the result of a W, which no action needs.

    >>> num_results(Schedule("by hand", ((Action("F", 0),),), (0,), 1))
    4
    """
    return 2 * schedule.num_chunks * schedule.num_microbatches + 2


def run_order(schedule: Schedule) -> Iterator[tuple[int, Action, int, int]]:
    """Yields every action of a schedule in one sequential order that respects all dependencies.

    Each entry is the stage, the action, the index of the result that the action needs, and the index of the result that
    it gives; :func:`num_results` describes these indices.

    Raises: LayoutError: at the end, if stages deadlock.

    >>> lists = ((Action("F", 0), Action("B", 0)), (Action("F", 0, 1), Action("B", 0, 1)))
    >>> [f"stage {stage} {action}: {need}" for stage, action, need, _ in run_order(Schedule("", lists, (0, 1), 1))]
    ['stage 0 0F0: 4', 'stage 1 1F0: 0', 'stage 1 1B0: 1', 'stage 0 0B0: 3']
    """
    num_microbatches, num_chunks = schedule.num_microbatches, schedule.num_chunks
    size, last = num_chunks * num_microbatches, num_chunks - 1
    # A flag for each result. At most one stage waits for each flag, and runs on when it is set.
    done = bytearray(num_results(schedule))
    always, never = 2 * size, 2 * size + 1
    done[always] = 1
    waiting: dict[int, int] = {}
    positions = [0] * schedule.num_stages
    ready = list(reversed(range(schedule.num_stages)))
    while ready:
        stage = ready.pop()
        actions = schedule.actions[stage]
        for position in range(positions[stage], len(actions)):
            action = actions[position]
            kind, microbatch, chunk = action
            own = chunk * num_microbatches + microbatch
            if kind == "F":
                need, give = own - num_microbatches if chunk else always, own
            elif kind == "W":
                need, give = size + own, never
            else:
                give = size + own
                need = own if chunk == last else give + num_microbatches  # the next chunk's gradient comes after this F
            if not done[need]:
                waiting[need] = stage
                positions[stage] = position
                break
            yield stage, action, need, give
            done[give] = 1
            if give in waiting:
                ready.append(waiting.pop(give))
        else:
            positions[stage] = len(actions)
    if any(position < len(actions) for position, actions in zip(positions, schedule.actions, strict=True)):
        _raise_deadlock(schedule, positions)


def _check_sizes(schedule: Schedule, num_microbatches: int | None) -> None:
    """Raises LayoutError unless the number of microbatches is the requested one and each stage holds a chunk."""
    name, num_stages = schedule.name, schedule.num_stages
    if num_microbatches is not None and schedule.num_microbatches != num_microbatches:
        raise LayoutError(
            f"schedule '{name}' is for another number of microbatches",
            given=f"{schedule.num_microbatches} in the schedule, {num_microbatches} asked for",
            allowed=f"{schedule.num_microbatches}",
            fix=f"write mb{schedule.num_microbatches}, or build the schedule for {num_microbatches}",
        )
    if schedule.num_microbatches < 1 or not num_stages or set(schedule.stage_of) != set(range(num_stages)):
        raise LayoutError(
            f"schedule '{name}' fits no pipeline",
            given=f"{num_stages} stages, {schedule.num_microbatches} microbatches, chunks on {schedule.stage_of}",
            allowed="one stage or more, each with a chunk or more, and one microbatch or more",
            fix="give each stage a chunk, counted from stage 0",
        )


def _count_actions(schedule: Schedule) -> tuple[bytearray, tuple[int, Action] | None]:
    """Returns the bits of actions seen for each chunk and microbatch, and the first action that runs too early.

    Raises LayoutError for an action that cannot be, or comes twice.
    """
    num_microbatches, num_chunks, stage_of = schedule.num_microbatches, schedule.num_chunks, schedule.stage_of
    seen = bytearray(num_chunks * num_microbatches)
    early = None
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            kind, microbatch, chunk = action
            in_range = 0 <= chunk < num_chunks and 0 <= microbatch < num_microbatches
            if not in_range or stage_of[chunk] != stage or kind not in _BIT:
                held = ", ".join(map(str, schedule.chunks_of(stage)))
                raise LayoutError(
                    f"schedule '{schedule.name}' has an action that cannot be",
                    given=f"{action} on stage {stage}",
                    allowed=f"on stage {stage}: chunk {held} and microbatches 0 to {num_microbatches - 1}",
                    fix="a cell is chunk, kind, microbatch, like 0F3: correct that one",
                )
            own = chunk * num_microbatches + microbatch
            was, bit = seen[own], _BIT[kind]
            if was & bit or was & _EXCLUDES[kind]:
                other: ActionKind = "I" if was & 4 else "W" if was & 8 else "B"  # the kind seen before that excludes it
                again = "comes twice" if was & bit else f"comes beside {action._replace(kind=other)}"
                raise LayoutError(
                    f"schedule '{schedule.name}' runs one backward or forward twice",
                    given=f"on stage {stage}, {action} {again}",
                    allowed="F once, and B once or I and W once",
                    fix=f"take one of them out of stage {stage}",
                )
            if _NEEDS[kind] & ~was and early is None:
                early = (stage, action)
            seen[own] = was | bit
    return seen, early


def _raise_missing(schedule: Schedule, seen: bytearray) -> None:
    """Raises for the first chunk and microbatch without all of its actions."""
    where = next(own for own, bits in enumerate(seen) if bits not in _COMPLETE)
    chunk, microbatch = divmod(where, schedule.num_microbatches)
    stage, bits = schedule.stage_of[chunk], seen[where]
    if not bits:
        what, add = "does not run", f"{chunk}F{microbatch} and {chunk}B{microbatch}"
    elif not bits & 1:
        what, add = "has no forward of", f"{chunk}F{microbatch}"
    elif bits == 1:
        what, add = "has no backward of", f"{chunk}B{microbatch}"
    else:
        add = f"{chunk}{'W' if bits & 4 else 'I'}{microbatch}"
        what = f"has only one half of the backward, no {add}, of"
    count = sum(bits not in _COMPLETE for bits in seen)
    raise LayoutError(
        f"schedule '{schedule.name}' misses an action",
        given=f"chunk {chunk} on stage {stage} {what} microbatch {microbatch}"
        + (f"; {count - 1} more of this kind" if count > 1 else ""),
        allowed=f"for each chunk and each of microbatches 0 to {schedule.num_microbatches - 1}: "
        "F once, and B once or I and W once",
        fix=f"add {add} to stage {stage}",
    )


def _raise_deadlock(schedule: Schedule, positions: list[int]) -> None:
    """Raises with the cycle of stages that wait for each other, found by following what each stage waits for."""
    at: dict[Action, tuple[int, int]] = {}
    for stage, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            at[action] = stage, position

    def is_done(action: Action) -> bool:
        return action in at and at[action][1] < positions[at[action][0]]

    def wait_for(stage: int) -> tuple[Action, Action]:
        """Returns the next action of a stage, and the action that it waits for."""
        action = schedule.actions[stage][positions[stage]]
        for need in needs(action, schedule.num_chunks):
            either = [need] if need.kind != "I" else [need, need._replace(kind="B")]
            if not any(is_done(alternative) for alternative in either):
                return action, next((alternative for alternative in either if alternative in at), need)
        raise AssertionError(f"{action} could run")

    stage = next(s for s, actions in enumerate(schedule.actions) if positions[s] < len(actions))
    path: list[int] = []
    while stage not in path:
        path.append(stage)
        wanted = wait_for(stage)[1]
        if wanted not in at:  # possible in incomplete schedules only
            break
        stage = at[wanted][0]
    cycle = path[path.index(stage) :]
    wanted_by = [wait_for(stage)[1] for stage in cycle]
    links, fixes = [], []
    for wanted in wanted_by:
        link = f"waits for {wanted}"
        if wanted not in at:
            link += ", which no stage runs"
            fixes.append(f"add {wanted}")
        elif at[wanted][1] > positions[at[wanted][0]]:
            stage = at[wanted][0]
            before = schedule.actions[stage][positions[stage]]
            link += f", which stage {stage} runs after {before}"
            fixes.append(f"for one, on stage {stage} move {wanted} before {before}")
        links.append(link)
    assert fixes, "in a cycle some action is behind another on its stage"
    first = schedule.actions[cycle[0]][positions[cycle[0]]]
    raise LayoutError(
        f"schedule '{schedule.name}' deadlocks",
        given=f"stage {cycle[0]}: {first} " + ", which ".join(links),
        allowed="an order in which every action runs after those that it waits for",
        fix=fixes[0],
    )
