"""For tests in a real browser: the pages, made once by the command, and one Chromium for all tests.

They run in an environment of their own, with selenium and without torch (``make test-browser``). The pages are made by
the Python of ``.venv``, or by that of SHARDWRIGHT_PYTHON.
"""

import os
import subprocess
from pathlib import Path

import pytest
from tools.chromium import browser, missing

ROOT = Path(__file__).resolve().parents[1]
PYTHON = os.environ.get("SHARDWRIGHT_PYTHON", str(ROOT / ".venv" / "bin" / "python"))


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """A page of each kind, by its name."""
    out = tmp_path_factory.mktemp("pages")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run([PYTHON, str(ROOT / "tests_browser" / "make_pages.py"), str(out)], check=True, env=environment)
    return {path.stem: path for path in out.glob("*.html")}


@pytest.fixture(scope="session")
def driver():
    if missing():
        pytest.skip(missing())
    with browser() as found:
        yield found
