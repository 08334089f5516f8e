"""Makes the pages that the tests in a browser look at, by the command: runs, a comparison, a plan and a timeline.

A small run is trained for real, under two layouts; a long one on many ranks has made-up metrics.
"""

import json
import math
import sys
from pathlib import Path

from typer.testing import CliRunner

from shardwright.cli.main import app

TINY = ["--set", "num_layers=2", "--set", "width=16", "--set", "num_heads=2", "--seq", "16", "--batch", "8"]


def run(*arguments: object) -> None:
    found = CliRunner().invoke(app, [str(each) for each in arguments])
    assert found.exit_code == 0, (arguments, found.output, found.exception)


def stretch(folder: Path, num_steps: int, num_ranks: int) -> None:
    """Gives a run made-up metrics of many steps and ranks, and predicted figures beside measured ones."""
    kept = json.loads((folder / "run.json").read_text())
    figures = {"step_s": 0.4, "waterfall": {"matmul": 0.3, "dp": 0.1}, "memory_by_kind": {"activations": 2**30},
               "traffic_by_axis": {"dp": 2**20}}  # fmt: skip
    kept["parts"][-1] |= {"predicted": figures, "measured": {**figures, "step_s": 0.5}}
    (folder / "run.json").write_text(json.dumps(kept))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            held = [2**34 + 2**28 * (rank % 8) + step * 2**16 for rank in range(num_ranks)]
            row = {
                "step": step, "loss": 2 + 9 * math.exp(-step / 300) + 0.1 * math.sin(step), "lr": 1e-3,
                "grad_norm": 1 + 0.5 * math.cos(step), "step_ms": 400.0, "tokens_per_s": 1e6, "time_s": 0.4 * step,
                "held_bytes": held, "memory_bytes": [each + 2**28 for each in held],
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")


def main() -> None:
    out = Path(sys.argv[1])
    train = ["train", "--ranks", "threads", "--eval-every", "2", "--eval-batches", "2", "--out", out / "small"]
    run(*train, "--layout", "dp2 tp2", "--steps", "8", "--stop-at", "4", *TINY)
    run(*train, "--layout", "pp2/1f1b mb4", "--resume", "--stop-at", "8")
    run("train", "--ranks", "threads", "--layout", "dp2", "--steps", "4", *TINY, "--out", out / "long")
    stretch(out / "long", 10_000, 256)
    run("report", out / "small", "--out", out / "run.html")
    run("report", out / "long", "--out", out / "long.html")
    run("report", "--compare", out / "small", out / "long", "--out", out / "comparison.html")
    run("show", "--layout", "pp2/zb-v mb4", "--timeline", out / "timeline.html", *TINY, "--set", "num_layers=4")
    run("plan", "--cluster", "a100-80gb:1x2", "--layout", "dp2 bf16", "--html", out / "plan.html", *TINY)


if __name__ == "__main__":
    main()
