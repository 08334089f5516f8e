"""The search: never worse than a named schedule that fits, never over the limit, better where times are uneven."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import LayoutError, PlanError
from shardwright.strategies.pipeline.schedule_checks import check_schedule
from shardwright.strategies.pipeline.schedules import SCHEDULES, build
from shardwright.strategies.pipeline.schedules.auto import search
from shardwright.strategies.pipeline.schedules.greedy import SchedulingRules, greedy
from shardwright.strategies.pipeline.simulate import ChunkMemory, ChunkTimes, simulate
from strategies.pipeline.by_hand import NAMES, left_over

UNEVEN = ChunkTimes((1, 2, 1, 3), (2, 2, 1, 4), (1, 1, 1, 2), transfer_s=1)


@st.composite
def problems(draw):
    """Stages, microbatches, and times and bytes of one to three numbers of chunks."""
    num_stages, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    cuts = draw(st.sampled_from([(1,), (2,), (1, 2), (3,), (1, 2, 3)]))
    times, memory = [], []
    for per_stage in cuts:
        n = num_stages * per_stage
        numbers = st.lists(st.integers(1, 9), min_size=n, max_size=n).map(tuple)
        times.append(ChunkTimes(draw(numbers), draw(numbers), draw(numbers), draw(st.integers(0, 3))))
        memory.append(ChunkMemory(draw(numbers), draw(numbers), draw(numbers)))
    return num_stages, num_microbatches, times, memory


def peak(timeline):
    return max(timeline.peak_bytes(stage) for stage in range(len(timeline.spans)))


def named(num_stages, num_microbatches, times, memory):
    """Makespan and peak of every named schedule for which there are times."""
    for of_cut, held in zip(times, memory, strict=True):
        per_stage = of_cut.num_chunks // num_stages
        for name in NAMES:
            if SCHEDULES[name].takes(per_stage):
                timeline = simulate(build(name, num_stages, num_microbatches, per_stage), of_cut, held)
                yield timeline.makespan_s, peak(timeline)


def least_bytes(num_stages, memory):
    """What one microbatch alone holds on the fullest stage, for the best placement of each cut."""
    for held in memory:
        per_stage = held.num_chunks // num_stages
        rounds = tuple(range(num_stages)) * per_stage
        for stage_of in [rounds] + [(*range(num_stages), *reversed(range(num_stages)))] * (per_stage == 2):
            whole = zip(stage_of, held.activation_bytes, held.weight_bytes, held.parameter_bytes, strict=True)
            sums = [0] * num_stages
            for stage, *parts in whole:
                sums[stage] += sum(parts)
            yield max(sums)


@settings(max_examples=25)
@given(problems())
def test_it_is_never_worse_than_the_best_named_schedule(problem):
    num_stages, num_microbatches, times, memory = problem
    schedule, timeline = search(num_stages, num_microbatches, times, memory, max_chunks_per_stage=3)
    check_schedule(schedule, num_microbatches)
    assert not any(left_over(schedule))
    assert (timeline.makespan_s, peak(timeline)) <= min(named(*problem))
    of_cut, held = next((t, b) for t, b in zip(times, memory, strict=True) if t.num_chunks == schedule.num_chunks)
    assert timeline == simulate(schedule, of_cut, held)


@settings(max_examples=25)
@given(problems(), st.floats(0, 1))
def test_it_respects_the_limit_down_to_one_microbatch_at_a_time(problem, share):
    num_stages, num_microbatches, times, memory = problem
    rows = list(named(*problem))
    least = min(least_bytes(num_stages, memory))
    limit = round(least + share * (max(least, *(held for _, held in rows)) - least))
    schedule, timeline = search(num_stages, num_microbatches, times, memory, limit, max_chunks_per_stage=3)
    check_schedule(schedule, num_microbatches)
    assert peak(timeline) <= limit
    fits = [row for row in rows if row[1] <= limit]
    assert not fits or (timeline.makespan_s, peak(timeline)) <= min(fits)
    with pytest.raises(PlanError, match=rf"allowed: {least} bytes or more"):
        search(num_stages, num_microbatches, times, memory, least - 1, max_chunks_per_stage=3)


@settings(max_examples=10)
@given(problems())
def test_the_same_question_has_the_same_answer(problem):
    num_stages, num_microbatches, times, _ = problem
    assert search(*problem, max_chunks_per_stage=3) == search(*problem, max_chunks_per_stage=3)
    without = search(num_stages, num_microbatches, times, max_chunks_per_stage=3)
    assert without[1].memory == ()


def test_uneven_times_and_transfers_are_met_with_a_list_that_beats_every_named_one():
    chunks = ChunkTimes((1, 2, 1, 3, 2, 1, 2, 1), (2, 2, 1, 4, 2, 1, 3, 1), (1, 1, 1, 2, 2, 1, 1, 1), transfer_s=1)
    best = min(simulate(build(n, 4, 8), chunks).makespan_s for n in ("interleaved", "zb-v", "dualpipe-v"))
    schedule, timeline = search(4, 8, chunks)
    assert schedule.name == "auto"
    assert timeline.makespan_s < 0.95 * best


def test_a_limit_between_zb_h1_and_zb_h2_is_used():
    times, memory = ChunkTimes.equal(4, transfer_s=0.25), ChunkMemory.equal(4, 2, 1)
    h1, h2 = (simulate(build(name, 4, 16), times, memory) for name in ("zb-h1", "zb-h2"))
    schedule, timeline = search(4, 16, times, memory, limit_bytes=(peak(h1) + peak(h2)) // 2)
    assert schedule.name == "auto"
    assert h2.makespan_s <= timeline.makespan_s < h1.makespan_s
    assert peak(h1) < peak(timeline) < peak(h2)


def test_a_named_schedule_that_nothing_beats_keeps_its_name():
    assert search(2, 4, ChunkTimes.equal(2))[0] == build("zb-h1", 2, 4)  # zb-h2 takes as long and holds more


def written(preferences, times, num_microbatches):
    """The lists of two stages by the greedy scheduler, and how long they take."""
    schedule = greedy((0, 1), num_microbatches, times, preferences, ChunkMemory.equal(2))
    return [" ".join(map(str, actions)) for actions in schedule.actions], simulate(schedule, times).makespan_s


def test_weights_are_done_while_something_is_on_its_way():
    lists, step = written(SchedulingRules((2, 1)), ChunkTimes.equal(2, transfer_s=1), 4)
    assert lists[0] == "0F0 0F1 0I0 0F2 0I1 0F3 0W0 0W1 0I2 0W2 0I3 0W3"
    assert lists[1] == "1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1F3 1I3 1W2 1W3"
    assert step == 15  # 17 for the list of no transfer


def test_the_patient_do_not_begin_a_weight_that_something_would_have_to_wait_for():
    times = ChunkTimes((3, 1), (1, 1), (2, 2), transfer_s=1)
    (_, last), step = written(SchedulingRules((2, 1)), times, 2)
    assert (last, step) == ("1F0 1I0 1W0 1F1 1I1 1W1", 14)  # 1F1 could begin a second before 1W0 ends
    (_, last), step = written(SchedulingRules((2, 1), patient=True), times, 2)
    assert (last, step) == ("1F0 1I0 1F1 1I1 1W0 1W1", 13)


def test_preferences_decide_which_action_is_first_and_how_many_microbatches_are_held():
    times = ChunkTimes.equal(2, transfer_s=1)
    (first, _), _ = written(SchedulingRules((3, 1)), times, 4)
    assert first.startswith("0F0 0F1 0F2 0I0")
    (backward, _), _ = written(SchedulingRules((9, 9)), ChunkTimes.equal(2), 4)
    (forward, _), _ = written(SchedulingRules((9, 9), forward_first=True), ChunkTimes.equal(2), 4)
    assert (backward[:15], forward[:15]) == ("0F0 0F1 0F2 0I0", "0F0 0F1 0F2 0F3")
    for deep_first, second in ((True, "1F0"), (False, "0F1")):
        schedule = greedy(
            (0, 0), 2, ChunkTimes.equal(2), SchedulingRules((4,), deep_first=deep_first), ChunkMemory.equal(2)
        )
        assert str(schedule.actions[0][1]) == second


def test_of_two_that_take_equally_long_it_takes_the_one_that_holds_less():
    # one stage: every order takes as long, and one microbatch at a time holds least
    _, timeline = search(1, 5, ChunkTimes.equal(1), ChunkMemory.equal(1, 3))
    assert peak(timeline) == 3


def test_it_chooses_how_many_chunks_a_stage_holds():
    cheap, dear = ChunkTimes.equal(8, 1, 1, 1), ChunkTimes.equal(8, 1, 1, 1, transfer_s=4)
    whole = ChunkTimes.equal(4, 2, 2, 2)
    assert search(4, 8, [whole, cheap])[0].num_chunks == 8
    assert search(4, 8, [ChunkTimes.equal(4, 2, 2, 2, transfer_s=4), dear])[0].num_chunks == 4


def test_unbalanced_stages_end_close_to_the_work_of_the_slowest():
    _, timeline = search(4, 16, UNEVEN)
    slowest = 16 * (3 + 4 + 2)
    into_it = sum(UNEVEN.forward_s[:3]) + 3  # its first microbatch's way down, with three transfers
    assert timeline.makespan_s <= slowest + into_it + 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, 4, ChunkTimes.equal(3)), "times for 3 chunks allowed: each at most once: 2, 4"),
        ((2, 4, ChunkTimes.equal(6)), "times for 6 chunks"),
        ((2, 4, []), "times for nothing"),
        ((2, 4, [ChunkTimes.equal(2), ChunkTimes.equal(2)]), "times for 2, 2 chunks"),
        ((2, 4, ChunkTimes.equal(2), None, 100), "bytes for no chunks"),
        ((2, 4, ChunkTimes.equal(2), ChunkMemory.equal(4), 100), "bytes for 4 chunks"),
        ((0, 4, ChunkTimes.equal(2)), "'num_stages' is too small"),
        ((2, 0, ChunkTimes.equal(2)), "'num_microbatches' is too small"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(LayoutError) as error:
        search(*arguments)
    assert words in " ".join(str(error.value).split())
