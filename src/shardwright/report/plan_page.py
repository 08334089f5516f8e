"""Writes the predicted costs of layouts as one HTML page: bars, tables, and all constants of the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from shardwright.formatting import format_decimal_bytes, format_seconds
from shardwright.planner.explain import LEAST, PriceDifference, name_of_part, parts_of_step
from shardwright.planner.plan_results import Plans
from shardwright.planner.price import UTILISATION
from shardwright.report.charts import Bar, bar_list
from shardwright.report.page import fact_list, html_table, section, write_html

MOST_BARS = 10
"""The most layouts that are drawn as bars; the table has all."""


def write_plan_page(path: Path, plans: Plans, compared: Sequence[PriceDifference] = (), *, title: str = "Plan") -> Path:
    """Writes an HTML page about the layouts of ``plans``, the best first, to ``path``; returns the path.

    It shows the predicted step and memory of each listed layout, the parts of the best layout's step, its memory by
    stage, why the second best, if it fits, and each layout in ``compared`` take longer, what the search left out, and
    all constants. The file opens without a network and follows the reader's light or dark setting.
    """
    runners_up = [price for price in plans.layouts[1:2] if plans.fits(price)]
    sections = [
        _summary(plans), _picture(plans), _layouts(plans), _waterfall(plans),
        *(_comparison("The runner-up", plans.compare(price)) for price in runners_up),
        *(_comparison(f"Why not {difference.other.layout}?", difference) for difference in compared),
        _memory(plans), *_left_out(plans), _constants(plans),
    ]  # fmt: skip
    under = f"<code>{escape(str(plans.cluster))}</code> &middot; {plans.num_parameters:,} parameters &middot; "
    under += f"{plans.batch:,} samples a step"
    return write_html(path, title=title, under=under, sections=sections, parts=("chart",))


def _summary(plans: Plans) -> str:
    best = plans.row(plans.best)
    low, high = format_seconds(best["step_s_low"]), format_seconds(best["step_s_high"])
    memory = format_decimal_bytes(plans.cluster.device.memory_bytes)
    facts = [
        ("best layout", best["layout"], "" if best["fits"] else "does not fit; the nearest that was priced"),
        ("expected step", format_seconds(best["step_s_expected"]), f"likely {low} to {high}"),
        ("its parts add up to", format_seconds(best["step_s"]), plans.basis),
        ("tokens or samples a second", f"{best['tokens_per_s']:,.0f}", "all devices together"),
        ("of peak", f"{best['utilisation']:.0%}", "recomputed operations not counted"),
        ("memory", format_decimal_bytes(best["memory_bytes"]), f"of {memory}"),
        ("baseline", format_seconds(plans.baseline_s(plans.best)), f"at {UTILISATION:.0%} of peak"),
    ]  # fmt: skip
    remarks = [*plans.ways_out, *(f"{name}: {text}" for name, text in plans.notes()), *plans.warnings()]
    notes = "".join(f"<p class='note'>{escape(remark)}</p>" for remark in remarks)
    return f"<section>\n{fact_list(facts)}\n{notes}</section>"


def _picture(plans: Plans) -> str:
    """Returns HTML bars of the seconds of each layout's step, by part (products, messages, ...), and of its memory."""
    shown = plans.layouts[:MOST_BARS]
    parts = [name_of_part(name) for name in parts_of_step(*(price.waterfall for price in shown))]
    steps, memory = [], []
    for price in shown:
        line = str(price.layout)
        waterfall = {name_of_part(name): seconds for name, seconds in price.waterfall.items() if seconds > 0}
        expected = f"expect {format_seconds(plans.expected_s(price.step_s))}, {plans.utilisation(price):.0%} of peak"
        steps.append(Bar(line, waterfall, format_seconds(price.step_s), expected))
        note = "" if plans.fits(price) else "does not fit"
        memory.append(Bar(line, {"memory": price.memory_bytes}, format_decimal_bytes(price.memory_bytes), note))
    full = float(max(plans.cluster.device.memory_bytes, *(price.memory_bytes for price in shown)))
    note = "A full bar is the memory of a device, or of the layout that takes most."
    body = (
        f"{bar_list(steps, parts)}\n<h3>Memory of the fullest device</h3>\n"
        f'<p class="note">{note}</p>\n{bar_list(memory, ["memory"], most=full)}'
    )
    return section("Predicted step, by part", body)


