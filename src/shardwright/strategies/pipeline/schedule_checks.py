"""Whether a schedule can run: complete, in order, and free of deadlock; if not, which action waits for which."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from shardwright.errors import LayoutError
from shardwright.plan.schedule import Action, Kind, Schedule, needs

# what has been seen of one chunk and microbatch; F and B, or F, I and W, make a whole
_SEEN = {"F": 1, "B": 2, "I": 4, "W": 8}
_WHOLE = (1 | 2, 1 | 4 | 8)
_EXCLUDES = {"F": 0, "B": 4 | 8, "I": 2, "W": 2}
_NEEDS = {"F": 0, "B": 1, "I": 1, "W": 4}


def check_schedule(schedule: Schedule, num_microbatches: int | None = None) -> None:
    """Returns if every chunk runs each microbatch F once and B, or I and W, once, and no stage waits for ever.

    Raises: LayoutError: a number out of range, a chunk on two stages, an action that is missing, comes twice or
        comes before what its own stage needs for it, a deadlock; a schedule for another number of microbatches.

    >>> F0, B0 = Action("F", 0), Action("B", 0)
    >>> check_schedule(Schedule("by hand", ((F0, B0),), (0,), 1))
    >>> check_schedule(Schedule("by hand", ((F0,),), (0,), 1))
    Traceback (most recent call last):
    shardwright.errors.LayoutError: schedule 'by hand' misses an action
      given:   chunk 0 on stage 0 has no backward of microbatch 0
      allowed: for each chunk and each of microbatches 0 to 0: F once, and B once or I and W once
      fix:     add 0B0 to stage 0
    """
    _check_sizes(schedule, num_microbatches)
    seen, early = _look(schedule)
    if seen.count(_WHOLE[0]) + seen.count(_WHOLE[1]) < len(seen):
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
    """Raises LayoutError unless every chunk runs its forwards in the order of the microbatches.

    >>> F0, F1 = Action("F", 0), Action("F", 1)
    >>> check_order(Schedule("by hand", ((F0, F1),), (0,), 2))
    >>> check_order(Schedule("by hand", ((F1, F0),), (0,), 2))
    Traceback (most recent call last):
    shardwright.errors.LayoutError: schedule 'by hand' runs microbatches out of order, and the model keeps statistics
      given:   stage 0 runs 0F0 after 0F1
      allowed: on every chunk F of microbatch 0 first, then of 1, and so on: later ones weigh more
      fix:     on stage 0, move 0F0 before 0F1
    """
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


def run_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Every action with its stage, in one of the orders in which they could run one after the other.

    Raises: LayoutError: at the end, if stages wait for each other for ever.

    >>> lists = ((Action("F", 0), Action("B", 0)), (Action("F", 0, 1), Action("B", 0, 1)))
    >>> [f"stage {stage} {action}" for stage, action in run_order(Schedule("by hand", lists, (0, 1), 1))]
    ['stage 0 0F0', 'stage 1 1F0', 'stage 1 1B0', 'stage 0 0B0']
    """
    num_microbatches, num_chunks = schedule.num_microbatches, schedule.num_chunks
    size, last = num_chunks * num_microbatches, num_chunks - 1
    done = bytearray(2 * size + 1)  # the forwards, the gradients of inputs, and what nobody waits for
    done[always := 2 * size] = 1
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
                need, give = size + own, always
            else:
                give = size + own
                need = own if chunk == last else give + num_microbatches  # which has run only after our own F
            if not done[need]:
                waiting[need] = stage
                positions[stage] = position
                break
            yield stage, action
            done[give] = 1
            if give in waiting:
                ready.append(waiting.pop(give))
        else:
            positions[stage] = len(actions)
    if any(position < len(actions) for position, actions in zip(positions, schedule.actions, strict=True)):
        _raise_deadlock(schedule, positions)


def _check_sizes(schedule: Schedule, num_microbatches: int | None) -> None:
    """Stages, chunks and microbatches there are, and each stage holds a chunk."""
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
            f"schedule '{name}' is for no pipeline",
            given=f"{num_stages} stages, {schedule.num_microbatches} microbatches, chunks on {schedule.stage_of}",
            allowed="one stage or more, each with a chunk or more, and one microbatch or more",
            fix="give each stage a chunk, counted from stage 0",
        )


def _look(schedule: Schedule) -> tuple[bytearray, tuple[int, Action] | None]:
    """What there is of each chunk and microbatch, and the first action, if any, that its own stage runs too early."""
    num_microbatches, num_chunks, stage_of = schedule.num_microbatches, schedule.num_chunks, schedule.stage_of
    seen = bytearray(num_chunks * num_microbatches)
    early = None
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            kind, microbatch, chunk = action
            in_range = 0 <= chunk < num_chunks and 0 <= microbatch < num_microbatches
            if not in_range or stage_of[chunk] != stage or kind not in _SEEN:
                _raise_stray(schedule, stage, action)
            own = chunk * num_microbatches + microbatch
            was, bit = seen[own], _SEEN[kind]
            if was & bit or was & _EXCLUDES[kind]:
                _raise_twice(schedule, stage, action, was)
            if _NEEDS[kind] & ~was and early is None:
                early = (stage, action)
            seen[own] = was | bit
    return seen, early


