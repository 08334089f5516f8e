"""What an accelerator holds beside tensors: the arithmetic, and that a CPU's account stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import devices
from shardwright.ledger.account import predict_memory
from shardwright.ledger.device_memory import DeviceMemory, beside_tensors, workspace_bytes
from shardwright.ledger.tracking import MemoryAccount, MemorySnapshot, Tracker
from shardwright.models import CrossEntropy
from shardwright.plan.plan import Job
from shardwright.report.memory import memory_data, memory_text

MIB = 2**20


def held(*sizes):
    memory = DeviceMemory()
    for size in sizes:
        memory.count(size)
    return memory


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([512, 513], 3 * 512, 2 * MIB),
        ([MIB] * 3, 3 * MIB, 4 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([6 * MIB] * 4, 24 * MIB, 40 * MIB),
        ([10 * MIB + 1], 12 * MIB - (2 * MIB - 512), 12 * MIB),
        ([11 * MIB + 1], 12 * MIB, 12 * MIB),
        ([10 * MIB, 30 * MIB, 5], 40 * MIB + 512, 42 * MIB),
    ],
)
def test_tensors_take_whole_blocks_of_segments_of_their_class(sizes, allocated, reserved):
    memory = held(*sizes)
    assert (memory.most_bytes, memory.segment_bytes) == (allocated, reserved)
    assert memory.rounding_bytes == allocated - sum(sizes)


def test_segments_of_what_was_freed_are_kept_and_used_again():
    memory = held(*[6 * MIB] * 4)
    for _ in range(3):
        memory.count(6 * MIB, freed=True)
    memory.count(6 * MIB)
    assert (memory.most_bytes, memory.segment_bytes) == (24 * MIB, 40 * MIB)
    memory.count(12 * MIB)
    assert (memory.most_bytes, memory.segment_bytes) == (24 * MIB, 52 * MIB)


@pytest.mark.parametrize(
    ("generation", "variable", "num_bytes"),
    [(9, None, 32 * MIB), (None, None, 32 * MIB), (8, None, (2 * 4096 + 8 * 16) * 1024), (8, ":4096:8", 32 * MIB)],
)
def test_the_workspace_is_that_of_the_card_or_of_the_variable(monkeypatch, generation, variable, num_bytes):
    monkeypatch.setattr(devices, "generation", lambda: generation)
    assert workspace_bytes({"CUBLAS_WORKSPACE_CONFIG": variable} if variable else {}) == num_bytes


@pytest.mark.parametrize(("given", "num_bytes"), [({}, 16 * 4 * MIB), ({"NCCL_MAX_NCHANNELS": "2"}, 8 * MIB),
                                                  ({"NCCL_BUFFSIZE": "1024"}, 16 * 1024)])  # fmt: skip
def test_each_communicator_takes_a_buffer_a_channel(given, num_bytes):
    assert beside_tensors(held(), "cuda", 3, given)["nccl"] == 3 * num_bytes
    assert beside_tensors(held(), "cuda", 0, given)["nccl"] == 0


def test_an_accelerator_without_nccl_has_no_workspace_of_cublas():
    assert beside_tensors(held(1), "xpu", 3) == {"rounding": 511, "segments": 2 * MIB - 512}


def test_a_tracker_of_an_accelerator_counts_storages_there_alone():
    with Tracker(device=torch.device("meta")) as tracker:
        x = torch.ones(100, device="meta")
        y = torch.ones(50)
        del x
        z = torch.ones(3 * MIB, device="meta")
    assert [moment.num_bytes for moment in tracker.account().moments] == [400, 400, 12 * MIB]
    assert (tracker.memory.most_bytes, y.numel(), z.numel()) == (12 * MIB, 50, 3 * MIB)


def predicted(line, **options):
    batch = (torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))
    return predict_memory(Job(nn.Linear(4, 4), CrossEntropy()), line, 0, batch, **options)


def test_a_cpu_holds_nothing_beside_tensors_and_an_accelerator_what_is_estimated(monkeypatch):
    monkeypatch.delenv("NCCL_MAX_NCHANNELS", raising=False)
    host, threads = predicted("dp2"), predicted("dp2", ranks="threads")
    card = predicted("dp2", device="cuda", foreach=False)
    assert host.beside == threads.beside == {}
    assert host.allocated_bytes == host.peak_bytes
    counters = {"optimizer": threads.at_peak()["optimizer"] - 2 * 4}  # AdamW counts steps on the host
    assert card.at_peak() == threads.at_peak() | counters, "and no blocks of shared memory"
    assert card.beside["nccl"] == 16 * 4 * MIB, "dp is all ranks"
    assert card.allocated_bytes == card.peak_bytes + card.beside["rounding"] + 64 * MIB
    assert 0 < card.beside["rounding"] == -card.peak_bytes % 512 + 512 * (card.beside["rounding"] // 512)
    assert predicted("single", device="cuda").beside["nccl"] == 0


COMMUNICATORS = {
    "pp2 mb2": [3, 3],  # of all ranks, and two of the pair
    "pp3/1f1b mb2": [3, 5, 3],  # the stage in the middle is one of two pairs
    "pp3/interleaved:v2 mb3": [5, 5, 5],  # what leaves the last stage comes to the first
    "pp2/zb-v mb2": [3, 3],
    "pp2 dp2 mb2": [5, 5, 5, 5],  # of pp, of dp and of all ranks
    "pp1 dp2": [1, 1],
}
"""How many of NCCL's communicators each rank is a member of."""


@pytest.mark.parametrize("line", COMMUNICATORS)
def test_each_pair_of_stages_that_exchange_messages_has_two_communicators(line, monkeypatch):
    monkeypatch.delenv("NCCL_MAX_NCHANNELS", raising=False)
    monkeypatch.delenv("NCCL_BUFFSIZE", raising=False)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    batch = (torch.ones(6, 4), torch.zeros(6, dtype=torch.int64))
    for rank, number in enumerate(COMMUNICATORS[line]):
        found = predict_memory(Job(model, CrossEntropy()), line, rank, batch, device="cuda")
        assert found.beside["nccl"] == number * 16 * 4 * MIB


def test_an_accelerators_optimizer_takes_all_parameters_at_once_as_torch_does_there():
    weight, bias = 4 * 4 * 4, 4 * 4
    state = 2 * (weight + bias)
    together, one_by_one = (predicted("single", device="cuda", **each) for each in ({}, {"foreach": False}))
    assert together.most()["optimizer"] == state + weight + bias
    assert one_by_one.most()["optimizer"] == state + 2 * weight


def test_the_estimates_stand_below_the_table_and_in_the_data():
    moments = (MemorySnapshot("0B0", (2048, 0, 0, 0, 0, 0, 0, 0, 0)),)
    card = MemoryAccount(moments, beside={"rounding": 24, "segments": 2**20, "workspace": 64 * MIB, "nccl": 128 * MIB})
    last = memory_text({0: card}).splitlines()[-1]
    assert last == (
        "Beside tensors the device holds, as an estimate: rounding 24 B, free in segments 1.0 MiB, "
        "cuBLAS's workspace 64.0 MiB, NCCL's buffers 128.0 MiB."
    )
    assert memory_data({0: card})[0]["predicted"]["beside"] == card.beside
    assert "Beside" not in memory_text({0: MemoryAccount(moments)})
    assert "beside" not in memory_data({0: MemoryAccount(moments)})[0]["predicted"]
