"""Rebuilds the generated tables of the README files from the code and from measured rows.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. ``--check`` fails when one is out of date.
"""

import json
import re
import statistics
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import torch

from shardwright.initial_values import without_values
from shardwright.layout import Layout
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.plan.plan import Job
from shardwright.report.description import describe
from shardwright.report.show import show_text
from shardwright.strategies import STRATEGIES
from shardwright.strategy import Strategy

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("guide", "which_layout", "how_fast")]
"""The pages of docs/ that have tables."""

MOST_DIVERGENCE = 1e-4
"""The largest relative difference of losses that rounding explains, as in ``benchmarks/trust/kills.py``."""


def file_of(strategy: Strategy) -> str:
    """Returns the file that defines a strategy, relative to the folder of strategies."""
    (module,) = (m for m in list(sys.modules.values()) if vars(m).get("STRATEGY") is strategy)
    return f"{module.__name__.removeprefix('shardwright.strategies.').replace('.', '/')}.py"


def strategies() -> str:
    """Returns the table of all registered strategies."""
    lines = ["| strategy | factor | does | source |", "|---|---|---|---|"]
    for name, strategy in sorted(STRATEGIES.items()):
        does = getattr(strategy, "does", type(strategy).__doc__ or "").strip().splitlines()[0].replace("``", "`")
        factor = f"`{strategy.axis}N`" if strategy.default else f"`{strategy.axis}N/{next(iter(strategy.options))}`"
        lines.append(
            f"| [{name}](src/shardwright/strategies/{file_of(strategy)}) | {factor} | {does} | {strategy.source} |"
        )
    return "\n".join(lines)


def texts(strategy: Strategy) -> list[tuple[str, str]]:
    """Returns each option of a strategy and what it does."""
    return [(name, option.text) for name, option in strategy.options.items()]


def options() -> str:
    """Returns the table of all options; an option that all strategies of an axis have is listed once."""
    lines = ["| factor | option | does |", "|---|---|---|"]
    counts = Counter(pair for strategy in STRATEGIES.values() for pair in texts(strategy))
    for name, strategy in sorted(STRATEGIES.items()):
        first = f"`{strategy.axis}N` ([{name}](../src/shardwright/strategies/{file_of(strategy)}))"
        for option, text in texts(strategy):
            if counts[option, text] <= 2:
                lines.append(f"| {first} | `/{option}` | {text} |")
                first = ""
    axes = {pair: s.axis for s in STRATEGIES.values() for pair in texts(s) if counts[pair] > 2}
    lines += [f"| every `{axis}N` | `/{option}` | {text} |" for (option, text), axis in axes.items()]
    return "\n".join(lines)


def run_file() -> str:
    """Returns the options of a run as ``shardwright init`` writes them."""
    text = (ROOT / "src" / "shardwright" / "cli" / "templates" / "run.toml.txt").read_text(encoding="utf-8")
    return f"```toml\n{text.strip()}\n```"


def plan() -> str:
    """Returns the memory and traffic of the default model as ``show`` prints them."""
    config = GPTConfig()
    with without_values():
        job = Job(GPT(config), CrossEntropy())
    line = Layout.parse("dp2/zero1 tp2 bf16")
    inputs = torch.empty(8, config.max_tokens, dtype=torch.int64, device="meta")
    text = show_text(describe(job, line, inputs=inputs), width=110)
    tail = "\n".join(row.rstrip() for row in text[text.index("\nmemory ") + 1 :].splitlines())
    return f'```text\n$ shardwright show --layout "{line}"\n...\n{tail.strip()}\n```'


def layouts_13b(what: str) -> str:
    """Layouts of a model of 13 billion parameters, as the planner priced them: docs/plans.json, of tools/plans.py."""
    found = json.loads((ROOT / "docs" / "plans.json").read_text())
    if what == "search":
        command = found["command"].replace(" --cluster", " \\\n    --cluster").replace(" --set v", " \\\n    --set v")
        return f"```text\n$ {command}\n{found['text']}\n```"
    heads = "| layout | seconds a step, expected | on the fullest device | fits | most of it |"
    lines = [heads, "|---|---|---|---|---|"]
    for row in sorted(found["rows"], key=lambda row: (not row["fits"], row["step_s"])):
        memory, fits = f"{row['memory_bytes'] / 1e9:.0f} GB", "yes" if row["fits"] else "no"
        lines.append(f"| `{row['layout']}` | {row['step_s_expected']:.1f} | {memory} | {fits} | {row['most']} |")
    return "\n".join(lines)


def newest(folder: str) -> dict:
    """Returns the rows measured last, or none if nothing has been measured yet."""
    found = sorted((ROOT / "benchmarks" / folder / "results").glob("*.json"))
    return json.loads(found[-1].read_text()) if found else {"table": []}


def compared() -> str:
    """Steps and starts of an older commit and of a newer one, from the newest run that has each benchmark."""
    titles = "| benchmark | variant | old, ms | new, ms | new / old (median) | range | CPU seconds, new / old | range |"
    lines = [titles, "|---" * 8 + "|"]
    rows: dict[str, list[dict]] = {}
    for path in sorted((ROOT / "benchmarks" / "compared" / "results").glob("*.json")):
        table = json.loads(path.read_text())["table"]
        rows |= {
            name: [row for row in table if row["benchmark"] == name] for name in {row["benchmark"] for row in table}
        }
    for row in (row for name in sorted(rows) for row in rows[name]):
        times = " | ".join(f"{row[f'{tree}_s_median'] * 1000:.0f}" for tree in ("old", "new"))
        cpu = ratio_of(row, "cpu_ratio") if "cpu_ratio_median" in row else " | "
        lines.append(f"| {row['benchmark']} | `{row['name']}` | {times} | {ratio_of(row)} | {cpu} |")
    return "\n".join(lines)


