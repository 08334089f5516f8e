"""Kills a training run again and again, in every way, and checks what is left: processes, files, checkpoints, losses.

A chain is one run that goes on after each kill under the next layout, until each layout was killed once. Then its
losses must be those of a run that nothing disturbed.
"""

import argparse
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import shared_memory
from benchmarks.common import machine, options_of, sized, write_beside

from shardwright.checkpoint.loading import read_whole
from shardwright.checkpoint.manifest import check_files, find, read, steps_in
from shardwright.train.config import TrainConfig
from shardwright.train.loop import train
from shardwright.train.progress import read_metrics

LAYOUTS = sized(
    ["dp2", "tp2", "pp2/1f1b mb2", "dp2/zero1", "dp2/zero2", "dp2/zero3", "dp2 tp2", "pp2/gpipe mb2 dp2", "tp4/2d",
     "pp2/1f1b mb2 tp2", "dp4/zero3", "pp2/zb-h2 mb4 dp2/zero1"],
    ["dp2"],
)  # fmt: skip
VICTIMS = ("rank", "launcher", "group", "fork server", "group, told to stop")
STEPS, TOLERANCE = 4000, 1e-4
SETTINGS = {"num_layers": 2, "width": 16, "num_heads": 4, "dropout": 0.1}
TINY = {"settings": SETTINGS, "seq": 16, "batch": 8, "schedule": "constant", "steps": STEPS}
FLAGS = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
FLAGS += ["--seq", "16", "--batch", "8", "--schedule", "constant", "--steps", str(STEPS), "--save-every", "2"]
MOST_S = 300
FAULTS = ("unkilled", "orphans", "unloadable", "lost", "unsaved", "left", "shared", "diverged")


def ranks_in(folder):
    """The processes of the ranks of the run that has its temporary files in ``folder``."""
    return [psutil.Process(int(path.read_text())) for path in folder.glob("shardwright-run-*/*.pid")]


def left_in(folder):
    """What is still there; torch's own cache, which it keeps for the next process, is not ours."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def wait_until(process, holds):
    """Waits until ``holds()``; where the run ends before, or takes too long, it kills the rest, and raises."""
    end = time.monotonic() + MOST_S
    while not holds():
        if (code := process.poll()) is not None or time.monotonic() > end:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise RuntimeError(f"the run ended with {code}, or hung, before its end could be seen")
        time.sleep(0.0005)


def is_saving(out):
    """Whether a checkpoint is being written at this moment."""
    return any((out / "checkpoints").glob(".tmp-*"))


def end_it(process, victim, folder):
    """Kills or signals the victim; returns whether all that ran is to end by itself now."""
    if victim == "rank":
        random.choice(ranks_in(folder)).kill()
    elif victim == "launcher":
        process.kill()
    elif victim == "group":
        os.killpg(process.pid, signal.SIGKILL)
    elif victim == "fork server":
        psutil.Process(process.pid).children()[0].kill()
    else:
        os.killpg(process.pid, signal.SIGTERM)
    return victim != "fork server"


def is_there(process):
    """Whether a process is running, and not only waiting to be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_whole(checkpoint):
    """Whether a checkpoint can be loaded, its files compared with their checksums."""
    try:
        manifest = read(checkpoint)
        check_files(checkpoint, manifest, set(manifest.files))
        for name in manifest.tensors:
            read_whole(checkpoint, manifest, name)
    except Exception:
        return False
    return True


def kill_once(out, folder, layout, victim, *, saving, beside):
    """One start, kill and end; returns the row. ``beside``: checkpoints are written beside training."""
    resumes = bool(steps_in(out / "checkpoints"))
    command = [sys.executable, "-m", "shardwright.cli", "train", "--layout", layout, *FLAGS, "--out", str(out)]
    command += ["--save-async" if beside else "--no-save-async"]
    with (out.parent / "said").open("w") as said:
        process = subprocess.Popen(
            [*command, *(["--resume"] if resumes else [])], start_new_session=True, stdout=subprocess.DEVNULL,
            stderr=said, env=os.environ | {"TMPDIR": str(folder)},
        )  # fmt: skip
    before = len(read_metrics(out))
    wait_until(process, lambda: len(read_metrics(out)) >= before + 3 and steps_in(out / "checkpoints"))
    launcher = psutil.Process(process.pid)
    family = [launcher, *launcher.children(recursive=True)]
    if saving:
        wait_until(process, lambda: is_saving(out))
    newest = steps_in(out / "checkpoints")[-1]
    shared = shared_memory.names()
    ends, start = end_it(process, victim, folder), time.monotonic()
    # whether it came in time: the save may have been complete by then, and where ranks live on it may be complete later
    cut = is_saving(out)
    row = {"layout": layout, "victim": victim, "saving": saving, "cut": cut, "beside": beside, "unkilled": 0}
    if not ends:  # a run needs no fork server once it has started
        done = len(read_metrics(out))
        wait_until(process, lambda: len(read_metrics(out)) > done + 1)
        newest, start = steps_in(out / "checkpoints")[-1], time.monotonic()
        os.killpg(process.pid, signal.SIGTERM)
    deadline = start + 30
    while (alive := [each for each in family if is_there(each)]) and time.monotonic() < deadline:
        process.poll()
        time.sleep(0.01)
    row["end_s"] = time.monotonic() - start
    row["orphans"] = len(alive)
    for each in alive:
        each.kill()
    row["exit_code"] = process.wait()
    found = find(out / "checkpoints")
    row["unloadable"] = int(not is_whole(found))
    row["lost"] = int(int(found.name[5:]) < int(newest.name[5:]))
    told = victim in ("fork server", "group, told to stop")
    row["unsaved"] = max(0, last_step_of(out) - int(found.name[5:])) if told else None
    row["by the others"] = (
        None if victim != "rank" else int("which held all of it" in (out.parent / "said").read_text())
    )
    # what a whole group leaves the next run removes: the next kill of the chain counts it, if it did not
    row["left"] = None if victim == "group" else len(left_in(folder))
    row["shared"] = len(shared_memory.left_since(shared))
    return row


