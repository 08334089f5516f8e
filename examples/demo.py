"""The whole job on real text: verify a layout, train under it, resume under another, sample, and show it all.

``make demo`` runs this. Every step is a command that a person could type; they are printed as they run.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "shardwright.cli"]


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
    parser.add_argument("--steps", type=int, default=700, help="in all: half under each layout")
    options = parser.parse_args()
    out = options.out
    shutil.rmtree(out, ignore_errors=True)
    half = options.steps // 2

    run("verify", "--layout", "dp2 tp4")
    run("show", "--layout", "dp2 tp2")
    common = ["--steps", str(options.steps), "--batch", "16", "--seq", "128", "--lr", "0.002", "--eval-every", "50"]
    run("train", "--layout", "dp2 tp2", *common, "--stop-at", str(half), "--save-every", "100", "--out", str(out))
    run("checkpoint", "inspect", str(out))
    run("train", "--resume", "--layout", "tp2", "--out", str(out), "--stop-at", str(options.steps))
    run("sample", "--from", str(out), "--layout", "tp2", "--prompt", "def ", "--num", "240")
    draw(out, half)
    print(f"\nWritten to {out}:")
    for path in sorted(p for p in out.rglob("*") if p.is_file() and not p.name.startswith(".")):
        print(f"  {path}  ({path.stat().st_size:,} bytes)")
    print(f"\nOpen {out / 'report.html'} to see the loss curve, the layout and what every rank holds.")


if __name__ == "__main__":
    main()
