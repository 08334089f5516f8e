"""Ten minutes on one card: whether results, memory and times on it are what this library says.

Each part is a process of its own and prints one line of JSON. Where a part fails or is not within its bound, this
names it and ends with code 1. Without a card this says so and ends with code 2; ``--device cpu --smallest`` runs every
part here, so that none rots. See docs/gpu.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional

import shardwright as sw
from shardwright import devices
from shardwright.cost.device import profiles
from shardwright.layout import Layout
from shardwright.ledger import measure_memory, predict_memory
from shardwright.models.gpt import GPT, GPTConfig
from shardwright.plan.plan import Job
from shardwright.planner.predicted import cluster_for, predict_step

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import SMALLEST, machine, options_of, orders, sized, write

LINES = ["dp2", "dp2/zero1", "dp2/zero2", "dp2/zero3", "tp2", "tp2/sp", "tp4", "tp2x2/2d", "tp2x2x2/3d"]
LINES += ["pp2/1f1b mb4", "pp4/zb-h1 mb8", "dp2 recompute:full", "dp2 bf16", "pp2/1f1b mb2 dp2/zero1 tp2"]
CONFIG = sized(
    {"num_layers": 12, "width": 768, "num_heads": 12, "vocabulary": 32768, "max_tokens": 1024},
    {"num_layers": 1, "width": 32, "num_heads": 4, "vocabulary": 64, "max_tokens": 16},
)
SMALL = {"num_layers": 4, "width": 32, "num_heads": 4, "vocabulary": 64, "max_tokens": 16}
BATCH, ROUNDS, STEPS = sized((4, 7, 5), (2, 1, 1))
MOST_S = {"verify": 150, "compile": 100, "plan": 140}
OTHERS_MOST_S = 35
"""Seconds that one part may take: ten minutes for all. On an H100 the longest took 35, 29 and 93, others up to 25."""
PREDICTED = ("dp1", "dp1 bf16", "dp1 recompute:full", "dp1 bf16 recompute:full")
CLUSTER = sys.argv[sys.argv.index("--cluster") + 1] if "--cluster" in sys.argv else None
LARGER = {"num_layers": 24, "width": 1024, "num_heads": 16}
MOST_RATIO, MOST_OFF = 1.05, 0.1
COMPILED = sized("dp1 compile", "dp1 compile:aot_eager")  # for the smallest run no C++ compiler is started
NUM_FIRST = 3
"""First steps of a compiled layout: the first is inspected and runs uncompiled, the second compiles."""


def tokens(config, batch):
    drawn = torch.randint(
        config["vocabulary"], (batch, config["max_tokens"] + 1), generator=torch.Generator().manual_seed(0)
    )
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def plain(config=CONFIG):
    torch.manual_seed(0)
    return GPT(GPTConfig(**config))


def ours(world, line, config=CONFIG):
    """A step of this library on one rank, its run and its batch."""
    run = sw.parallelize(plain(config), line, world)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-4)
    (batch,) = run.shard([tokens(config, BATCH)])

    def step():
        loss = run.step(batch)
        optimizer.step()
        return loss

    return step, run, batch, optimizer


def torch_alone(world, *, autocast=False):
    """A step of plain torch, of the same model."""
    model = plain().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = (each.to(world.device) for each in tokens(CONFIG, BATCH))

    def step():
        optimizer.zero_grad()
        with torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def in_turn(device, each):
    """Seconds of a step of each variant, all of them once a round, each round in another order."""
    rounds = []
    for number, order in orders(each, ROUNDS):
        row = {}
        for name in order:
            devices.synchronize(device)
            start = time.perf_counter()
            for _ in range(STEPS):
                each[name]()
            devices.synchronize(device)
            row[name] = (time.perf_counter() - start) / STEPS
        rounds += [row] if number else []
    return rounds


def compared(rounds, name, other):
    ratios = [row[name] / row[other] for row in rounds]
    return {
        "ms": {each: statistics.median(row[each] for row in rounds) * 1000 for each in rounds[0]},
        "ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)],
    }  # fmt: skip


def time_of(world):
    """How long a step takes beside plain torch on one rank."""
    found = compared(in_turn(world.device, {"dp1": ours(world, "dp1")[0], "torch": torch_alone(world)}), "dp1", "torch")
    return found if SMALLEST else {**found, "within": found["ratio"] <= MOST_RATIO}  # a tiny step is all overhead


def bf16_of(world):
    """A step in bf16 beside one in fp32 and torch's autocast, and how far the losses of the first step are apart."""
    steps = {line: ours(world, line)[0] for line in ("dp1", "dp1 bf16")}
    whole, narrow = (step().item() for step in steps.values())
    off = abs(narrow / whole - 1)
    rounds = in_turn(world.device, {**steps, "autocast": torch_alone(world, autocast=True)})
    beside = compared(rounds, "dp1 bf16", "autocast")["ratio"]
    found = compared(rounds, "dp1 bf16", "dp1")
    return {**found, "ratio_to_autocast": beside, "loss_off": off, "within": off < 0.02}