def _layouts(plans: Plans) -> str:
    heads = [
        "layout",
        "expected step",
        "sum of parts",
        "of peak",
        "memory",
        "payload of messages",
        "bubble",
        "most of it",
    ]
    body = []
    for price in plans.listed:
        sent, most = sum(price.traffic_by_axis.values()), name_of_part(plans.limit(price))
        body.append([
            f"<code>{escape(str(price.layout))}</code>", format_seconds(plans.expected_s(price.step_s)),
            format_seconds(price.step_s), f"{plans.utilisation(price):.0%}", format_decimal_bytes(price.memory_bytes),
            format_decimal_bytes(sent), f"{price.bubble:.1%}", escape(most) if plans.fits(price) else "does not fit",
        ])  # fmt: skip
    return section("Layouts", html_table(heads, body, numbers_from=1, stacked=True))


def _waterfall(plans: Plans) -> str:
    best = plans.best
    body = [
        [escape(name_of_part(name)), format_seconds(best.waterfall[name]), f"{best.waterfall[name] / best.step_s:.1%}"]
        for name in parts_of_step(best.waterfall)
        if best.waterfall[name] >= LEAST * best.step_s
    ]
    body.append(["<b>step</b>", format_seconds(best.step_s), ""])
    note = "Messages count as far as no computation hides them. The parts add up to the step."
    table = html_table(["part", "time", "share"], body, numbers_from=1)
    return section(f"Where the time of {best.layout} goes", table, note)


def _comparison(heading: str, compared: PriceDifference) -> str:
    steps = compared.best.step_s, compared.other.step_s
    parts = [(p, a, b) for p, a, b in compared.differences() if abs(b - a) >= LEAST * compared.best.step_s]
    rows = [*((name_of_part(p), a, b) for p, a, b in parts), ("step", *steps)]
    body = [[escape(name), format_seconds(a), format_seconds(b), _signed(b - a)] for name, a, b in rows]
    return section(heading, html_table(["part", "best", "this", "more"], body, numbers_from=1), compared.why())


def _signed(seconds: float) -> str:
    return ("+" if seconds > 0 else "") + format_seconds(seconds)


def _memory(plans: Plans) -> str:
    stages = plans.best.memory
    kinds = [kind for kind in stages[0].by_kind if any(stage.by_kind[kind] for stage in stages)]
    body = []
    for first, last in _alike(stages):
        stage = stages[first]
        sizes = [*(stage.by_kind[kind] for kind in kinds), stage.beside, stage.num_bytes]
        body.append([f"{first}" if first == last else f"{first} to {last}", *map(format_decimal_bytes, sizes)])
    heads = ["stage", *kinds, "beside tensors", "all"]
    limit = format_decimal_bytes(plans.cluster.device.memory_bytes * plans.memory_limit)
    note = f"At the moment at which a rank of the stage holds most. Limit: {limit}."
    return section(f"Memory of {plans.best.layout}", html_table(heads, body, numbers_from=1, stacked=True), note)


def _alike(stages: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Yields the first and the last number of each run of equal stages."""
    first = 0
    for number in range(1, len(stages) + 1):
        if number == len(stages) or stages[number] != stages[first]:
            yield first, number - 1
            first = number


def _left_out(plans: Plans) -> Iterator[str]:
    body = [[f"{row['count']:,}", escape(row["reason"]), f"<code>{escape(str(row['nearest']))}</code>"]
            for row in plans.rejected()]  # fmt: skip
    if body:
        yield section("What was left out", html_table(["layouts", "because", "such as"], body, stacked=True))


def _constants(plans: Plans) -> str:
    body = [
        [f"<code>{escape(row['name'])}</code>", f"{row['value']:.4g}", escape(row["unit"]), escape(row["source"]),
         escape(row["meaning"])]
        for row in plans.constants()
    ]  # fmt: skip
    note = "A prediction is as good as these: datasheets and guesses are replaced by runs of your own, with --anchor."
    table = html_table(["name", "value", "unit", "source", "meaning"], body, stacked=True)
    return section("Constants", table, note)
