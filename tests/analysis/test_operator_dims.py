"""What operators do with the dims of their tensors, in letters."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from shardwright.analysis.dims.dim_letters import Role
from shardwright.analysis.dims.operator_dims import relation_of
from shardwright.analysis.recorded.recording import Recorded


@pytest.mark.parametrize(
    ("x", "w"), [((8, 4), (2, 4, 6)), ((2, 8, 4), (4, 6)), ((8, 4), (4, 6)), ((2, 8, 4), (2, 4, 8))]
)
def test_each_letter_of_a_product_of_groups_is_a_dim_of_a_tensor(x, w):
    offsets = torch.empty(2, dtype=torch.int32, device="meta") if len(x) + len(w) < 6 else None
    with Recorded() as recorded:
        torch._grouped_mm(torch.empty(x, device="meta"), torch.empty(w, device="meta"), offs=offsets)
    relation = relation_of(recorded.recording.calls[-1])
    used = {letter for dims in (*relation.operands, *relation.results) for dim in dims for letter in dim}
    assert used == set(range(len(relation.letters.sizes)))
    assert all(relation.letters.sizes)
    assert [relation.letters.size(dim) for dim in relation.operands[0]] == list(x)
    assert [relation.letters.size(dim) for dim in relation.operands[1]] == list(w)


@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
def test_products_in_place_have_the_addend_of_those_that_are_not(name):
    sizes = [(2, *size)[name == "addmm" :] for size in ((4, 6), (4, 3), (3, 6))]
    found = []
    for call in (getattr(torch, name), getattr(torch.Tensor, f"{name}_")):
        with Recorded() as recorded:
            call(*(torch.empty(size, device="meta") for size in sizes))
        found.append(relation_of(recorded.recording.calls[-1]))
    assert [each.addend for each in found] == [0, 0]
    assert found[0].operands == found[1].operands


def pixels(*shape):
    return torch.randn(shape, dtype=torch.float64)


KEEPING = {
    "unfold": (lambda x: functional.unfold(x, (2, 3), padding=1), pixels(3, 4, 5, 6)),
    "unfold of one": (lambda x: functional.unfold(x, 2, stride=2), pixels(4, 6, 6)),
    "fold": (lambda x: functional.fold(x, (4, 5), (2, 3)), pixels(3, 4 * 6, 9)),
    "shuffle": (lambda x: functional.pixel_shuffle(x, 2), pixels(3, 4 * 4, 2, 3)),
    "unshuffle": (lambda x: functional.pixel_unshuffle(x, 2), pixels(2, 3, 4, 6)),
    "windows": (lambda x: x.unfold(1, 3, 2), pixels(3, 9, 2)),
    "grid": (lambda x: functional.grid_sample(x, GRID, align_corners=False), pixels(1, 4, 5, 6)),
    "pad": (lambda x: functional.pad(x, (1, 2), mode="reflect"), pixels(3, 4, 5)),
    "pad of one": (lambda x: functional.pad(x, (1, 2), mode="reflect"), pixels(4, 5)),
    "pad of one picture": (lambda x: functional.pad(x, (1, 2, 0, 1), mode="replicate"), pixels(4, 5, 6)),
    "pool of one picture": (lambda x: functional.max_pool2d(x, 2), pixels(4, 6, 6)),
    "upsample": (lambda x: functional.interpolate(x, scale_factor=2, mode="linear"), pixels(3, 4, 5)),
    "upsample volumes": (lambda x: functional.interpolate(x, scale_factor=2, mode="trilinear"), pixels(2, 3, 2, 2, 2)),
    "upsample smoothly": (
        lambda x: functional.interpolate(x, size=3, mode="bicubic", antialias=True), pixels(3, 2, 6, 6),
    ),
}  # fmt: skip
GRID = pixels(1, 3, 2, 2).tanh()


@pytest.mark.parametrize("name", KEEPING)
def test_of_a_letter_that_an_operator_keeps_some_indices_give_the_same_results_alone(name):
    function, x = KEEPING[name]
    with Recorded() as recorded:
        function(x.to("meta"))
    relation = relation_of(recorded.recording.calls[-1])
    letters, (taken, *_), (made, *_) = relation.letters, relation.operands, relation.results
    y = function(x)
    assert [letters.size(dim) for dim in taken] == list(x.shape)
    assert [letters.size(dim) for dim in made] == list(y.shape)
    kept = [letter for dim in taken for letter in dim if letters.roles[letter] is Role.SAME]
    assert kept, "some dims are kept"

    def some(tensor, dims, letter):
        order = [each for dim in dims for each in dim]
        assert order.count(letter) == 1
        part = tensor.reshape([letters.sizes[each] for each in order]).narrow(order.index(letter), 0, 1)
        sizes = {**dict(enumerate(letters.sizes)), letter: 1}
        return part.reshape([math.prod(sizes[each] for each in dim) for dim in dims])

    for letter in kept:
        torch.testing.assert_close(function(some(x, taken, letter)), some(y, made, letter))
