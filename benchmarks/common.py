"""What the benchmarks share: rows, medians, and the facts of the machine."""

import json
import os
import platform
import statistics
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch


def machine() -> dict:
    """What the numbers were measured on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "measured": datetime.now(UTC).isoformat(timespec="minutes"),
        "load_before": os.getloadavg()[0],
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def ratio_rows(rounds: list[dict[str, float]], limits: dict[str, str]) -> list[dict]:
    """Each variant's ratio to its limit, round by round: median and range; ``limits`` maps a variant to its limit."""
    rows = []
    for name, limit in limits.items():
        ratios = [r[name] / r[limit] for r in rounds]
        rows.append(
            {
                "name": name,
                "limit": limit,
                "ms_median": statistics.median(r[name] for r in rounds) * 1000,
                "limit_ms_median": statistics.median(r[limit] for r in rounds) * 1000,
                "ratio_median": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "rounds": len(ratios),
            }
        )
    return rows


def write(folder: str, result: dict) -> None:
    """Writes ``results/<measured>.json`` beside the benchmark, raw rows and all."""
    path = Path(folder) / "results"
    path.mkdir(exist_ok=True)
    stamp = result["machine"]["measured"].replace(":", "").replace("+0000", "")
    (path / f"{stamp}.json").write_text(json.dumps(result, indent=1) + "\n")