def gpt_step() -> str:
    """Steps of a GPT beside their limits."""
    result = newest("gpt_step")
    lines = ["| variant | ms | limits (median) | range | CPU seconds, in limits |", "|---|---|---|---|---|"]
    for row, cpu in zip(result["table"], result["cpu"], strict=True):
        span = f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}"
        ratio, used = f"{row['ratio_median']:.3f}", f"{cpu['ratio_median']:.3f}"
        lines.append(f"| {row['name']} | {row['ms_median']:.0f} | {ratio} | {span} | {used} |")
    return "\n".join(lines)


def alike_ranks() -> str:
    """Descriptions of a layout with classes of alike ranks, and with each rank taken for itself."""
    lines = ["| layout | layers | ranks taken as | CPU s (median) | peak memory, MiB |", "|---|---|---|---|---|"]
    runs: dict[tuple[str, int, str], list[dict]] = {}
    for row in newest("alike_ranks")["table"]:
        runs.setdefault((row["layout"], row["layers"], row["ways"]), []).append(row)
    for (layout, layers, ways), found in runs.items():
        seconds, peak = (statistics.median(row[key] for row in found) for key in ("cpu_s", "peak_bytes"))
        lines.append(f"| `{layout}` | {layers} | {ways} | {seconds:.1f} | {peak / 2**20:.0f} |")
    return "\n".join(lines)


def dropout(what: str) -> str:
    """Masks beside torch's dropout, in nanoseconds an element, or steps of a GPT; before: hashed on the host."""
    result = newest("dropout")
    found = {(row["what"], row["tree"]): row["s_median"] for row in result["table"]}
    if what == "steps":
        lines = ["| dropout | before, ms | after, ms | plain torch, ms |", "|---|---|---|---|"]
        cells = (("ours", "before"), ("ours", "after"), ("torch", "after"))
        for p in (0.0, result["p"]):
            times = [found[f"step, dropout {p}, {who}", tree] for who, tree in cells]
            lines.append(f"| {p} | " + " | ".join(f"{each * 1e3:.1f}" for each in times) + " |")
        return "\n".join(lines)
    lines = ["| mask | before, ns an element | after | `functional.dropout` |", "|---|---|---|---|"]
    cells = (("mask", "before"), ("mask", "after"), ("torch", "after"))
    for name, count in result["elements"].items():
        times = [found[f"{name}, {who}", tree] for who, tree in cells]
        shape = "x".join(map(str, result["shapes"][name]))
        lines.append(f"| {name}, {shape} | " + " | ".join(f"{each / count * 1e9:.2f}" for each in times) + " |")
    return "\n".join(lines)


def ratio_of(row: dict, key: str = "ratio", digits: int = 3) -> str:
    """A ratio's median and its range, as two cells."""
    return f"{row[f'{key}_median']:.{digits}f} | {row[f'{key}_min']:.2f} to {row[f'{key}_max']:.2f}"


def cluster() -> str:
    """Two nodes beside one, and beside DistributedDataParallel, by the link between them."""
    lines = ["| link | ran | ms | tokens a second | beside | ms | ratio (median) | range |", "|---" * 8 + "|"]
    for row in newest("cluster")["table"]:
        tokens = "" if "summed" in row["name"] else f"{row['tokens_per_s']:,.0f}"
        times = f"{row['ms_median']:.0f} | {tokens} | {row['limit']} | {row['limit_ms_median']:.0f}"
        span = ratio_of(row, digits=2)
        lines.append(f"| {row['link']} | {row['name']} | {times} | {span} |")
    return "\n".join(lines)


def cluster_recovery() -> str:
    """The first start of a run and its next step after a node was lost."""
    lines = [
        "| then comes | losses | first start, median | loss to next step, median | beyond the start, median | worst |",
        "|---" * 6 + "|",
    ]
    for row in newest("cluster/recovery")["table"]:
        times = " | ".join(f"{row[key]:.1f} s" for key in ("start_s", "recovery_s", "beyond_s", "beyond_s_max"))
        lines.append(f"| {row['came']} node | {row['losses']} | {times} |")
    return "\n".join(lines)


