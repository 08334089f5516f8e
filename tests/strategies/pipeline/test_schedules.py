"""Every named schedule: complete, in order, free of deadlock, with the memory and the bubble of its paper."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import LayoutError
from shardwright.plan.schedule import Action
from shardwright.strategies.pipeline.schedule_checks import check_schedule
from shardwright.strategies.pipeline.schedules import SCHEDULES, build, forward_only
from shardwright.strategies.pipeline.simulate import ChunkMemory, ChunkTimes, simulate
from strategies.pipeline.by_hand import NAMES, chunk_counts, left_over, most_held, own_idle, schedules

STAGES, MICROBATCHES = st.integers(1, 8), st.integers(1, 20)
# F, I and W with W no longer than either, as the formulas of the zero-bubble paper assume
SPLIT = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)).filter(lambda t: t[2] <= min(t[:2]))


def bubble(schedule, forward_s=1, input_s=1, weight_s=1):
    """The longest that a stage waits, from its own first action to its own last."""
    timeline = simulate(schedule, ChunkTimes.equal(schedule.num_chunks, forward_s, input_s, weight_s))
    return max(own_idle(timeline, stage) for stage in range(schedule.num_stages))


def held_until(schedule, ends):
    return [most_held(actions, ends) for actions in schedule.actions]


@given(schedules())
def test_every_chunk_runs_each_microbatch_forward_once_and_backward_once(schedule):
    counts = Counter(action for actions in schedule.actions for action in actions)
    assert set(counts.values()) == {1}
    for chunk, stage in enumerate(schedule.stage_of):
        for m in range(schedule.num_microbatches):
            kinds = "".join(a.kind for a in schedule.actions[stage] if (a.chunk, a.microbatch) == (chunk, m))
            assert kinds in ("FB", "FIW")
    assert len(counts) == sum(map(len, schedule.actions))
    assert {action.microbatch for action in counts} == set(range(schedule.num_microbatches))
    assert {action.chunk for action in counts} == set(range(schedule.num_chunks))


@given(schedules())
def test_every_schedule_runs_to_its_end(schedule):
    check_schedule(schedule, schedule.num_microbatches)
    assert not any(left_over(schedule))


@pytest.mark.sampled(100)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_microbatches", [1, 65])
def test_every_schedule_runs_on_64_stages(name, num_microbatches):
    schedule = build(name, 64, num_microbatches)
    check_schedule(schedule, num_microbatches)
    assert not any(left_over(schedule))


@given(schedules())
def test_evaluation_runs_the_forwards_alone(schedule):
    forwards = forward_only(schedule)
    assert not any(left_over(forwards))
    assert [str(a) for actions in forwards.actions for a in actions] == [
        str(a) for actions in schedule.actions for a in actions if a.kind == "F"
    ]
    assert (forwards.stage_of, forwards.num_microbatches) == (schedule.stage_of, schedule.num_microbatches)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_are_spread_evenly_and_the_v_turns_on_the_last_stage(name):
    for per_stage in chunk_counts(name):
        schedule = build(name, 4, 8, per_stage)
        assert [len(schedule.chunks_of(stage)) for stage in range(4)] == [per_stage] * 4
    if "-v" in name:
        assert schedule.stage_of == (0, 1, 2, 3, 3, 2, 1, 0)


@given(schedules(), st.data())
def test_a_stage_holds_no_more_than_all_there_is(schedule, data):
    stage = data.draw(st.integers(0, schedule.num_stages - 1))
    all_there_is = schedule.num_microbatches * len(schedule.chunks_of(stage))
    assert 1 <= most_held(schedule.actions[stage], "BW") <= all_there_is


@given(STAGES, MICROBATCHES)
def test_naive_holds_one_microbatch_and_gpipe_all(p, m):
    assert held_until(build("naive", p, m), "B") == [1] * p
    assert held_until(build("gpipe", p, m), "B") == [m] * p


@given(STAGES, MICROBATCHES)
def test_one_f_one_b_holds_one_microbatch_for_each_stage_from_it_on(p, m):
    assert held_until(build("1f1b", p, m), "B") == [min(p - s, m) for s in range(p)]


@given(STAGES, MICROBATCHES, st.integers(2, 4))
def test_interleaved_holds_one_and_p_minus_1_over_pv_times_what_one_f_one_b_does(p, m, v):
    most = p * v + p - 1  # = p v (1 + (p - 1) / (p v)) chunks
    held = held_until(build("interleaved", p, m, v), "B")
    assert max(held) <= min(most, m * v)
    if m % p == 0 and m >= 2 * p:
        assert held[0] == most


@given(STAGES, MICROBATCHES)
def test_zb_h1_holds_no_more_than_one_f_one_b(p, m):
    schedule = build("zb-h1", p, m)
    assert held_until(schedule, "I") == [min(p - s, m) for s in range(p)]
    assert max(held_until(schedule, "W")) == min(p, m)


@given(STAGES, MICROBATCHES)
def test_zb_h2_holds_twice_as_many_less_one(p, m):
    schedule = build("zb-h2", p, m)
    assert held_until(schedule, "I") == [min(2 * (p - s) - 1, m) for s in range(p)]
    assert max(held_until(schedule, "W")) == min(2 * p - 1, m)


@given(STAGES, MICROBATCHES, st.integers(1, 9), st.integers(0, 9))
def test_zero_bubble_stages_hold_the_bytes_of_the_paper(p, m, for_input, for_weight):
    # M_I is for_input + for_weight, of which W still needs M_W = for_weight; once as many microbatches are in flight
    memory = ChunkMemory.equal(p, for_input, for_weight)
    for name, least, count in (
        ("zb-h1", p, lambda s: (p - s, s)),
        ("zb-h2", 2 * p - 1, lambda s: (2 * (p - s) - 1, 2 * s)),
    ):
        timeline = simulate(build(name, p, m + least - 1), ChunkTimes.equal(p), memory)
        for s in range(p):
            whole, half = count(s)
            assert timeline.peak_bytes(s) == whole * (for_input + for_weight) + half * for_weight


@given(STAGES, MICROBATCHES)
def test_the_v_schedules_hold_2p_and_2p_plus_1_chunks(p, m):
    zb_v, dualpipe_v = (held_until(build(name, p, m), "BW") for name in ("zb-v", "dualpipe-v"))
    assert max(zb_v) <= 2 * p
    assert max(dualpipe_v) <= 2 * p + 1
    if m >= 2 * p:
        assert zb_v == [2 * p] * p
        assert dualpipe_v == [2 * p + 1] * p


@given(STAGES, MICROBATCHES, st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_the_bubble_of_naive_gpipe_and_one_f_one_b(p, m, f, i, w):
    times = ChunkTimes.equal(p, f, i, w)
    step, work = {name: simulate(build(name, p, m), times).makespan_s for name in NAMES[:3]}, m * (f + i + w)
    assert step == {"naive": p * work, "gpipe": work + (p - 1) * (f + i + w), "1f1b": work + (p - 1) * (f + i + w)}


@given(STAGES, st.integers(1, 3), st.integers(2, 4), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_interleaving_divides_the_bubble_by_the_chunks(p, groups, v, f, i, w):
    # f, i, w of one chunk: a stage's are v times that. For whole groups of p microbatches
    timeline = simulate(build("interleaved", p, groups * p, v), ChunkTimes.equal(p * v, f, i, w))
    assert timeline.makespan_s - groups * p * v * (f + i + w) == (p - 1) * (v * (f + i + w)) / v


@given(STAGES, MICROBATCHES, SPLIT)
def test_the_bubble_of_zb_h1_from_p_microbatches_on(p, m, times):
    f, i, w = times
    schedule = build("zb-h1", p, m + p - 1)
    assert bubble(schedule, *times) == (p - 1) * (f + i - w)
    step = simulate(schedule, ChunkTimes.equal(p, *times)).makespan_s
    assert step - (m + p - 1) * (f + i + w) == (p - 1) * (f + i - w)


@given(STAGES, MICROBATCHES, SPLIT)
def test_the_bubble_of_zb_h2_from_2p_minus_1_microbatches_on(p, m, times):
    f, i, w = times
    schedule = build("zb-h2", p, m + 2 * p - 2)
    timeline = simulate(schedule, ChunkTimes.equal(p, *times))
    assert min(own_idle(timeline, s) for s in range(p)) >= 0
    if i + f >= 2 * w:
        assert bubble(schedule, *times) == (p - 1) * (f + i - 2 * w)
    assert bubble(schedule) == 0
    assert (
        simulate(schedule, ChunkTimes.equal(p)).makespan_s == (m + 2 * p - 2) * 3 + p - 1
    )  # begun one F after the other


@given(STAGES, MICROBATCHES)
def test_zb_v_never_waits_for_equal_times_from_2p_minus_1_microbatches_on(p, m):
    m += 2 * p - 2
    schedule = build("zb-v", p, m)
    assert bubble(schedule) == 0
    assert simulate(schedule, ChunkTimes.equal(2 * p)).makespan_s == 6 * m + p - 1


@given(STAGES, MICROBATCHES, SPLIT)
def test_the_bubble_of_dualpipe_v_from_2p_microbatches_on(p, m, times):
    f, i, w = times
    schedule = build("dualpipe-v", p, m + 2 * p - 1)
    assert bubble(schedule) == p - 1
    if f <= i + w:
        assert bubble(schedule, *times) <= (p - 1) * ((f + i + w) + (i + w) - 3 * w)


def test_every_schedule_says_what_it_is():
    assert all(family.description for family in SCHEDULES.values())
    assert {n: f.default_chunks for n, f in SCHEDULES.items()} == {n: chunk_counts(n)[0] for n in NAMES}
    for name, family in SCHEDULES.items():
        assert build(name, 3, 4) == build(name, 3, 4, family.default_chunks)
        assert build(name, 3, 4).name == name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1", 2, 2), "given: 1f1 allowed: naive, gpipe, 1f1b fix: write 1f1b"),
        (("1f1b", 0, 2), "'num_stages' given: 0 allowed: 1 or more"),
        (("1f1b", 2, 0), "'num_microbatches' given: 0 fix: start at 8"),
        (("1f1b", 2, 2, 2), "'1f1b' given: 2 allowed: 1 fix: leave"),
        (("zb-v", 2, 2, 3), "'zb-v' given: 3 allowed: 2 fix: leave"),
        (("interleaved", 2, 2, 1), "'interleaved' given: 1 allowed: 2 or more fix: leave"),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_can(arguments, words):
    with pytest.raises(LayoutError) as error:
        build(*arguments)
    text = " ".join(str(error.value).split())
    at = 0
    for word in words.split():
        at = text.index(word, at)


def test_gradients_add_up_in_the_order_of_one_device():
    for name in NAMES:
        for actions in build(name, 4, 9).actions:
            for chunk in {a.chunk for a in actions}:
                last = [a.microbatch for a in actions if a.chunk == chunk and a.kind in "BW"]
                assert last == sorted(last), (name, Action("B", 0, chunk))
