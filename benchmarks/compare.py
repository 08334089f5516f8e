"""Two source trees in one interleaved run: how many times as long shardwright's own variants take in the new one.

A round runs each benchmark in both trees, each in a process of its own, in its own checkout; every second round begins
with the new one. The medians of both are divided round by round, so that a slower hour of the machine counts for both.
Limits are plain torch in both trees: how far their ratios lie from 1 is the noise of the machine. Benchmarks that count
CPU seconds are compared by these too, which other programs of the machine change less.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPARED = ("gpt_step", "zero_step", "pipeline_step", "tensor_modes", "startup")
"""The benchmarks that have ``--ours``."""
MOST_S = 600
"""Seconds after which a benchmark is taken to hang."""


def seconds_of(checkout: Path, name: str, *more: str) -> dict[str, dict[str, float]]:
    """The median seconds (and CPU seconds, if counted) of each of shardwright's variants, in one run of a benchmark."""
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}:{checkout}"}
    script = checkout / "benchmarks" / name / "run.py"
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, str(script), "--ours", "--rows", str(rows), *more]
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=MOST_S, check=False
        )
        if done.returncode:
            sys.exit(f"{name} failed in {checkout}\n{done.stdout}{done.stderr}")
        found = json.loads(rows.read_text())
    return {
        key: {variant: statistics.median(row[variant] for row in found[kind]) for variant in found[kind][0]}
        for key, kind in (("s", "rounds"), ("cpu_s", "cpu_rounds"))
        if kind in found
    }


def ratios_of(rounds: list[dict[str, dict[str, dict[str, float]]]], kind: str, variant: str) -> dict:
    """The median and the range of the ratios new / old of one variant, and the medians of both; none if not counted."""
    pairs = [
        (row["old"][kind][variant], row["new"][kind][variant])
        for row in rounds
        if kind in row["old"] and kind in row["new"]
    ]
    if not pairs:
        return {}
    ratios, of = [new / old for old, new in pairs], "" if kind == "s" else "cpu_"
    return {
        f"old_{kind}_median": statistics.median(old for old, _ in pairs),
        f"new_{kind}_median": statistics.median(new for _, new in pairs),
        f"{of}ratio_median": statistics.median(ratios),
        f"{of}ratio_min": min(ratios),
        f"{of}ratio_max": max(ratios),
    }


def rows_of(name: str, rounds: list[dict[str, dict[str, dict[str, float]]]]) -> list[dict]:
    """A row for each variant that both trees have: the median and the range of the ratios new / old."""
    variants = [variant for variant in rounds[0]["new"]["s"] if variant in rounds[0]["old"]["s"]]
    return [
        {"benchmark": name, "name": variant, "rounds": len(rounds)}
        | ratios_of(rounds, "s", variant)
        | ratios_of(rounds, "cpu_s", variant)
        for variant in variants
    ]


def commit_of(checkout: Path) -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False).stdout.strip()


def options_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", type=Path, required=True, help="the checkout that is the measure")
    parser.add_argument("--new", type=Path, default=ROOT, help="the checkout that is measured: by default, this one")
    parser.add_argument("--only", default=",".join(COMPARED), help="these benchmarks only, with commas between them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the rows, and every round's seconds, into this file")
    parser.add_argument("--smallest", action="store_true", help="tiny sizes: whether the comparison runs")
    options = parser.parse_args(words)
    options.only = options.only.split(",")
    if unknown := [name for name in options.only if name not in COMPARED]:
        parser.error(f"no benchmark to compare: {', '.join(unknown)}; there are {', '.join(COMPARED)}")
    options.old, options.new = options.old.resolve(), options.new.resolve()
    for checkout in (options.old, options.new):
        if missing := [name for name in options.only if not (checkout / "benchmarks" / name / "run.py").exists()]:
            parser.error(f"{checkout} has no benchmarks {', '.join(missing)}")
    return options


def main(words: list[str]) -> None:
    options = options_of(words)
    more = ["--smallest"] if options.smallest else []
    rounds: dict[str, list] = {name: [] for name in options.only}
    for number in range(options.rounds):
        for name in options.only:
            trees = [("old", options.old), ("new", options.new)][:: -1 if number % 2 else 1]
            rounds[name].append({tree: seconds_of(checkout, name, *more) for tree, checkout in trees})
        print(f"round {number + 1} of {options.rounds} is done", flush=True)
        if options.out is not None:  # after each round, so that an interrupted run has its rows
            table = [row for name in options.only for row in rows_of(name, rounds[name])]
            commits = {"old": commit_of(options.old), "new": commit_of(options.new)}
            options.out.write_text(json.dumps({"commits": commits, "table": table, "rounds": rounds}, indent=1) + "\n")
    for name in options.only:
        for row in rows_of(name, rounds[name]):
            old_ms, new_ms = (row[f"{tree}_s_median"] * 1000 for tree in ("old", "new"))
            cpu = f"   CPU seconds {row['cpu_ratio_median']:.3f}" if "cpu_ratio_median" in row else ""
            print(
                f"{name:14} {row['name']:28} {new_ms:9.1f} ms, old {old_ms:9.1f} ms   "
                f"new / old {row['ratio_median']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f}){cpu}"
            )
