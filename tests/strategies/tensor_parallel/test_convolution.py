"""Convolutional models under layouts: equal to one device, laid out and priced as the plan says."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from contract.cases import (
    CONVNET,
    Case,
    Pictures,
    check_divides,
    check_equal,
    check_names,
    check_refused,
    check_shapes,
    check_traffic,
)
from shardwright import Layout, launch, load, parallelize, save
from shardwright.analysis.traced.convolution_chains import find_convolution_chains
from shardwright.checkpoint.manifest import read as read_manifest
from shardwright.errors import LayoutError
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job


class Block(nn.Module):
    """Two convolutions with norms, and a residual around them."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, hidden, 3, padding=1), nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, channels, 3, padding="same", bias=False)
        self.norm2, self.act = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.act(self.norm1(self.conv1(x)))
        return self.act(x + self.norm2(self.conv2(y)))


class ConvNormAct(nn.Sequential):
    """A convolution in a class of its own, as torchvision has it."""

    def __init__(self, inputs: int, outputs: int, kernel: int, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class InvertedResidual(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            ConvNormAct(channels, hidden, 1),
            ConvNormAct(hidden, hidden, 3, groups=hidden),
            nn.Conv2d(hidden, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return x + self.conv(x)


class Gated(nn.Module):
    """Two first convolutions, multiplied; pooled by functions; the second has channels of its own to drop."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 3)
        self.drop, self.last = nn.Dropout(0.3), nn.Conv2d(6, 4, 2)

    def forward(self, x):
        y = self.value(x) * torch.sigmoid(self.gate(x))
        return self.last(self.drop(functional.avg_pool2d(functional.max_pool2d(y, 2, 1), 2, 1)))


def head(channels: int) -> list[nn.Module]:
    """The mean of each channel, then classes."""
    return [
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 8), nn.ReLU(), nn.Linear(8, 5)
    ]  # fmt: skip


def resnet():
    return nn.Sequential(nn.Conv2d(4, 5, 3, stride=2), nn.BatchNorm2d(5), Block(5, 7), Block(5, 3), *head(5))


def mobilenet():
    return nn.Sequential(ConvNormAct(4, 6, 3), InvertedResidual(6, 8), InvertedResidual(6, 9), *head(6))


def separable():
    """Depthwise then pointwise, the first as in MobileNet's first version."""
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, groups=4, padding_mode="circular"), nn.SyncBatchNorm(8), nn.GELU(),
        nn.Conv2d(8, 5, 1), nn.BatchNorm2d(5, affine=False), *head(5),
    )  # fmt: skip


def grouped():
    """Groups before, inside and at the end of a chain: what comes out is joined."""
    return nn.Sequential(
        nn.Conv2d(4, 12, 3, padding=1, groups=4), nn.ReLU(), nn.Conv2d(12, 8, 3, groups=4, bias=False), nn.Tanh(),
        nn.Conv2d(8, 4, 1, groups=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True), *head(4),
    )  # fmt: skip


def joined():
    """A chain that ends in groups: its output is gathered and then changed in place."""
    return nn.Sequential(
        nn.Conv2d(4, 9, 3), nn.BatchNorm2d(9), nn.Conv2d(9, 6, 3, groups=3), nn.ReLU(inplace=True), *head(6)
    )


def lines():
    return nn.Sequential(
        nn.BatchNorm1d(4), nn.Conv1d(4, 6, 3, dilation=2, bias=False), nn.BatchNorm1d(6, momentum=None),
        nn.MaxPool1d(2), nn.Dropout(0.2), nn.Conv1d(6, 5, 2, stride=2), nn.Flatten(),
        nn.BatchNorm1d(15, track_running_stats=False), nn.Linear(15, 5),
    )  # fmt: skip


def volumes():
    return nn.Sequential(
        nn.Conv3d(2, 5, 2), nn.BatchNorm3d(5), nn.AvgPool3d(2), nn.SiLU(), nn.Conv3d(5, 2, 1), nn.AdaptiveAvgPool3d(1),
        nn.Flatten(), nn.Linear(2, 5),
    )  # fmt: skip


def flattened():
    """The last convolution is followed by a layer whose in-features are its channels' pixels."""
    return nn.Sequential(
        nn.Conv2d(4, 7, 3), nn.BatchNorm2d(7), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25),
        nn.Linear(7 * 4, 6), nn.LayerNorm(6), nn.Linear(6, 5),
    )  # fmt: skip


