"""How much memory does a rank need beside its own part to load weights from files, and how much of them does it read?

Two ranks that are processes fill a run from each kind of file in turn. Beside it the way without slices: each rank
reads the whole file with torch.load, and gives the whole state dict to the run. Memory is the highest resident size
(VmHWM, which counts pages of mapped files too) since just before the load, without what was resident then: the rank's
part of the model, which is there already.
"""

import argparse
import ctypes
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, orders, sized, write

import shardwright as sw
from shardwright.models import GPT, GPTConfig

LAYOUTS = sized(("dp2/zero3", "tp2", "pp2 mb2"), ("dp2/zero3",))
CONFIG = sized(GPTConfig(num_layers=4, width=1024, num_heads=8, vocabulary=8192),
               GPTConfig(num_layers=1, width=16, num_heads=2))  # fmt: skip
WHOLE = "torch.load of all"
SOURCES = {"safetensors": "model.safetensors", "safetensors, 8 files": "folder", "dcp": "dcp", "pt": "model.pt"}


def resident(key):
    """A size in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def read_bytes():
    """What the process has read by calls so far, in bytes; pages of mapped files do not count."""
    return int(Path("/proc/self/io").read_text().split()[1])


def trim():
    """Gives memory that the C library has kept back to the system."""
    ctypes.CDLL(None).malloc_trim(0)


def run_of(world, line):
    with sw.without_values():
        model = GPT(CONFIG)
    return sw.parallelize(model, line, world)


def written(world, folder):
    """Writes the files that the ranks will read, by this library."""
    run = run_of(world, "single")
    num_bytes = sum(parameter.nbytes for parameter in run.parameters.values())
    for name, to in SOURCES.items():
        most = num_bytes // 8 if to in ("folder", "dcp") else 10**12
        sw.save_weights(run, folder / to, format="dcp" if name == "dcp" else None, max_file_bytes=most)
    return num_bytes


def measured(world, line, folder, rounds):
    """For each round and source, of each rank: bytes beside its part at the peak, bytes read, CPU seconds."""
    run = run_of(world, line)
    part = sum(parameter.nbytes for parameter in run.parameters.values())
    largest = max(parameter.nbytes for parameter in run.parameters.values())
    everyone, found = world.everyone(), []
    for number, order in orders((*SOURCES, WHOLE), rounds):
        for name in order:
            everyone.barrier()
            trim()  # memory that was freed and kept would hide what is taken now
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
            before, read, start = resident("VmRSS"), read_bytes(), time.process_time()
            if name == WHOLE:
                run.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
            else:
                sw.load_weights(run, folder / SOURCES[name])
            cpu_s = time.process_time() - start
            beside = resident("VmHWM") - before
            own = torch.tensor([part, largest, beside, read_bytes() - read, int(cpu_s * 1e6)], dtype=torch.int64)
            every = everyone.all_gather(own).view(-1, 5).tolist()
            if number:
                keys = "part_bytes", "largest_bytes", "beside_bytes", "read_bytes", "cpu_us"
                ranks = [dict(zip(keys, each, strict=True)) for each in every]
                found.append({"layout": line, "source": name, "ranks": ranks})
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = options_of(parser, smallest={"rounds": 1})
    facts = machine()
    if not Path("/proc/self/clear_refs").exists():
        return write(options, __file__, {"machine": facts, "left_out": {"weights": "no /proc/self/clear_refs"}})
    folder = Path(tempfile.mkdtemp(prefix="weights-"))
    try:
        (model_bytes,) = sw.launch(written, 1, folder, ranks="threads")
        rows = [row for line in LAYOUTS for row in sw.launch(measured, 2, line, folder, options.rounds)[0]]
    finally:
        shutil.rmtree(folder)
    table = []
    for line in LAYOUTS:
        for name in (*SOURCES, WHOLE):
            each = [rank for row in rows if (row["layout"], row["source"]) == (line, name) for rank in row["ranks"]]
            most = {key: max(rank[key] for rank in each) for key in each[0]}
            table.append({"layout": line, "source": name, "model_bytes": model_bytes, **most})
            print(
                f"{line:10} {name:22} part {most['part_bytes'] / 2**20:6.1f} MiB, largest tensor of it "
                f"{most['largest_bytes'] / 2**20:5.1f}, beside it {most['beside_bytes'] / 2**20:6.1f}, read "
                f"{most['read_bytes'] / 2**20:6.1f}, CPU {most['cpu_us'] / 1e6:.2f} s"
            )
    return write(options, __file__, {"machine": facts, "table": table, "rows": rows})


if __name__ == "__main__":
    main()
