"""Schedules run and counted the plain way, from the definitions: nothing is shared with the library."""

from __future__ import annotations

from hypothesis import strategies as st

from shardwright.strategies.pipeline.schedules import SCHEDULES, build

NAMES = tuple(SCHEDULES)


def chunk_counts(name):
    """The numbers of chunks a stage that the tests try."""
    return (2, 3) if name == "interleaved" else (2,) if name in ("zb-v", "dualpipe-v") else (1,)


@st.composite
def schedules(draw, most_stages=8, most_microbatches=20, names=NAMES):
    """Any named schedule."""
    name = draw(st.sampled_from(names))
    num_stages, num_microbatches = draw(st.integers(1, most_stages)), draw(st.integers(1, most_microbatches))
    return build(name, num_stages, num_microbatches, draw(st.sampled_from(chunk_counts(name))))


def wanted(action, num_chunks):
    """What must have run before an action: pairs of forms, one of which suffices, as texts."""
    kind, m, c = action.kind, action.microbatch, action.chunk
    if kind == "F":
        return [(f"{c - 1}F{m}",)] if c > 0 else []
    if kind == "W":
        return [(f"{c}I{m}",)]
    after = [(f"{c + 1}I{m}", f"{c + 1}B{m}")] if c < num_chunks - 1 else []
    return [(f"{c}F{m}",), *after]


def left_over(schedule):
    """Runs what can run until nothing can; gives what is left on each stage."""
    left = [list(actions) for actions in schedule.actions]
    done = set()
    while True:
        can = [
            actions
            for actions in left
            if actions and all(done & set(forms) for forms in wanted(actions[0], len(schedule.stage_of)))
        ]
        if not can:
            return left
        for actions in can:
            done.add(str(actions.pop(0)))


def most_held(actions, ends):
    """The most microbatches, over all chunks of a stage, between their F and the end of one of the kinds ``ends``."""
    held = most = 0
    for action in actions:
        held += (action.kind == "F") - (action.kind in ends)
        most = max(most, held)
    return most


def own_idle(timeline, stage):
    """How long a stage waits between the start of its first action and the end of its last."""
    spans = timeline.spans[stage]
    busy = sum(span.end_s - span.start_s for span in spans)
    return spans[-1].end_s - spans[0].start_s - busy
