"""What overlap gains on a slow link: every layout with its messages behind its products, and with none there.

Two ranks, so that each has a core of its own: where ranks share cores, one computes while another waits, and the system
overlaps what we do not. The link is emulated (:class:`shardwright.comm.Link`): a message arrives after its latency and
its bytes, and who waits for it sleeps.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import LINKS, machine, options_of, over_links, sized, write
from benchmarks.gpt_step.run import BATCH, CONFIG, SEQ
from benchmarks.tensor_modes.cases import HIDDEN, TOKENS, WIDTH, InsideMLP, mlp_data, plain_mlp
from benchmarks.tensor_modes.run import gpt, turns

LAYOUTS = sized(
    ("tp2", "tp2/sp", "tp2x1/2d", "tp1x2/2d", "tp2x1/2d:summa", "tp2x1x1/3d", "tp1x1x2/3d"), ("tp2", "tp2x1/2d")
)


def measure(world, rounds, steps):
    mlp, data, each = plain_mlp(), mlp_data(), {}
    for layout in LAYOUTS:
        for line in (layout, f"{layout}/no-overlap"):
            each[f"mlp {line}"] = InsideMLP(world, line, mlp, *data).step
            each[f"gpt {line}"] = gpt(world, line)[1]
    return turns(world, each, rounds, steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="of each variant in its turn")
    options = options_of(parser, smallest={"rounds": 1})
    os.environ["OMP_NUM_THREADS"] = "1"
    facts = machine()
    pairs = {f"{model} {line}": f"{model} {line}/no-overlap" for model in ("mlp", "gpt") for line in LAYOUTS}
    rows, rounds = over_links(measure, pairs, options.rounds, options.steps)
    table = [{**row, "model": row["name"].partition(" ")[0], "layout": row["name"].partition(" ")[2]} for row in rows]
    sizes = {"width": WIDTH, "hidden": HIDDEN, "tokens": TOKENS}
    write(options, __file__, {"machine": facts, "mlp": sizes, "gpt": {**CONFIG, "batch": BATCH, "seq": SEQ},
          "links": LINKS, "table": table, "rounds": rounds})  # fmt: skip


if __name__ == "__main__":
    main()
