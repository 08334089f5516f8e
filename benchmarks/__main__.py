"""All committed benchmarks, one after the other: ``make bench``."""

import subprocess
import sys
from pathlib import Path

for script in sorted(Path(__file__).parent.glob("*/run.py")):
    print(f"== {script.parent.name}", flush=True)
    subprocess.run([sys.executable, str(script), "--write"], check=True)
