"""Are a search's estimates near the prices, and is what a search calls best the best of the prices?

Layouts of three models are drawn with a fixed seed, estimated as a search does, and priced. Then a search of the same
model says which layout it takes for the best. Nothing is timed: estimates and prices do not depend on the machine.
"""

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from unittest.mock import patch

import torch

import shardwright as sw
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.planner import plans as planner

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, write

SEED = 0
GPT_13B = {"num_layers": 40, "width": 5120, "num_heads": 40, "vocabulary": 50257, "max_tokens": 2048}
GPT_1_3B = {"num_layers": 24, "width": 2048, "num_heads": 16, "vocabulary": 50257, "max_tokens": 2048}
LLAMA_7B = {"style": "llama", "num_layers": 32, "width": 4096, "num_heads": 32, "hidden": 11008, "vocabulary": 32000,
            "max_tokens": 4096, "tied": False}  # fmt: skip
CASES = {
    "gpt 13B": (GPT_13B, "h100-80gb:1x8", 64, 2048),
    "gpt 1.3B": (GPT_1_3B, "a100-80gb:2x8", 128, 2048),
    "llama 7B": (LLAMA_7B, "a100-80gb:1x8", 64, 4096),
}
SCHEDULES = ("", "", "1f1b/scatter", "interleaved:v2", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
COPIES = ("", "zero1", "zero1", "zero2", "zero3")
OPERATORS = ("", "", "sp", "seq", "regather")
RECOMPUTE = ("", "", "recompute:full", "recompute:selective")
CONTENDERS = 1.25
"""How many times the best price, and the memory limit, a layout's may be that counts as a contender."""


def drawn(ranks, batch, seed):
    """Lines of layouts, without end, each once."""
    draw, seen = random.Random(seed), set()
    powers = [2**n for n in range(ranks.bit_length())]
    divisions = [(pp, dp, tp) for pp in powers for dp in powers for tp in powers if pp * dp * tp == ranks and tp <= 8]
    for _ in range(10_000):
        pp, dp, tp = draw.choice(divisions)
        number = batch // dp // draw.choice((1, 2, 4, 8))
        sizes = (("pp", pp, SCHEDULES), ("mb", 0, ()), ("dp", dp, COPIES), ("tp", tp, OPERATORS))
        words = [f"{axis}{size}/{draw.choice(choices)}".rstrip("/") for axis, size, choices in sizes if size > 1]
        line = " ".join(filter(None, (*words, f"mb{max(1, number)}", "bf16", draw.choice(RECOMPUTE))))
        if number >= pp and (line := str(Layout.parse(line))) not in seen:
            seen.add(line)
            yield line


def rows_of(name, number, priced, out):
    """A row for each drawn layout, and the search's own rows.

    Prices in ``priced``, rows of a run before that refused the layouts in ``out``, are taken from there: a change of
    estimates alone leaves them as they are.
    """
    sizes, cluster, batch, tokens = CASES[name]
    with sw.without_values():
        model = GPT(GPTConfig(**sizes))
    example = tuple(torch.empty(batch, tokens, dtype=torch.long, device="meta") for _ in range(2))
    of_search, real = [], planner.search

    def followed(pricing, samples, record, wanted, short):
        with patch("shardwright.planner.search.Estimator", wraps=planner_estimator()) as made:
            found = real(pricing, samples, record, wanted, short)
        of_search.append((KEPT[-1], record, wanted))
        assert made.called, "a search estimates"
        return found

    with patch.object(planner, "search", followed):
        found = sw.plan_layouts(model, cluster, example, loss=CrossEntropy())
    estimator, record, wanted = of_search[0]
    table, refused = [], []
    for line in drawn(estimator.pricing.cluster.num_ranks, batch, SEED):
        if len(table) == number:
            break
        if (name, line) in out:
            continue
        layout = Layout.parse(line)
        estimate = estimator.estimate(layout)
        if (name, line) in priced:
            table.append({**priced[name, line], "estimate_s": estimate and estimate.step_s,
                          "estimate_bytes": estimate and estimate.memory_bytes})  # fmt: skip
            continue
        try:
            price = estimator.pricing.price(layout, record(layout, batch))
        except (LayoutError, PlanError) as problem:
            refused.append({"model": name, "layout": line, "why": problem.what})
            continue
        table.append({"model": name, "layout": line, "price_s": price.step_s, "price_bytes": price.memory_bytes,
                      "estimate_s": estimate and estimate.step_s,
                      "estimate_bytes": estimate and estimate.memory_bytes})  # fmt: skip
    searched = [{"model": name, "layout": str(each.layout), "price_s": each.step_s, "price_bytes": each.memory_bytes,
                 "fits": found.fits(each)} for each in found.layouts]  # fmt: skip
    return table, searched, refused, wanted.limit_bytes


KEPT = []
"""The estimators that searches have made."""


def planner_estimator():
    """The class of estimators, of which each one made is kept."""
    from shardwright.planner.estimate import Estimator

    def made(*args, **kwargs):
        KEPT.append(Estimator(*args, **kwargs))
        return KEPT[-1]

    return made


def features(line):
    """What a layout is counted under."""
    layout = Layout.parse(line)
    by_axis = {factor.axis: "/".join(map(str, factor.options)) or "plain" for factor in layout.factors}
    return [*(f"{axis} {options}" for axis, options in by_axis.items()), f"recompute {layout.recompute or 'none'}"]


def quantiles(ratios):
    """The least, the 5th percentile, the median, the 95th and the largest."""
    cut = statistics.quantiles(ratios, n=20, method="inclusive") if len(ratios) > 1 else ratios * 19
    return tuple(round(each, 3) for each in (min(ratios), cut[0], statistics.median(ratios), cut[-1], max(ratios)))


def summary(table):
    """Quantiles of estimate / price by feature: of seconds and of bytes."""
    groups = {}
    for row in table:
        if row["estimate_s"] is not None:
            for feature in ("all", *features(row["layout"])):
                groups.setdefault(feature, []).append(row)
    return [
        {"feature": feature, "layouts": len(rows),
         **{f"of_{unit}": quantiles([row[f"estimate_{unit}"] / row[f"price_{unit}"] for row in rows])
            for unit in ("s", "bytes")}}
        for feature, rows in sorted(groups.items())
    ]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=int, default=60)
    parser.add_argument("--prices", type=Path, metavar="FILE", help="take prices from these rows of a run before")
    parser.add_argument("--model", choices=CASES, action="append")
    options = options_of(parser, {"layouts": 2, "model": ["gpt 1.3B"]})
    rows, searched, left, best = [], [], [], []
    known = json.loads(options.prices.read_text()) if options.prices else {"table": [], "refused": []}
    priced = {(row["model"], row["layout"]): row for row in known["table"]}
    out = {(row["model"], row["layout"]) for row in known["refused"]}
    for name in options.model or CASES:
        table, layouts, refused, limit = rows_of(name, options.layouts, priced, out)
        rows, searched, left = rows + table, searched + layouts, left + refused
        fit = [row for row in table if row["price_bytes"] <= limit]
        near = [row for row in table if row["price_bytes"] <= CONTENDERS * limit
                and row["price_s"] <= CONTENDERS * min(each["price_s"] for each in fit or table)]  # fmt: skip
        for what, some in (("all", table), ("contenders", near)):
            print(name, what)
            for row in summary(some):
                print(f"  {row['feature']:24} {row['layouts']:4}  s {row['of_s']}  bytes {row['of_bytes']}")
        least = min(fit, key=lambda row: row["price_s"], default=None)
        own = min((row for row in layouts if row["fits"]), key=lambda row: row["price_s"], default=None)
        best.append({"model": name, "of_search": own, "of_drawn": least, "limit_bytes": limit})
        print(name, "search", own, "drawn", least, flush=True)
    by_model = {name: summary([row for row in rows if row["model"] == name]) for name in options.model or CASES}
    result = {"machine": machine(), "best": best, "summary": by_model, "searched": searched, "table": rows}
    write(options, __file__, {**result, "refused": left})


if __name__ == "__main__":
    main()
