"""The pretend accelerator itself: equal to the CPU to the last bit, and what it counts and refuses."""

from __future__ import annotations

import importlib
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import Mesh, run_on_threads
from shardwright.comm.backends.fake import fake_world
from shardwright.global_tensor import creation
from shardwright.global_tensor.geometry import GlobalLayout
from shardwright.global_tensor.placement import Placement
from shardwright.global_tensor.sbp import broadcast

module_to_global = importlib.import_module("shardwright.global_tensor.module_to_global")


class Several(nn.Module):
    """A convolution, a batch norm, attention, norms and an embedding."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(6, 8))
        self.over_tokens, self.statistics = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.words(tokens) + self.places
        x = x + self.statistics(self.over_tokens(x.transpose(1, 2))).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(functional.gelu(x))


def trained(device, kind):
    """A plain training loop: its losses and all that it leaves."""
    torch.manual_seed(0)
    model = Several().to(device)
    optimizer = kind(model.parameters(), lr=0.01, foreach=True)
    draw, losses = torch.Generator().manual_seed(1), []
    for _ in range(3):
        tokens, targets = (torch.randint(11, (4, 6), generator=draw).to(device) for _ in range(2))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.detach())
    return [each.cpu() for each in (*losses, *model.state_dict().values(), *(p.grad for p in model.parameters()))]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_plain_training_loop_is_equal_to_the_cpus_to_the_last_bit(accelerator, kind):
    for found, expected in zip(trained(accelerator.device, kind), trained("cpu", kind), strict=True):
        assert torch.equal(found, expected)


def test_a_cpu_tensor_beside_one_of_the_device_is_refused_unless_it_is_one_number_that_is_read(accelerator):
    x = torch.ones(2, device=accelerator.device)
    assert (x * torch.tensor(2.0)).sum().cpu() == 4
    for wrong in (lambda: x + torch.ones(2), lambda: torch.ones(2) @ x, lambda: torch.ones(()).add_(x.sum())):
        with pytest.raises(RuntimeError, match="same device, but found at least two devices, acc:0 and cpu"):
            wrong()


def mask_of(x):
    return x > 0


STOPS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "a list": lambda x: x.tolist(),
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: torch.ones(2).to(x.device),
    "a tensor of numbers": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "from memory that is not pinned": lambda x: x.copy_(torch.ones(2), non_blocking=True),
    "nonzero": lambda x: x.nonzero(),
    "a mask that is read": lambda x: x[mask_of(x)],
    "a mask that is written": lambda x: x.masked_scatter(mask_of(x), x)[mask_of(x)],
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "indices on the host": lambda x: x[torch.tensor([0, 1])],
    "repeats": lambda x: x.repeat_interleave(torch.ones_like(x, dtype=torch.int64)),
}

NO_STOPS = {
    "arithmetic": lambda x: (x * 2 + 1).softmax(0),
    "filled": lambda x: torch.full((3,), 2.0, device=x.device),
    "views": lambda x: x.view(2, 1).expand(2, 3)[1:].t(),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "one number for a mask": lambda x: x.clone().masked_fill_(x > 0, 1.0),
    "from pinned memory": lambda x: x.copy_(torch.ones(2).pin_memory(), non_blocking=True),
    "to pinned memory": lambda x: torch.empty(2, pin_memory=True).copy_(x, non_blocking=True),
    "to the host without waiting": lambda x: x.to("cpu", non_blocking=True),
    "an assertion on the device": lambda x: torch._assert_async((x > 0).all()),
    "larger": lambda x: x.clone().resize_(5),
}


@pytest.mark.parametrize("name", STOPS)
def test_what_stops_the_host_is_counted_with_its_line(accelerator, name):
    x = torch.ones(2, device=accelerator.device)
    with accelerator.counting() as stops:
        STOPS[name](x)
    assert stops.total() == 1
    assert "at test_accelerator.py:" in next(iter(stops))


@pytest.mark.parametrize("name", NO_STOPS)
def test_what_does_not_stop_the_host_is_not_counted(accelerator, name):
    x = torch.ones(2, device=accelerator.device)
    with accelerator.counting() as stops:
        NO_STOPS[name](x)
    assert not stops


def test_a_stop_inside_of_torch_names_its_line_too(accelerator):
    layer = nn.Linear(2, 2)
    with accelerator.counting() as stops:
        layer.to(accelerator.device)
    assert [text.split(":")[0] for text in stops] == ["copy cpu to acc at test_accelerator.py"]
    assert all(" by torch/nn/modules/module.py:" in text for text in stops)


def test_views_and_data_share_storages_as_everywhere(accelerator):
    x = torch.zeros(2, 3, device=accelerator.device)
    parameter = nn.Parameter(torch.empty(0, device=accelerator.device))
    parameter.data = x[1]
    parameter.data.fill_(2.0)
    other = torch.empty(0, device=accelerator.device).set_(x.untyped_storage())
    assert other.cpu().tolist() == [0.0] * 3 + [2.0] * 3
    assert other.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


def test_live_and_peak_bytes_are_those_of_the_devices_storages(accelerator):
    with accelerator.counting_memory():
        x = torch.zeros(1000, device=accelerator.device)
        assert accelerator.live_bytes == accelerator.peak_bytes == 4000
        y = (x + 1).sum()
        assert accelerator.peak_bytes == 8004
        assert accelerator.live_bytes == 4004
        del x, y
        assert accelerator.live_bytes == 0


def test_pinned_memory_is_counted(accelerator):
    before = accelerator.num_pinned
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned()
    assert accelerator.num_pinned == before + 2


def test_ranks_as_threads_meet_in_their_backwards_on_one_device(accelerator):
    def work(axes):
        x = torch.ones(3, device=accelerator.device, requires_grad=True)
        x.register_hook(lambda grad: axes["dp"].all_reduce(grad.clone()))
        (x * (1 + axes["dp"].index)).sum().backward()
        return x.grad.device.type, x.grad.tolist(), axes["dp"].device.type

    assert run_on_threads(Mesh(dp=2), work, device=accelerator.device) == [("acc", [3.0] * 3, "acc")] * 2


def test_an_empty_out_is_enlarged_to_what_the_operator_makes(accelerator):
    parts = [torch.tensor([1.0, 2.0], device=accelerator.device), torch.tensor([3.0], device=accelerator.device)]
    out = torch.empty(0, device=accelerator.device)
    storage = out.untyped_storage().data_ptr()
    with accelerator.counting_memory():
        assert torch.cat(parts, out=out) is out
        assert (out.device.type, out.tolist()) == ("acc", [1.0, 2.0, 3.0])
        assert accelerator.live_bytes == 3 * 4
    assert out.untyped_storage().data_ptr() != storage


def test_an_out_that_is_large_enough_keeps_its_memory(accelerator):
    out = torch.zeros(3, device=accelerator.device)
    view = out[1:]
    torch.cat([torch.ones(1, device=accelerator.device), torch.full((2,), 4.0, device=accelerator.device)], out=out)
    assert view.tolist() == [4.0, 4.0]


def test_memory_is_freed_while_an_exception_passes_through_torchs_own_code(accelerator):
    def refuse(tensor):
        raise ValueError("it is not kept")

    x = torch.ones(1000, device=accelerator.device, requires_grad=True)
    with accelerator.counting_memory():
        for _ in range(3):  # torch frees the result of exp, and with it what Python must not be called for at that time
            with pytest.raises(ValueError, match="not kept"), torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
                (x * 2).exp()
        assert accelerator.peak_bytes
        assert accelerator.live_bytes == 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("on", ["acc", "cpu"])
def test_every_rank_of_a_modules_placement_holds_its_tensors_on_the_device(accelerator, monkeypatch, rank, on):
    """As ranks other than the first begin: with a tensor that is empty, until the first rank's values come."""
    held, where = [], Placement("acc", (0, 1), (2,))
    for room in (creation, module_to_global):
        monkeypatch.setattr(room, "current_world", lambda: fake_world(rank, 2, accelerator.device))
    monkeypatch.setattr(module_to_global, "wrap", lambda local, *_: held.append(local) or MagicMock())
    module_to_global._from_first_rank(torch.ones(3, 2, device=on), GlobalLayout(where, (broadcast,)))
    assert [local.device for local in held] == [accelerator.device]
    assert held[0].numel() == (0 if rank else 6)
