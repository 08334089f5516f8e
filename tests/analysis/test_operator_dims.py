"""What operators do with the dims of their tensors, in letters."""

from __future__ import annotations

import pytest
import torch

from shardwright.analysis.operator_dims import relation_of
from shardwright.analysis.recording import Recorded


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