def normed_by_groups():
    return nn.Sequential(
        nn.Conv2d(4, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.Conv2d(12, 8, 3),
        nn.Conv2d(8, 6, 1), nn.GroupNorm(6, 6, affine=False), nn.SiLU(), nn.Conv2d(6, 4, 1), *head(4),
    )  # fmt: skip


def gated():
    return nn.Sequential(Gated(), *head(4))


RESNET = Pictures("resnet", make=resnet)
JOINED = Pictures("joined groups", make=joined)
GROUP_NORMS = Pictures("norms of groups", make=normed_by_groups)
FLATTENED = Pictures("flattened", make=flattened)
CASES = (
    RESNET,
    Pictures("mobilenet", make=mobilenet),
    Pictures("separable", make=separable),
    Pictures("grouped", make=grouped),
    JOINED,
    Pictures("conv1d", make=lines, shape=(4, 17)),
    Pictures("conv3d", make=volumes, shape=(2, 4, 5, 6)),
    FLATTENED,
    Pictures("gated", make=gated),
    GROUP_NORMS,
)
LINES = ("dp3", "tp2", "tp3", "dp2 tp2", "dp2 tp2x2/2d")


def check(line: str, case: Case) -> None:
    check_equal(line, case)
    check_shapes(line, case)
    check_traffic(line, case)
    check_names(line, case)


def lays_out(line: str, case: Case) -> bool:
    try:
        make_plan(Job(case.model, case.loss), Layout.parse(line))
    except LayoutError:
        return False
    return True


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(100)
def test_a_convolutional_model_equals_one_device_and_sends_what_it_says(case, line):
    if lays_out(line, case):
        check(line, case)
    else:
        assert (case.name, line) in {("grouped", "tp3"), ("gated", "dp8")}
        check_refused(line, case.model)


@pytest.mark.parametrize("line", ["tp2", "tp3", "dp2 tp2", "tp2x2/2d", "tp3x1/2d"])
def test_the_convnet_equals_one_device_and_sends_what_it_says(line):
    check(line, CONVNET)
    check_divides(line, CONVNET)


@pytest.mark.parametrize("line", ["dp8", "tp2/sp", "dp2 tp2/sp", "tp2x2x1/3d", "dp2 tp2x1x2/2.5d"])
@pytest.mark.sampled(100)
def test_norms_share_statistics_over_every_axis_that_cuts_samples(line):
    check(line, RESNET)  # eight ranks, seven samples: one rank has none


# ---- what is cut


def placed(case: Case, line: str):
    return make_plan(Job(case.model, case.loss), Layout.parse(line))[0]


def test_the_first_layer_of_a_chain_is_cut_by_out_channels_and_the_last_by_in_channels():
    shapes = {name: layout.local_shape({"tp": 0}) for name, layout in placed(RESNET, "tp2").compute.items()}
    assert shapes["2.conv1.weight"] == (4, 5, 3, 3)
    assert shapes["2.conv1.bias"] == (4,)
    assert shapes["2.norm1.weight"] == (4,)
    assert shapes["2.conv2.weight"] == (5, 4, 3, 3)
    assert shapes["0.weight"] == (5, 4, 3, 3)  # it has no partner


def test_a_depthwise_layer_inside_a_chain_sends_nothing():
    plan = placed(CASES[1], "tp2")
    assert plan.compute["1.conv.1.0.weight"].local_shape({"tp": 0}) == (4, 1, 3, 3)
    note = plan.notes["1.conv.1.0"]
    assert (note.enters, note.leaves) == (False, False)


def test_groups_are_dealt_whole():
    plan = placed(JOINED, "tp2")
    assert plan.compute["0.weight"].local_shape({"tp": 0}) == (6, 4, 3, 3)  # two of three groups, three channels each
    assert plan.compute["2.weight"].local_shape({"tp": 0}) == (4, 3, 3, 3)


def test_a_group_norm_is_dealt_in_whole_groups_and_says_why_where_it_cannot_be():
    plan = placed(GROUP_NORMS, "tp2")
    assert [plan.compute["1.weight"].local_shape({"tp": i}) for i in range(2)] == [(8,), (4,)]
    assert plan.compute["0.weight"].local_shape({"tp": 0}) == (8, 4, 3, 3)
    assert plan.roles["1"].name == "channels"
    plan = placed(GROUP_NORMS, "tp4")
    assert not plan.compute["0.weight"].axes
    assert plan.compute["4.weight"].axes  # six groups are enough
    assert plan.roles["1"].why == "3 groups cannot be dealt over tp=4, nor the channels around it"


def test_a_layer_after_a_flatten_is_cut_by_the_pixels_of_the_channels():
    plan = placed(FLATTENED, "tp3")
    assert [plan.compute["6.weight"].local_shape({"tp": i}) for i in range(3)] == [(6, 12), (6, 8), (6, 8)]


def test_a_chain_sends_one_sum_forward_and_one_backward():
    inner = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    model = nn.Sequential(nn.BatchNorm2d(4), inner, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).double()

    def work(world):
        run = parallelize(model, "tp2", world)
        (batch,) = run.shard(RESNET.batches[:1])
        with world.recorder.recording() as records:
            run.step(batch)
        return [(record.kind, record.num_bytes) for record in records if record.num_bytes > 1000]

    x_bytes, y_bytes = 7 * 4 * 6 * 7 * 8, 7 * 4 * 2 * 3 * 8
    for found in launch(work, 2, ranks="threads"):
        assert found == [("all_reduce", y_bytes), ("all_reduce", x_bytes)]


@pytest.mark.parametrize(
    "between",
    [
        lambda c: nn.GroupNorm(1, c),
        lambda c: nn.Softmax(dim=1),
        lambda c: nn.PReLU(c),
        lambda c: nn.Flatten(2),
        lambda c: nn.utils.parametrizations.weight_norm(nn.Conv2d(c, c, 1)),
        lambda c: nn.utils.spectral_norm(nn.Conv2d(c, c, 1)),
        lambda c: nn.ConvTranspose2d(c, c, 1),
    ],
)
def test_layers_that_mix_channels_end_a_chain(between):
    model = nn.Sequential(nn.Conv2d(4, 8, 3), between(8), nn.Conv2d(8, 4, 1))
    assert find_convolution_chains(model) == ()


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.two(self.two(self.one(x)))


class SeenFromOutside(Twice):
    def forward(self, x):
        y = self.one(x)
        return self.two(y) + y


class FirstOfAFirst(Twice):
    """One of the layers before a product takes what the other gives, and takes it whole."""

    def __init__(self):
        super().__init__()
        self.three = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.one(x)
        return self.two(y * self.three(y))


class OneGate(Twice):
    """One channel weighs all others: each rank would need it."""

    def __init__(self):
        super().__init__()
        self.three = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        return self.two(self.one(x) * self.three(x))


class WeightRead(Twice):
    def forward(self, x):
        return self.two(self.one(x)) * self.one.weight.mean()


class MemoryFormat(Twice):
    def forward(self, x):
        return self.two(self.one(x.to(self.one.weight.dtype)))


@pytest.mark.parametrize("kind", [Twice, SeenFromOutside, FirstOfAFirst, OneGate, WeightRead, MemoryFormat])
def test_a_chain_that_other_code_reads_stays_whole(kind):
    assert find_convolution_chains(nn.Sequential(kind(), nn.ReLU())) == ()


class Branching(nn.Module):
    """Its own code cannot be traced, and that of its block can."""

    def __init__(self):
        super().__init__()
        self.block = Block(4, 8)

    def forward(self, x):
        return self.block(x) if x.sum() < 1e9 else x


def test_a_shared_layer_stays_whole():
    conv = nn.Conv2d(4, 4, 1)
    assert find_convolution_chains(nn.Sequential(conv, nn.ReLU(), conv, nn.Conv2d(4, 4, 1))) == ()
    model = Branching()
    model.again = model.block.conv1  # other code may call it
    assert find_convolution_chains(model) == ()


def test_chains_are_found_inside_a_model_that_cannot_be_traced():
    (chain,) = find_convolution_chains(Branching())
    assert (chain.firsts, chain.between, chain.last) == (("block.conv1",), ("block.norm1",), "block.conv2")


def test_a_model_of_convolutions_with_too_few_channels_is_refused_on_every_rank():
    case = Pictures("narrow", make=lambda: nn.Sequential(nn.Conv2d(4, 2, 3), nn.ReLU(), nn.Conv2d(2, 4, 3)))
    assert "Conv2d '0' (2, 4, 3, 3)" in check_refused("tp3", case.model)


# ---- buffers


def buffers_after_two_steps(line: str, case: Case, folder=None):
    def work(world):
        run = parallelize(case.model, line, world)
        for batch in run.shard(case.batches):
            run.step(batch)
        if folder is not None:
            save(folder, run)
        whole = {}
        for name, buffer in run.model.named_buffers():
            layout = run.plan.buffers.get(name)
            whole[name] = (buffer.clone(), layout.pieces(run.coord) if layout is not None else None)
        return whole

    return launch(work, Layout.parse(line), ranks="threads")


def on_one_device(case: Case):
    ((found),) = [buffers_after_two_steps("dp1", case)[0]]
    return {name: buffer for name, (buffer, _) in found.items()}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("case", [RESNET, CASES[2], CASES[5]], ids=str)
@pytest.mark.sampled(100)
def test_running_statistics_are_those_of_one_device_on_every_rank(case, line):
    expected = on_one_device(case)
    for rank in buffers_after_two_steps(line, case):
        for name, (buffer, pieces) in rank.items():
            whole = expected[name]
            part = whole if pieces is None else torch.cat([whole[piece.whole.slices] for piece in pieces])
            assert torch.allclose(buffer, part, rtol=1e-12, atol=1e-12), name


def test_ranks_that_hold_the_same_statistics_hold_the_same_bits():
    dp0_tp0, dp0_tp1, dp1_tp0, dp1_tp1 = buffers_after_two_steps("dp2 tp2", RESNET)
    for one, other in [(dp0_tp0, dp1_tp0), (dp0_tp1, dp1_tp1)]:
        assert all(torch.equal(buffer, other[name][0]) for name, (buffer, _) in one.items())


@pytest.mark.parametrize("line", ["dp2", "tp3", "dp2 tp2", "tp2x2/2d"])
def test_cut_statistics_are_saved_whole_and_loaded_under_any_layout(tmp_path, line):
    saved = buffers_after_two_steps("dp2 tp2", RESNET, tmp_path)
    assert any(pieces is not None for _, pieces in saved[0].values())
    expected = on_one_device(RESNET)
    manifest = read_manifest(next(tmp_path.glob("step-*")))
    stored = manifest.tensors["3.norm1.running_mean"][2]
    assert sorted((each.box.start, each.box.stop) for each in stored) == [((0,), (2,)), ((2,), (3,))]  # each once

    def work(world):
        run = parallelize(RESNET.model, line, world)
        load(tmp_path, run)
        for name, buffer in run.model.named_buffers():
            whole, layout = expected[name], run.plan.buffers.get(name)
            pieces = layout.pieces(run.coord) if layout is not None else None
            part = whole if pieces is None else torch.cat([whole[piece.whole.slices] for piece in pieces])
            assert torch.allclose(buffer, part, rtol=1e-12, atol=1e-12), name
        return True

    assert all(launch(work, Layout.parse(line), ranks="threads"))
