"""torchrun that says which nodes it waits for, and ends with the exit code of a rank."""

import subprocess
import sys
import time
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from shardwright.cluster.node_wait import LOOK_EVERY_S, NodeWait
from shardwright.cluster.torchrun import named_if_missing, wait_of
from shardwright.errors import CommunicationError

TWO_LOOKS_S = 2.4 * LOOK_EVERY_S
"""Seconds in which a node that had something to say would have said it: more than two reads of the store."""

COMMAND = [sys.executable, "-m", "shardwright.cluster.torchrun"]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("code", [0, 2])
def test_torchrun_ends_with_the_code_of_the_rank_that_failed(code, tmp_path):
    (tmp_path / "rank.py").write_text(f"import sys; sys.exit({code})")
    words = ["--standalone", "--nproc-per-node", "1", str(tmp_path / "rank.py")]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("exitcode  : 2" in done.stderr) == (code == 2)  # torch's table of the ranks that failed


@pytest.mark.sampled(0)
def test_nodes_that_torchrun_waits_for_in_vain_are_named():
    words = [
        "--nnodes",
        "3",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
        "--rdzv-id",
        "it",
    ]
    words += ["--rdzv-conf", "is_host=true,join_timeout=3", "--local-addr", "127.0.0.1", "--module", "this"]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error: not all nodes came" in done.stderr
    assert " s 1 of 3 nodes: 127.0.0.1\n" in done.stderr
    assert "Traceback" not in done.stderr


def free_port():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store.port


@pytest.fixture
def store():
    """A store as torchrun's first node has one."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def come(store, rank, num_nodes, said, port=None):
    where = ("127.0.0.1", store.port if port is None else port)
    return NodeWait(*where, num_nodes, rank, f"10.0.0.{rank or 0}", say_after_s=0.1, say=said.append)


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "nothing was said"
        time.sleep(0.05)


@pytest.mark.sampled(0)
def test_each_node_says_who_is_missing_and_no_more_once_all_have_come(store):
    said = [[], [], []]
    first, last, late = (come(store, rank, 3, said[rank]) for rank in range(3))
    with first, last:
        until(lambda: all(any("missing: 2" in line for line in each) for each in said[:2]))
        assert said[0][-1].endswith(" s: 2 of 3 nodes: 0 (10.0.0.0), 1 (10.0.0.1); missing: 2\n")
        with late:
            until(lambda: first.are_complete and last.are_complete and late.are_complete)
        before = [len(each) for each in said]
        time.sleep(TWO_LOOKS_S)
        assert [len(each) for each in said] == before
    assert first.seen() == "3 of 3 nodes: 0 (10.0.0.0), 1 (10.0.0.1), 2 (10.0.0.2)"


@pytest.mark.sampled(0)
def test_nodes_of_another_run_at_the_same_store_are_not_counted_nor_a_node_twice_that_comes_again(store):
    waits = [NodeWait("127.0.0.1", store.port, 3, None, "10.0.0.1", run_id, say_after_s=60) for run_id in "aab"]
    with waits[0]:
        until(lambda: "10.0.0.1" in waits[0].seen())
    with waits[1], waits[2]:
        until(lambda: all("10.0.0.1" in each.seen() for each in waits[1:]))
        time.sleep(TWO_LOOKS_S)
        assert [each.seen() for each in waits[1:]] == 2 * ["1 of 3 nodes: 10.0.0.1"]


@pytest.mark.sampled(0)
def test_a_store_that_has_gone_and_come_back_is_used_again():
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    first, last = (NodeWait("127.0.0.1", port, 3, rank, f"10.0.0.{rank}", say_after_s=60) for rank in (0, 2))
    with first, last:
        until(lambda: "missing: 1" in first.seen() and "2 of 3" in last.seen())
        del store
        time.sleep(TWO_LOOKS_S)
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        with NodeWait("127.0.0.1", port, 3, 1, "10.0.0.1", say_after_s=60):
            until(lambda: first.are_complete and last.are_complete)
    del store


@pytest.mark.sampled(0)
def test_nothing_is_said_once_ranks_are_started(store):
    said = []
    with come(store, 0, 2, said) as wait:
        until(lambda: said)
        rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        try:
            until(lambda: wait.is_started)
            time.sleep(TWO_LOOKS_S)
            before = len(said)
            time.sleep(TWO_LOOKS_S)
            assert len(said) == before
        finally:
            rank.kill()
            rank.wait()


def test_nodes_without_numbers_are_named_by_their_addresses(store):
    said = []
    with come(store, None, 2, said):
        until(lambda: any(line.endswith(" s: 1 of 2 nodes: 10.0.0.0\n") for line in said))


def test_a_first_node_that_does_not_answer_is_named():
    said, port = [], free_port()
    with come(None, 1, 2, said, port):
        until(lambda: said)
    assert said[0].endswith(f" s: nothing answers at 127.0.0.1:{port}, where the first node is waited for\n")


def give_up(wait, failure, condition):
    """Runs what torchrun does when it gives up, once a condition holds."""
    with named_if_missing(wait):
        until(condition)
        raise failure


@pytest.mark.sampled(0)
@pytest.mark.parametrize("failure", [RendezvousTimeoutError(), DistStoreError("timed out"), TimeoutError()])
def test_a_wait_in_vain_names_nodes_and_another_failure_stays_what_it_is(store, failure):
    alone = come(store, 0, 2, [])
    with pytest.raises(CommunicationError, match="not all nodes came") as caught:
        give_up(alone, failure, lambda: "10.0.0.0" in alone.seen())
    assert "1 of 2 nodes: 0 (10.0.0.0); missing: 1" in str(caught.value)
    both = come(store, 0, 2, []), come(store, 1, 2, [])
    with both[1], pytest.raises(type(failure)):
        give_up(both[0], failure, lambda: both[0].are_complete)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--nnodes 2 --node-rank 1 --master-addr here --master-port 5", (("here", 5), 2, "1")),
        ("--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint here:6 --local-addr there", (("here", 6), 2, None)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint here", (("here", 29400), 2, None)),
        ("--nnodes 2 --node-rank 1 --master-addr here", (("here", 29500), 2, "1")),
        ("--nnodes 2:3", (("127.0.0.1", 29500), 3, "0")),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint /path --rdzv-conf store_type=file", None),
        ("--nnodes nonsense", None),
        ("--no-such-option", None),
        ("--nnodes 2 --rdzv-backend etcd-v2 --rdzv-endpoint here:6", None),
        ("--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint here:6", None),
        ("--standalone --nproc-per-node 2", None),
    ],
)
def test_where_nodes_meet_is_read_from_torchruns_own_options(words, found):
    wait = wait_of([*words.split(), "script.py"])
    assert (wait and (wait._where, wait.num_nodes, wait._mark if wait.has_number else None)) == found
