"""The hash of elements: as random as what is tested for here, whatever the place; made where the tensor lies."""

from __future__ import annotations

import math
from itertools import pairwise
from shutil import which
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright import element_hash
from shardwright.element_hash import HeldDim, random_bits
from shardwright.keyed_dropout import dropout_mask
from shardwright.ledger.tracking import Tracker
from shardwright.rng import RngTracker, least_kept

SHAPE = (2, 128, 1024)
LIMIT = 5
"""The largest deviation in standard deviations: by chance one number in 1.7 million is farther off. Seeds are fixed."""


def bits(shape=SHAPE, *, seed=0, step=0, layer="drop", first=0, least=None):
    samples = torch.arange(first, first + shape[0])
    dims = [size if isinstance(size, HeldDim) else HeldDim(((0, size),), size) for size in shape[1:]]
    return random_bits(RngTracker(seed, step).words(layer), samples, torch.zeros_like(samples), dims, least)


def deviations(products):
    """How far the sum of numbers of mean 0 and variance 1 is from 0, in standard deviations."""
    return abs(products.sum().item()) / products.numel() ** 0.5


def normed(words, p):
    """Numbers of mean 0 and variance 1: the words, or a mask that drops with probability ``p``."""
    if p is None:
        return (words.double() - (2**24 - 1) / 2) / (2**24 / math.sqrt(12))
    return ((words < p * 2**24).double() - p) / math.sqrt(p * (1 - p))


# ---- how random they are


def test_each_bit_is_as_often_0_as_1_and_so_is_each_value_of_twelve():
    words = bits()
    for bit in range(24):
        assert deviations(((words >> bit) & 1).double() * 2 - 1) < LIMIT
    for twelve in (words >> 12, words & 4095):
        counts, mean = torch.bincount(twelve.flatten(), minlength=4096).double(), words.numel() / 4096
        chi_squared = ((counts - mean).square() / mean).sum().item()
        assert abs(chi_squared - 4095) < LIMIT * math.sqrt(2 * 4095)


@pytest.mark.parametrize("p", [None, 0.01, 0.1, 0.5])
def test_elements_of_one_dim_are_uncorrelated_at_every_distance_and_power_of_two(p):
    x = normed(bits(), p)
    for dim, size in enumerate(SHAPE):
        for away in {1, 2, 3, 5, 7, 31, 33, 100, 255, 257, *(2**k for k in range(11))}:
            if away < size:
                assert deviations(x.narrow(dim, 0, size - away) * x.narrow(dim, away, size - away)) < LIMIT
        for bit in range(size.bit_length() - 1):
            other = torch.arange(size)[torch.arange(size) & 2**bit == 0]
            assert deviations(x.index_select(dim, other) * x.index_select(dim, other + 2**bit)) < LIMIT


@pytest.mark.parametrize("p", [None, 0.1, 0.5])
def test_other_seeds_steps_layers_and_samples_are_uncorrelated(p):
    x = normed(bits(), p)
    changes = [{"step": 2**k} for k in (0, 1, 2, 10)] + [{"seed": 2**k} for k in (0, 1, 31, 32)]
    changes += [{"layer": name} for name in ("dro", "drop1", "drop#1", "blocks.0.drop")]
    for change in [*changes, *({"first": 2**k} for k in (1, 10, 20, 31, 32))]:
        y = normed(bits(**change), p)
        assert deviations(x * y) < LIMIT
        assert deviations(x[:, 1:] * y[:, :-1]) < LIMIT
        assert deviations(x[..., 1:] * y[..., :-1]) < LIMIT


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_four_corners_of_a_rectangle_are_uncorrelated(p):
    """What a hash that only adds a row's word to a column's would fail."""
    x = normed(bits(), p)
    for down in (1, 2, 16, 64):
        for right in (1, 2, 64, 512):
            corners = x[:, down:, right:] * x[:, :-down, :-right] * x[:, down:, :-right] * x[:, :-down, right:]
            assert deviations(corners) < LIMIT


def test_no_two_rows_and_no_two_columns_are_alike():
    x = normed(bits(), 0.5)[0]
    for each in (x, x.T):
        alike = (each @ each.T / each.shape[1] ** 0.5).fill_diagonal_(0)
        assert alike.abs().max() < 6.5  # of half a million pairs; one of 12 billion is farther off by chance


