"""Ranks that a real Open MPI starts: `mpirun ... shardwright train`, and a program of one's own with `launch`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap

import pytest
from tests_dist.command import FLAGS, losses_of_one_device

from shardwright.train.progress import read_metrics

MPIRUN = shutil.which("mpirun")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(MPIRUN is None, reason="not installed: mpirun (apt-get install openmpi-bin)"),
]


@pytest.fixture
def mpirun(tmp_path):
    """A function that runs a program of Python as so many ranks, and returns its exit code and what it says."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]

    def run(num_ranks, *words):
        allowed = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command = [MPIRUN, *allowed, "--oversubscribe", "-np", str(num_ranks), sys.executable, *map(str, words)]
        named = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path,
                              env=os.environ | named)  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return run


def test_train_under_mpirun_is_equal_to_one_device(mpirun, tmp_path):
    out = tmp_path / "run"
    code, said = mpirun(
        4, "-m", "shardwright.cli", "train", "--layout", "dp2 tp2", "--steps", "4", "--out", out, *FLAGS
    )
    assert code == 0, said
    assert [row["step"] for row in read_metrics(out)] == [1, 2, 3, 4]
    expected = losses_of_one_device(out, tmp_path / "whole")
    assert [row["loss"] for row in read_metrics(out)] == pytest.approx(expected, rel=1e-4)


def test_a_program_under_mpirun_gets_its_own_ranks_result(mpirun, tmp_path):
    (tmp_path / "program.py").write_text(
        textwrap.dedent("""
            import shardwright as sw

            def work(world):
                return world.rank, world.size

            if __name__ == "__main__":
                ((rank, size),) = sw.launch(work, "tp3")
                print(f"rank {rank} of {size}\\n", end="", flush=True)
        """)
    )
    code, said = mpirun(3, "program.py")
    assert code == 0, said
    assert sorted(line for line in said.splitlines() if line.startswith("rank")) == [f"rank {n} of 3" for n in range(3)]


def test_a_layout_of_other_ranks_than_mpirun_starts_is_refused_by_number(mpirun, tmp_path):
    words = ["-m", "shardwright.cli", "train", "--layout", "dp2 tp2", "--steps", "1", "--out", tmp_path / "run", *FLAGS]
    code, said = mpirun(2, *words)
    assert code == 2, said
    assert "given:   a layout for 4 ranks, a world of 2" in said
    assert "Traceback" not in said