def compile_of(world):
    """A compiled step beside one that is not, and the first steps; what torch compiled in other runs is not used."""
    first_s = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        compiled, plain_step = ours(world, COMPILED)[0], ours(world, "dp1")[0]
        for _ in range(NUM_FIRST):
            devices.synchronize(world.device)
            start = time.perf_counter()
            compiled()
            devices.synchronize(world.device)
            first_s.append(time.perf_counter() - start)
        found = compared(in_turn(world.device, {"on": compiled, "off": plain_step}), "on", "off")
    return {**found, "first_steps_s": first_s, "compiling_step_s": first_s[1]}


def busy_of(world):
    """The share of a profiled step's time in which the card runs kernels, how many, and the most frequent ones."""
    found = {}
    each = {line: ours(world, line)[0] for line in ("dp1", "dp1 bf16")}
    each |= {"torch": torch_alone(world), "autocast": torch_alone(world, autocast=True)}
    for name, step in each.items():
        for _ in range(3):
            step()
        devices.synchronize(world.device)
        with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            devices.synchronize(world.device)
            wall_us = (time.perf_counter() - start) * 1e6
        kernels = [each for each in profile.events() if each.device_type != torch.autograd.DeviceType.CPU]
        busy_us, end_us = 0.0, 0.0
        for kernel in sorted(kernels, key=lambda each: each.time_range.start):
            busy_us += max(0.0, kernel.time_range.end - max(kernel.time_range.start, end_us))
            end_us = max(end_us, kernel.time_range.end)
        found[name] = {"busy": busy_us / wall_us, "kernels": len(kernels) / STEPS, "wall_ms": wall_us / STEPS / 1000}
        found[name]["most"] = dict(Counter(kernel.name[:60] for kernel in kernels).most_common(6))
    return found


def synchronizations_of(world):
    """How often, and where, the host waits for the card in a step, once it is warm."""
    step = ours(world, "dp1")[0]
    for _ in range(3):
        step()
    debug = getattr(torch.get_device_module(world.device.type), "set_sync_debug_mode", None)
    if debug is None:
        return {"left_out": f"torch does not tell on {world.device.type}"}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        debug("warn")
        step()
        debug("default")
    said = [each for each in said if "a synchronizing" in str(each.message)]  # and not that the mode is a prototype
    places = Counter(f"{Path(each.filename).name}:{each.lineno}" for each in said)
    return {"synchronizations": len(said), "places": dict(places), "within": not said}


def memory_of(world):
    """The peak of the allocator beside the ledger's, predicted and measured, of one step."""
    step, run, batch, optimizer = ours(world, "dp1")
    kind = world.device.type
    for _ in range(2):
        step()
    counted = None
    if kind not in devices.HOST:
        torch.accelerator.reset_peak_memory_stats(world.device)
        step()
        devices.synchronize(world.device)
        counted = devices.peak_bytes(world.device)
    measured = measure_memory(run, batch, optimizer)
    job = Job(plain(), sw.CrossEntropy())
    predicted = predict_memory(job, "dp1", 0, tokens(CONFIG, BATCH), device=kind, ranks="threads")
    counted = measured.allocated_bytes if counted is None else counted
    off = predicted.allocated_bytes / counted - 1
    return {
        "allocator_bytes": counted, "measured_bytes": measured.allocated_bytes, "off": off,
        "predicted_bytes": predicted.allocated_bytes, "beside": dict(predicted.beside), "within": abs(off) <= MOST_OFF,
    }  # fmt: skip


def plan_of(world):
    """What steps are predicted to take, from the card's datasheet alone and by ``--cluster``, beside what they take."""
    (name,) = devices.names() or ("",)
    known = [each for each in profiles() if each.partition("-")[0] in name.lower()]
    if not known:
        return {"left_out": "no profile is of this device"}
    clusters = {"datasheet": f"{known[0]}:1x1", **({"calibrated": CLUSTER} if CLUSTER else {})}
    found = {}
    for config in (CONFIG, CONFIG | LARGER):
        for line in PREDICTED:
            job, given = Job(plain(config), sw.CrossEntropy()), tokens(config, BATCH)
            said = {
                name: predict_step(
                    job, Layout.parse(line), given, cluster_for(cluster, 1), device_type=world.device.type,
                    ranks="processes", optimizer=torch.optim.AdamW,
                )["step_s"]
                for name, cluster in clusters.items()
            }  # fmt: skip
            step = ours(world, line, config)[0]
            taken = statistics.median(row[line] for row in in_turn(world.device, {line: step}))
            found[f"{config['num_layers']} layers, {line}"] = {
                "ms": taken * 1000, "predicted_ms": {name: s * 1000 for name, s in said.items()},
                "off": {name: s / taken - 1 for name, s in said.items()},
            }  # fmt: skip
            del step
    return {"profile": known[0], "steps": found}