def collectives() -> str:
    """Our collectives beside gloo's own, in milliseconds."""
    result = newest("collectives")
    lines = [
        "| ranks | message | call | gloo's own | messages | shared memory |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["table"]:
        times = " | ".join(f"{row[way]:.2f} ms" for way in ("gloo", "sockets", "shared"))
        lines.append(f"| {row['ranks']} | {row['size']} | {row['call']} | {times} |")
    return "\n".join(lines)


def report_page() -> str:
    """The page of a long run on many ranks: its size, and how fast it is made and shown."""
    (row,) = newest("report")["table"]
    figures = [
        ("metrics.jsonl", f"{row['metrics_bytes'] / 1e6:.1f} MB"),
        ("the page, one file", f"{row['page_bytes'] / 1e6:.2f} MB"),
        ("to write it, CPU seconds with Python's start", f"{row['write_cpu_s']:.1f}"),
        ("to load it in Chromium, median", f"{row['load_ms']:.0f} ms"),
        ("until its content is painted, median", f"{row['painted_ms']:.0f} ms"),
        ("to follow the pointer on a chart, median", f"{row['pointer_ms_median']:.1f} ms"),
        ("elements", f"{row['nodes']:,}"),
    ]
    return "\n".join([f"| {row['name']} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in figures)])


def startup() -> str:
    """Start to first step."""
    result = newest("startup")
    lines = ["| start of 4 ranks | seconds (median) | range | ratio |", "|---|---|---|---|"]
    for row in result["table"]:
        span = f"{row['s_min']:.1f} to {row['s_max']:.1f}"
        lines.append(f"| {row['name']} | {row['s_median']:.2f} | {span} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def compiled() -> str:
    """Compiled steps beside uncompiled ones, and the first steps."""
    result = newest("compile")
    lines = [
        "| layout | ms | uncompiled, ms | ratio (median) | range | CPU seconds, ratio | first three steps, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, cpu in zip(result["table"], result["cpu"], strict=True):
        span = f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}"
        first = ", ".join(f"{seconds:.1f}" for seconds in result["first"][row["name"]])
        ratio, used = f"{row['ratio_median']:.3f}", f"{cpu['ratio_median']:.3f}"
        times = f"{row['ms_median']:.0f} | {row['limit_ms_median']:.0f}"
        lines.append(f"| {row['name']} | {times} | {ratio} | {span} | {used} | {first} |")
    return "\n".join(lines)


def real_sizes() -> str:
    """CPU seconds and memory of planning models of real sizes, beside those measured before where there are any."""
    lines = [
        "| model | layout | plan | before | show | before | more memory | stages |",
        "|---|---|---|---|---|---|---|---|",
    ]
    result = newest("real_sizes")
    before = {(row["name"], row["layout"], row["work"]): row for row in result.get("before", ())}
    rows = {(row["name"], row["layout"], row["work"]): row for row in result["table"]}
    for name, layout in dict.fromkeys((name, layout) for name, layout, _ in rows):
        plan, show = (rows.get((name, layout, work), {}) for work in ("plan", "show"))
        cells = [
            f"{each['cpu_s']:.1f} s" if "cpu_s" in each and "failed" not in each else "-"
            for work in ("plan", "show")
            for each in (rows.get((name, layout, work), {}), before.get((name, layout, work), {}))
        ]
        memory = max((each["mb"] for each in (plan, show) if "mb" in each), default=0)
        stages = plan.get("stages", ())
        spread = f"{min(stages):.1%} to {max(stages):.1%}" if stages else "-"
        lines.append(f"| {name} | `{layout}` | {' | '.join(cells)} | {memory:.0f} MB | {spread} |")
    return "\n".join(lines)


def tensor_modes(model: str) -> str:
    """Every tensor mode beside one process with two threads."""
    peer = "; a peer's" if model == "mlp" else ""
    goal = " goal |" if model == "mlp" else ""
    lines = [
        f"| layout | ms | limits (median) | range |{goal} CPU seconds, in limits | range | MB sent per rank{peer} |",
        "|---|---|---|---|" + ("---|" if goal else "") + "---|---|---|",
    ]
    for row in newest("tensor_modes")["table"]:
        if row["model"] != model:
            continue
        wall = ratio_of(row)
        cpu = ratio_of(row, "cpu_ratio")
        wanted = (f" {row['goal']:.2f} |" if row["goal"] else " - |") if goal else ""
        sent = f"{row['sent_mb']:.1f}" + (f"; {row['peer_sent_mb']:.1f}" if peer else "")
        lines.append(f"| `{row['layout']}` | {row['ms_median']:.0f} | {wall} |{wanted} {cpu} | {sent} |")
    return "\n".join(lines)


def tensor_memory() -> str:
    """What a rank holds under every tensor mode, also in shares of one device."""
    shares = "shares of one device"
    lines = [
        f"| model | layout | parameters, MB | {shares} | saved for backward, MB | {shares} |",
        "|---|---|---|---|---|---|",
    ]
    for model in ("mlp", "gpt"):
        for row in newest("tensor_memory")["table"]:
            if row["model"] == model:
                held = (f"{row[f'{w}_bytes'] / 1e6:.2f} | {row[f'{w}_shares']:.2f}" for w in ("parameter", "saved"))
                lines.append(f"| {model} | `{row['layout']}` | {' | '.join(held)} |")
    return "\n".join(lines)


def tensor_overlap() -> str:
    """Steps over emulated links, with and without overlap."""
    lines = [
        "| link | model | layout | ms | without overlap | ratio (median) | range | no link |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in newest("tensor_overlap")["table"]:
        times = f"{row['ms_median']:.0f} | {row['limit_ms_median']:.0f}"
        ratio = ratio_of(row)
        what = f"{row['link']} | {row['model']} | `{row['layout']}`"
        lines.append(f"| {what} | {times} | {ratio} | {row['free_ms_median']:.0f} |")
    return "\n".join(lines)


def zero_overlap() -> str:
    """Stages of ZeRO over emulated links, with and without overlap."""
    lines = ["| link | layout | ms | `ahead:0` | ratio (median) | range | no link |", "|---" * 7 + "|"]
    for row in newest("zero_overlap")["table"]:
        times = f"{row['ms_median']:.0f} | {row['limit_ms_median']:.0f}"
        ratio = ratio_of(row)
        lines.append(f"| {row['link']} | `{row['name']}` | {times} | {ratio} | {row['free_ms_median']:.0f} |")
    return "\n".join(lines)


def in_limits(row: dict) -> str:
    """A step's milliseconds, and its wall and CPU seconds in those of its limit, as cells."""
    wall = ratio_of(row)
    cpu = ratio_of(row, "cpu_ratio")
    return f"{row['ms_median']:.0f} | {wall} | {cpu}"


def pipeline_step() -> str:
    """Every schedule and every peer beside one process with two threads."""
    result = newest("pipeline_step")
    lines = ["| variant | ms | limits (median) | range | CPU seconds, in limits | range |", "|---|---|---|---|---|---|"]
    for row in result["table"]:
        lines.append(f"| {code(row['name'])} | {in_limits(row)} |")
    lines += [f"| {name} | left out: {why} | | | | |" for name, why in result.get("left_out", {}).items()]
    return "\n".join(lines)


def llama_step() -> str:
    """A Llama of transformers beside its limit and peers, and the ghost part of its stages."""
    result = newest("llama_step")
    lines = ["| variant | ms | limits (median) | range | CPU seconds, in limits | range |", "|---|---|---|---|---|---|"]
    for row in result["table"]:
        lines.append(f"| {code(row['name'])} | {in_limits(row)} |")
    lines += [f"| {name} | left out: {why} | | | | |" for name, why in result.get("left_out", {}).items()]
    ghosts = ", ".join(f"{share:.1%}" for share in result.get("ghosts", ()))
    return "\n".join([*lines, "", f"Ghost part of the stages' steps: {ghosts}."]) if ghosts else "\n".join(lines)


def pipeline_bubble() -> str:
    """Ideal, predicted and measured bubbles, by stages and microbatches."""
    rows = newest("pipeline_bubble")["table"]
    sizes = sorted({(row["stages"], row["microbatches"]) for row in rows})
    found = {(row["schedule"], row["stages"], row["microbatches"]): row for row in rows}
    lines = ["| schedule | " + " | ".join(f"p={p}, m={m}" for p, m in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for name in dict.fromkeys(row["schedule"] for row in rows):
        each = (found[name, *size] for size in sizes)
        parts = ([row.get("ideal"), row["predicted"], row["measured_median"]] for row in each)
        cells = (" / ".join(f"{100 * part:.1f}" for part in some if part is not None) for some in parts)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def pipeline_convnet() -> str:
    """Seconds of an epoch, and where the curves end."""
    lines = [
        "| variant | s an epoch | one process's (median) | range | last loss | most off | in float64 | last accuracy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in newest("pipeline_convnet")["table"]:
        ratio = ratio_of(row, digits=2)
        loss = f"{row['losses'][-1]:.4f} | {row['loss_off']:.0e} | {row['exact_off']:.0e}"
        seconds = f"{row['ms_median'] / 1000:.2f}"
        lines.append(f"| {code(row['name'])} | {seconds} | {ratio} | {loss} | {row['accuracies'][-1]:.3f} |")
    return "\n".join(lines)


def pipeline_actions() -> str:
    """What an action costs on layers that do nothing."""
    rows = newest("pipeline_overhead")["table"]
    found = {(row["ranks"], row["name"]): row for row in rows}
    lines = [
        "| layout | processes, us an action | range | CPU us | threads, us an action | range | CPU us |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = []
        for kind in ("processes", "threads"):
            row = found[kind, name]
            low, high = row["wall_us_range"]
            cells.append(f"{row['wall_us_median']:.0f} | {low:.0f} to {high:.0f} | {row['cpu_us_median']:.0f}")
        lines.append(f"| {code(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pipeline_scatter() -> str:
    """Parts between stages beside whole copies, on one node and with a node for each stage."""
    lines = [
        "| link | ran | ms | beside | ms | ratio (median) | range | CPU seconds, ratio | MB between nodes in a step |",
        "|---" * 9 + "|",
    ]
    for row in newest("pipeline_scatter")["table"]:
        crossed = f"{row['crossed_bytes'] / 1e6:.2f} of {row['limit_crossed_bytes'] / 1e6:.2f}"
        lines.append(
            f"| {row['link']} | {row['name']} | {row['ms_median']:.0f} | {row['limit']} | {row['limit_ms_median']:.0f} "
            f"| {ratio_of(row)} | {row['cpu_ratio_median']:.2f} | {crossed if row['crossed_bytes'] else '-'} |"
        )
    return "\n".join(lines)


def pipeline_scatter_bytes() -> str:
    """The payload bytes that stages send each other in a step, of each rank."""
    lines = ["| layout | rank | sent | received | all-gathered, payload |", "|---|---|---|---|---|"]
    for layout, ranks in newest("pipeline_scatter").get("bytes", {}).items():
        for rank, found in enumerate(ranks):
            cells = (f"{found.get(kind, 0):,}" for kind in ("send", "receive", "all_gather"))
            lines.append(f"| `{layout}` | {rank} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pipeline_lists() -> str:
    """The time to build and simulate long schedules."""
    lines = ["| schedule | actions | built in | simulated in |", "|---|---|---|---|"]
    for row in newest("pipeline_overhead").get("lists", ()):
        times = f"{row['build_s_median']:.2f} s | {row['simulate_s_median']:.2f} s"
        lines.append(f"| `{row['name']}` | {row['actions']} | {times} |")
    return "\n".join(lines)


def zero_step() -> str:
    """Stages and peers beside ranks that send nothing; each case as it was measured last."""
    lines = ["| case | variant | ms | limits (median) | range | CPU seconds, in limits | range |", "|---" * 7 + "|"]
    newest_of: dict[str, list[dict]] = {}
    for path in sorted((ROOT / "benchmarks" / "zero_step" / "results").glob("*.json")):
        table = json.loads(path.read_text())["table"]
        newest_of |= {case: [row for row in table if row["case"] == case] for case in {row["case"] for row in table}}
    for case in sorted(newest_of, key=lambda case: (case.startswith("large"), case)):
        lines += [f"| {case} | {row['name']} | {in_limits(row)} |" for row in newest_of[case]]
    return "\n".join(lines)


def zero_copies() -> str:
    """What ZeRO-3 and fully_shard hold and copy."""
    lines = ["| model | ranks | variant | peak, MB | copied around calls | by our transport |", "|---" * 6 + "|"]
    for row in newest("zero_copies")["table"]:
        around, inside = (row.get(key, 0) / row["parameter_bytes"] for key in ("around", "inside"))
        ours = f"{inside:.2f} P" if row["name"].startswith("dp") else "not seen"
        what = f"{row['size']} | {row['ranks']} | {code_of(row['name'])} | {row['peak_bytes'] / 1e6:.1f}"
        lines.append(f"| {what} | {around:.2f} P | {ours} |")
    return "\n".join(lines)


def code_of(name: str) -> str:
    """Returns a data-parallel layout line as code."""
    return f"`{name}`" if name.startswith("dp") else name


def ledger() -> str:
    """Peaks by ranks: what was measured on the one that held most, and how far any prediction was off."""
    rows = newest("ledger")["table"]
    sizes = sorted({row["ranks"] for row in rows})
    lines = ["| layout | " + " | ".join(f"N = {size}" for size in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    found = {(row["ranks"], row["stage"], row["recompute"], row["precision"]): row for row in rows}
    for case in dict.fromkeys(key[1:] for key in found):
        cells = []
        for row in (found.get((size, *case)) for size in sizes):
            off = max(row["off_min"], row["off_max"], key=abs) if row else 0.0
            cells.append(f"{max(row['measured_bytes']) / 1e6:.2f} MB, {off:+.2%}" if row else "")
        stage, word, precision = case
        line = " ".join(f"dpN{stage.removeprefix('/plain')} {precision.removeprefix('fp32')} {word}".split())
        lines.append(f"| `{line}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def planner() -> str:
    """Errors and regret of predicted steps, by the model and by constant utilisation."""
    heads = "question | runs | predicted by | error: mean | median | p90 | regret: mean | median | best of three"
    heads += " | rank correlation"
    lines = [f"| {heads} |", "|---" * 10 + "|"]
    for row in newest("planner")["table"]:
        for name, errors in row["errors"].items():
            regret = row.get("regret", {}).get(name, {})
            keys = [*(errors[key] for key in ("mean", "median", "p90"))]
            keys += [regret.get(key) for key in ("mean", "median", "best_of_three_mean")]
            shares = " | ".join("" if each is None else f"{each:.1%}" for each in keys)
            order = regret.get("rank_correlation")
            said = "" if order is None else f"{order:.3f}"
            lines.append(f"| {row['question']} | {row['runs']} | {name} | {shares} | {said} |")
    return "\n".join(lines)


def planner_unmeasured() -> str:
    """Measured seconds as multiples of predicted ones, on machines of which nothing was measured."""
    lines = ["| accelerators | predicted by | runs | one in twenty below | median | one in twenty above |"]
    lines.append("|---" * 6 + "|")
    for row in newest("planner_unmeasured")["table"]:
        shares = " | ".join(f"{row[key]:.2f}" for key in ("p5", "median", "p95"))
        lines.append(f"| {row['gpu']} | {row['predicted_by']} | {row['runs']} | {shares} |")
    return "\n".join(lines)


def planner_unmeasured_errors() -> str:
    """Errors of steps that were predicted where nothing was measured, with an anchor and without, and a baseline's."""
    heads = "accelerators | predicted by | error: mean | median | with one anchor: mean | median"
    lines = [f"| {heads} |", "|---" * 6 + "|"]
    rows = {(row["gpu"], row["predicted_by"], row["anchors"]): row for row in newest("planner_unmeasured")["errors"]}
    for (gpu, said, anchors), row in rows.items():
        if not anchors:
            shares = (f"{each[key]:.1%}" for each in (row, rows[gpu, said, 1]) for key in ("mean", "median"))
            lines.append(f"| {gpu} | {said} | {' | '.join(shares)} |")
    return "\n".join(lines)


def planner_megatron() -> str:
    """Errors of steps that Megatron-LM's authors published, with so many of them as anchors, and a baseline's."""
    lines = ["| runs | anchors | error: mean | median | constant utilisation: mean | median |", "|---" * 6 + "|"]
    for row in newest("planner_megatron")["table"]:
        each = (row[name][key] for name in ("model", "constant utilisation") for key in ("mean", "median"))
        shares = [f"{share:.1%}" for share in each]
        shares[2:] = shares[2:] if row["anchors"] else ["", ""]
        lines.append(f"| {row['table']} ({row['runs']}) | {row['anchors']} | {' | '.join(shares)} |")
    return "\n".join(lines)


def planner_tables() -> str:
    """How far simulated bubbles are off those of the zero-bubble papers."""
    said = {"fitted": "named schedules, fewest microbatches: fitted", "held out": "named schedules, more: held out"}
    lines = ["| schedules | bubbles | mean error, points | worst |", "|---" * 4 + "|"]
    for row in newest("planner_tables")["table"]:
        what = said.get(row["what"], f"`{row['what']}`, searched")
        lines.append(f"| {what} | {row['bubbles']} | {row['mean']:.2f} | {row['worst']:.2f} |")
    return "\n".join(lines)


def planner_own() -> str:
    """Steps of this library on this machine, predicted after a calibration, beside measured ones."""
    heads = "ranks | model | layouts | error: median | worst | predicted best | fastest | regret"
    lines = [f"| {heads} |", "|---" * 8 + "|"]
    for row in newest("planner_own")["table"]:
        errors = f"{row['median_error']:.1%} | {row['worst_error']:.0%}"
        best = f"`{row['chosen']}` | `{row['fastest']}` | {row['regret']:.1%}"
        lines.append(f"| {row['ranks']} | {row['model']} | {row['layouts']} | {errors} | {best} |")
    return "\n".join(lines)


def planner_search() -> str:
    """Estimates of a search by prices, before and after the search of record 50, each newest rows of their kind."""
    found = [
        json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/planner_search/results").glob("*.json"))
    ]
    kinds = {"before": [each for each in found if not each.get("estimates_alone")],
             "after": [each for each in found if each.get("estimates_alone")]}  # fmt: skip
    lines = ["| model | | layouts | seconds | bytes |", "|---" * 5 + "|"]
    for model in dict.fromkeys(row["model"] for row in found[0]["table"]):
        for kind, results in kinds.items():
            tables = [rows for each in results if (rows := [row for row in each["table"] if row["model"] == model])]
            if not tables:
                continue
            shares = []
            for what in ("s", "bytes"):
                each = sorted(row[f"estimate_{what}"] / row[f"price_{what}"] for row in tables[-1])
                cuts = statistics.quantiles(each, n=20, method="inclusive")
                shares.append(
                    ", ".join(f"{x:.3f}" for x in (each[0], cuts[0], statistics.median(each), cuts[-1], each[-1]))
                )
            lines.append(f"| {model} | {kind} | {len(tables[-1])} | {' | '.join(shares)} |")
    return "\n".join(lines)


def planner_memory() -> str:
    """How far the planner's memory of stages is off the ledger's."""
    rows, bar = newest("planner_memory")["table"], newest("planner_memory")["bar"]
    within, layouts = sum(abs(row["off"]) <= bar for row in rows), {row["layout"] for row in rows}
    whole = {row["layout"] for row in rows if row["rehearsed_whole"]}
    lines = [
        "| stages | of layouts | within the bar | bar | largest error | layouts rehearsed whole |",
        "|---" * 6 + "|",
    ]
    worst = max(abs(row["off"]) for row in rows)
    return "\n".join([*lines, f"| {len(rows)} | {len(layouts)} | {within} | {bar:.1%} | {worst:.2%} | {len(whole)} |"])


def planner_speed() -> str:
    """What commands of the planner take for a model of 175 billion parameters, with the bars."""
    bars = {"plan --layout": "10 s, 500 MB", "show": "10 s, 500 MB", "plan": "12 s", "plan again": "2 s"}
    lines = ["| command | CPU s | peak, MB | bar |", "|---|---|---|---|"]
    result = newest("planner_speed")
    for name, bar in bars.items():
        rows = [row for row in result["table"] if row["what"] == name and row["tree"] == "this"]
        seconds, peak = (statistics.median(row[key] for row in rows) for key in ("cpu_s", "peak_MB"))
        lines.append(f"| `{name}` | {seconds:.1f} | {peak:.0f} | {bar} |")
    for row in result["one_more_layout"]:
        lines.append(f"| price of `{row['layout']}` | {row['ms'] / 1000:.3f} | | 0.005 s |")
    return "\n".join(lines)


def offload() -> str:
    """State on disk beside state in memory."""
    lines = ["| variant | s a step | range | resident, MiB | range | tensors, MiB | on disk, MiB |", "|---" * 7 + "|"]
    for row in newest("offload")["table"]:
        keys = ("resident_bytes", "resident_min_bytes", "resident_max_bytes", "tensor_bytes", "disk_bytes")
        middle, low, high, tensors, disk = (f"{row[key] / 2**20:.0f}" for key in keys)
        times = f"{row['s_median']:.2f} | {row['s_min']:.2f} to {row['s_max']:.2f}"
        lines.append(f"| `{row['variant']}` | {times} | {middle} | {low} to {high} | {tensors} | {disk} |")
    return "\n".join(lines)


def weights() -> str:
    """Memory and bytes of loading weights."""
    lines = ["| layout | from | part, MiB | largest tensor of it | beside it at the peak | read | CPU seconds |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in newest("weights")["table"]:
        sizes = " | ".join(f"{row[f'{key}_bytes'] / 2**20:.1f}" for key in ("part", "largest", "beside", "read"))
        lines.append(f"| `{row['layout']}` | {row['source']} | {sizes} | {row['cpu_us'] / 1e6:.2f} |")
    return "\n".join(lines)


def global_rows(key: str) -> dict:
    """The rows of one question of ``global_tensors`` measured last."""
    found = sorted((ROOT / "benchmarks" / "global_tensors" / "results").glob("*.json"))
    every = [json.loads(path.read_text()) for path in found]
    return next((each for each in reversed(every) if key in each), {key: []})


def global_sweep() -> str:
    """Random transfers with fixed seeds."""
    row = global_rows("sweep")["sweep"]
    lines = ["| transfers | wrong | sbp pairs | sources | destinations | seconds | CPU seconds, each rank |"]
    lines.append("|---|---|---|---|---|---|---|")
    placements = row["of_placements"]
    cells = f"{row['transfers']} | {len(row['wrong'])} | {row['sbp_pairs']} of {row['of_sbp_pairs']}"
    cells += f" | {row['sources']} of {placements} | {row['destinations']} of {placements} | {row['seconds']:.0f}"
    return "\n".join([*lines, f"| {cells} | {max(row['cpu_seconds_per_rank']):.0f} |"])


def global_operators() -> str:
    """Operators against one device."""
    rows = global_rows("operators")["operators"]
    lines = ["| operators | layouts tried | wrong | refused | operators that refuse some |", "|---|---|---|---|---|"]
    refusing = ", ".join(f"`{row['name']}`" for row in rows if row["refused"])
    tried, refused = (sum(row[key] for row in rows) for key in ("tried", "refused"))
    wrong = sum(len(row["wrong"]) for row in rows)
    return "\n".join([*lines, f"| {len(rows)} | {tried} | {wrong} | {refused} | {refusing} |"])


def global_bytes() -> str:
    """Bytes of transfers, beside gathering first."""
    lines = ["| from | to | by | MB | gathered first, MB |", "|---|---|---|---|---|"]
    for row in global_rows("transfers")["transfers"]:
        by, mb = ", ".join(row["kinds"]), f"{row['bytes'] / 1e6:.2f} | {row['gather_bytes'] / 1e6:.2f}"
        lines.append(f"| `{row['source']}` | `{row['destination']}` | {by} | {mb} |")
    return "\n".join(lines)


def global_redistribute() -> str:
    """``to_global`` beside ``redistribute``."""
    lines = ["| shape | transfer | ms | redistribute, ms | ratio (median) | range |", "|---|---|---|---|---|---|"]
    for row in global_rows("redistribute")["redistribute"]:
        times = f"{row['ours_ms']:.2f} | {row['dtensor_ms']:.2f} | {row['ratio_median']:.2f}"
        span = f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}"
        lines.append(f"| {row['shape']} | `{row['pair']}` | {times} | {span} |")
    return "\n".join(lines)


def code(name: str) -> str:
    """Returns a layout line as code, and other names unchanged."""
    return f"`{name}`" if name.partition(" ")[2].startswith("mb") or name.startswith("mb") else name


def kills() -> str:
    """What killing runs came to, by what was killed, in all runs of the command."""
    found = ["saving", "cut", "beside", "orphans", "left", "shared", "unloadable", "lost", "unsaved"]
    lines = [
        "| killed | times | as a save began | before it was complete | saves beside training | processes left "
        "| files left | left in /dev/shm | unloadable | lost | not saved | diverged | ended in (median) | worst |",
        "|" + "---|" * 14,
    ]
    every = sorted((ROOT / "benchmarks" / "trust" / "kills" / "results").glob("*.json"))
    rows = [row for path in every for row in json.loads(path.read_text())["rows"]]
    for victim in dict.fromkeys(row["victim"] for row in rows):
        of_one = [row for row in rows if row["victim"] == victim]
        # what a whole group leaves the next run removes, and would count
        shown = [key if (key, victim) != ("left", "group") else "" for key in found]
        given = [[row[key] for row in of_one if row.get(key) is not None] for key in shown]
        counts = " | ".join(_counted(each, len(of_one)) for each in given)
        diverged = sum(row["divergence"] is None or not row["divergence"] <= MOST_DIVERGENCE for row in of_one)
        ends = [row["end_s"] for row in of_one]
        times = f"{statistics.median(ends):.1f} s | {max(ends):.1f} s"
        lines.append(f"| {victim} | {len(of_one)} | {counts} | {diverged} | {times} |")
    return "\n".join(lines)


def _counted(values: list, times: int) -> str:
    """The sum of what was counted, and of how many kills if not of all."""
    if not values:
        return "-"
    return f"{sum(values)}" if len(values) == times else f"{sum(values)} of {len(values)}"


def ends() -> str:
    """How long a run takes to end after a rank has failed beside a busy one, or was stopped."""
    lines = ["| what happens to one of three ranks | times | named | ended in (median) | worst |", "|---" * 5 + "|"]
    for row in newest("trust/ends")["table"]:
        times = f"{row['end_s_median']:.1f} s | {row['end_s_max']:.1f} s"
        lines.append(f"| {row['case']} | {row['times']} | {row['named']} | {times} |")
    return "\n".join(lines)


def saves() -> str:
    """What a checkpoint each 20 steps costs a step."""
    lines = ["| saves | ms a step | without | lost, median | range | CPU seconds lost | held up by the call |"]
    lines.append("|" + "---|" * 7)
    for row in newest("trust/saves")["table"]:
        span = f"{row['ratio_min'] - 1:+.1%} to {row['ratio_max'] - 1:+.1%}"
        cells = f"{row['ms_median']:.0f} | {row['limit_ms_median']:.0f} | {row['ratio_median'] - 1:+.1%} | {span}"
        call = f"{row['call_ms_median']:.0f} ms, {row['call_share_median']:.1%}"
        lines.append(f"| {row['name']} | {cells} | {row['cpu_ratio_median'] - 1:+.1%} | {call} |")
    return "\n".join(lines)


def soak() -> str:
    """What ranks hold in long runs."""
    lines = ["| layout | steps | grows in 1,000 steps | its own | holds | descriptors | threads |", "|---" * 7 + "|"]
    for row in newest("trust/soak")["table"]:
        cells = [f"{row[f'{key}_bytes_per_1000'] / 2**10:+.1f} KiB" for key in ("resident", "own")]
        cells.append(f"{row['own_bytes_end'] / 2**20:.1f} MiB")
        cells += [f"{row[f'{key}_warm']}, then {row[f'{key}_end']}" for key in ("descriptors", "threads")]
        lines.append(f"| `{row['layout']}` | {row['steps']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def restarts() -> str:
    """How many restarts of torchrun recovered."""
    lines = ["| kills | recovered | steps | largest difference | recovered in (median) | worst |", "|" + "---|" * 6]
    for row in newest("trust/restarts")["table"]:
        times = f"{row['recovery_s_median']:.1f} s | {row['recovery_s_max']:.1f} s"
        lines.append(f"| {row['kills']} | {row['recovered']} | {row['steps']} | {row['divergence']:.0e} | {times} |")
    return "\n".join(lines)


def flips() -> str:
    """What single flipped bits of a checkpoint did."""
    lines = ["| written under | bits flipped | detected | undetected | tracebacks |", "|---|---|---|---|---|"]
    for row in newest("trust/flips")["table"]:
        counts = " | ".join(str(row.get(key, 0)) for key in ("flips", "detected", "undetected", "traceback"))
        lines.append(f"| `{row['name']}` | {counts} |")
    return "\n".join(lines)


def draws() -> str:
    """What drawn layouts and files did."""
    lines = ["| drawn | draws | done | refused | tracebacks | slowest |", "|---|---|---|---|---|---|"]
    for row in newest("trust/fuzz")["table"]:
        counts = " | ".join(str(row[key]) for key in ("draws", "ran", "refused", "traceback"))
        lines.append(f"| {row['name']} | {counts} | {row['s_max']:.2f} s |")
    return "\n".join(lines)


def _on_cards() -> dict[str, dict]:
    """The newest row of each part that ran on a card."""
    found: dict[str, dict] = {}
    for path in sorted((ROOT / "benchmarks" / "gpu" / "results").glob("*.json")):
        found |= {row["part"]: row for row in json.loads(path.read_text())["rows"]}
    return found


def on_a_card() -> str:
    """What each part found on a card, where it was run last."""
    rows = _on_cards()
    time, bf16, compiled_step, memory = (rows[part] for part in ("time", "bf16", "compile", "memory"))
    errors = rows["verify"]["errors"]
    low, high = time["ratio_range"]
    lines = ["| what | found |", "|---|---|"]
    lines.append(f"| layouts equal to one CPU | {len(errors) - len(rows['verify']['unequal'])} of {len(errors)} |")
    lines.append(f"| a step beside plain torch, fp32 | {time['ratio']:.3f} ({low:.3f} to {high:.3f}) |")
    lines.append(f"| a step in bf16 beside torch's autocast | {bf16['ratio_to_autocast']:.2f} |")
    lines.append(f"| a step in bf16 beside one in fp32 | {bf16['ratio']:.2f} |")
    lines.append(f"| a compiled step beside one that is not, fp32 | {compiled_step['ratio']:.3f} |")
    for name in ("dp1", "torch", "dp1 bf16", "autocast"):
        each = rows["busy"][name]
        found = f"{each['kernels']:.0f}, {each['busy']:.0%}"
        lines.append(f"| kernels of a step, and their share of its time: {name} | {found} |")
    lines.append(f"| waits of the host in a step | {rows['synchronizations']['synchronizations']} |")
    both = f"{memory['predicted_bytes'] / 1e6:,.0f} MB, {memory['off']:+.2%}"
    lines.append(f"| memory predicted, beside the allocator's peak | {both} |")
    return "\n".join(lines)


def planned_on_a_card() -> str:
    """Steps that were predicted for a card beside what they took there."""
    lines = ["| step | predicted from the data sheet | taken | predicted / taken |", "|---|---|---|---|"]
    for name, row in _on_cards()["plan"]["steps"].items():
        said = row["predicted_ms"]  # the first run had the data sheet's alone
        said = said["datasheet"] if isinstance(said, dict) else said
        lines.append(f"| {name} | {said:.1f} ms | {row['ms']:.1f} ms | {said / row['ms']:.2f} |")
    return "\n".join(lines)


def every_benchmark() -> str:
    """Returns the question of each benchmark, a link to how it was measured, and its tables."""
    parts = []
    for path in sorted((ROOT / "benchmarks").glob("*/README.md")):
        text = path.read_text()
        title = text.partition("\n")[0].lstrip("# ")
        names = re.findall(r"<!-- table: (.+?) -->", text)
        folder = path.parent.name
        parts.append(f"## {title}\n\n[How, and what follows](../benchmarks/{folder}/README.md) (`benchmarks/{folder}`)")
        has_rows = any((path.parent / "results").glob("*.json"))
        without = "The figures are on that page." if has_rows else "Nothing was measured yet."
        parts += [TABLES[name]() for name in names] or [without]
    return "\n\n".join(parts)


TABLES = {
    "every benchmark": every_benchmark,
    "compared": compared,
    "flips": flips,
    "draws": draws,
    "global_sweep": global_sweep,
    "global_operators": global_operators,
    "global_bytes": global_bytes,
    "global_redistribute": global_redistribute,
    "strategies": strategies,
    "options": options,
    "plan": plan,
    "run.toml": run_file,
    "13b search": partial(layouts_13b, "search"),
    "13b layouts": partial(layouts_13b, "layouts"),
    "gpt_step": gpt_step,
    "alike_ranks": alike_ranks,
    "dropout masks": partial(dropout, "masks"),
    "dropout steps": partial(dropout, "steps"),
    "cluster": cluster,
    "cluster recovery": cluster_recovery,
    "collectives": collectives,
    "startup": startup,
    "report": report_page,
    "compile": compiled,
    "gpu": on_a_card,
    "gpu plan": planned_on_a_card,
    "real_sizes": real_sizes,
    "tensor_modes mlp": partial(tensor_modes, "mlp"),
    "tensor_modes gpt": partial(tensor_modes, "gpt"),
    "tensor_memory": tensor_memory,
    "tensor_overlap": tensor_overlap,
    "llama_step": llama_step,
    "pipeline_step": pipeline_step,
    "pipeline_bubble": pipeline_bubble,
    "pipeline_convnet": pipeline_convnet,
    "pipeline_overhead actions": pipeline_actions,
    "pipeline_overhead lists": pipeline_lists,
    "pipeline_scatter": pipeline_scatter,
    "pipeline_scatter bytes": pipeline_scatter_bytes,
    "zero_step": zero_step,
    "ledger": ledger,
    "planner": planner,
    "planner_memory": planner_memory,
    "planner_own": planner_own,
    "planner_search": planner_search,
    "planner_speed": planner_speed,
    "planner_tables": planner_tables,
    "planner_unmeasured": planner_unmeasured,
    "planner_unmeasured errors": planner_unmeasured_errors,
    "planner_megatron": planner_megatron,
    "kills": kills,
    "ends": ends,
    "saves": saves,
    "soak": soak,
    "restarts": restarts,
    "zero_copies": zero_copies,
    "zero_overlap": zero_overlap,
    "offload": offload,
    "weights": weights,
}


def rebuilt(text: str) -> str:
    """Returns the text with every generated table replaced."""
    for name, build in TABLES.items():
        start, end = f"<!-- table: {name} -->", "<!-- end -->"
        if start in text:
            before, _, rest = text.partition(start)
            after = rest.partition(end)[2]
            text = f"{before}{start}\n{build()}\n{end}{after}"
    return text


def main() -> None:
    stale = []
    for path in [ROOT / "README.md", *PAGES, *sorted((ROOT / "benchmarks").glob("*/README.md"))]:
        text = path.read_text()
        new = rebuilt(text)
        if new != text:
            stale.append(path.relative_to(ROOT))
            if "--check" not in sys.argv:
                path.write_text(new)
    names = ", ".join(map(str, stale))
    if "--check" in sys.argv and stale:
        sys.exit(f"out of date: {names}\n  fix: make tables")
    print(f"rebuilt {names}" if stale else "all tables are up to date")


if __name__ == "__main__":
    main()