def test_each_bit_of_a_place_changes_each_of_the_upper_bits_of_half_of_the_words():
    """The avalanche: of columns, and of rows, for those twelve bits that decide whether an element is kept."""
    words = torch.randint(-(2**62), 2**62, (4000, 1), generator=torch.Generator().manual_seed(0))
    columns = torch.randint(2**31 - 1, (16,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)

    def mixed(rows, columns):
        return element_hash._mixed(*element_hash._row_words(rows), columns, None)

    changed = [mixed(words, columns ^ 2**bit) for bit in range(31)]
    changed += [mixed(words ^ 2**bit, columns) for bit in range(63)]
    for each in changed:
        for bit in range(20, 32):
            flipped = ((each ^ mixed(words, columns)) >> bit) & 1
            assert deviations(flipped.double() * 2 - 1) < LIMIT


# ---- more elements than 2**32


@pytest.mark.parametrize("size", [2**40, 2**31, 2**33 + 5])
def test_elements_that_are_2_to_the_32_apart_differ(size):
    """Of one row, in columns; and in outer dims of as many rows."""
    starts = [0, size // 2 + 7, size - 500, *(2**k for k in (20, 24, 30, 31, 32) if 2**k + 500 < size)]
    for shape in (lambda part: (1, part), lambda part: (1, part, 300), lambda part: (1, 2**20, part)):
        found = []
        for start in starts:
            part = shape(HeldDim(((start, start + 500),), size))
            found.append(bits([HeldDim(((5, 6),), each) if each == 2**20 else each for each in part]).flatten())
        for i, a in enumerate(found):
            assert all((a == b).double().mean() < 0.01 for b in found[:i])


def test_a_range_across_2_to_the_31_columns_equals_its_parts():
    cuts = (2**31 - 70, 2**31 - 3, 2**31, 2**31 + 60)
    whole, *parts = (bits((2, HeldDim(((a, b),), 2**34))) for a, b in ((cuts[0], cuts[-1]), *pairwise(cuts)))
    assert torch.equal(whole, torch.cat(parts, 1))


# ---- where they are made


READING = ("_local_scalar_dense", "nonzero", "lift_fresh", "unique", "equal", "_unique2", "masked_select")


class _RefusesReading(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket.__name__ not in READING
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("samples", [range(3, 7), (0, 1, 5, 2)])
def test_nothing_is_read_back_and_no_list_is_made_a_tensor(samples):
    rng = RngTracker(samples=samples)
    with _RefusesReading():
        dropout_mask(rng, "drop", (4, 9, 300), (), 0.1)
    assert dropout_mask(RngTracker(samples=samples), "drop", (4, 9), (), 0.1, device=torch.device("meta")).is_meta


@pytest.mark.parametrize("shape", [(4, 32, 256, 512), (1, 2**24), (2**14, 1024)])
def test_a_mask_needs_little_memory_beside_itself(shape):
    with Tracker() as tracker:
        dropout_mask(RngTracker(samples=range(shape[0])), "drop", shape, (), 0.1)
    scratch = 2 * 4 * element_hash.BLOCK + 2**20
    assert tracker.account().peak_bytes < 1.03 * math.prod(shape) + 2 * scratch


@pytest.mark.parametrize("count", [5, 70])
def test_blocks_of_any_size_give_the_same_bits(count):
    shape, cut = (3, 2, HeldDim(((2, 2 + count), (3000, 3040)), 4000)), (2, 3, HeldDim(((7, 20),), 50), 6, 2)
    for each in (shape, cut):
        expected = bits(each), bits(each, least=least_kept(0.1))
        for block in (3, 64, 1000):
            with patch.object(element_hash, "BLOCK", block):
                assert torch.equal(bits(each), expected[0])
                assert torch.equal(bits(each, least=least_kept(0.1)), expected[1])


# ---- compiled

COMPILED = [(3, 8, 16, 64), (3, 33), (3, HeldDim(((5, 40), (70, 99)), 2**34 + 7))]


def check_compiled(shape, backend):
    dims = [size if isinstance(size, HeldDim) else HeldDim(((0, size),), size) for size in shape[1:]]

    def drawn(key, samples, within, least):
        return random_bits([key, 77], samples, within, dims, least)

    compiled, samples = torch.compile(drawn, fullgraph=True, backend=backend), torch.arange(shape[0])
    for key in (torch.tensor(5), torch.tensor(-(2**63))):
        for least in (None, least_kept(0.1)):
            given = (key, samples, samples * 0, least)
            assert torch.equal(compiled(*given), drawn(*given))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("shape", COMPILED, ids=len)
def test_traced_whole_the_bits_are_the_same(shape):
    check_compiled(shape, "aot_eager")


@pytest.mark.sampled(0)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(which("g++") is None, reason="torch.compile needs a compiler of C++ on a CPU")
def test_fused_by_a_compiler_the_bits_are_the_same():
    check_compiled(COMPILED[0], "inductor")


@pytest.fixture
def pretends_to_fuse(monkeypatch):
    """A kernel for a CPU as one is made for an accelerator, by a backend that is quick to start."""
    element_hash._fused.cache_clear()
    monkeypatch.setattr(element_hash, "has_triton", lambda: True)
    monkeypatch.setattr(element_hash, "_UNFUSED", ())
    made = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **named: made(function, backend="aot_eager", **named))
    yield monkeypatch
    element_hash._fused.cache_clear()


@pytest.mark.sampled(0)
def test_a_kernel_that_an_accelerator_gets_gives_the_same_bits(pretends_to_fuse):
    with patch.object(element_hash, "_UNFUSED", ("cpu",)):
        expected = bits((2, 5, 300)), bits((2, 5, 300), least=7)
    element_hash._fused.cache_clear()
    assert torch.equal(bits((2, 5, 300)), expected[0])
    assert torch.equal(bits((2, 5, 300), least=7), expected[1])
    assert element_hash._fused.cache_info().hits == 1


def test_where_no_kernel_can_be_compiled_torchs_operators_are_used_and_said(pretends_to_fuse):
    expected = bits((2, 5, 300))

    def fails(*args):
        raise RuntimeError("no compiler of C")

    for kernel, reason in ((fails, "no compiler of C"), (lambda *args: torch.zeros(1), "its bits are other")):
        element_hash._fused.cache_clear()
        pretends_to_fuse.setattr(torch, "compile", lambda function, kernel=kernel, **named: kernel)
        with pytest.warns(UserWarning, match=reason):
            assert torch.equal(bits((2, 5, 300)), expected)
