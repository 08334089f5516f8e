"""The demo, which the README begins with: every stage of it runs, and one that fails ends it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from examples import demo

from shardwright.train.progress import read_metrics

ROOT = Path(__file__).resolve().parents[1]
STAGES = ["verify", "show", "train", "checkpoint", "train --resume", "sample"]


@pytest.mark.timeout(600)  # half a minute on quiet cores
def test_every_stage_of_the_smallest_demo_runs_and_leaves_its_files(tmp_path):
    out = tmp_path / "demo"
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--smallest", "--out", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    typed = [line.removeprefix("$ shardwright ") for line in said.splitlines() if line.startswith("$ shardwright ")]
    assert len(typed) == len(STAGES)
    assert all(line.startswith(stage) for line, stage in zip(typed, STAGES, strict=True)), typed
    assert [row["step"] for row in read_metrics(out)] == [1, 2, 3, 4]
    assert json.loads((out / "run.json").read_text())["options"]["layout"] == "tp2"
    for name in ("demo.png", "layout.png", "loss.png", "report.html", "checkpoints/step-00000004/manifest.json"):
        assert (out / name).stat().st_size > 0, name


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_ends_the_demo_with_an_error(tmp_path, monkeypatch, capsys, stage):
    """The command is replaced by one that fails at one stage only and does nothing at the others."""
    code = "import sys; sys.exit(('train --resume' if '--resume' in sys.argv else sys.argv[2]) == sys.argv[1])"
    monkeypatch.setattr(demo, "COMMAND", [sys.executable, "-c", code, stage])
    monkeypatch.setattr(sys, "argv", ["demo.py", "--smallest", "--out", str(tmp_path / "demo")])
    with pytest.raises(subprocess.CalledProcessError):
        demo.main()
    last = capsys.readouterr().out.split("$ shardwright ")[-1]
    assert last.startswith(stage)
