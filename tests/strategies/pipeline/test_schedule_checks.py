"""A schedule that cannot run is refused with the action that is wrong, or the cycle of those that wait."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from processor_time import takes_less
from shardwright.errors import LayoutError
from shardwright.plan.schedule import Action, Schedule
from shardwright.strategies.pipeline.schedule_checks import check_schedule, run_order
from shardwright.strategies.pipeline.schedules import build, forward_only
from strategies.pipeline.by_hand import left_over, schedules, wanted


def parse(*rows, stage_of=None, num_microbatches=None):
    """A schedule from texts like ``0F0 0B0``, one for each stage."""
    lists = [[re.fullmatch(r"(\d+)([A-Z])(\d+)", cell).groups() for cell in row.split()] for row in rows]
    actions = tuple(tuple(Action(kind, int(m), int(chunk)) for chunk, kind, m in cells) for cells in lists)
    most = max(a.microbatch for of_stage in actions for a in of_stage)
    return Schedule("mine", actions, stage_of or tuple(range(len(rows))), num_microbatches or most + 1)


def message(schedule, num_microbatches=None):
    with pytest.raises(LayoutError) as error:
        check_schedule(schedule, num_microbatches)
    text = str(error.value)
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == ["given", "allowed", "fix"]
    return text


def with_list(schedule, stage, actions):
    return replace(schedule, actions=(*schedule.actions[:stage], tuple(actions), *schedule.actions[stage + 1 :]))


@given(schedules(most_stages=5, most_microbatches=8), st.data())
def test_an_action_left_out_is_named_with_its_chunk_and_microbatch(schedule, data):
    stage = data.draw(st.integers(0, schedule.num_stages - 1))
    actions = list(schedule.actions[stage])
    out = actions.pop(data.draw(st.integers(0, len(actions) - 1)))
    text = message(with_list(schedule, stage, actions))
    assert f"chunk {out.chunk} on stage {stage}" in text
    assert f"microbatch {out.microbatch}" in text
    assert f"add {out} to stage {stage}" in text or f"{out} and" in text or f"and {out}" in text


@given(schedules(most_stages=5, most_microbatches=8), st.data())
def test_an_action_that_comes_twice_is_named(schedule, data):
    stage = data.draw(st.integers(0, schedule.num_stages - 1))
    actions = list(schedule.actions[stage])
    again = data.draw(st.sampled_from(actions))
    actions.insert(data.draw(st.integers(0, len(actions))), again)
    assert f"on stage {stage}, {again} comes twice" in message(with_list(schedule, stage, actions))


@given(schedules(most_stages=5, most_microbatches=8), st.data())
def test_any_order_passes_if_and_only_if_it_runs_to_its_end(schedule, data):
    shuffled = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(1, 4))):
        stage = shuffled.randrange(schedule.num_stages)
        actions = list(schedule.actions[stage])
        actions.insert(shuffled.randrange(len(actions)), actions.pop(shuffled.randrange(len(actions))))
        schedule = with_list(schedule, stage, actions)
    if any(left_over(schedule)):
        text = message(schedule)
        assert "deadlocks" in text or "out of order" in text
    else:
        check_schedule(schedule)


@given(schedules(most_stages=6, most_microbatches=6), st.integers(0, 2**32))
def test_every_link_of_a_deadlock_is_true_and_the_last_closes_the_cycle(schedule, seed):
    shuffled = random.Random(seed)
    for stage in range(schedule.num_stages):  # each stage takes the microbatches in an order of its own
        number = list(range(schedule.num_microbatches))
        shuffled.shuffle(number)
        renumbered = [a._replace(microbatch=number[a.microbatch]) for a in schedule.actions[stage]]
        schedule = with_list(schedule, stage, renumbered)
    assume(any(left_over(schedule)))
    stage, now, *links = re.split(
        r": | waits for |, which waits for ", message(schedule).splitlines()[1].split("stage ", 1)[1]
    )
    start, stage_of = now, {str(a): s for s, actions in enumerate(schedule.actions) for a in actions}
    place = {str(a): i for actions in schedule.actions for i, a in enumerate(actions)}
    by_name = {str(a): a for actions in schedule.actions for a in actions}
    assert stage_of[start] == int(stage)
    for link in links:
        needed, late, after = re.fullmatch(r"(\w+)(?:, which stage (\d+) runs after (\w+))?", link).groups()
        assert any(needed in forms for forms in wanted(by_name[now], schedule.num_chunks))
        if after:
            assert stage_of[needed] == stage_of[after] == int(late)
            assert place[after] < place[needed]
        now = after or needed
    assert now == start


def test_a_deadlock_says_which_action_waits_for_which():
    text = message(parse("0F0 0B0 0F1 0B1", "1F0 1F1 1I0 1W0 1B1"))
    assert text.splitlines() == [
        "schedule 'mine' deadlocks",
        "  given:   stage 0: 0B0 waits for 1I0, which stage 1 runs after 1F1, which waits for 0F1, "
        "which stage 0 runs after 0B0",
        "  allowed: an order in which every action runs after those that it waits for",
        "  fix:     for one, on stage 1 move 1I0 before 1F1",
    ]


def test_a_deadlock_within_one_stage_is_told_as_well():
    text = message(parse("1F0 0F0 1B0 0B0", stage_of=(0, 0)))
    assert "stage 0: 1F0 waits for 0F0, which stage 0 runs after 1F0\n" in text
    assert "on stage 0 move 0F0 before 1F0" in text


def test_a_cycle_over_three_stages_leaves_out_stages_that_only_wait_for_it():
    text = message(parse("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"))
    assert "stage 1: 1B0 waits for 2B0, which stage 2 runs after 2F1, which waits for 1F1, which stage 1" in text


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (("0B0 0F0",), {}, "stage 0 runs 0B0 before 0F0"),
        (("0F0 0W0 0I0",), {}, "stage 0 runs 0W0 before 0I0"),
        (("0F0 0I0",), {}, "only one half of the backward, no 0W0"),
        (("0F0 0W0",), {}, "only one half of the backward, no 0I0"),
        (("0F0",), {}, "has no backward of microbatch 0"),
        (("0B0",), {}, "has no forward of microbatch 0"),
        (("0F0 0B0 0I0",), {}, "0I0 comes beside 0B0"),
        (("0F0 0I0 0B0",), {}, "0B0 comes beside 0I0"),
        (("0F0 0B0",), {"num_microbatches": 3}, "does not run microbatch 1; 1 more"),
        (("0F0 0B0 0F7 0B7",), {"num_microbatches": 2}, "0F7 on stage 0"),
        (("0F0 0B0 3F0",), {}, "3F0 on stage 0"),
        (("0F0 0B0 1F0", "1B0"), {}, "1F0 on stage 0"),
        (("0F0 0B0 0X0",), {}, "0X0 on stage 0"),
        (("0F0 0B0", "1F0 1B0"), {"stage_of": (0, 0)}, "2 stages, 1 microbatches, chunks on (0, 0)"),
        (("0F0 0B0",), {"stage_of": (0, 1)}, "chunks on (0, 1)"),
    ],
)
def test_what_is_wrong_is_named(rows, options, words):
    assert words in message(parse(*rows, **options))


def test_numbers_below_zero_are_out_of_range():
    for action in (Action("F", -1), Action("F", 0, -1)):
        assert f"{action} on stage 0" in message(Schedule("mine", ((action,),), (0,), 1))
    assert "0 microbatches" in message(Schedule("mine", ((),), (0,), 0))
    assert "0 stages" in message(Schedule("mine", (), (), 1))


def test_a_schedule_for_other_microbatches_is_refused():
    schedule = build("1f1b", 2, 4)
    check_schedule(schedule, 4)
    assert "4 in the schedule, 8 asked for" in message(schedule, 8)


def test_forwards_alone_are_no_step():
    assert "has no backward of microbatch 0; 7 more" in message(forward_only(build("1f1b", 2, 4)))


@given(schedules(most_stages=5, most_microbatches=8))
def test_the_run_order_holds_every_action_after_what_it_needs(schedule):
    done = set()
    for stage, action, _, _ in run_order(schedule):
        assert all(done & set(forms) for forms in wanted(action, schedule.num_chunks))
        assert action in schedule.actions[stage]
        done.add(str(action))
    assert len(done) == sum(map(len, schedule.actions))


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_64_stages_and_1024_microbatches_that_deadlock_are_told_in_seconds(name):
    schedule = build(name, 64, 1024)
    last = [a._replace(microbatch=1023 - a.microbatch) for a in schedule.actions[63]]  # the last microbatch first
    broken = with_list(schedule, 63, last)
    said = []
    assert takes_less(4, lambda: said.append(message(broken)))
    assert all("deadlocks" in each for each in said)
