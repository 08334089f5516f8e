"""Calls on shards that go by sizes, numbers, bytes or memory of the whole give what they give on it, or are refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import verify
from shardwright.comm.launch import run_on_threads
from shardwright.errors import PlanError, RankFailedError
from shardwright.mesh import Mesh
from shardwright.models import MeanSquaredError
from shardwright.sharding.tensor_shard import shard_of, tag, tagged
from shardwright.strategies.tensor_parallel.shards_mode import ShardsMode

WIDTH = 8


def halves(size):
    return bytes([0] * (size // 2) + [1] * (size - size // 2))


def given(shapes):
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def mine(whole, part, rank):
    for dim in range(whole.dim()):
        if part.cuts[dim] is not None:
            whole = whole.index_select(dim, torch.tensor(part.held(dim, rank)))
    return whole


def weighted(result):
    return (result * torch.arange(1, result.numel() + 1, dtype=result.dtype).view(result.shape)).sum()


def on_shards(axes, function, shapes, dims):
    """The whole result, the shape that the code sees of it, and this rank's gradients; tensor i is cut in dims[i]."""
    axis, leaves = axes["tp"], []
    for whole, cut in zip(given(shapes), dims, strict=True):
        cuts = tuple(halves(size) if dim == cut else None for dim, size in enumerate(whole.shape))
        part = shard_of(whole.shape, cuts)
        leaf = (whole if part is None else mine(whole, part, axis.index)).clone().requires_grad_()
        tag(leaf, part)
        leaves.append((leaf, part))
    mode = ShardsMode(axis)
    with mode:
        result = function(*(leaf for leaf, _ in leaves))
        seen = tuple(result.shape)
    local, whole, held = tuple(result.shape), mode.whole(result), tagged(result)
    assert local == (seen if held is None else held.local_shape(axis.index))
    weighted(whole).backward()
    return whole.detach(), seen, [(leaf.grad, part) for leaf, part in leaves]


def check_on_shards(function, shapes, dims):
    leaves = [whole.requires_grad_() for whole in given(shapes)]
    expected = function(*leaves)
    weighted(expected).backward()
    work = partial(on_shards, function=function, shapes=shapes, dims=dims)
    for rank, (found, seen, gradients) in enumerate(run_on_threads(Mesh(tp=2), work)):
        assert seen == tuple(expected.shape)
        torch.testing.assert_close(found, expected.detach())
        for leaf, (gradient, part) in zip(leaves, gradients, strict=True):
            torch.testing.assert_close(gradient, leaf.grad if part is None else mine(leaf.grad, part, rank))


SQUEEZES = {
    "every dim": (lambda x: x.squeeze() * 2, (2, 4), 0),
    "the first dim": (lambda x: x.squeeze(0) * 2, (2, 4), 0),
    "the last dim": (lambda x: x.squeeze(-1) * 2, (4, 2), 1),
    "two dims": (lambda x: x.squeeze((0, -1)) * 2, (1, 4, 2), 2),
    "the last dim, unevenly": (lambda x: x.squeeze(-1) * 2, (4, 3), 1),
    "every dim, beside one of one element": (lambda x: x.squeeze().softmax(1), (4, 2, 5, 1), 1),
}


@pytest.mark.parametrize("name", SQUEEZES)
def test_squeeze_keeps_a_dim_of_which_only_a_rank_has_one_element(name):
    function, shape, dim = SQUEEZES[name]
    check_on_shards(function, [shape], [dim])


def slices_that_move(x):
    start, parts = torch.tensor(1), []
    for _ in range(3):
        parts.append(x[:, start:] * 2)
        start += 1
    return torch.cat(parts, 1)


def slices_written(x):
    out, start, stop = x * 1, torch.tensor(0), torch.tensor(1)
    for number in range(3):
        out[:, start:stop] = x[:, -1:] * (number + 2)
        start += 1
        stop += 1
    return out


@pytest.mark.parametrize(
    ("function", "dim"), [(slices_that_move, dim) for dim in (0, 1, 2)] + [(slices_written, dim) for dim in (0, 2)]
)
def test_a_slice_with_a_bound_that_is_a_tensor_is_read_anew(function, dim):
    check_on_shards(function, [(4, 6, 8)], [dim])


