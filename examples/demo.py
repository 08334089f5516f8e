"""The whole job on real text: verify a layout, train under it, resume under another, sample, and show it all.

``make demo`` runs this. Every step is a command that a person could type; they are printed as they run. With
``--smallest`` each of them runs with a tiny model and for a few steps, which shows whether the demo works.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "shardwright.cli"]
TINY = ["--set", "num_layers=1", "--set", "width=16", "--set", "num_heads=4", "--batch", "4", "--seq", "16"]
"""The model and the batch of ``--smallest``."""


def run(*arguments: str) -> None:
    """Prints and runs one command."""
    shown = " ".join(f"'{a}'" if " " in a else a for a in arguments)
    print(f"\n$ shardwright {shown}", flush=True)
    start = time.perf_counter()
    subprocess.run([*COMMAND, *arguments], check=True, env={"SHARDWRIGHT_DEVICE": "cpu", **os.environ})
    print(f"({time.perf_counter() - start:.0f} s)", flush=True)


def draw(out: Path, half: int) -> None:
    """Draws one loss curve over two layouts, the picture of the README."""
    from shardwright.report.pictures import draw_losses
    from shardwright.train.progress import read_metrics

    rows = read_metrics(out)
    first = [row for row in rows if row["step"] <= half]
    draw_losses({"dp2 tp2, four ranks": first, "resumed as tp2, two ranks": rows[len(first) :]}, out / "demo.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, help="in all: half under each layout (700; with --smallest 4)")
    parser.add_argument("--smallest", action="store_true", help="a tiny model for a few steps (half a minute)")
    options = parser.parse_args()
    out, steps = options.out, options.steps or (4 if options.smallest else 700)
    shutil.rmtree(out, ignore_errors=True)
    half = steps // 2

    tiny = TINY if options.smallest else []
    sizes = TINY if options.smallest else ["--batch", "16", "--seq", "128"]
    save_every, eval_every, num_bytes = ("1", "2", "8") if options.smallest else ("100", "50", "240")
    common = ["--steps", str(steps), *sizes, "--lr", "0.002", "--eval-every", eval_every, "--eval-batches", "4"]

    run("verify", "--layout", "dp2 tp4", *tiny)
    run("show", "--layout", "dp2 tp2", *tiny)
    run("train", "--layout", "dp2 tp2", *common, "--stop-at", str(half), "--save-every", save_every, "--out", str(out))
    run("checkpoint", "inspect", str(out))
    run("train", "--resume", "--layout", "tp2", "--out", str(out), "--stop-at", str(steps))
    run("sample", "--from", str(out), "--layout", "tp2", "--prompt", "def ", "--num", num_bytes)
    draw(out, half)
    print(f"\nWritten to {out}:")
    for path in sorted(p for p in out.rglob("*") if p.is_file() and not p.name.startswith(".")):
        print(f"  {path}  ({path.stat().st_size:,} bytes)")
    print(f"\nOpen {out / 'report.html'} to see the loss curve, the layout and what every rank holds.")


if __name__ == "__main__":
    main()
