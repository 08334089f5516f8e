"""A schedule's actions in rounds: what waits for what, by the definition, one action at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from shardwright.errors import LayoutError
from shardwright.plan.schedule import Action, Schedule
from shardwright.strategies.pipeline.rounds import KINDS, rounds_of
from shardwright.strategies.pipeline.schedules import build
from strategies.pipeline.by_hand import schedules, wanted


@given(schedules(most_stages=5, most_microbatches=7))
def test_an_action_is_in_the_first_round_after_those_of_all_that_it_waits_for(schedule):
    found = rounds_of(schedule)
    counts = [0] * schedule.num_stages
    names, round_of, waited = [], {}, []
    for stage in found.stage.tolist():  # actions of a stage come in its order
        names.append((stage, schedule.actions[stage][counts[stage]]))
        counts[stage] += 1
    assert counts == [len(actions) for actions in schedule.actions]
    assert [what % schedule.num_chunks for what in found.what.tolist()] == [action.chunk for _, action in names]
    assert [KINDS[what // schedule.num_chunks] for what in found.what.tolist()] == [action.kind for _, action in names]
    for number, (own, (needs, before)) in enumerate(found.waits):
        assert len({stage for stage, _ in names[own]}) == own.stop - own.start, "one action of a stage in a round"
        round_of.update((index, number) for index in range(own.start, own.stop))
        waited += zip(needs.tolist(), before.tolist(), strict=True)
    by_name = {str(action): index for index, (_, action) in enumerate(names)}
    for index, (stage, action) in enumerate(names):
        earlier = [n for n in range(index) if names[n][0] == stage]
        form = [next(f for f in forms if f in by_name) for forms in wanted(action, schedule.num_chunks)]
        after = [round_of[by_name[each]] for each in form] + [round_of[each] for each in earlier[-1:]]
        assert round_of[index] == max(after, default=-1) + 1
        # of what it needs, what comes last in the model; its own forward is on its own stage
        assert waited[index] == (by_name[form[-1]] if form else len(names), earlier[-1] if earlier else len(names))


def test_stages_that_wait_for_each_other_are_refused():
    both = (Action("F", 0), Action("B", 0)), (Action("B", 0, 1), Action("F", 0, 1))
    with pytest.raises(LayoutError, match="deadlocks"):
        rounds_of(Schedule("by hand", both, (0, 1), 1))


def test_schedules_that_differ_in_their_actions_alone_have_rounds_of_their_own():
    one = build("1f1b", 2, 4)
    other = replace(build("gpipe", 2, 4), name=one.name)
    assert hash(one) == hash(other)
    assert one != other
    assert rounds_of(one).what.tolist() != rounds_of(other).what.tolist()
    assert rounds_of(build("1f1b", 2, 4)) is rounds_of(one)