def nccl_of(world):
    """Collectives of torch's backend for the card, with one rank: what they give, and which backend it is."""
    x = torch.arange(8.0, device=world.device)
    reduced, gathered, part = x.clone(), torch.empty_like(x), torch.empty_like(x)
    dist.all_reduce(reduced)
    gather, scatter = (getattr(dist, f"{name}_single", None) for name in ("all_gather", "reduce_scatter"))
    (gather or dist.all_gather_into_tensor)(gathered, x)  # torch before 2.13 has the older names alone
    (scatter or dist.reduce_scatter_tensor)(part, x.clone())
    dist.barrier()
    equal = all(torch.equal(each, x) for each in (reduced, gathered, part))
    return {"backend": dist.get_backend(), "losses": [ours(world, "dp1")[0]().item()], "within": equal}


def verify_on(kind):
    """Several ranks on the one card, over gloo and shared memory, beside one CPU."""
    os.environ[devices.OPTION] = kind if kind == "cpu" else f"{kind}/gloo"
    errors, unequal = {}, []
    for line in sized(LINES, LINES[4:5] + LINES[9:10]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that ranks share the card is what is wanted
            verdict = sw.verify(GPT(GPTConfig(**SMALL)), line, [tokens(SMALL, 8)] * 2, ranks="processes")
        errors[line] = verdict.max_relative_error
        unequal += [] if verdict.equal else [line]
    return {"errors": errors, "unequal": unequal, "within": not unequal}


ON_A_RANK = {
    "nccl": nccl_of, "time": time_of, "busy": busy_of, "synchronizations": synchronizations_of,
    "memory": memory_of, "bf16": bf16_of, "compile": compile_of, "plan": plan_of,
}  # fmt: skip
PARTS = ("verify", *ON_A_RANK)


def row_of(part, kind):
    """The row of one part, on this kind of device."""
    start = time.perf_counter()
    found = verify_on(kind) if part == "verify" else sw.launch(ON_A_RANK[part], 1, device=kind)[0]
    return {"part": part, "device": kind, "seconds": time.perf_counter() - start, **found}


def row_in_a_process(part, kind):
    """The row of one part, from a process of its own; what stops it is in the row."""
    most_s = MOST_S.get(part, OTHERS_MOST_S)
    command = [sys.executable, __file__, "--part", part, "--device", kind, *(["--smallest"] if SMALLEST else [])]
    command += ["--cluster", CLUSTER] if CLUSTER else []
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=most_s, check=False)
    except subprocess.TimeoutExpired:
        return {"part": part, "device": kind, "failed": f"took more than {most_s} s"}
    if ended.returncode:
        return {"part": part, "device": kind, "failed": ended.stderr.strip()[-2000:]}
    return json.loads(ended.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="cpu, or the type of the accelerator; by default that", default=None)
    parser.add_argument("--cluster", help="a file that `shardwright calibrate` wrote here, for the part plan")
    parser.add_argument("--part", choices=PARTS, help="this part alone, in this process")
    options = options_of(parser, smallest={"device": "cpu"})
    kind = options.device or devices.accelerator()
    if options.device is None and kind == "cpu":
        print("no card: torch sees no accelerator with a backend of its own; --device cpu --smallest tries every part")
        sys.exit(2)
    if options.part:
        print(json.dumps(row_of(options.part, kind)), flush=True)
        return
    rows = []
    for part in PARTS:
        rows.append(row_of(part, kind) if SMALLEST else row_in_a_process(part, kind))
        print(json.dumps(rows[-1]), flush=True)
    facts = machine() | {"devices": devices.names()}
    write(options, __file__, {"machine": facts, "gpt": {**CONFIG, "batch": BATCH}, "rows": rows})
    ends = [f"{row['part']} failed" for row in rows if "failed" in row]
    ends += [f"{row['part']} is not within its bound" for row in rows if not row.get("within", True)]
    if ends:
        sys.exit(", ".join(ends))


if __name__ == "__main__":
    main()