def divergence_of(out, losses):
    """The largest relative difference of a chain's losses from an undisturbed run's; None if losses are missing."""
    found = [(row["step"], row["loss"]) for row in read_metrics(out)]
    if [step for step, _ in found] != [*range(1, len(losses) + 1)]:
        return None
    return max(abs(mine - loss) / abs(loss) for (_, mine), loss in zip(found, losses, strict=True))


def last_step_of(out):
    """The number of the last step in a run's metrics."""
    return max((row["step"] for row in read_metrics(out)), default=0)


def has_diverged(difference):
    """Whether losses are not those of the undisturbed run; losses that are missing or NaN are not."""
    return difference is None or not difference <= TOLERANCE


def undisturbed(num_steps):
    """The losses of a run on one device."""
    with tempfile.TemporaryDirectory() as folder:
        train(TrainConfig(layout="single", stop_at=num_steps, **TINY), Path(folder) / "run", ranks="threads")
        return [row["loss"] for row in read_metrics(Path(folder) / "run")]


def chains(seconds, kills):
    """Kills until the time or the number is reached; yields each chain's rows, and its divergence in each of them."""
    end, done = time.monotonic() + seconds, 0
    kinds = ((False, True), (True, True), (True, False))
    turns = itertools.cycle([(victim, *kind) for kind in kinds for victim in VICTIMS])
    while time.monotonic() < end and done < kills:
        rows = []
        with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as base:
            out, folder = Path(base) / "run", Path(base) / "tmp"
            folder.mkdir()
            for layout in random.sample(LAYOUTS, len(LAYOUTS)):
                if time.monotonic() < end and done < kills:
                    victim, saving, beside = next(turns)
                    done += 1
                    try:
                        rows.append(kill_once(out, folder, layout, victim, saving=saving, beside=beside))
                    except RuntimeError as failure:  # the chain ends, and its rows count
                        row = {"layout": layout, "victim": victim, "saving": saving, "beside": beside}
                        row |= dict.fromkeys(FAULTS[:-1], 0) | {"unkilled": 1, "end_s": float(MOST_S)}
                        rows.append(row | {"said": str(failure)})
                        break
                    shown = {key: round(value, 2) if key == "end_s" else value for key, value in rows[-1].items()}
                    print(" ".join(f"{key}={value}" for key, value in shown.items()), flush=True)
            difference = divergence_of(out, undisturbed(last_step_of(out)))
        for row in rows:
            yield {**row, "divergence": difference}


def summary_of(victim, rows):
    """What the kills of one kind of victim came to."""
    ends = [row["end_s"] for row in rows] or [0.0]
    faults = {fault: sum(row[fault] or 0 for row in rows) for fault in FAULTS[:-1]}
    return {
        "victim": victim, "kills": len(rows), "saving": sum(row["saving"] for row in rows),
        "cut": sum(row.get("cut", False) for row in rows),
        "beside": sum(row.get("beside", False) for row in rows), **faults,
        "diverged": sum(has_diverged(row["divergence"]) for row in rows),
        "end_s_median": statistics.median(ends), "end_s_max": max(ends),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="kill for so long")
    parser.add_argument("--kills", type=int, default=300, help="and no more often")
    parser.add_argument("--seed", type=int, default=0)
    options = options_of(parser, smallest={"kills": 2})
    random.seed(options.seed)
    os.environ["OMP_NUM_THREADS"] = "1"
    facts = machine()
    rows = list(chains(options.seconds, options.kills))
    table = [summary_of(victim, [row for row in rows if row["victim"] == victim]) for victim in VICTIMS]
    table = [row for row in table if row["kills"]]
    for row in table:
        print("  ".join(f"{key} {value if isinstance(value, str) else f'{value:.4g}'}" for key, value in row.items()))
    write_beside(options, __file__, {"machine": facts, "table": table, "rows": rows})
    if any(row[fault] for row in table for fault in FAULTS):
        sys.exit("a kill left something behind, or lost something")


if __name__ == "__main__":
    main()
