"""Layers with statistics over the batch, under layouts in which each microbatch has statistics of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from shardwright import launch, parallelize, verify
from shardwright.errors import LayoutError, PlanError, RankFailedError
from shardwright.layout import Layout

W = 6
OWN = "mb3/own-statistics"


def pairs(*sizes):
    draw = torch.Generator().manual_seed(2)
    return [(torch.randn(size, W, generator=draw), torch.arange(size) % W) for size in sizes]


def normed():
    """Statistics that are running, cumulative, and of a weight; dropout, whose masks are those of the samples."""
    return nn.Sequential(
        nn.Linear(W, W), nn.BatchNorm1d(W), nn.Dropout(0.2), nn.ReLU(), nn.Linear(W, W),
        nn.BatchNorm1d(W, momentum=None), nn.Tanh(), spectral_norm(nn.Linear(W, W)),
    )  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [f"dp2 {OWN}", f"pp2/zb-v {OWN} dp2 recompute:1", "pp2/interleaved:v2 mb4/own-statistics", f"pp4/zb-h1 {OWN}"],
)
def test_each_microbatch_is_normalised_as_on_one_device_that_adds_up_their_gradients(line):
    verdict = verify(normed(), line, pairs(10, 8))
    assert verdict.equal, verdict
    assert verdict.buffers_error < 1e-10


@pytest.mark.parametrize("line", [f"pp2/zb-v {OWN} recompute:1", f"dp2 {OWN}"])
def test_every_microbatch_counts_once(line):
    model = normed()

    def work(world):
        run = parallelize(model, line, world)
        for batch in run.shard(pairs(10, 7)):
            run.step(batch)
        return {int(b) for n, b in run.model.named_buffers() if n.endswith("tracked") and b.numel()}

    found = set().union(*launch(work, Layout.parse(line).num_ranks, ranks="threads"))
    assert found - {0} == {6}  # a stage without the layer counts nothing


def frozen():
    """A model in training whose BatchNorms normalize by their running statistics, and change none."""
    model = normed()[:-2]
    for module in model:
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.uniform_(-1, 1)
            module.eval()
    return model


@pytest.mark.parametrize(
    "line", ["mb3", "pp2/zb-v mb3", "pp2 mb2 dp2", "pp2/interleaved:v2 mb4 recompute:1", "mb2 tp2"]
)
def test_frozen_batch_norms_need_no_statistics_of_microbatches(line):
    verdict = verify(frozen(), line, pairs(10, 8))
    assert verdict.equal, verdict
    assert verdict.buffers_error == 0


@pytest.mark.parametrize("line", ["mb2", "pp2 mb2"])
def test_a_batch_norm_that_is_frozen_no_longer_is_refused_in_the_next_step(line):
    model = frozen()

    def work(world):
        run = parallelize(model, line, world)
        run.step(next(run.shard(pairs(4))))
        run.model.train()
        run.step(next(run.shard(pairs(4))))

    with pytest.raises((PlanError, RankFailedError), match=r"was in eval mode.*\n.*\n.*get_submodule\('1'\)\.eval"):
        launch(work, Layout.parse(line).num_ranks, ranks="threads")
    with pytest.raises(LayoutError, match=r"'1' computes statistics over the batch.*\n.*\n.*\n.*freeze it by"):
        verify(normed(), line, pairs(4))
    with pytest.raises(LayoutError, match="'1' computes statistics"):  # who calls train() in time means to train them
        verify(frozen().eval(), line, pairs(4))


def test_a_mean_that_instances_keep_is_one_for_each_microbatch():
    model = nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.InstanceNorm1d(3, track_running_stats=True), nn.Flatten(), nn.Linear(12, 4)
    )
    batch = (torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(1)), torch.arange(5) % 4)
    with pytest.raises(LayoutError, match="write pp2 mb2/own-statistics"):
        verify(model, "pp2 mb2", [batch])
    verdict = verify(model, "pp2 mb2/own-statistics", [batch, batch])
    assert verdict.equal, verdict


def test_a_batch_too_small_for_its_microbatches_is_refused_on_every_rank():
    model = normed()

    def work(world):
        run = parallelize(model, f"pp2 {OWN}", world)
        with pytest.raises(PlanError, match="2 samples in 3 microbatches"):
            run.step(next(run.shard(pairs(2))))
        return run.evaluate(next(run.shard(pairs(2)))).item()

    first, second = launch(work, 2, ranks="threads")
    assert first == second


def test_a_norm_that_stages_share_is_refused():
    norm = nn.BatchNorm1d(W)
    model = nn.Sequential(nn.Linear(W, W), norm, nn.Linear(W, W), norm)
    with pytest.raises(LayoutError, match="several stages or chunks call it"):
        verify(model, "pp2", pairs(5))


def test_a_schedule_that_runs_a_later_microbatch_first_is_refused(tmp_path):
    path = tmp_path / "late.csv"
    path.write_text("0F1,0F0,0B1,0B0\n1F1,1B1,1F0,1B0\n")
    assert verify(nn.Sequential(nn.Linear(W, W), nn.Linear(W, W)), f"pp2/file:{path} mb2", pairs(5)).equal
    with pytest.raises(LayoutError, match="runs microbatches out of order"):
        verify(
            nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.Linear(W, W)),
            f"pp2/file:{path} mb2/own-statistics",
            pairs(5),
        )


@pytest.mark.parametrize("line", ["bf16", "pp2 mb2/own-statistics dp2 fp16"])
def test_statistics_stay_wide_beside_weights_that_are_narrow(line):
    model = nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.Linear(W, W))
    verdict = verify(model, line, pairs(9), dtype=torch.float32)
    assert verdict.equal, verdict


class Keeping(nn.Module):
    """Fills a table when it is first called, and keeps the mean of what it sees, or not."""

    def __init__(self, mean):
        super().__init__()
        self.register_buffer("table", torch.zeros(W))
        self.register_buffer("seen", torch.zeros(W))
        self.mean = mean

    def forward(self, x):
        with torch.no_grad():
            self.table.copy_(torch.arange(W).to(x.dtype))
            if self.mean:
                self.seen.lerp_(x.mean(0), 0.5)
        return x + self.table


@pytest.mark.filterwarnings("ignore:.*with which it changes the buffer")
@pytest.mark.parametrize("line", ["mb2", "pp2/gpipe mb2"])
def test_a_buffer_that_code_of_ones_own_changes_with_every_microbatch_is_refused(line):
    def model(mean):
        return nn.Sequential(nn.Linear(W, W), Keeping(mean), nn.Linear(W, W))

    assert verify(model(mean=False), line, pairs(5, 4)).equal
    assert verify(model(mean=True), f"{line}/own-statistics", pairs(5, 4)).equal
    with pytest.raises((PlanError, RankFailedError), match=r"'1.seen' changes with every call"):
        verify(model(mean=True), line, pairs(5, 4))


class InWindows(nn.Module):
    """A batch norm of pictures whose places are then taken for tokens, as attention in windows does."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.layer = nn.Conv2d(2, 32, 1), nn.BatchNorm2d(32), nn.Linear(32, 32)

    def forward(self, x):
        x = self.norm(self.conv(x)).view(len(x), 32, 1, 4, 1, 4).permute(0, 2, 4, 3, 5, 1)
        x = self.layer(x).tanh() + x
        return x.permute(0, 5, 1, 3, 2, 4).reshape(len(x), 32, 4, 4)


