"""What does a description of a layout, with what each rank sends, cost with and without classes of alike ranks?

One process for each description, in turn; CPU seconds of `describe` alone, and the process's peak memory. "each rank"
is the same code with every rank taken for itself.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import shardwright as sw
from shardwright.layout import Layout
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.parallelize.planning import job_for
from shardwright.plan.alike_ranks import AlikeRanks
from shardwright.report.description import describe

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, sized, write

WIDTH, HEADS, TOKENS, VOCABULARY = sized(12288, 64), sized(96, 8), sized(2048, 16), sized(51200, 64)
CASES = sized(
    [("pp4 mb8 dp2 tp8", layers, 64, 3) for layers in (12, 24, 48)] + [("pp64 mb64 dp6 tp8", 96, 1536, 1)],
    [("pp2 mb2 dp2 tp2", 3, 8, 1)],
)
"""The layout, the number of layers, the global batch, and the number of rounds."""
MOST_EACH = 1000
"""The most ranks that are taken each for itself: of 3,072, that was stopped after 500 s."""


def one(line, num_layers, batch, ways):
    """Describes one layout in this process, and prints its row as JSON."""
    import torch._dynamo  # what torch's meta kernels import at their first call is not ours

    with sw.without_values():
        model = GPT(GPTConfig(num_layers=num_layers, width=WIDTH, num_heads=HEADS, max_tokens=TOKENS,
                              vocabulary=VOCABULARY))  # fmt: skip
    layout = Layout.parse(line)
    inputs = torch.empty((batch, TOKENS), dtype=torch.int64, device="meta")
    job = job_for(model, CrossEntropy(), layout, inputs, batch * TOKENS)
    start_s = time.process_time()
    if ways == "each rank":
        with mock.patch.object(AlikeRanks, "like", lambda self, coord: coord):
            found = describe(job, layout, inputs=inputs)
    else:
        found = describe(job, layout, inputs=inputs)
    cpu_s = time.process_time() - start_s
    sent = {str(rank["rank"]): rank["sent_bytes"] for rank in found["ranks"]}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"cpu_s": cpu_s, "peak_bytes": peak, "sent": hash(json.dumps(sent))}))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help="for the processes that this starts")
    options = options_of(parser, {})
    if options.one:
        one(*json.loads(options.one))
        return
    table = []
    for line, num_layers, batch, rounds in CASES:
        for number in range(rounds):
            for ways in ("classes", "each rank")[:: 1 if number % 2 else -1]:
                if ways == "each rank" and Layout.parse(line).num_ranks > MOST_EACH:
                    continue
                asked = json.dumps([line, num_layers, batch, ways])
                more = ["--smallest"] if options.smallest else []
                command = [sys.executable, __file__, "--one", asked, *more]
                env_hash = {**os.environ, "PYTHONHASHSEED": "0"}
                done = subprocess.run(command, check=True, capture_output=True, text=True, env=env_hash)
                row = {"layout": line, "layers": num_layers, "ways": ways, "round": number, **json.loads(done.stdout)}
                table.append(row)
                print(row, flush=True)
    for line, num_layers, *_ in CASES:  # the classes change nothing
        assert len({row["sent"] for row in table if (row["layout"], row["layers"]) == (line, num_layers)}) == 1
    write(options, __file__, {"machine": machine(), "table": table})


if __name__ == "__main__":
    main()
