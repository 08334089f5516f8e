"""torchrun that ends with the exit code of a rank."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("code", [0, 2])
def test_torchrun_ends_with_the_code_of_the_rank_that_failed(code, tmp_path):
    (tmp_path / "rank.py").write_text(f"import sys; sys.exit({code})")
    words = ["--standalone", "--nproc-per-node", "1", str(tmp_path / "rank.py")]
    done = subprocess.run([sys.executable, "-m", "shardwright.cluster.torchrun", *words], capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ("exitcode  : 2" in done.stderr) == (code == 2)  # torch's table of the ranks that failed
