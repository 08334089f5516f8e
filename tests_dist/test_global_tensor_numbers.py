"""What global tensors make of dtypes: torch's default one, narrow ones, complex ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from shardwright.global_tensor import arange, from_local, ones, placement, randn, sbp, zeros


def halved_under_two_defaults(world) -> None:
    two = placement("cpu", ranks=[0, 1])

    def halves():
        return arange(6, placement=two, sbp=sbp.split(0)) / 2

    assert halves().dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        found = halves()  # ranks that compute nothing are told the dtype of now
        assert found.dtype == found.to_local().dtype == torch.float64
        assert found.full_tensor().tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    finally:
        torch.set_default_dtype(torch.float32)


def test_another_default_dtype_counts_from_the_next_operator_on(pools):
    pools(4).run(halved_under_two_defaults)


def narrowed(world) -> None:
    where = placement("cpu", ranks=range(4))
    terms = from_local(torch.full((2,), [7e4, -6.9e4, 0.0, 0.0][world.rank]), where, sbp.partial_sum)
    narrow = zeros(2, placement=where, sbp=sbp.partial_sum, dtype=torch.float16)
    casts = {
        "cast": lambda: terms.half(),
        "copied": lambda: narrow.clone().copy_(terms),
        "added": lambda: narrow.clone().add_(terms),
        "averaged": lambda: torch.stack([terms, terms]).mean(0, dtype=torch.float16),
        "added up": lambda: torch.stack([terms, -terms, terms]).cumsum(0, dtype=torch.float16)[2],
    }
    for name, cast in casts.items():
        assert cast().full_tensor().tolist() == [1000.0] * 2, name
    assert terms.double().sbp == terms.clone().copy_(terms).sbp == (sbp.partial_sum,)  # nothing was sent


def test_terms_of_a_sum_are_added_up_before_they_are_rounded(pools):
    pools(4).run(narrowed)


def conjugates(world) -> None:
    where, two = placement("cpu", ranks=range(4)), placement("cpu", ranks=[1, 3])
    x = randn(5, 3, placement=where, sbp=sbp.split(0), dtype=torch.complex128, seed=0)
    whole = x.full_tensor()
    moves = {
        "cut otherwise": (x.conj().to_global(sbp=sbp.split(1)), whole.conj()),
        "to others": (x.to_global(sbp=sbp.broadcast).conj().to_global(two, sbp.split(1)), whole.conj()),
        "in an operator": (x @ x.mH, whole @ whole.mH),
        "an imaginary part": (x.conj().imag.to_global(two, sbp.broadcast), whole.conj().imag),
        "parts": (from_local(whole.conj().imag, where, sbp.broadcast, check=True), whole.conj().imag),
        "parts cut anew": (from_local(whole.tensor_split(4)[world.rank].conj(), where, sbp.split(0)), whole.conj()),
    }
    for name, (found, expected) in moves.items():
        torch.testing.assert_close(found.full_tensor(), expected, msg=name)


def test_conjugates_move_as_the_numbers_that_they_are(pools):
    pools(4).run(conjugates)


def refused_by_torch(world) -> None:
    two, layout = placement("cpu", ranks=[0, 1]), {"sbp": sbp.split(0), "placement": placement("cpu", ranks=[0, 1])}
    x, numbers = ones(4, 4, **layout), ones(1, **layout, dtype=torch.int64)  # rank 1 holds none of one number
    wide = ones(4, placement=two, sbp=sbp.broadcast, dtype=torch.float64)
    wrong = {
        "softmax of whole numbers": lambda: x.long().softmax(0),
        "layer norm of two dtypes": lambda: F.layer_norm(x, (4,), wide),
        "index_add of two dtypes": lambda: x.index_add(0, numbers, ones(1, 4, **layout, dtype=torch.float64)),
        "by zero": lambda: numbers // 0,
        "by zero in a tensor": lambda: numbers // torch.tensor(0),
        "to a negative power": lambda: numbers**-1,
    }
    for name, call in wrong.items():
        with pytest.raises((RuntimeError, NotImplementedError, ZeroDivisionError)):
            pytest.fail(f"{name} gives {call()}")
    assert x.index_select(0, numbers - 1).full_tensor().tolist() == [[1.0] * 4]  # ones are no rows of one row
    assert x[:1].gather(0, (numbers - 1).view(1, 1)).full_tensor().tolist() == [[1.0]]
    world.everyone().barrier()


def test_what_torch_refuses_as_it_computes_is_refused_on_ranks_that_compute_nothing(pools):
    pools(4).run(refused_by_torch)