CALLS = {
    "bytes as integers": (lambda x: x * (x.detach().view(torch.int64).to(x.dtype) / 2.0**62), [(4, 8)], [1]),
    "bytes as smaller integers": (
        lambda x: x * (x.detach().view(torch.int32)[:, ::2].to(x.dtype) / 2.0**30), [(4, 8)], [1],
    ),
    "bytes as smaller integers, other rows": (
        lambda x: x * (x.detach().view(torch.int32)[:, ::2].to(x.dtype) / 2.0**30), [(4, 8)], [0],
    ),
    "a tensor and a list of indices": (lambda x: x[torch.tensor([2, 0, 1]), [0, 1, 2]] * 2, [(4, 8)], [1]),
    "a tensor and a list of indices, other rows": (lambda x: x[torch.tensor([2, 0, 1]), [0, 1, 2]] * 2, [(4, 8)], [0]),
    "a list of indices": (lambda x: x[:, [2, 0]] * 2, [(4, 8)], [1]),
    "two lists of indices": (lambda x: x[[2, 0], [1, 3]] * 2, [(4, 8)], [1]),
    "a quantile": (lambda x: torch.quantile(x, 0.3, dim=-1), [(4, 8)], [1]),
    "a quantile of each shard's own": (lambda x: torch.quantile(x, 0.3, dim=-1), [(4, 8)], [0]),
    "a variance by names": (lambda x: torch.var(input=x, dim=-1), [(4, 8)], [1]),
    "a list of every index": (lambda x: x[:, list(range(8))] * 2, [(4, 8)], [1]),
    "a list of every index of two": (lambda x: x[:, [0, 1]] * 2, [(4, 2)], [1]),
    "a list of every index of rows": (lambda x: x[list(range(4))] * 2, [(4, 8)], [0]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_parts_gives_what_it_gives_on_the_whole(name):
    check_on_shards(*CALLS[name])


@pytest.mark.parametrize("dims", [(None, 1, 1), (None, 1, None), (0, 0, 0), (2, None, None), (None, None, 3)])
def test_one_query_head_attends_to_several_key_heads(dims):
    check_on_shards(functional.scaled_dot_product_attention, [(2, 1, 3, 4), (2, 4, 5, 4), (2, 4, 5, 4)], dims)


def diagonal_written(x, w):
    copy = x + 0
    copy.diagonal().add_(w)
    return copy


def steps_written(x, w):
    copy = x + 0
    copy[:, ::3].add_(w * 1)
    return copy


@pytest.mark.parametrize(("function", "size"), [(diagonal_written, 8), (steps_written, 3)])
def test_a_write_of_a_shard_to_a_view_of_a_gathered_copy_is_refused(function, size):
    with pytest.raises((PlanError, RankFailedError), match="writes to a tensor of which each rank holds a shard"):
        check_on_shards(function, [(8, 8), (size,)], [1, 0])


STRIDED = {
    "transposed": lambda x: x.t().as_strided((8, 4), x.t().stride()),
    "a part": lambda x: x[1:, 2:].as_strided((2, 3), x.stride(), x[1:, 2:].storage_offset()),
    "by torch's function": lambda x: torch.as_strided(x.t(), (8, 4), x.t().stride()),
    "by names": lambda x: torch.as_strided(input=x.t(), size=(8, 4), stride=x.t().stride()),
}


@pytest.mark.parametrize("name", STRIDED)
def test_as_strided_of_a_shard_that_is_not_contiguous_is_refused(name):
    with pytest.raises((PlanError, RankFailedError), match="'as_strided' reads the memory of a tensor of which"):
        check_on_shards(STRIDED[name], [(4, 8)], [1])


def test_as_strided_of_a_contiguous_shard_gives_what_it_gives_on_the_whole():
    check_on_shards(lambda x: x.as_strided((3, 2, 8), (8, 8, 1)) * 2, [(4, 8)], [1])


class Up(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return self.down(self.inside(torch.tanh(self.up(x))))


class SqueezeGroups(nn.Module):
    """Two groups of channels, each with its softmax; the last dim of one element is squeezed."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv2d(WIDTH, 16, 1), nn.Conv1d(16, WIDTH, 1)

    def forward(self, x):
        hidden = self.up(x.mT[..., None])
        groups = hidden.view(len(x), 2, 8, x.shape[1], 1).squeeze()
        return self.down(groups.softmax(2).flatten(1, 2)).mT


class TwoUnits(Up):
    def __init__(self):
        super().__init__(2)

    def inside(self, hidden):
        return hidden.squeeze(-1)


class Write(Up):
    """Writes token by token at a place that tensors keep."""

    def inside(self, hidden):
        out, start, stop = torch.zeros_like(hidden), torch.tensor(0), torch.tensor(1)
        for number in range(hidden.shape[1]):
            out[:, start:stop] = hidden[:, :1] * hidden[:, -1:] + hidden.mean(1, keepdim=True) * (1 + number)
            start += 1
            stop += 1
        return out


class WriteBuffer(Up):
    """Writes from a place that a buffer keeps."""

    def __init__(self):
        super().__init__()
        self.register_buffer("place", torch.tensor(0))

    def inside(self, hidden):
        out = hidden * 1
        self.place.zero_()
        for _ in range(3):
            out[:, self.place :] *= 2
            self.place += 1
        return out


class BitsNumber(Up):
    """Reads the bytes of each activation as a number."""

    def inside(self, hidden):
        double = hidden.dtype == torch.float64
        bits = hidden.detach().view(torch.int64 if double else torch.int32)
        return hidden * (bits.to(hidden.dtype) / 2.0 ** (62 if double else 30))


class VarianceByNames(Up):
    def inside(self, hidden):
        return hidden * torch.var(input=hidden, dim=-1, keepdim=True)


class OneQueryHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.out = nn.Linear(16, WIDTH)

    def forward(self, x):
        keys, values = (layer(x).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.k, self.v))
        attended = functional.scaled_dot_product_attention(self.q(x)[:, None], keys, values)
        return self.out(attended.transpose(1, 2).flatten(2))


MODELS = (SqueezeGroups, TwoUnits, Write, WriteBuffer, BitsNumber, VarianceByNames, OneQueryHead)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_with_such_calls_trains_on_parts_as_on_one_device(kind):
    torch.manual_seed(0)
    batches = [(torch.randn(4, 6, WIDTH), torch.randn(4, 6, WIDTH)) for _ in range(2)]
    verdict = verify(kind(), "tp2", batches, loss=MeanSquaredError(), dtype=torch.float64)
    assert verdict.equal, str(verdict)
