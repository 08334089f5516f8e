"""The simulator against times and bytes worked out from the definitions, one action at a time."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from processor_time import takes_less
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.parallelize.planning import job_for
from shardwright.plan.schedule import Action, Schedule
from shardwright.report.description import describe
from shardwright.strategies.pipeline.schedule_checks import check_schedule
from shardwright.strategies.pipeline.schedules import build, forward_only
from shardwright.strategies.pipeline.simulate import ChunkMemory, ChunkTimes, ends_of, simulate
from strategies.pipeline.by_hand import NAMES, schedules, wanted


@st.composite
def cases(draw):
    """A schedule with whole-number times and bytes for its chunks, so that all sums are exact."""
    schedule = draw(schedules(most_stages=5, most_microbatches=7))
    num_chunks, num_stages = schedule.num_chunks, schedule.num_stages
    numbers = st.lists(st.integers(0, 9), min_size=num_chunks, max_size=num_chunks).map(tuple)
    link = st.integers(0, 5)
    links = {(a, b): draw(link) for a in range(num_stages) for b in range(num_stages) if a != b}
    times = ChunkTimes(draw(numbers), draw(numbers), draw(numbers), draw(link) if draw(st.booleans()) else links)
    return schedule, times, ChunkMemory(draw(numbers), draw(numbers), draw(numbers))


def lasts(action, times):
    chunk = action.chunk
    return {
        "F": times.forward_s[chunk],
        "I": times.input_s[chunk],
        "W": times.weight_s[chunk],
        "B": times.input_s[chunk] + times.weight_s[chunk],
    }[action.kind]


def expected_ends(schedule, times):
    """When each action ends, by asking back for what it waits for."""
    by_name = {str(a): (s, i, a) for s, actions in enumerate(schedule.actions) for i, a in enumerate(actions)}

    @cache
    def end(name):
        stage, position, action = by_name[name]
        start = end(str(schedule.actions[stage][position - 1])) if position else 0
        for forms in wanted(action, schedule.num_chunks):
            form = next(form for form in forms if form in by_name)
            source = by_name[form][0]
            link = times.transfer_s if isinstance(times.transfer_s, int) else times.transfer_s.get((source, stage))
            start = max(start, end(form) + (link if source != stage else 0))
        return start + lasts(action, times)

    return {name: end(name) for name in by_name}


@given(cases())
def test_an_action_starts_when_its_stage_is_free_and_what_it_needs_has_arrived(case):
    schedule, times, _ = case
    timeline = simulate(schedule, times)
    ends = expected_ends(schedule, times)
    for stage, spans in enumerate(timeline.spans):
        assert [span.action for span in spans] == list(schedule.actions[stage])
        for span in spans:
            assert span.end_s == ends[str(span.action)]
            assert span.start_s == span.end_s - lasts(span.action, times)
    assert timeline.memory == ()
    assert timeline.name == schedule.name


@given(cases())
def test_the_ends_of_stages_are_those_of_the_simulated_timeline(case):
    schedule, times = case[:2]
    timeline = simulate(schedule, times)
    (found,) = ends_of(schedule, times)
    assert found.ends_s == pytest.approx([spans[-1].end_s for spans in timeline.spans], rel=1e-12)
    busy = [timeline.busy_s(stage) for stage in range(schedule.num_stages)]
    assert found.busy_s == pytest.approx(busy, rel=1e-12)
    assert found.bubble == pytest.approx(timeline.bubble, abs=1e-12)


@given(cases())
def test_memory_is_what_the_microbatches_under_way_hold(case):
    schedule, times, memory = case
    timeline = simulate(schedule, times, memory)
    for stage, spans in enumerate(timeline.spans):
        of = {str(span.action): span for span in spans}
        fixed = sum(memory.parameter_bytes[c] for c in schedule.chunks_of(stage))
        intervals = []
        for span in spans:
            kind, m, chunk = span.action
            if kind == "F":
                whole = of.get(f"{chunk}B{m}")
                first, second = whole or of[f"{chunk}I{m}"], whole or of[f"{chunk}W{m}"]
                intervals.append((span.start_s, first.end_s, memory.activation_bytes[chunk]))
                intervals.append((span.start_s, second.end_s, memory.weight_bytes[chunk]))
        at_last = dict(timeline.memory[stage])
        for second, held in at_last.items():  # what ends at a time is gone, what begins at it is there
            assert held == fixed + sum(size for start, end, size in intervals if start <= second < end)
        assert timeline.memory[stage][-1][1] == fixed
        assert [at for at, _ in timeline.memory[stage]] == sorted(at for at, _ in timeline.memory[stage])
        if all(min(t) > 0 for t in (times.forward_s, times.input_s, times.weight_s)):
            assert timeline.peak_bytes(stage) == max(at_last.values())


def test_a_transfer_delays_the_stage_after_but_not_the_one_that_sends():
    timeline = simulate(build("gpipe", 2, 2), ChunkTimes.equal(2, 2, 1, 1, transfer_s=5))
    # stage 0 goes on with F1 while F0 is on its way, and the two overlap
    assert [span[1:] for span in timeline.spans[0]] == [(0, 2), (2, 4), (18, 20), (20, 22)]
    assert [span[1:] for span in timeline.spans[1]] == [(7, 9), (9, 11), (11, 13), (13, 15)]


def test_neighbouring_chunks_on_one_stage_need_no_transfer():
    slow = simulate(build("zb-v", 1, 3), ChunkTimes.equal(2, transfer_s=100))
    assert slow.makespan_s == 2 * 3 * 3


def test_a_split_backward_lets_the_stage_before_go_on_earlier():
    whole = simulate(build("gpipe", 2, 1), ChunkTimes.equal(2))
    half = simulate(build("zb-h1", 2, 1), ChunkTimes.equal(2))
    assert (whole.makespan_s, half.makespan_s) == (6, 5)


def test_links_may_differ_by_direction_and_one_given_serves_both():
    assert ChunkTimes.equal(2, transfer_s={(0, 1): 3, (1, 0): 4}).over(1, 0) == 4
    assert ChunkTimes.equal(2, transfer_s={(0, 1): 3}).over(1, 0) == 3
    with pytest.raises(LayoutError, match=r"no transfer time from stage 1 to stage 2"):
        simulate(build("1f1b", 3, 2), ChunkTimes.equal(3, transfer_s={(0, 1): 3}))


@given(schedules(most_stages=5, most_microbatches=7))
def test_evaluation_is_simulated_too(schedule):
    timeline = simulate(forward_only(schedule), ChunkTimes.equal(schedule.num_chunks))
    assert sum(map(len, timeline.spans)) == schedule.num_chunks * schedule.num_microbatches


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_times_and_bytes_are_for_the_chunks_of_the_schedule(num_chunks):
    schedule = build("1f1b", 2, 2)
    with pytest.raises(LayoutError, match=rf"times for {num_chunks}, a schedule of 2"):
        simulate(schedule, ChunkTimes.equal(num_chunks))
    with pytest.raises(LayoutError, match=rf"bytes for {num_chunks}, a schedule of 2"):
        simulate(schedule, ChunkTimes.equal(2), ChunkMemory.equal(num_chunks))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ChunkTimes((1,), (1, 2), (1,)), "1 forward_s, 2 input_s, 1 weight_s"),
        (lambda: ChunkTimes((1,), (-1,), (1,)), "input_s -1"),
        (lambda: ChunkTimes((1,), (1,), (float("nan"),)), "weight_s nan"),
        (lambda: ChunkTimes((), (), ()), "0 forward_s"),
        (lambda: ChunkTimes.equal(1, transfer_s=-2), "transfer_s -2"),
        (lambda: ChunkTimes.equal(1, transfer_s={(0, 1): -2}), "transfer_s -2"),
        (lambda: ChunkMemory((1,), (1,), ()), "0 parameter_bytes"),
        (lambda: ChunkMemory((1,), (-1,), (1,)), "weight_bytes -1"),
    ],
)
def test_times_and_bytes_that_cannot_be_are_refused(make, words):
    with pytest.raises(LayoutError) as error:
        make()
    assert words in str(error.value)


def test_a_deadlock_is_told_in_place_of_a_time():
    rows = ((Action("B", 0), Action("F", 0)), (Action("F", 0, 1), Action("B", 0, 1)))
    with pytest.raises(LayoutError, match=r"stage 0: 0B0 waits for 0F0, which stage 0 runs after 0B0"):
        simulate(Schedule("mine", rows, (0, 1), 1), ChunkTimes.equal(2))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(100)
def test_64_stages_and_1024_microbatches_are_built_in_a_second_and_simulated_in_two(name):
    schedule = build(name, 64, 1024)
    times, memory = ChunkTimes.equal(schedule.num_chunks), ChunkMemory.equal(schedule.num_chunks)
    # twice the limit, for machines that do other work: alone, 0.1 to 0.6, 0.1 to 0.2 and 0.4 to 0.9 seconds
    assert takes_less(2, lambda: build(name, 64, 1024))
    assert takes_less(2, lambda: check_schedule(schedule))
    assert takes_less(4, lambda: simulate(schedule, times, memory))


def test_a_backward_under_full_recomputation_takes_three_forwards():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    bubbles = {}
    for words in ("", " recompute:full"):
        layout = Layout.parse(f"pp2 mb4{words}")
        found = describe(job_for(layers, nn.Identity(), layout, torch.zeros(8, 8)), layout)["timeline"]
        spans = {action: end - start for stage in found["spans"] for action, start, end in stage}
        bubbles[words] = spans["0B1"] / spans["0F1"]
    assert bubbles == pytest.approx({"": 2.0, " recompute:full": 3.0})
