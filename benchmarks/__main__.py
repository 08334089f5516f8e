"""The committed benchmarks, one after the other: ``make bench``, ``make bench-smallest``; or two source trees compared.

python -m benchmarks                       every benchmark, measured again, rows written under its results/
python -m benchmarks --smallest            every benchmark in its smallest sizes: whether it runs
python -m benchmarks --list                their names
python -m benchmarks compare --old CHECKOUT --rounds 3 --out compared.json
"""

import argparse
import faulthandler
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

from shardwright import devices

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
MOST_S = 600
"""Seconds after which a benchmark in its smallest sizes is taken to hang: all end, with a traceback."""


def scripts() -> dict[str, Path]:
    """Every benchmark's script by its name: the folder of a ``run.py``, or ``folder/file`` of another script."""
    every = sorted(path for path in HERE.glob("*/*.py") if 'if __name__ == "__main__"' in path.read_text())
    return {(path.parent.name if path.name == "run.py" else f"{path.parent.name}/{path.stem}"): path for path in every}


def measure(wanted: dict[str, Path]) -> None:
    """Runs each benchmark in a process of its own, and writes its rows under its ``results/``."""
    for name, script in wanted.items():
        print(f"== {name}", flush=True)
        if name == "gpu" and not devices.count():
            print("left out: there is no card")
            continue
        subprocess.run([sys.executable, str(script), "--write"], check=True)


def run_smallest(wanted: dict[str, Path]) -> list[str]:
    """Runs each benchmark in its smallest sizes, rows going to a temporary folder; the names of those that failed.

    All of them run in this process, so that torch is loaded once and ranks are forks of one server. The last lines
    that are printed name what was left out on this machine, such as a peer that is not installed, and why.
    """
    failed, left_out = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, script) in enumerate(wanted.items()):
            print(f"== {name}", flush=True)
            start, rows = time.perf_counter(), Path(folder) / f"{number}.json"
            faulthandler.dump_traceback_later(MOST_S, exit=True, file=sys.__stderr__)
            try:
                with command_line(str(script), "--smallest", "--rows", str(rows)):
                    runpy.run_path(str(script), run_name="__main__")
                if not rows.exists():
                    raise FileNotFoundError(f"{name} wrote no rows")
                for peer, why in json.loads(rows.read_text()).get("left_out", {}).items():
                    left_out[name, peer] = " ".join(why.split())
            except (Exception, SystemExit):
                failed.append(name)
                print(f"== {name} failed\n{traceback.format_exc()}", flush=True)
            else:
                print(f"== {name} ran in {time.perf_counter() - start:.1f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(f"== left out: {len(left_out) or 'nothing'}")
    for (name, peer), why in left_out.items():
        print(f"{name if name == peer else f'{name}, {peer}'} is left out: {why}", flush=True)
    return failed


@contextmanager
def command_line(*words: str):
    """The arguments and the environment of a benchmark's own process, for as long as the block runs."""
    before, environment = sys.argv, dict(os.environ)
    sys.argv = [*words]
    try:
        yield
    finally:
        sys.argv = before
        os.environ.clear()
        os.environ.update(environment)


def main() -> None:
    if sys.argv[1:2] == ["compare"]:
        from benchmarks.compare import main as compare

        return compare(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smallest", action="store_true", help="tiny sizes, nothing kept: whether they run")
    parser.add_argument("--only", metavar="NAMES", help="these benchmarks only, with commas between them")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    options = parser.parse_args()
    every = scripts()
    names = options.only.split(",") if options.only else list(every)
    if unknown := [name for name in names if name not in every]:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(every)}")
    wanted = {name: every[name] for name in names}
    if options.list:
        print("\n".join(wanted))
    elif not options.smallest:
        measure(wanted)
    elif failed := run_smallest(wanted):
        sys.exit(f"failed: {', '.join(failed)}")
    return None


if __name__ == "__main__":
    main()
