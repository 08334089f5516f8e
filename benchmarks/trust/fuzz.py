"""Draws layouts, files of options, manifests and files of schedules: each is done or refused, in seconds.

A draw that ends in anything but a result or an error for users (exit code 0 or 2) is a traceback.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, write_beside
from benchmarks.trust.flips import save, started

import shardwright as sw
from shardwright.checkpoint.manifest import MANIFEST, find, signed
from shardwright.cli.main import app
from shardwright.errors import CheckpointError
from shardwright.strategies.pipeline.schedules import SCHEDULES

TINY = ["--set", "num_layers=2", "--set", "width=8", "--set", "num_heads=2", "--seq", "8", "--batch", "4"]
SIZES = (0, 1, 1, 2, 2, 2, 3, 4, 8, 63, 1000, 4096, 10**6, 2**20, 10**9, 10**30, -1)
OPTIONS = (
    *(
        "zero1",
        "zero2",
        "zero3",
        "offload:host",
        "offload:disk",
        "ahead:2",
        "bucket:0",
        "sp",
        "seq",
        "auto",
        "2d",
        "3d",
    ),
    *(
        "2.5d:d2",
        "spatial",
        "file:nowhere",
        "cut:token",
        "cut:",
        "x",
        "interleaved:v2",
        "auto:8GiB",
        "auto:1",
        *SCHEDULES,
    ),
)
WORDS = ("bf16", "fp16", "fp32", "single", "mb2", "mb2/own-statistics", "mb0", "recompute:full", "recompute:x*", "cp2")
JUNK = (None, True, -1, 0, 1.5, 10**30, float("nan"), "", "x", "../x", [], [[]], {}, {"a": 1}, "\ud800", "load")
GOOD = ("layout = 'dp2 tp2'", "layout = 'pp2/zb-v mb4'", "batch = 16", "seq = 64", "steps = 9", "lr = 1e-3", "clip = 0")
GOOD_SETTINGS = ("width = 64", "num_heads = 2", "num_layers = 3", "style = 'llama'", "tied = false", "dropout = 0.1")
KEYS = (
    "stepz",
    "layout",
    "model",
    "data",
    "batch",
    "seq",
    "steps",
    "seed",
    "lr",
    "clip",
    "timeout_s",
    "keep",
    "warmup",
)
SETTINGS = (
    "wide",
    "width",
    "num_heads",
    "num_layers",
    "vocabulary",
    "dropout",
    "style",
    "hidden",
    "theta",
    "widths",
    "tied",
)
VALUES = ("0", "1", "2", "-1", "8", "3.5", "1e308", "inf", "nan", "1e-320", "9" * 30, "9" * 5000, "true", "''", "'x'")
VALUES += (
    "'gpt'",
    "'mlp'",
    "'dp2'",
    "'pp2 mb2'",
    "[1, 2]",
    "[" * 2000 + "]" * 2000,
    "{a = 1}",
    "2026-01-01",
    "'\\u0000'",
)


def layout_of(draw, folder):
    """Arguments of ``show`` with a drawn layout: items of the grammar, now and then with a wrong letter."""
    items = []
    for _ in range(draw.randrange(1, 5)):
        sizes = "x".join(str(draw.choice(SIZES)) for _ in range(draw.choice((1, 1, 1, 2, 3))))
        more = "".join(f"/{draw.choice(OPTIONS)}" for _ in range(draw.choice((0, 0, 1, 2))))
        items.append(draw.choice((draw.choice(WORDS), draw.choice(("dp", "tp", "pp", "ep", "xp")) + sizes + more)))
    return ["show", "--layout", smudged(draw, " ".join(items), 0.2), *TINY]


def config_of(draw, folder):
    """Arguments of ``show`` with a drawn file of options."""
    lines = draw.sample(GOOD, draw.randrange(4))
    lines += [f"{draw.choice(KEYS)} = {draw.choice(VALUES)}" for _ in range(draw.choice((0, 0, 1, 2)))]
    lines += ["[settings]", *draw.sample(GOOD_SETTINGS, draw.randrange(4))]
    lines += [f"{draw.choice(SETTINGS)} = {draw.choice(VALUES)}" for _ in range(draw.choice((0, 0, 1, 2)))]
    (folder / "options.toml").write_text(smudged(draw, "\n".join(lines), 0.2), errors="surrogatepass")
    return ["show", "--config", str(folder / "options.toml")]


def schedule_of(draw, folder):
    """Arguments of ``show`` with a drawn file of a schedule: a right one with some cells exchanged or smudged."""
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    for _ in range(draw.randrange(3)):
        row = draw.choice(rows)
        row[draw.randrange(len(row))] = draw.choice(("", "F0", "1F9", "0W0", "2B1", "x", "0F999999999", "9" * 99))
    suffix = draw.choice((".csv", ".json"))
    text = json.dumps({"stages": rows}) if suffix == ".json" else "\n".join(map(",".join, rows))
    path = folder / f"schedule{suffix}"
    path.write_text(smudged(draw, text, 0.3), errors="surrogatepass")
    return ["show", "--layout", f"pp2/file:{path} mb2", *TINY]


def smudged(draw, text, share):
    """The text with one letter exchanged, left out or repeated, in ``share`` of the draws."""
    if draw.random() > share:
        return text
    place = draw.randrange(len(text))
    return text[:place] + draw.choice(("", "\0", "x", "9", "/", "[", '"', "\n", text[place] * 999)) + text[place + 1 :]


def changed(draw, value):
    """A copy of a JSON value in which one entry, at a drawn depth, is left out or another value."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.15:
        return draw.choice(JUNK)
    value = value.copy()
    key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
    if draw.random() < 0.1:
        value.pop(key)
    elif isinstance(value, dict) and draw.random() < 0.1:
        value[str(draw.choice(JUNK))] = value[key]
    else:
        value[key] = changed(draw, value[key])
    return value


