"""Every drawing of a timeline shows all of it or says what it leaves out, at any size and under any name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from processor_time import takes_less
from shardwright.plan.schedule import Action
from shardwright.report.timeline_outline import NOTHING, percent
from shardwright.report.timeline_page import write_timeline_page
from shardwright.report.timeline_picture import draw_timelines, shade, timelines_figure
from shardwright.report.timeline_text import timeline_text
from shardwright.report.timelines import write_trace
from shardwright.runtime.timeline import Span, Timeline

NASTY = "<script>alert('\"&')</script> $\\frac{ \x1b[31m\n\u65e5\u672c \U0001f642"
ROW = re.compile(r"^stage (\d+) *\|(.*)\|(.*)$", re.MULTILINE)
ACTION_BYTES = 2**20
V = (("F", 0), ("F", 1), ("B", 1), ("B", 0), ("I", 1), ("W", 1), ("I", 0), ("W", 0))


def one_f_one_b(num_stages, num_microbatches, unit_s=1e-3, name="1f1b", split=False, counted=True):
    """1F1B: a forward takes one unit, a backward two, or I and W one each; a transfer takes no time."""
    spans, clocks, done = [[] for _ in range(num_stages)], [0.0] * num_stages, {}
    back, kinds = ("I", "IW") if split else ("B", "B")
    waiting = []
    for stage in range(num_stages):
        warmup = min(num_stages - stage - 1, num_microbatches)
        order = [("F", m) for m in range(warmup)]
        for m in range(num_microbatches):
            order += [("F", m + warmup)] * (m + warmup < num_microbatches) + [(kind, m) for kind in kinds]
        waiting.append(order[::-1])
    while any(waiting):
        for stage, order in enumerate(waiting):
            while order:
                kind, m = order[-1]
                needs = {"F": ("F", stage - 1), back: (back, stage + 1)}.get(kind, ("", -1))
                there = done.get((*needs, m)) if 0 <= needs[1] < num_stages else 0.0
                if there is None:
                    break
                start = max(clocks[stage], there)
                clocks[stage] = done[kind, stage, m] = start + unit_s * (2 if kind == "B" else 1)
                spans[stage].append(Span(Action(kind, m, stage), start, clocks[stage]))
                order.pop()
    memory = [held(of_stage, back) for of_stage in spans] if counted else []
    return Timeline(name, tuple(map(tuple, spans)), tuple(memory))


def held(spans, back):
    changes, now = [], 0
    for span in spans:
        if span.action.kind in ("F", back):
            now += ACTION_BYTES if span.action.kind == "F" else -ACTION_BYTES
            changes.append((span.start_s if span.action.kind == "F" else span.end_s, now))
    return tuple(changes)


def longer(timeline, factor, later_s=0.5, **changes):
    """The same actions as a run might measure them: longer, and some time after the clock was set."""
    spans = (tuple(Span(a, s * factor + later_s, e * factor + later_s) for a, s, e in of) for of in timeline.spans)
    return Timeline(changes.get("name", timeline.name), tuple(spans))


@st.composite
def any_timelines(draw):
    """One or two timelines of any actions, one after the other on each stage, at any scale of time."""
    scale = draw(st.sampled_from([1e-7, 1e-3, 1.0, 3600.0]))
    found = []
    for name in ("a", "b")[: draw(st.integers(1, 2))]:
        stages = []
        for _ in range(draw(st.integers(1, 5))):
            now, spans = draw(st.integers(0, 20)), []
            for m, (kind, chunk, gap, length) in enumerate(draw(st.lists(ACTIONS, max_size=12))):
                spans.append(Span(Action(kind, m, chunk), (now + gap) * scale, (now + gap + length) * scale))
                now += gap + length
            stages.append(tuple(spans))
        found.append(Timeline(name, tuple(stages)))
    return found


ACTIONS = st.tuples(st.sampled_from("FBIW"), st.integers(0, 2), st.integers(0, 9), st.integers(1, 9))


def zero_of(timeline):
    return min((span.start_s for stage in timeline.spans for span in stage), default=0.0)


def rows_of(text):
    """Stage, cells and what stands behind them, of every row in a text."""
    return [(int(stage), cells, behind) for stage, cells, behind in ROW.findall(text)]


# ---- the text


@given(any_timelines(), st.integers(40, 160))
def test_the_rows_of_a_text_have_one_width_within_the_given_one(timelines, width):
    rows = [line for line in timeline_text(timelines, width=width).splitlines() if ROW.match(line)]
    assert len(rows) == sum(len(t.spans) for t in timelines if t.makespan_s)
    assert len(set(map(len, rows))) <= 1
    assert all(len(row) <= width for row in rows)


@given(any_timelines(), st.integers(40, 160))
def test_the_busy_cells_of_a_stage_match_its_busy_time_to_a_cell_for_each_action(timelines, width):
    rows = iter(rows_of(timeline_text(timelines, width=width)))
    longest = max(timeline.makespan_s for timeline in timelines)
    for timeline in timelines:
        for stage in range(len(timeline.spans)) if timeline.makespan_s else ():
            _, cells, _ = next(rows)
            busy = len(cells) - cells.count(" ")
            expected = timeline.busy_s(stage) / longest * len(cells)
            assert abs(busy - expected) <= len(timeline.spans[stage]) + 0.5


@given(any_timelines(), st.integers(40, 160))
def test_a_label_names_an_action_of_its_stage_or_its_kind_alone(timelines, width):
    rows = iter(rows_of(timeline_text(timelines, width=width)))
    for timeline in timelines:
        for spans in timeline.spans if timeline.makespan_s else ():
            _, cells, _ = next(rows)
            chunks = sorted({span.action.chunk for span in spans})
            allowed = set()
            for kind, m, chunk in (span.action for span in spans):
                letter = kind.lower() if chunks.index(chunk) % 2 else kind
                allowed |= {letter, f"{letter}{m}"}
            text = re.sub(r"[-=~. ]+", " ", cells)
            labels = re.compile("|".join(sorted(map(re.escape, allowed | {" "}), key=len, reverse=True)))
            assert not labels.sub("", text)


def test_kinds_and_chunks_are_told_apart_without_colour_and_the_text_stays_under_colour():
    one = Timeline("v", ((*(Span(Action(k, 3, c), t, t + 4) for t, (k, c) in zip(range(0, 32, 4), V, strict=True)),),))
    (_, cells, _), = rows_of(timeline_text([one], width=80))  # fmt: skip
    assert cells == "F3-----f3-----b3=====B3=====i3~~~~~w3.....I3~~~~~W3....."
    coloured = timeline_text([one], width=80, colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).split() == timeline_text([one], width=80).split()
    assert "\x1b[30;46mF3" in coloured


def test_a_number_that_does_not_fit_is_left_out_whole():
    spans = tuple(Span(Action("F", 120 + n), n, n + 1) for n in range(20))
    (_, cells, _), = rows_of(timeline_text([Timeline("many", (spans,))], width=78))  # fmt: skip
    assert cells == "F--" * 20


def test_the_text_states_makespan_bubble_and_peak_in_total_and_for_each_stage():
    timeline = one_f_one_b(4, 8)
    text = timeline_text([timeline])
    assert text.startswith("1f1b: makespan 33.0 ms, bubble 27.3 %, peak 4.0 MiB on stage 0\n")
    assert [behind.split() for _, _, behind in rows_of(text)] == [
        ["27.3", "%", f"{4 - stage}.0", "MiB"] for stage in range(4)
    ]
    assert "peak" not in timeline_text([one_f_one_b(4, 8, counted=False)])


def test_predicted_and_measured_share_a_scale_that_begins_at_the_first_action_of_each():
    timeline = one_f_one_b(3, 4)
    text = timeline_text([timeline, longer(timeline, 1.25)])
    assert "1f1b, predicted: makespan 18.0 ms" in text
    assert "1f1b, measured: makespan 22.5 ms" in text
    assert "measured takes 1.25 times as long as predicted" in text
    rows = rows_of(text)
    assert [stage for stage, _, _ in rows] == [0, 1, 2, 0, 1, 2]
    assert rows[0][1].startswith("F0")
    assert rows[3][1].startswith("F0")
    lengths = [len(rows[n][1].rstrip()) for n in (0, 3)]
    assert lengths[1] == len(rows[0][1])
    assert lengths[0] == pytest.approx(lengths[1] / 1.25, abs=1)


@pytest.mark.parametrize(
    ("unit_s", "makespan", "unit"), [(2e-7, "6.60 µs", "µs"), (1, "33.0 s", "s"), (600, "5 h 30 min", "h")]
)
def test_the_unit_of_time_suits_the_run(unit_s, makespan, unit, tmp_path):
    timeline = one_f_one_b(4, 8, unit_s)
    text = timeline_text([timeline])
    assert f"makespan {makespan}," in text
    assert re.search(rf"^ +0 .*\d {unit}$", text, re.MULTILINE)
    assert f"time, {unit}" in words_of(timelines_figure([timeline]))
    assert makespan in write_timeline_page(tmp_path / "page.html", [timeline]).read_text(encoding="utf-8")


# ---- the picture


def words_of(figure):
    return [text.get_text() for text in figure.texts]


def png_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def boxes_of(axes):
    return [path.get_extents() for collection in axes.collections for path in collection.get_paths()]


@pytest.mark.sampled(0)
@settings(max_examples=25)
@given(any_timelines())
def test_a_picture_has_a_box_for_each_action_where_and_as_long_as_it_is(timelines):
    figure = timelines_figure(timelines)
    longest = max(timeline.makespan_s for timeline in timelines)
    for axes, timeline in zip(figure.axes, timelines, strict=True):
        drawn = sorted((int(box.y0), box.x0, box.x1) for box in boxes_of(axes))
        scale, zero = axes.get_xlim()[1] / (longest or 1), zero_of(timeline)
        expected = sorted(
            (stage, (start - zero) * scale, (end - zero) * scale)
            for stage, spans in enumerate(timeline.spans)
            for _, start, end in spans
        )
        assert np.array(drawn) == pytest.approx(np.array(expected), abs=1e-6 * axes.get_xlim()[1])


@pytest.mark.parametrize("num_stages", [1, 4, 16, 40])
@pytest.mark.parametrize("pair", [False, True])
def test_the_picture_is_a_png_that_fits_a_page(num_stages, pair, tmp_path):
    timeline = one_f_one_b(num_stages, 8)
    timelines = [timeline, longer(timeline, 1.3)] if pair else [timeline]
    width, height = png_size(draw_timelines(tmp_path / "made" / "timeline.png", timelines, title="A schedule"))
    assert width == 1500
    assert 350 < height < 2200


@pytest.mark.parametrize(
    "timelines",
    [
        [one_f_one_b(4, 8)],
        [one_f_one_b(4, 8, 1e-6), longer(one_f_one_b(4, 8, 1e-6), 1.01)],
        [one_f_one_b(16, 32, split=True, name="a name that is long " * 9)],
        [Timeline("v", ((*(Span(Action(k, 9, c), t, t + 1) for t, (k, c) in enumerate(V)),),))],
    ],
)
def test_no_words_of_a_picture_overlap_or_cross_its_edge(timelines):
    figure = timelines_figure(timelines, title="words " * 40)
    figure.canvas.draw()
    texts = [*figure.texts, *(t for axes in figure.axes for t in (*axes.texts, *axes.get_yticklabels()))]
    texts += [t for axes in figure.axes for t in axes.get_xticklabels() if axes.xaxis.get_tick_params()["labelbottom"]]
    shown = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text() and t.get_visible()]
    for (one, box), (other, there) in combinations(shown, 2):
        apart = box.x1 <= there.x0 or there.x1 <= box.x0 or box.y1 <= there.y0 or there.y1 <= box.y0
        assert apart, f"{one!r} lies on {other!r}"
    edge = figure.bbox
    assert all(box.x0 >= 0 and box.x1 <= edge.x1 and box.y0 >= 0 and box.y1 <= edge.y1 for _, box in shown)


def test_the_headings_of_a_measured_picture_are_whole_since_they_leave_out_the_title():
    line = "pp2/interleaved:v2 mb4 dp2/zero1 tp2"
    predicted, measured = (one_f_one_b(2, 4, 1e-2, name=f"{line}, {what}") for what in ("predicted", "measured"))
    words = words_of(timelines_figure([predicted.at_speed_of(measured), measured], title=line))
    assert {line, "predicted (scaled)", "measured"} <= {*words}
    assert not [each for each in words if each.endswith("\N{HORIZONTAL ELLIPSIS}")]


def test_a_microbatch_is_written_inside_its_action_wherever_there_is_room():
    figure = timelines_figure([one_f_one_b(4, 8)])
    axes = figure.axes[0]
    found = [(int(text.get_position()[1]), text.get_text()) for text in axes.texts]
    assert sorted(found) == sorted((stage, str(m)) for stage in range(4) for m in range(8) for _ in "FB")
    assert not timelines_figure([one_f_one_b(40, 8)]).axes[0].texts


def test_of_actions_too_narrow_for_a_pixel_each_pixel_shows_the_mean_colour():
    spans = tuple(Span(Action("F", n), 3 * n, 3 * n + 1) for n in range(5000))
    figure = timelines_figure([Timeline("narrow", (spans,))])
    pixels = np.asarray(figure.axes[0].images[0].get_array())
    idle = np.array([int("eef1f4"[n : n + 2], 16) / 255 for n in (0, 2, 4)])
    expected = idle + (np.array(shade("F", 0, 1)) - idle) / 3
    assert pixels.reshape(-1, 3).mean(axis=0) == pytest.approx(expected, abs=1e-3)
    assert pixels.reshape(-1, 3).std(axis=0).max() < 0.05
    assert any("too narrow for a pixel" in words for words in words_of(figure))


def test_memory_is_drawn_below_the_stages_where_it_was_counted():
    timeline = one_f_one_b(3, 4)
    figure = timelines_figure([timeline])
    assert len(figure.axes) == 2
    peaks = sorted(max(line.get_ydata()) for line in figure.axes[1].lines)
    assert peaks == sorted(timeline.peak_bytes(stage) for stage in range(3))
    assert len(timelines_figure([one_f_one_b(3, 4, counted=False)]).axes) == 1


# ---- the page


class Checker(HTMLParser):
    """Every tag that is opened is closed; what the page loads from elsewhere, and its scripts, are kept."""

    def __init__(self):
        super().__init__()
        self.open, self.outside, self.scripts, self.text, self.labels = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.outside += [value for key, value in attrs if key in ("src", "href", "action", "srcset")]
        self.labels += [value for key, value in attrs if key == "aria-label"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] == "script" else self.text).append(data)


def checked(path):
    checker = Checker()
    checker.feed(path.read_text(encoding="utf-8"))
    checker.close()
    assert not checker.open
    return checker


@settings(max_examples=25)
@given(any_timelines())
def test_every_action_is_once_in_the_data_of_the_page(tmp_path_factory, timelines):
    path = write_timeline_page(tmp_path_factory.mktemp("page") / "page.html", timelines)
    data = json.loads(checked(path).scripts[0])
    kinds = [letter for letter, _, _ in data["kinds"]]
    assert [each["name"] for each in data["timelines"]] == [timeline.name for timeline in timelines]
    for found, timeline in zip(data["timelines"], timelines, strict=True):
        zero = zero_of(timeline)
        for stage, spans in zip(found["stages"], timeline.spans, strict=True):
            rows = np.array(stage["spans"]).reshape(-1, 5)
            assert [(kinds[int(k)], m, c) for k, m, c in rows[:, :3]] == [span.action for span in spans]
            times = np.array([span[1:] for span in spans]).reshape(-1, 2) - zero
            assert rows[:, 3:] == pytest.approx(times, abs=1e-8 * timeline.makespan_s)


def test_the_page_loads_nothing_and_forbids_loading(tmp_path):
    timeline = one_f_one_b(4, 8)
    path = write_timeline_page(tmp_path / "made" / "page.html", [timeline, longer(timeline, 2)], title="A schedule")
    page, found = path.read_text(encoding="utf-8"), checked(path)
    assert not found.outside
    for word in ("http:", "https:", "url(", "@import", "fetch(", "XMLHttp", "innerHTML", "eval("):
        assert word not in page
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    text = " ".join(found.text)
    assert "4 stages, 8 microbatches, 64 actions; measured takes 2.00 times as long as predicted" in text
    assert timeline_text([timeline, longer(timeline, 2)], width=130) in text
    assert any("1f1b, measured: makespan 66.0 ms, bubble 27.3 %, on 4 stages" in label for label in found.labels)


def test_the_numbers_of_each_stage_are_in_a_table(tmp_path):
    timeline = Timeline("two", ((Span(Action("F", 0), 0, 3),), (Span(Action("F", 0, 1), 3, 4),)))
    page = write_timeline_page(tmp_path / "page.html", [timeline]).read_text(encoding="utf-8")
    rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    assert rows[1:] == [["0", "3.00 s", percent(0.25)], ["1", "1.00 s", percent(0.75)]]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here to read the script")
def test_the_script_of_the_page_parses(tmp_path):
    script = checked(write_timeline_page(tmp_path / "page.html", [one_f_one_b(2, 2)])).scripts[1]
    (tmp_path / "script.js").write_text(script, encoding="utf-8")
    subprocess.run(["node", "--check", str(tmp_path / "script.js")], check=True)


# ---- the trace


@given(any_timelines())
def test_every_action_is_one_event_of_the_trace_on_its_stage(tmp_path_factory, timelines):
    trace = json.loads(write_trace(tmp_path_factory.mktemp("trace") / "trace.json", timelines).read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    found = {(e["pid"], e["tid"], e["args"]["kind"], e["args"]["microbatch"], e["args"]["chunk"]): e for e in events}
    expected = {
        (process, stage + 1, *span.action): ((span.start_s - zero_of(timeline)) * 1e6, span)
        for process, timeline in enumerate(timelines, 1)
        for stage, spans in enumerate(timeline.spans)
        for span in spans
    }
    assert len(events) == len(expected)
    assert found.keys() == expected.keys()
    for key, (start, span) in expected.items():
        assert found[key]["name"] == str(span.action)
        assert found[key]["ts"] == pytest.approx(start, rel=1e-9, abs=1e-3)
        assert found[key]["dur"] == pytest.approx((span.end_s - span.start_s) * 1e6, rel=1e-9, abs=2e-3)


def test_processes_threads_and_counters_of_a_trace_are_named(tmp_path):
    timeline = one_f_one_b(2, 3)
    events = json.loads(write_trace(tmp_path / "trace.json", [timeline, timeline]).read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert names == {
        (1, 0): "1f1b, predicted", (1, 1): "stage 0", (1, 2): "stage 1",
        (2, 0): "1f1b, measured", (2, 1): "stage 0", (2, 2): "stage 1",
    }  # fmt: skip
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 2 and e["name"] == "memory of stage 1"]
    changes = dict(timeline.memory[1])
    assert {e["ts"]: e["args"]["bytes"] for e in counters} == pytest.approx(
        {at * 1e6: num_bytes for at, num_bytes in changes.items()}
    )


# ---- all of them


def test_names_are_printed_literally_and_never_interpreted(tmp_path):
    timeline = one_f_one_b(2, 2, name=NASTY)
    text = timeline_text([timeline, longer(timeline, 2)])
    assert "<script>alert" in text
    assert all(line.isprintable() for line in text.splitlines())
    assert sum("makespan" in line for line in text.splitlines()) == 2
    assert png_size(draw_timelines(tmp_path / "timeline.png", [timeline], title=NASTY))[0] == 1500
    path = write_timeline_page(tmp_path / "page.html", [timeline], title=NASTY)
    assert len(checked(path).scripts) == 2
    assert path.read_text(encoding="utf-8").count("<script") == 2
    assert json.loads(checked(path).scripts[0])["timelines"][0]["name"] == NASTY
    events = json.loads(write_trace(tmp_path / "trace.json", [timeline]).read_text())["traceEvents"]
    assert events[0]["args"]["name"] == NASTY


@pytest.mark.parametrize("spans", [(), ((), ()), ((Span(Action("F", 0), 2, 2),),)])
def test_a_timeline_in_which_nothing_takes_time_is_drawn_as_an_empty_one(spans, tmp_path):
    for timelines in ([Timeline("empty", spans)], [Timeline("empty", spans), one_f_one_b(2, 2)]):
        assert f"empty: {NOTHING}" in timeline_text(timelines)
        assert NOTHING in [text.get_text() for text in timelines_figure(timelines).axes[0].texts]
        draw_timelines(tmp_path / "timeline.png", timelines)
        assert NOTHING in " ".join(checked(write_timeline_page(tmp_path / "page.html", timelines)).text)
        write_trace(tmp_path / "trace.json", timelines)


def test_no_timeline_at_all_is_drawn_too(tmp_path):
    assert timeline_text([]) == ""
    assert png_size(draw_timelines(tmp_path / "timeline.png", []))[0] == 1500
    assert NOTHING in " ".join(checked(write_timeline_page(tmp_path / "page.html", [])).text)
    assert json.loads(write_trace(tmp_path / "trace.json", []).read_text())["traceEvents"] == []


@pytest.mark.sampled(0)
def test_sixty_four_stages_with_a_thousand_microbatches_are_drawn_in_seconds(tmp_path):
    timeline = one_f_one_b(64, 1024)
    drawn = []

    def draw():
        text = timeline_text([timeline])
        size = png_size(draw_timelines(tmp_path / "timeline.png", [timeline]))
        page = write_timeline_page(tmp_path / "page.html", [timeline])
        drawn.append((text, size, page, write_trace(tmp_path / "trace.json", [timeline])))

    assert takes_less(15, draw)
    text, (width, height), page, trace = drawn[0]
    assert len(text.splitlines()) < 30
    assert all(len(line) <= 100 for line in text.splitlines())
    assert [stage for stage, _, _ in rows_of(text)][::15] == [0, 63]
    assert "16 of 64 stages are drawn" in text
    words = " ".join(text.split())
    cells = sum(len(re.findall("[FB]", cells)) for _, cells, _ in rows_of(text))
    assert f"{32768 - cells:,} of the 32,768 actions in these rows, with 1,024 microbatches, are left out" in words
    assert width == 1500
    assert height < 1500
    data = json.loads(checked(page).scripts[0])
    assert sum(len(stage["spans"]) for stage in data["timelines"][0]["stages"]) == 5 * 2 * 64 * 1024
    assert sum(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"]) == 2 * 64 * 1024
