"""Activations offloaded to disk: equal to the last bit, out of memory, their space reused."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from contract.cases import CASES, check_equal, check_traffic
from shardwright.errors import PlanError
from shardwright.ledger.account import measure_memory, predict_memory
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.plan.plan import Job
from shardwright.runtime.activation_offload import ActivationOffload
from shardwright.runtime.offload_storage import OffloadStorage

NAMED = {case.name: case for case in CASES}
WORD = "recompute:offload:disk"


@pytest.mark.sampled(100)
@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("dp2/zero3/bucket:0 mb3", "gpt2 apart"),
        ("tp2/sp", "gpt2 tied"),
        ("pp2/zb-h1 mb3", "gpt2 apart"),
        ("dp2 tp2/spatial", "convnet"),
        ("tp2x2/2d", "llama one kv head"),
    ],
)
def test_blocks_whose_tensors_are_on_disk_are_those_of_one_device_and_send_nothing_more(line, name):
    check_equal(f"{line} {WORD}", NAMED[name])
    check_traffic(f"{line} {WORD}", NAMED[name])


def plain():
    with sw.without_values():
        return GPT(GPTConfig(num_layers=2, num_heads=4, width=32, max_tokens=16, dropout=0.1))


def data():
    tokens = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients(world, line, folder):
    run = sw.parallelize(plain(), line, world, offload_folder=folder)
    (batch,) = run.shard([data()])
    for _ in range(2):
        run.step(batch)
    return {name: p.grad for name, p in run.parameters.items()}, list(folder.iterdir())


@pytest.mark.parametrize("line", ["single", "dp2/zero3/bucket:0"])
def test_gradients_are_the_same_to_the_last_bit_and_nobody_sees_the_files(tmp_path, line):
    size = sw.Layout.parse(line).num_ranks
    expected = sw.launch(gradients, size, line, tmp_path, ranks="threads")
    found = sw.launch(gradients, size, f"{line} {WORD}".removeprefix("single "), tmp_path, ranks="threads")
    for (mine, left), (theirs, _) in zip(found, expected, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert left == []


def test_what_is_out_is_not_in_the_ledger_of_a_rank_predicted_or_measured():
    def work(world):
        run = sw.parallelize(plain(), WORD, world)
        optimizer = run.optimizer(torch.optim.AdamW)
        (batch,) = run.shard([data()])
        for _ in range(2):
            run.step(batch)
            optimizer.step()
        return measure_memory(run, batch, optimizer)

    (measured,) = sw.launch(work, 1, ranks="threads")
    predicted, kept = (predict_memory(Job(plain(), CrossEntropy()), line, 0, data()) for line in (WORD, "single"))
    assert -0.01 <= predicted.peak_bytes / measured.peak_bytes - 1 <= 0.02
    assert predicted.most()["activations"] < 0.5 * kept.most()["activations"]


class Gate(torch.nn.Module):
    """A product of three views of one tensor."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 24)

    def forward(self, x):
        a, b, c = torch.tanh(self.up(x)).chunk(3, -1)
        return a * b * c


def test_room_is_used_again_by_steps_of_any_length_and_each_storage_goes_out_once():
    def work(world):
        storage, gate = OffloadStorage("disk", world.everyone()), Gate()
        x = torch.arange(32.0).view(4, 8).sin().requires_grad_()  # so that the weight is wanted too
        gate(x).sum().backward()
        expected, gate.up.weight.grad = gate.up.weight.grad, None
        ActivationOffload(storage).attach(gate)
        used, rooms = [], []
        for length in (4, 3, 2, 4):
            gate.zero_grad()
            total = gate(x[:length].clone()).sum()
            used.append(sorted(tensor.numel() // length for tensor in storage.tensors))
            rooms.append(min(tensor.data_ptr() for tensor in storage.tensors))
            total.backward()
            del total  # and the graph
        return used, len(set(rooms)), torch.equal(gate.up.weight.grad, expected)

    ((used, num_rooms, same),) = sw.launch(work, 1, ranks="threads")
    assert used == [[8 * 4, 8 * 4, 24 * 4]] * 4  # the input, the first product, and what it is taken of
    assert num_rooms == 1
    assert same


def test_a_folder_that_cannot_be_written_is_refused_on_every_rank_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()

    def work(world):
        with pytest.raises(PlanError, match="no room to offload to disk"):
            sw.parallelize(plain(), f"dp2 {WORD}", world, offload_folder=tmp_path / "file" / "folder")

    sw.launch(work, 2, ranks="threads")