def _raise_twice(schedule: Schedule, stage: int, action: Action, seen: int) -> None:
    """An action that comes again, or a whole backward beside a half of one."""
    other: Kind = "I" if seen & 4 else "W" if seen & 8 else "B"
    again = (
        f"{action} comes twice" if seen & _SEEN[action.kind] else f"{action} comes beside {action._replace(kind=other)}"
    )
    raise LayoutError(
        f"schedule '{schedule.name}' runs one backward or forward twice",
        given=f"on stage {stage}, {again}",
        allowed="F once, and B once or I and W once",
        fix=f"take one of them out of stage {stage}",
    )


def _raise_stray(schedule: Schedule, stage: int, action: Action) -> None:
    """An action with a number that cannot be, or on a stage that does not hold its chunk."""
    held = ", ".join(map(str, schedule.chunks_of(stage)))
    raise LayoutError(
        f"schedule '{schedule.name}' has an action that cannot be",
        given=f"{action} on stage {stage}",
        allowed=f"on stage {stage}: chunk {held} and microbatches 0 to {schedule.num_microbatches - 1}",
        fix="a cell is chunk, kind, microbatch, like 0F3: correct that one",
    )


def _raise_missing(schedule: Schedule, seen: bytearray) -> None:
    """The first chunk and microbatch that is no whole."""
    where = next(own for own, bits in enumerate(seen) if bits not in _WHOLE)
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
    count = sum(bits not in _WHOLE for bits in seen)
    raise LayoutError(
        f"schedule '{schedule.name}' misses an action",
        given=f"chunk {chunk} on stage {stage} {what} microbatch {microbatch}"
        + (f"; {count - 1} more of this kind" if count > 1 else ""),
        allowed=f"for each chunk and each of microbatches 0 to {schedule.num_microbatches - 1}: "
        "F once, and B once or I and W once",
        fix=f"add {add} to stage {stage}",
    )


def _raise_deadlock(schedule: Schedule, positions: list[int]) -> None:
    """The circle of stages that wait for each other."""
    at: dict[Action, tuple[int, int]] = {}
    for stage, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            at[action] = stage, position

    def is_done(action: Action) -> bool:
        return action in at and at[action][1] < positions[at[action][0]]

    def wait_for(stage: int) -> tuple[Action, Action]:
        """What a stage is about to run, and what it waits for."""
        action = schedule.actions[stage][positions[stage]]
        for need in needs(action, schedule.num_chunks):
            forms = [need] if need.kind != "I" else [need, need._replace(kind="B")]
            if not any(is_done(form) for form in forms):
                return action, next((form for form in forms if form in at), need)
        raise AssertionError(f"{action} could run")

    stage = next(s for s, actions in enumerate(schedule.actions) if positions[s] < len(actions))
    path: list[int] = []
    while stage not in path:
        path.append(stage)
        wanted = wait_for(stage)[1]
        if wanted not in at:  # only where the schedule is not complete
            break
        stage = at[wanted][0]
    circle = path[path.index(stage) :]
    links = []
    for stage in circle:
        action, wanted = wait_for(stage)
        links.append(f"waits for {wanted}" + _why_late(schedule, positions, at, wanted))
    first = schedule.actions[circle[0]][positions[circle[0]]]
    raise LayoutError(
        f"schedule '{schedule.name}' deadlocks",
        given=f"stage {circle[0]}: {first} " + ", which ".join(links),
        allowed="an order in which what an action waits for has run before it",
        fix=_advice(schedule, positions, at, [wait_for(stage)[1] for stage in circle]),
    )


def _why_late(schedule: Schedule, positions: list[int], at: dict[Action, tuple[int, int]], wanted: Action) -> str:
    """Behind which action ``wanted`` stands."""
    if wanted not in at:
        return ", which no stage runs"
    stage, position = at[wanted]
    if position == positions[stage]:
        return ""
    return f", which stage {stage} runs after {schedule.actions[stage][positions[stage]]}"


def _advice(schedule: Schedule, positions: list[int], at: dict[Action, tuple[int, int]], circle: list[Action]) -> str:
    """One move that opens the circle."""
    for wanted in circle:
        if wanted not in at:
            return f"add {wanted}"
        stage, position = at[wanted]
        if position > positions[stage]:
            return f"for one, on stage {stage} move {wanted} before {schedule.actions[stage][positions[stage]]}"
    raise AssertionError("a circle without an action that stands behind another")
