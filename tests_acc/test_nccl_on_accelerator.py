"""The library over NCCL's rules where ranks are on the pretend accelerator: all that is sent is there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from comm.scenarios import SCENARIOS
from contract.cases import GPT2, one_device_once
from nccl_rules import Variant
from pretend_nccl import over_nccl
from shardwright.comm.launch import run_threads
from shardwright.layout import Layout
from shardwright.parallelize import parallelize
from shardwright.verify import verify

STRICTEST = Variant()


class MadeOn(TorchFunctionMode):
    """Moves what scenarios make on the host to a device."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made.to(self.device) if func in (torch.ones, torch.randn, torch.randint) else made


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.removeprefix("scenario_"))
def test_channels_of_an_accelerator_do_what_every_backend_must(accelerator, scenario, num_ranks):
    def work(world):
        with MadeOn(world.device):
            scenario(world)

    with over_nccl(STRICTEST, accelerator.device):
        run_threads(work, num_ranks, device=accelerator.device)


LAYOUTS = (
    "dp2", "dp2 bf16", "dp2/zero1", "dp2/zero2 mb2", "dp2/zero3", "dp2/zero3/offload", "tp2", "tp2/sp", "tp2x2/2d",
    "tp2x2x1/2.5d", "pp2/1f1b mb4", "pp2/zb-h1 mb4", "pp2/1f1b mb2 dp2/zero1", "pp2/1f1b mb2 tp2", "dp2/zero3 tp2",
    "pp2/1f1b/scatter mb2 tp2",
)  # fmt: skip


@pytest.mark.parametrize("line", LAYOUTS)
def test_layouts_send_nothing_of_the_host(accelerator, line):
    """An error tells of a tensor of the host; the comparison, of a wait that is missing."""

    def on_the_device(work, *args):
        return run_threads(work, Layout.parse(line).num_ranks, *args, device=accelerator.device)

    with one_device_once(GPT2), over_nccl(STRICTEST, accelerator.device):
        verdict = verify(GPT2.model, line, GPT2.batches, loss=GPT2.loss, launcher=on_the_device)
    assert verdict.equal, str(verdict)


class WithUnused(nn.Module):
    """A layer that the forward does not use: ranks send negative zeros for its gradients."""

    def __init__(self):
        super().__init__()
        self.every, self.unused = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.every(x)


def trained(world, model, line, batch):
    run = parallelize(model, line, world)
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    for part in run.shard([batch] * 2):
        run.step(part)
        optimizer.step()
    return [each.detach().cpu() for each in run.parameters.values()]


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3", "zero1/offload", "zero2/offload", "zero3/offload"])
@pytest.mark.parametrize("words", ["bf16", "/fp32-sums bf16", "/fp32-sums bf16 mb2"])
def test_gradients_that_no_rank_has_are_sent_from_the_device_too(accelerator, stage, words):
    torch.manual_seed(0)
    with torch.device("meta"):
        model = WithUnused()
    line, draw = f"dp2/{stage}{'' if words[0] == '/' else ' '}{words}", torch.Generator().manual_seed(1)
    given = model, line, (torch.randn(8, 4, generator=draw), torch.randint(3, (8,), generator=draw))
    with over_nccl(STRICTEST, accelerator.device):
        found = run_threads(trained, 2, *given, device=accelerator.device)
    for mine, expected in zip(found, run_threads(trained, 2, *given), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))


def reduced(axis, tensor):
    axis.all_reduce(tensor)


def gathered(axis, tensor):
    axis.all_gather(tensor)


def cut(axis, tensor):
    axis.reduce_scatter(tensor)


def spread(axis, tensor):
    axis.broadcast(tensor)


def exchanged(axis, tensor):
    axis.all_to_all([tensor] * 2, [tensor.shape] * 2)


def passed_on(axis, tensor):
    other = 1 - axis.index
    axis.send_and_receive_async({other: tensor}, {other: tensor.shape}, tensor.dtype).wait()


@pytest.mark.parametrize("call", [reduced, gathered, cut, spread, exchanged, passed_on], ids=lambda call: call.__name__)
def test_a_tensor_of_the_host_is_refused(accelerator, call):
    def work(world, device):
        call(world.everyone(), torch.ones(2, device=device))

    with over_nccl(STRICTEST, accelerator.device):
        run_threads(partial(work, device=accelerator.device), 2, device=accelerator.device)
    with (
        pytest.raises(Exception, match="was given a tensor that NCCL does not take: cpu"),
        over_nccl(STRICTEST, accelerator.device),
    ):
        run_threads(partial(work, device="cpu"), 2, device=accelerator.device)


def test_the_rules_themselves_never_stop_the_host(accelerator):
    def work(world):
        axis = world.everyone()
        sums = axis.all_reduce_async(torch.ones(2, device=world.device))
        whole = axis.all_gather(torch.ones(2, device=world.device))
        return sums.wait(), whole

    with over_nccl(STRICTEST, accelerator.device), accelerator.counting() as stops:
        found = run_threads(work, 2, device=accelerator.device)
    assert stops == {}
    assert [(sums.tolist(), whole.tolist()) for sums, whole in found] == [([2] * 2, [1] * 4)] * 2
