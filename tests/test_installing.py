"""What is installed is whole: data files of the package, the image and the environment name what is there."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from shardwright.report import missing
from shardwright.report.machine import machine_text

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOUND = {"backends": ["gloo"], "devices": [], "free_memory_bytes": 2**34}


def test_every_file_of_the_package_that_is_no_code_is_in_the_wheel():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    places = [(ROOT / "src" / name.replace(".", "/"), each) for name, group in patterns.items() for each in group]
    data = [path for path in (ROOT / "src" / "shardwright").rglob("*") if path.is_file()]
    data = [path for path in data if path.suffix not in (".py", ".pyc")]
    assert len(data) > 10
    for path in data:
        fits = [
            path.is_relative_to(folder) and fnmatch(path.relative_to(folder).as_posix(), each)
            for folder, each in places
        ]
        assert any(fits), f"{path.relative_to(ROOT)} is not installed"


def test_the_image_copies_what_is_there_and_has_a_stage_for_each_kind_of_machine():
    text = (ROOT / "Dockerfile").read_text()
    lines = re.sub(r"\\\n", " ", text).splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    assert {each[0] for each in words} <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}
    stages = [each[3] for each in words if each[0] == "FROM"]
    assert stages == ["build", "base", "cpu", "cuda"]
    assert all(each[1].split(":")[0] == "python" or each[1] in stages for each in words if each[0] == "FROM")
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for each in words:
        for name in each[1:-1] if each[0] == "COPY" else ():
            assert (ROOT / name).exists()
            assert f"!{name}" in ignored, "the build would not see it"
        if each[0] in ("ENTRYPOINT", "CMD"):
            json.loads(" ".join(each[1:]))
    assert sum(each[0] == "USER" for each in words) == 2, "no image runs as root"


def test_the_environment_and_the_loggers_name_extras_that_the_project_has():
    extras = PROJECT["project"]["optional-dependencies"]
    texts = [(ROOT / "environment.yml").read_text(), *(fix for _, fix in missing.PACKAGES.values())]
    named = {name for text in texts for group in re.findall(r"\[([a-z,]+)\]", text) for name in group.split(",")}
    assert {"tensorboard", "notebook", "cluster"} <= named <= extras.keys()


def test_a_machine_that_has_everything_lacks_nothing(monkeypatch):
    monkeypatch.setattr(missing.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nvidia-smi" else name)
    assert missing.lacks(FOUND) == []


@pytest.mark.parametrize(
    ("change", "what", "fix"),
    [
        ({"backends": []}, "torch's gloo", "torch.distributed"),
        ({"free_memory_bytes": 2**20}, "free memory", "end other programs"),
        ({"cards": True}, "a torch that sees the NVIDIA cards", "install torch's CUDA build"),
        ({"compiler": False}, "a C++ compiler (g++)", "apt-get install g++"),
        ({"package": "cloudpickle"}, "the package cloudpickle", "pip install 'shardwright[notebook]'"),
    ],
)
def test_the_doctor_says_what_is_missing_and_what_to_type(monkeypatch, change, what, fix):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(missing.importlib.util, "find_spec", lambda name: None if name == change.get("package") else 1)
    there = {"nvidia-smi": "cards" in change, "g++": "compiler" not in change, "clang++": "compiler" not in change}
    monkeypatch.setattr(shutil, "which", lambda name: name if there[name] else None)
    (entry,) = missing.lacks({**FOUND, **change})
    assert entry["what"] == what
    assert fix in entry["fix"]
    (line,) = missing.lacks_text([entry])
    assert line.startswith(f"missing: {what}, for ")
    machine = {
        "python": "3", "torch": "2", "cpus": 1, "memory_bytes": 1, "free_memory_bytes": 1, "devices": [],
        "backends": [], "matmul_flops_per_s": 1.0, "all_reduce_s": {}, "missing": [entry],
    }  # fmt: skip
    assert line in machine_text(machine).splitlines()
