"""BatchNorm of a sharded batch, against torch's own on one device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from contract.cases import check_refused
from shardwright import Mesh, launch, parallelize, run_on_threads, verify
from shardwright.analysis.traced.batch_norms import batch_norms
from shardwright.errors import PlanError
from shardwright.operators.batch_norm import share_statistics

KINDS = {
    "1d": (nn.BatchNorm1d, (3,)),
    "1d of lines": (nn.BatchNorm1d, (3, 4)),
    "2d": (nn.BatchNorm2d, (3, 2, 4)),
    "3d": (nn.BatchNorm3d, (3, 2, 1, 2)),
    "sync": (nn.SyncBatchNorm, (3, 2, 2)),
}
OPTIONS = {
    "as it is": {},
    "not affine": {"affine": False},
    "an even mean": {"momentum": None},
    "nothing kept": {"track_running_stats": False},
    "neither": {"affine": False, "track_running_stats": False, "eps": 1e-3},
}


def drawn(norm: nn.Module) -> nn.Module:
    """With weights that do something."""
    for i, parameter in enumerate(norm.parameters()):
        parameter.data = torch.linspace(-1 + i, 2, parameter.numel(), dtype=parameter.dtype)
    return norm


def outcome(norm, batches, *, train_last=True):
    """Outputs, gradients and buffers of two steps and a third in either mode."""
    found = []
    for number, x in enumerate(batches):
        norm.train(train_last or number < len(batches) - 1)
        x = x.clone().requires_grad_()
        norm.zero_grad()
        y = norm(x)
        (y * torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape)).sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in norm.parameters())])
    return found, [buffer.clone() for buffer in norm.buffers()]


def shard_of(weights, sizes, index):
    return weights.split(list(sizes))[index]


def compare(kind, options, shares, train_last=True, dtype=torch.float64, tolerance=1e-12):
    """Three batches, cut in uneven shares, on as many ranks."""
    make, shape = KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(sum(sizes), *shape, generator=generator, dtype=torch.float64).to(dtype) for sizes in shares]
    plain = drawn(make(3, **options).to(dtype))
    found, buffers = outcome(plain, batches, train_last=train_last)
    size = len(shares[0])

    def share(axes):
        norm = drawn(make(3, **options).to(dtype))
        share_statistics([norm], [axes["dp"]])
        index = axes["dp"].index
        mine = []
        for number, (x, sizes) in enumerate(zip(batches, shares, strict=True)):
            norm.train(train_last or number < len(batches) - 1)
            x_mine = shard_of(x, sizes, index).clone().requires_grad_()
            norm.zero_grad()
            y = norm(x_mine)
            factors = torch.arange(1.0, x.numel() + 1, dtype=dtype).view(x.shape)
            (y * shard_of(factors, sizes, index)).sum().backward()
            mine.append([y.detach(), x_mine.grad, *(axes["dp"].all_reduce(p.grad.clone()) for p in norm.parameters())])
        return mine, [buffer.clone() for buffer in norm.buffers()]

    by_rank = run_on_threads(Mesh(dp=size), share)
    for number, (y, dx, *gradients) in enumerate(found):
        theirs = [steps[number] for steps, _ in by_rank]
        assert_close(torch.cat([each[0] for each in theirs]), y, tolerance)
        assert_close(torch.cat([each[1] for each in theirs]), dx, tolerance)
        for each in theirs:
            for mine, gradient in zip(each[2:], gradients, strict=True):
                assert_close(mine, gradient, tolerance)
    for _, kept in by_rank:
        for mine, buffer in zip(kept, buffers, strict=True):
            assert_close(mine, buffer, tolerance)
        assert all(torch.equal(a, b) for a, b in zip(kept, by_rank[0][1], strict=True)), "not the same bits"


def assert_close(found, expected, tolerance):
    scale = max(1.0, float(expected.abs().max()))
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * scale


UNEVEN = ((3, 2, 1), (2, 0, 3), (0, 1, 4))


@pytest.mark.parametrize("train_last", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(3)  # every fourth case would end in a step that trains
def test_uneven_and_empty_shares_give_what_one_device_gives(kind, options, train_last):
    compare(kind, options, UNEVEN, train_last)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_number_of_ranks_gives_what_one_device_gives(size):
    compare("2d", {}, [[2] * size] * 3)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=4).filter(lambda sizes: sum(sizes) > 1))
def test_any_shares_give_what_one_device_gives(sizes):
    compare("2d", {}, [sizes] * 3)


def test_at_a_mean_of_a_million_no_digit_is_lost_that_one_device_keeps():
    generator = torch.Generator().manual_seed(1)
    far = torch.randn(6, 3, 2, 4, generator=generator, dtype=torch.float64) + 1e6
    factors = torch.arange(1.0, far.numel() + 1, dtype=far.dtype).view(far.shape)

    def run(norm, x, factors):
        y = norm(x)
        (y * factors).sum().backward()
        return y.detach(), norm.weight.grad, norm.running_var

    exact = run(nn.BatchNorm2d(3).double(), far - 1e6, factors)  # the difference is exact
    plain = run(nn.BatchNorm2d(3).double(), far, factors)

    def share(axes):
        norm = nn.BatchNorm2d(3).double()
        share_statistics([norm], [axes["dp"]])
        mine = (each.split([3, 2, 1])[axes["dp"].index] for each in (far, factors))
        y, dw, var = run(norm, *mine)
        return y, axes["dp"].all_reduce(dw.clone()), var

    found = run_on_threads(Mesh(dp=3), share)
    ours = (torch.cat([y for y, _, _ in found]), found[0][1], found[0][2])
    for mine, theirs, right, floor in zip(ours, plain, exact, (0.0, 0.0, 1e-11), strict=True):
        assert (mine - right).abs().max() <= (theirs - right).abs().max() + floor


def test_a_constant_channel_has_itself_as_its_mean_to_the_last_bit_and_no_variance():
    values = torch.linspace(1e5, 1e6, 50)

    def share(axes):
        norm = nn.BatchNorm1d(50, momentum=1.0)
        share_statistics([norm], [axes["dp"]])
        norm(values.expand([3, 2, 2][axes["dp"].index], 50))
        return torch.equal(norm.running_mean, values), float(norm.running_var.max())

    assert run_on_threads(Mesh(dp=3), share) == [(True, 0.0)] * 3  # a mean of means would be off by a bit


def test_single_precision_is_as_exact_as_on_one_device():
    compare("2d", {}, UNEVEN, dtype=torch.float32, tolerance=1e-5)


def test_half_precision_keeps_statistics_in_single():
    x = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = nn.BatchNorm1d(2)(x.float()).bfloat16()

    def share(axes):
        norm = nn.BatchNorm1d(2)
        share_statistics([norm], [axes["dp"]])
        y = norm(x.split(3)[axes["dp"].index])
        assert y.dtype == torch.bfloat16
        assert norm.running_var.dtype == torch.float32
        return y

    assert torch.allclose(torch.cat(run_on_threads(Mesh(dp=2), share)), expected, atol=1e-2)


# ---- several axes


def test_strategies_that_know_nothing_of_each_other_add_an_axis_each():
    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = nn.BatchNorm1d(3).double()
    expected = plain(x).detach()

    def share(axes):
        norm = nn.BatchNorm1d(3).double()
        share_statistics([norm], [axes["dp"]])
        share_statistics([norm], [axes["row"]])
        mine = x.split([4, 0, 2, 3])[2 * axes["dp"].index + axes["row"].index]
        return norm(mine).detach(), norm.running_mean, norm.running_var

    found = run_on_threads(Mesh(dp=2, row=2), share)
    assert_close(torch.cat([y for y, _, _ in found]), expected, 1e-12)
    for _, mean, var in found:
        assert torch.equal(mean, found[0][1])
        assert_close(mean, plain.running_mean, 1e-12)
        assert_close(var, plain.running_var, 1e-12)


def test_each_call_is_recorded_as_the_strategys_whose_axis_it_is():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 5)).double()

    def work(world):
        from shardwright import parallelize

        run = parallelize(model, "dp2 tp2x2/2d", world, check_every=0)
        (batch,) = run.shard([(torch.randn(9, 3).double(), torch.arange(9) % 5)])
        with world.recorder.recording() as records:
            run.step(batch)
        return {(r.source, r.axis, r.num_bytes) for r in records if r.num_bytes == 2 * (2 * 4 + 1) * 8}

    for found in launch(work, 8, ranks="threads"):
        assert {("data_parallel", "dp", 144), ("tensor_2d", "row", 144)} <= found


# ---- what is left alone, what is refused


def test_a_norm_that_shares_with_nobody_stays_torchs_own():
    def share(axes):
        norm, sync = nn.BatchNorm1d(3), nn.SyncBatchNorm(3)
        share_statistics([norm, sync], [axes["dp"]])
        return "forward" in vars(norm), "forward" in vars(sync)

    assert run_on_threads(Mesh(dp=1), share) == [(False, True)]


def test_one_value_of_each_channel_is_refused_on_every_rank():
    def share(axes):
        norm = nn.BatchNorm1d(3)
        share_statistics([norm], [axes["dp"]])
        with pytest.raises(PlanError, match="more than one value of each channel"):
            norm(torch.ones(1 if axes["dp"].index == 0 else 0, 3))
        norm(torch.ones(1, 3))  # two on all ranks
        return True

    assert run_on_threads(Mesh(dp=2), share) == [True, True]


def test_an_input_of_the_wrong_shape_is_refused_as_on_one_device():
    def share(axes):
        norm = nn.BatchNorm2d(3)
        share_statistics([norm], [axes["dp"]])
        with pytest.raises(ValueError, match="expected 4D input"):
            norm(torch.ones(2, 3))
        return True

    assert run_on_threads(Mesh(dp=2), share) == [True, True]


class Halved(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) / 2


def between_layers(norm, line="dp2"):
    return check_refused(line, nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 3)))


def test_kinds_that_may_do_anything_are_refused_where_the_batch_is_cut():
    assert "given:   Halved on dp2" in between_layers(Halved(4))
    own = nn.BatchNorm1d(4)
    own.forward = partial(torch.add, 1)
    assert "'1' computes statistics" in between_layers(own)
    assert "InstanceNorm1d" in between_layers(nn.InstanceNorm1d(4, track_running_stats=True))


def test_microbatches_refuse_a_norm_whose_batch_they_would_cut():
    assert "which 'mb' cuts" in between_layers(nn.BatchNorm1d(4), "dp2 mb2")


def test_a_norm_in_evaluation_mode_sends_nothing_and_changes_nothing():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    for _, norm in batch_norms(model):
        norm.eval()
        norm.running_mean.fill_(0.3)

    def work(world):
        from shardwright import parallelize

        run = parallelize(model, "dp2", world, check_every=0)
        (batch,) = run.shard([(torch.randn(5, 3).double(), torch.arange(5) % 3)])
        with world.recorder.recording() as records:
            run.step(batch)
        return {r.kind for r in records}, run.model[1].running_mean.tolist()

    assert launch(work, 2, ranks="threads") == [({"all_reduce"}, [0.3] * 4)] * 2
    batch = (torch.randn(5, 3), torch.arange(5) % 3)
    assert verify(model, "dp2", [batch, batch]).equal


def test_a_batch_norm_in_evaluation_takes_statistics_of_another_dtype_than_its_input():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2)).double().eval()
    batch = torch.randn(4, 2, 6, 6), torch.randn(4, 2)

    def work(world):
        run = parallelize(model, "dp2 bf16", world, loss=nn.MSELoss())
        return run.step(next(run.shard([batch])))

    wanted = nn.functional.mse_loss(model(batch[0].double()), batch[1].double())
    assert launch(work, 2, ranks="threads")[0].item() == pytest.approx(wanted.item(), rel=0.05)