def by_command(make, draw, folder):
    """What the command does with a draw, and the draw as text."""
    words = make(draw, folder)
    found = CliRunner().invoke(app, words)
    outcome = {0: "ran", 2: "refused"}.get(found.exit_code, "traceback")
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        outcome = f"traceback: {type(found.exception).__name__}: {found.exception}"[:300]
    files = [Path(words[2])] if words[1] == "--config" else [*folder.glob("schedule.*")]
    return outcome, " ".join(words[1:3]) + "".join(f" {file.read_bytes()[:300]!r}" for file in files)


def manifests(world, folder, count, draw):
    """Rows of loads with drawn manifests, half of them with a right checksum."""
    run, optimizer = started(world, "single")
    path = find(folder) / MANIFEST
    plain, rows = path.read_text(), []
    found = json.loads(plain)
    del found["sha256"]
    for _ in range(count):
        made = changed(draw, found)
        text = json.dumps(made, indent=1)
        path.write_text(signed(text) if draw.random() < 0.5 else text)
        start_s, cpu_s = time.perf_counter(), time.process_time()
        try:
            sw.load(folder, run, optimizer)
            outcome = "ran"
        except CheckpointError:
            outcome = "refused"
        except Exception as failure:
            outcome = f"traceback: {type(failure).__name__}: {failure}"[:300]
        rows.append(("manifest", outcome, time.perf_counter() - start_s, time.process_time() - cpu_s, text))
        if outcome.startswith("traceback"):
            print(rows[-1], flush=True)
    path.write_text(plain)
    sw.load(folder, run, optimizer)  # the checkpoint is as it was
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=5000)
    options = options_of(parser, smallest={"draws": 20})
    facts, rows, draw, each = machine(), [], random.Random(14), options.draws // 4
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        CliRunner().invoke(app, ["show", *TINY])  # what is imported at the first call is no time of a draw
        for kind, make in (("layout", layout_of), ("options", config_of), ("schedule", schedule_of)):
            for _ in range(each):
                start_s, cpu_s = time.perf_counter(), time.process_time()
                outcome, text = by_command(make, draw, folder)
                rows.append((kind, outcome, time.perf_counter() - start_s, time.process_time() - cpu_s, text))
                if outcome.startswith("traceback") or rows[-1][3] > 2:
                    print(rows[-1], flush=True)
                for path in folder.glob("*"):
                    path.unlink()
        sw.launch(save, 1, "single", folder / "run", ranks="threads")
        rows += sw.launch(manifests, 1, folder / "run", each, draw, ranks="threads")[0]
        shutil.rmtree(folder / "run")
    table = []
    for kind in ("layout", "options", "manifest", "schedule"):
        mine = [row for row in rows if row[0] == kind]
        counts = Counter(outcome.partition(":")[0] for _, outcome, *_ in mine)
        ends = {end: counts[end] for end in ("ran", "refused", "traceback")}
        most = {"s_max": max(row[2] for row in mine), "cpu_s_max": max(row[3] for row in mine)}
        table.append({"name": kind, "draws": len(mine), **ends, **most})
        print(table[-1])
    texts = [f"{kind}, {wall_s:.3f} s, {cpu_s:.3f} s of CPU: {outcome}" for kind, outcome, wall_s, cpu_s, _ in rows]
    write_beside(options, __file__, {"machine": facts, "table": table, "rounds": texts})


if __name__ == "__main__":
    main()
