"""What do a plan, a search and a description of a model of 175 billion parameters take, in CPU seconds and memory?

Each command is a process of its own, for which nothing is kept, but for "plan again", which finds what "plan" has kept.
With --old, it also runs on another source tree in turn. "one more layout" is the price of a layout
whose rehearsals are at hand: its seconds, the memory of each stage, its traffic and its pipeline.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, sized, write

ROOT = Path(__file__).resolve().parents[2]
SIZES = sized({"num_layers": 96, "width": 12288, "num_heads": 96, "vocabulary": 51200, "max_tokens": 2048},
              {"num_layers": 9, "width": 16, "num_heads": 4, "vocabulary": 32, "max_tokens": 8})  # fmt: skip
BATCH = sized(1536, 32)
GPT3 = sized("pp64/1f1b/scatter mb256 dp6/zero1 tp8 bf16", "pp2/1f1b/scatter mb4 dp2/zero1 tp2 bf16")
LARGE, SMALLER = sized(("a100-80gb:384x8", "a100-80gb:128x8"), ("a100-80gb:1x8", "a100-80gb:1x2"))
COMMANDS = {
    "plan --layout": ["plan", "--layout", GPT3, "--cluster", LARGE],
    "show": ["show", "--layout", GPT3],
    "plan": ["plan", "--cluster", SMALLER],
    "plan again": ["plan", "--cluster", SMALLER],
}
"""The first two of the GPT-3 layout on 3,072 ranks, and a search of layouts on 1,024, twice."""
MOST_S = 300
PRICED = sized(
    ["pp8/1f1b mb48 dp16/zero1 tp8 bf16", "pp8/zb-v mb48 dp32/zero1 tp4 bf16", "pp64/1f1b mb96 dp2/zero1 tp8 bf16"],
    ["pp2/1f1b mb4 bf16"],
)


def command_row(words, tree, caches):
    """The CPU seconds and the peak memory of one command on a source tree; stopped after 300 s of CPU time."""
    model = [word for name, size in SIZES.items() for word in ("--set", f"{name}={size}")]
    more = ["--model", "gpt", *model, "--batch", str(BATCH), "--seq", str(SIZES["max_tokens"]), "--json"]
    limited = ["bash", "-c", f'ulimit -t {MOST_S}; exec "$@"', "limited"]
    line = [*limited, sys.executable, "-m", "shardwright.cli", *words, *more]
    env = {**os.environ, "PYTHONPATH": str(tree), "SHARDWRIGHT_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    env["XDG_CACHE_HOME"] = caches
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, env=env)
    _, status, used = os.wait4(process.pid, 0)
    code = process.returncode = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGXCPU, -signal.SIGKILL), f"{words} ended with {code}"
    return {"cpu_s": used.ru_utime + used.ru_stime, "peak_MB": used.ru_maxrss * 1024 / 1e6, "finished": code == 0}


def price_row(line):
    """The milliseconds of one layout's price, from rehearsals that were made: of the first price, and of later ones."""
    import torch

    import shardwright as sw
    from shardwright.layout import Layout
    from shardwright.models import GPT, GPTConfig
    from shardwright.planner.price import Pricing

    with sw.without_values():
        model = GPT(GPTConfig(**SIZES))
    rows = torch.empty(BATCH, SIZES["max_tokens"], dtype=torch.long, device="meta")
    cluster = f"a100-80gb:{max(1, Layout.parse(line).num_ranks // 8)}x{min(8, Layout.parse(line).num_ranks)}"
    plans = sw.plan_layouts(model, cluster, (rows, rows), layout=line)
    pricing, found = Pricing(plans.cluster), []
    for _ in range(6):
        records = replace(plans.best.records)  # of which nothing is kept from an earlier price
        start = time.process_time()
        pricing.price(plans.best.layout, records)
        found.append(1000 * (time.process_time() - start))
    rest = sorted(found[1:])
    return {"rehearsals": plans.best.records.num_rehearsals, "first_ms": found[0], "ms": rest[len(rest) // 2]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--old", type=Path, help="the checkout of another version, measured in turn")
    options = options_of(parser, smallest={"rounds": 1})
    facts, table = machine(), []
    trees = {"this": ROOT / "src", **({} if options.old is None else {"old": options.old / "src"})}
    for number in range(options.rounds):
        kept = {which: TemporaryDirectory() for which in trees}
        for (name, words), (which, tree) in product(COMMANDS.items(), trees.items()):
            if name == "plan":  # the first of the two searches finds nothing
                kept[which] = TemporaryDirectory()
            row = {"what": name, "tree": which, "round": number, **command_row(words, tree, kept[which].name)}
            table.append({**row, "load": os.getloadavg()[0]})
            print(json.dumps(table[-1]), flush=True)
    prices = [{"layout": line, **price_row(line)} for line in PRICED]
    print(json.dumps(prices))
    write(options, __file__, {"machine": facts, "table": table, "one_more_layout": prices})


if __name__ == "__main__":
    main()
