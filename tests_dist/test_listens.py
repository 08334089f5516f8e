"""What a run opens to others while it trains, as the kernel lists it: no port that another machine could reach."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests_dist.command import FLAGS, end_all, family_of, start, temporary_folder, wait_for_step, within

from shardwright.train.progress import read_metrics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
LISTENS, ACCEPTS = "0A", 1 << 16


def sockets_of(process):
    """The inodes of a process's sockets."""
    links = []
    for path in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since: a process opens and closes files while it is looked at
            links.append(os.readlink(path))
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def listening_addresses(process):
    """The addresses, in the kernel's hexadecimal, on which a process listens over TCP."""
    mine = sockets_of(process)
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in mine:
                yield fields[1].split(":")[0]


def listening_paths(process):
    """The names of the local sockets on which a process listens."""
    mine = sockets_of(process)
    for line in Path(f"/proc/{process.pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in mine and int(fields[3], 16) & ACCEPTS:
            yield Path(fields[7])


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """The processes of a run that trains."""
    out = tmp_path_factory.mktemp("family") / "run"
    with temporary_folder() as folder:
        process = start(out, "--steps", "100000", folder=folder)
        found = []
        try:
            wait_for_step(process, out, 2)
            found = family_of(process)
            yield found
        finally:
            process.terminate()
            process.wait(timeout=30)
            end_all(found)


def test_a_run_that_trains_listens_on_no_address_that_another_machine_reaches(family):
    found = {address for process in family for address in listening_addresses(process)}
    assert found, "gloo listens on the loopback interface: without it the tables were read wrongly"
    assert found <= LOOPBACK


def test_ranks_of_torchrun_on_one_machine_listen_on_its_loopback_alone(tmp_path):
    """Torch's own agent listens for itself (docs/guide.md): only the ranks are ours."""
    out = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module"]
    command = [*torchrun, "shardwright.cli", "train", "--layout", "dp2", "--steps", "100000", *FLAGS, "--out", str(out)]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    family = [psutil.Process(process.pid)]
    try:
        assert within(120, lambda: len(read_metrics(out)) >= 2 or process.poll() is not None)
        family += family[0].children(recursive=True)
        ranks = [each for each in family if "RANK" in each.environ()]
        assert len(ranks) == 2
        for rank in ranks:
            found = set(listening_addresses(rank))
            assert found
            assert found <= LOOPBACK
    finally:
        process.kill()
        process.wait()
        end_all(family)


def test_the_local_sockets_of_a_run_can_be_opened_by_no_name(family):
    paths = [path for process in family for path in listening_paths(process)]
    assert len(paths) == 4
    assert not [path for path in paths if path.exists() or str(path).startswith("@")]
