"""Ranks that were started one by one, as Slurm and MPI start them, and the devices that they ask for."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from contextlib import closing
from socket import create_server

import pytest

import shardwright as sw
from shardwright.errors import PlanError

WORK = textwrap.dedent("""
    import sys, torch, shardwright as sw

    def work(world):
        return world.rank, int(world.everyone().all_reduce(torch.tensor(world.rank + 1)))

    print(*sw.launch(work, 2, timeout_s=60)[0])
""")


def free_port():
    with closing(create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


def start(environments):
    """What each process says: (exit code, output, errors)."""
    environments = list(environments)
    for _ in range(3):  # a port that was free may be another program's by the time that rank 0 opens it
        found = started_once(environments)
        if not any("rank 0 cannot open the store" in text for _, _, text in found):
            break
    return found


def started_once(environments):
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORK], env={**os.environ, **meet, **environment}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for environment in environments
    ]  # fmt: skip
    said = [process.communicate(timeout=100) for process in started]
    return [(process.returncode, *each) for process, each in zip(started, said, strict=True)]


def test_ranks_that_slurm_starts_form_one_world():
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    found = start(dict(zip(names, (str(rank), "2", str(rank)), strict=True)) for rank in range(2))
    assert [(code, out) for code, out, _ in found] == [(0, "0 3\n"), (0, "1 3\n")], found


def test_ranks_of_which_one_asks_for_a_card_that_is_not_there_all_end_with_the_same_error():
    found = start(
        {"RANK": str(rank), "WORLD_SIZE": "2", "SHARDWRIGHT_DEVICE": ("auto", "cuda")[rank]} for rank in range(2)
    )
    assert [code for code, _, _ in found] == [1, 1]
    for _, _, text in found:
        assert "PlanError: there is no device 'cuda'" in text
        assert "given:   rank 1 on " in text


def test_a_device_that_is_not_there_is_refused_by_the_launcher():
    with pytest.raises(PlanError, match="there is no device 'gpu'"):
        sw.launch(print, 2, device="gpu")