class ByHand(nn.Module):
    """What a BatchNorm2d computes, without torch's kernel."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x):
        x = x - x.mean((0, 2, 3), keepdim=True)
        x = x / (x.square().mean((0, 2, 3), keepdim=True) + self.eps).sqrt()
        return x * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def test_a_batch_norm_of_one_sample_has_right_gradients_on_a_stage():
    torch.manual_seed(0)
    model, x, y = InWindows().double(), torch.randn(2, 2, 4, 4).double(), torch.randn(2, 32, 4, 4).double()

    def work(world):
        run = parallelize(model, "pp2/1f1b/cut:conv,layer mb2/own-statistics", world, loss=nn.MSELoss(), example=x)
        run.step(next(run.shard([(x, y)])))
        return {name: p.grad for name, p in run.parameters.items() if p.grad is not None and p.grad.numel()}

    first, second = launch(work, 2, ranks="threads")
    model.norm = ByHand(model.norm)
    for sample in (0, 1):
        ((model(x[[sample]]) - y[[sample]]).square().sum() / y.numel()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close({**first, **second}[name], parameter.grad)


class Columns(nn.Module):
    """A layer by einsum, which no rule knows, and a batch norm of its features, of which tp holds parts."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(*size) / 3) for size in ((4 * W, W), (W, 4 * W)))
        self.norm = nn.BatchNorm1d(4 * W)

    def forward(self, x):
        y = self.norm(torch.einsum("biw,oi->bow", x, self.up)).relu()
        return x + torch.einsum("biw,oi->bow", y, self.down)


def test_a_batch_norm_of_one_sample_of_which_ranks_hold_parts_runs_on_a_stage():
    torch.manual_seed(0)
    model = nn.Sequential(Columns(), Columns(), nn.Flatten(), nn.Linear(3 * W, 2))
    verdict = verify(model, "pp2/1f1b dp2 tp2", [(torch.randn(2, W, 3), torch.tensor([1, 0]))])
    assert verdict.equal, str(verdict)
