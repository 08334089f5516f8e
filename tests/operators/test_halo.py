"""Convolutions and pools of pictures with sharded rows, against one device."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import accumulate, pairwise, product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from shardwright import Mesh, launch, run_on_threads
from shardwright.comm.recorder import total_bytes
from shardwright.errors import LayoutError, RankFailedError
from shardwright.mesh import balanced
from shardwright.operators.batch_norm import shared_group_norm
from shardwright.operators.halo import halo_convolution, halo_enlarge, halo_pool, halo_transposed_convolution
from shardwright.operators.picture_rows import SlidingWindow, TransposedWindow, Upsampling, output_sizes, reading_of

TOLERANCE = 1e-12


def balanced_sizes(size: int, parts: int) -> tuple[int, ...]:
    return tuple(b - a for a, b in pairwise(balanced(size, parts)))


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def gradients(y, *tensors):
    factors = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape).sin()
    return torch.autograd.grad((y * factors).sum(), tensors)


def check(x, run_whole, run_share, sizes, dim, weights=()):
    """Outputs, the input's gradient, and the weights', summed over the ranks."""
    x = x.requires_grad_()
    weights = [weight.requires_grad_() for weight in weights]
    y = run_whole(x, *weights)
    expected = gradients(y, x, *weights)
    factors = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape).sin()

    def share(axes):
        axis = axes["tp"]
        mine = x.detach().split(list(sizes), dim)[axis.index].clone().requires_grad_()
        own = [weight.detach().clone().requires_grad_() for weight in weights]
        y_mine = run_share(mine, *own, axis)
        num_rows = axis.all_gather(torch.tensor([y_mine.shape[dim]]))
        cut = factors.split(num_rows.tolist(), dim)[axis.index]
        dx, *dws = torch.autograd.grad((y_mine * cut).sum(), (mine, *own))
        return y_mine.detach(), dx, [axis.all_reduce(dw.clone()) for dw in dws]

    found = run_on_threads(Mesh(tp=len(sizes)), share)
    joined = torch.cat([each[0] for each in found], dim)
    assert joined.shape == y.shape
    assert (joined - y).abs().max() < TOLERANCE
    assert (torch.cat([each[1] for each in found], dim) - expected[0]).abs().max() < TOLERANCE
    for _, _, dws in found:
        for mine, dw in zip(dws, expected[1:], strict=True):
            assert (mine - dw).abs().max() < TOLERANCE * max(1.0, float(dw.abs().max()))


def check_convolution(sizes, *, kernel, stride=1, padding=0, dilation=1, groups=1, dim=2):
    shape = [2, 4, 5, 5]
    shape[dim] = sum(sizes)
    weights = [drawn(6, 4 // groups, kernel, kernel), drawn(6)]
    across = [1, 1]
    across[dim - 2] = stride
    pads = [2, 2]
    pads[dim - 2] = padding
    dilations = [1, 1]
    dilations[dim - 2] = dilation
    settings = {"stride": across, "padding": pads, "dilation": dilations, "groups": groups}
    check(
        drawn(*shape),
        partial(functional.conv2d, **settings),
        lambda x, w, b, axis: halo_convolution(x, w, b, axis, sizes, dim=dim, **settings),
        sizes,
        dim,
        weights,
    )


# ---- convolutions


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"), list(product([1, 3, 5], [1, 2], [0, 1, 2], [1, 2, 3, 4]))
)
@pytest.mark.sampled(5)  # every fourth case would be on one rank
def test_a_convolution_of_cut_rows_equals_one_device(kernel, stride, padding, size):
    check_convolution(balanced_sizes(11, size), kernel=kernel, stride=stride, padding=padding)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 8), (0, 7, 0, 4), (9, 1, 1), (1, 2, 1, 3), (11, 0)])
def test_slices_thinner_than_the_halo_fetch_from_further_neighbours(sizes):
    for dilation in (1, 2):
        check_convolution(sizes, kernel=5, padding=2 * dilation, dilation=dilation)


def test_a_rank_without_an_output_still_gives_its_rows():
    check_convolution((2, 2, 2), kernel=5)  # two outputs on three ranks
    check_convolution((1, 1, 1, 1), kernel=3, stride=3)


def test_padding_wider_than_the_kernel_is_zeros_for_some_outputs():
    check_convolution((2, 1, 1), kernel=1, padding=3)
    check_convolution((2, 1, 1), kernel=3, padding=5, stride=2)
    check_convolution((1, 1, 1, 1), kernel=1, padding=5)  # the last rank's outputs read nothing of the picture


def test_columns_can_be_cut_and_groups_kept():
    check_convolution((3, 2, 4), kernel=3, padding=1, groups=2, dim=3)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 2),
)
def test_any_cut_and_any_window_equal_one_device(sizes, kernel, stride, padding, dilation):
    assume(sum(sizes) > 0)
    assume(kernel <= 5)
    assume(SlidingWindow(kernel, stride, padding, dilation).num_outputs(sum(sizes)) > 0)
    check_convolution(tuple(sizes), kernel=kernel, stride=stride, padding=padding, dilation=dilation)


@pytest.mark.parametrize(("num_dims", "dim"), [(1, 2), (3, 2), (3, 4)])
def test_lines_and_volumes_are_cut_as_pictures_are(num_dims, dim):
    shape = [2, 3, *([6] * num_dims)]
    convolve = {1: functional.conv1d, 3: functional.conv3d}[num_dims]
    check(
        drawn(*shape),
        partial(convolve, padding=1),
        lambda x, w, b, axis: halo_convolution(x, w, b, axis, (3, 1, 2), dim=dim, padding=1),
        (3, 1, 2),
        dim,
        [drawn(4, 3, *([3] * num_dims)), drawn(4)],
    )


def test_layer_after_layer_the_sizes_are_those_that_are_said():
    x = drawn(2, 3, 13, 4).requires_grad_()
    w1, w2 = drawn(4, 3, 3, 3), drawn(5, 4, 3, 3)
    expected = functional.conv2d(
        functional.max_pool2d(functional.conv2d(x, w1, padding=1).relu(), 2), w2, stride=2, padding=1
    )
    (dx,) = gradients(expected, x)
    factors = torch.arange(1.0, expected.numel() + 1, dtype=x.dtype).view(expected.shape).sin()

    def share(axes):
        axis = axes["tp"]
        sizes = balanced_sizes(13, 3)
        mine = x.detach().split(list(sizes), 2)[axis.index].clone().requires_grad_()
        y = halo_convolution(mine, w1, None, axis, sizes, padding=1).relu()
        sizes = output_sizes(sizes, SlidingWindow(3, padding=1))
        y = halo_pool(y, torch.nn.MaxPool2d(2), axis, sizes, kernel=2)
        sizes = output_sizes(sizes, SlidingWindow(2, stride=2))
        y = halo_convolution(y, w2, None, axis, sizes, stride=2, padding=1)
        sizes = output_sizes(sizes, SlidingWindow(3, stride=2, padding=1))
        assert y.shape[2] == sizes[axis.index]
        (dx_mine,) = torch.autograd.grad((y * factors.split(list(sizes), 2)[axis.index]).sum(), mine)
        return y.detach(), dx_mine

    found = run_on_threads(Mesh(tp=3), share)
    assert (torch.cat([y for y, _ in found], 2) - expected).abs().max() < TOLERANCE
    assert (torch.cat([each for _, each in found], 2) - dx).abs().max() < TOLERANCE


SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum)


@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    mode=st.sampled_from(["reflect", "replicate", "circular"]),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 3),
    padding=st.integers(0, 4),
)
def test_any_border_equals_one_device(sizes, mode, kernel, stride, padding):
    size = sum(sizes)
    assume(padding < size or (mode == "circular" and padding == size) or mode == "replicate")
    assume(SlidingWindow(kernel, stride, padding).num_outputs(size) > 0)
    weights = [drawn(4, 3, kernel, 3), drawn(4)]

    def whole(x, weight, bias):
        return functional.conv2d(functional.pad(x, (1, 1, padding, padding), mode), weight, bias, (stride, 1))

    def share(x, weight, bias, axis):
        around = {"stride": (stride, 1), "padding": (padding, 1), "padding_mode": mode}
        return halo_convolution(x, weight, bias, axis, sizes, **around)

    check(drawn(2, 3, size, 4), whole, share, tuple(sizes), 2, weights)


@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    more=st.integers(0, 2),
    groups=st.sampled_from([1, 2]),
)
def test_any_transposed_convolution_equals_one_device(sizes, kernel, stride, padding, dilation, more, groups):
    assume(more < max(stride, dilation))
    assume(TransposedWindow(kernel, stride, padding, dilation, more).num_outputs(sum(sizes)) > 0)
    given_settings = {
        "stride": (stride, 2), "padding": (padding, 1), "output_padding": (more, 1), "dilation": (dilation, 1),
        "groups": groups,
    }  # fmt: skip
    check(
        drawn(2, 4, sum(sizes), 3),
        partial(functional.conv_transpose2d, **given_settings),
        lambda x, w, b, axis: halo_transposed_convolution(x, w, b, axis, sizes, **given_settings),
        tuple(sizes),
        2,
        [drawn(4, 3, kernel, 3), drawn(3 * groups)],
    )


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, factor=st.integers(1, 4), mode=st.sampled_from(["nearest", "nearest-exact", "bilinear", "bicubic"]))
def test_any_enlargement_equals_one_device(sizes, factor, mode):
    enlarge = torch.nn.Upsample(scale_factor=(factor, 2), mode=mode)
    margin = {"bilinear": 1, "bicubic": 2}.get(mode, 0)
    check(
        drawn(2, 3, sum(sizes), 4),
        enlarge,
        lambda x, axis: halo_enlarge(x, enlarge, axis, sizes, factor=factor, margin=margin),
        tuple(sizes),
        2,
    )


@pytest.mark.parametrize("sizes", [(6,), (4, 2), (1, 0, 5), (2, 2, 2)])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.sampled(5)  # every fourth case would be on one rank
def test_groups_are_normalised_by_all_of_their_pixels(sizes, num_groups):
    x = drawn(3, 4, 6, 5) + 1000  # squares subtracted from squares would show
    check(
        x,
        lambda x, w, b: functional.group_norm(x, num_groups, w, b),
        lambda x, w, b, axis: shared_group_norm(x, num_groups, w, b, eps=1e-5, axes=[axis]),
        sizes,
        2,
        [drawn(4), drawn(4)],
    )


# ---- pools


@pytest.mark.parametrize("sizes", [(8,), (4, 4), (2, 4, 2), (3, 3, 3), (5, 0, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("pool", [torch.nn.MaxPool2d(2), torch.nn.AvgPool2d(2)])
def test_a_pool_of_cut_rows_equals_one_device(pool, sizes):
    check(
        drawn(2, 3, sum(sizes), 4), pool, lambda x, axis: halo_pool(x, pool, axis, sizes, kernel=2), sizes, dim=2
    )  # fmt: skip


def test_a_pool_whose_windows_overlap_equals_one_device():
    pool, sizes = torch.nn.AvgPool2d(3, stride=2), (4, 3, 4)
    check(
        drawn(2, 3, 11, 5), pool, lambda x, axis: halo_pool(x, pool, axis, sizes, kernel=3, stride=2), sizes, dim=2
    )  # fmt: skip


@pytest.mark.parametrize("size", [7, 8, 9, 10])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (2, 3), (2, 5)])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.sampled(5)  # every fourth case would have seven rows
def test_a_last_window_may_hang_over_the_end_but_not_begin_there(size, kernel, stride, padding):
    sizes = balanced_sizes(size, 3)
    pool, here = (torch.nn.MaxPool2d(kernel, stride, (rows, 1), ceil_mode=True) for rows in (padding, 0))
    settings = {"kernel": kernel, "stride": stride, "padding": padding, "ceil": True, "fill": -torch.inf}
    check(drawn(2, 3, size, 5), pool, lambda x, axis: halo_pool(x, here, axis, sizes, **settings), sizes, dim=2)


# ---- what is sent


def sent(sizes, run):
    """Payload bytes by kind, of a forward and its backward, on each rank."""

    def work(world):
        axis = world.axes(Mesh(tp=len(sizes)))["tp"]
        mine = drawn(2, 3, sizes[axis.index], 4).requires_grad_()
        with world.recorder.recording() as records:
            y = run(mine, axis)
        forward = total_bytes(records)
        with world.recorder.recording() as records:
            y.sum().backward()
        return forward, total_bytes(records)

    return launch(work, len(sizes), ranks="threads")


def test_each_rank_sends_the_rows_that_others_read_and_gets_their_gradients_back():
    row_bytes = 2 * 3 * 4 * 8
    weight = drawn(4, 3, 5, 3)
    found = sent((4, 4, 4), lambda x, axis: halo_convolution(x, weight, None, axis, (4, 4, 4), padding=2))
    edge = Counter({("core", "tp", "send"): 2 * row_bytes, ("core", "tp", "receive"): 2 * row_bytes})
    assert found == [(edge, edge), (edge + edge, edge + edge), (edge, edge)]


def test_a_window_of_one_row_and_pools_along_the_cuts_send_nothing():
    weight = drawn(4, 3, 1, 3)
    nothing = [(Counter(), Counter())] * 2
    assert sent((3, 3), lambda x, axis: halo_convolution(x, weight, None, axis, (3, 3))) == nothing
    assert sent((4, 4), lambda x, axis: halo_pool(x, torch.nn.MaxPool2d(2), axis, (4, 4), kernel=2)) == nothing


@given(
    sizes=SIZES,
    resize=st.one_of(
        st.builds(SlidingWindow, st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), ceil=st.booleans()),
        st.builds(TransposedWindow, st.integers(1, 4), st.integers(1, 3), st.integers(0, 1)),
        st.builds(Upsampling, st.integers(1, 4), st.integers(0, 2)),
    ),
)
def test_what_one_member_gives_another_reads(sizes, resize):
    assume(resize.num_outputs(sum(sizes)) > 0)
    reading = reading_of(tuple(sizes), resize)
    for member in range(len(sizes)):
        rows = [row for a, b in reading.needed[member] for row in range(a, b)]
        assert [row for _, (a, b) in reading.pieces(member) for row in range(a, b)] == rows
        assert sum(reading.num_given(holder, member) for holder in range(len(sizes))) == len(rows)
        for holder, (a, b) in reading.pieces(member):
            assert reading.held[holder][0] <= a < b <= reading.held[holder][1]


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(sum),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    padding=st.integers(0, 3),
)
def test_outputs_are_shared_out_once_and_read_rows_in_order(sizes, kernel, stride, padding):
    window = SlidingWindow(kernel, stride, padding)
    assume(window.num_outputs(sum(sizes)) > 0)
    outputs = output_sizes(sizes, window)
    assert sum(outputs) == window.num_outputs(sum(sizes))
    assert max(outputs) - min(outputs) <= 1
    ends = list(accumulate(outputs, initial=0))
    for a, b in pairwise(ends):
        first, stop = window.span((a, b))
        assert stop - first == ((b - a - 1) * stride + window.reach if b > a else 0)


# ---- what is refused


def test_a_window_larger_than_the_picture_is_refused_on_every_rank():
    def share(axes):
        with pytest.raises(LayoutError, match="larger than the picture"):
            halo_convolution(torch.ones(1, 1, 2, 9), torch.ones(1, 1, 5, 1), None, axes["tp"], (2, 2))
        return True

    assert run_on_threads(Mesh(tp=2), share) == [True, True]


def test_sizes_that_are_not_those_of_the_rows_are_refused():
    def share(axes):
        halo_convolution(torch.ones(1, 1, 2, 9), torch.ones(1, 1, 1, 1), None, axes["tp"], (2, 3))

    with pytest.raises((LayoutError, RankFailedError), match="differ from the given sizes"):
        run_on_threads(Mesh(tp=2), share)
