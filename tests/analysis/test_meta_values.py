"""Code that reads values runs on the meta device: what it is told, and what only a real run can tell."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.analysis.on_meta.meta_device import on_meta
from shardwright.analysis.on_meta.meta_values import MetaValues
from shardwright.analysis.on_meta.operator_results import run_on_meta
from shardwright.analysis.recorded.record_forward import record_forward
from shardwright.analysis.recorded.recording import Recorded


class ChecksItsInputs(nn.Module):
    """A table whose forward asks something about the ids that it is given."""

    def __init__(self, check):
        super().__init__()
        self.table, self.check = nn.Embedding(8, 4), check

    def forward(self, ids):
        self.check(ids)
        return self.table(ids)


def warns(ids):
    if 0 in ids[:, [-1, 0]]:
        raise AssertionError("an answer of yes would say that these are padded")


def asserts(ids):
    assert (ids < 8).all()


@pytest.mark.parametrize("check", [warns, asserts])
def test_a_check_of_the_inputs_does_not_hinder_recording(check):
    recording = record_forward(ChecksItsInputs(check).to("meta"), torch.zeros(2, 3, dtype=torch.int64, device="meta"))
    assert [use.shape for use in recording.outputs] == [(2, 3, 4)]


class Seen(TorchDispatchMode):
    """Notes the operators that run and draw random numbers."""

    def __init__(self):
        super().__init__()
        self.random = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.random += [function] * (torch.Tag.nondeterministic_seeded in function.tags)
        return function(*args, **(kwargs or {}))


DRAWS = [
    lambda: torch.rand([]), lambda: torch.empty(3).uniform_(), lambda: torch.binomial(torch.ones(3), torch.ones(3)),
    lambda: nn.functional.rrelu_(torch.full((3,), -1.0), training=True),
]  # fmt: skip


@pytest.mark.parametrize("draw", DRAWS)
def test_a_recording_draws_no_random_numbers(draw):
    with Seen() as seen, MetaValues():
        draw()
    assert not seen.random


@pytest.mark.parametrize("draw", DRAWS)
def test_numbers_drawn_on_the_cpu_are_the_same_in_every_recording(draw):
    before = torch.get_rng_state()
    with MetaValues():
        assert (draw() == 0.5).all()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("x", "w", "grouped", "shape"),
    [((8, 4), (2, 4, 6), True, (8, 6)), ((2, 8, 4), (4, 6), True, (8, 6)), ((8, 4), (4, 6), True, (2, 8, 6)),
     ((2, 8, 4), (2, 4, 8), False, (2, 8, 8))],
)  # fmt: skip
def test_products_of_groups_have_a_shape_on_meta_in_every_dtype(x, w, grouped, shape):
    offsets = torch.tensor([4, 8], dtype=torch.int32, device="meta") if grouped else None
    with MetaValues():
        found = torch._grouped_mm(torch.empty(x, device="meta"), torch.empty(w, device="meta"), offs=offsets)
    assert found.shape == shape


def test_a_product_of_groups_on_meta_has_the_dtype_that_is_asked_for():
    x, w = torch.empty(2, 8, 4, device="meta"), torch.empty(2, 4, 8, device="meta")
    grouped = torch.ops.aten._grouped_mm.default
    assert run_on_meta(grouped, (x, w), {}).dtype is torch.float32
    assert run_on_meta(grouped, (x, w), {"out_dtype": torch.bfloat16}).dtype is torch.bfloat16


def test_values_of_the_masks_that_torchs_attention_makes_are_not_kept():
    recorded, q = Recorded(), torch.empty(1, 2, 64, 8, device="meta")
    with recorded:
        own = torch.ones(4, 4, device="meta").tril()
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        after = own + 1
    assert not [value for value in recorded._values.values() if value.numel() >= 64 * 64]
    assert recorded.values(after).sum() == 26  # those of the user's own code are


def test_whether_tensors_are_equal_is_decided_by_their_shapes_where_these_differ():
    with on_meta(nn.Identity(), values=False, guess=True):
        three, four = torch.empty(3, device="meta"), torch.empty(4, device="meta")
        assert torch.equal(three, three)
        assert not torch.equal(three, four)


def counted_down(x):
    while (x > 1).any():
        x = x - 1


@pytest.mark.sampled(0)
@pytest.mark.parametrize("values", [False, True])
def test_a_loop_that_ends_when_values_say_so_is_stopped(values):
    x = torch.empty(3, device="meta")
    with (
        on_meta(nn.Identity(), values=values, guess=True),
        pytest.raises(RuntimeError, match="a loop that ends when values say so cannot be planned"),
    ):
        counted_down(x)
