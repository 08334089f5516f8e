"""What overlap gains ZeRO on a slow link: every stage with messages beside its compute, and with none there.

Two ranks, so that each has a core of its own, over the emulated links of ``tensor_overlap``.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import LINKS, machine, options_of, over_links, sized, write
from benchmarks.gpt_step.run import BATCH, CONFIG, SEQ
from benchmarks.tensor_modes.run import gpt, turns

STAGES = sized(("zero1", "zero2", "zero3"), ("zero3",))
PAIRS = {f"dp2/{stage}{more}": f"dp2/{stage}/ahead:0" for stage in STAGES for more in ("", "/ahead:2")}
"""Every layout beside the same one that gathers nothing early, and waits for each sum."""


def measure(world, rounds, steps):
    each = {line: gpt(world, line)[1] for line in dict.fromkeys([*PAIRS, *PAIRS.values()])}
    return turns(world, each, rounds, steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of each variant in its turn")
    options = options_of(parser, smallest={"rounds": 1, "steps": 1})
    os.environ["OMP_NUM_THREADS"] = "1"
    facts = machine()
    table, rounds = over_links(measure, PAIRS, options.rounds, options.steps)
    write(options, __file__, {"machine": facts, "gpt": {**CONFIG, "batch": BATCH, "seq": SEQ}, "links": LINKS,
          "table": table, "rounds": rounds})  # fmt: skip


if __name__ == "__main__":
    main()
