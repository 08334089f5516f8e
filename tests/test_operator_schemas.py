"""Operators that draw random numbers are known by their results without drawing any."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from shardwright.analysis.on_meta.meta_values import RANDOM
from shardwright.operator_schemas import undrawn

ATEN = torch.ops.aten
X, MEANS, SHARES = torch.zeros(2, 3), torch.zeros(4, 1), torch.ones(2, 3)

CALLS = {
    "_sample_dirichlet": (ATEN._sample_dirichlet.default, (SHARES,), {}),
    "_standard_gamma": (ATEN._standard_gamma.default, (SHARES,), {}),
    "bernoulli": (ATEN.bernoulli.default, (SHARES,), {}),
    "bernoulli with p": (ATEN.bernoulli.p, (SHARES, 0.5), {}),
    "binomial": (ATEN.binomial.default, (SHARES, SHARES), {}),
    "multinomial": (ATEN.multinomial.default, (SHARES, 2), {}),
    "native_dropout": (ATEN.native_dropout.default, (X, 0.5, True), {}),
    "normal": (ATEN.normal.float_float, (0.0, 1.0, [2, 3]), {}),
    "normal of means": (ATEN.normal.Tensor_float, (X, 1.0), {}),
    "normal of means and deviations": (ATEN.normal.Tensor_Tensor, (MEANS, torch.ones(5)), {}),
    "poisson": (ATEN.poisson.default, (SHARES,), {}),
    "rand": (ATEN.rand.default, ([2, 3],), {"dtype": torch.float64}),
    "rand_like": (ATEN.rand_like.default, (X.t(),), {}),
    "randint": (ATEN.randint.low, (1, 5, [2, 3]), {}),
    "randint_like": (ATEN.randint_like.default, (X, 5), {}),
    "randn": (ATEN.randn.default, ([],), {}),
    "randn_like": (ATEN.randn_like.default, (X,), {"dtype": torch.float64}),
    "randperm": (ATEN.randperm.default, (5,), {}),
    "rrelu": (ATEN.rrelu_with_noise.default, (X, torch.zeros(2, 3), 0.1, 0.3, True), {}),
}
IN_PLACE = {
    name: (getattr(ATEN, name).default if name != "bernoulli_" else ATEN.bernoulli_.float)
    for name in sorted(RANDOM)
    if name.endswith("_") and "rrelu" not in name
}


def seen(results):
    return [(each.shape, each.stride(), each.dtype, each.device.type) for each in tree_leaves(results)]


@pytest.mark.parametrize("name", CALLS)
def test_what_a_random_operator_returns_is_known_without_drawing(name):
    function, args, named = CALLS[name]
    expected, before = seen(function(*args, **named)), torch.get_rng_state()
    assert seen(undrawn(function, args, named, "cpu")) == expected
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_fill_with_random_numbers_returns_the_tensor_that_it_fills(name):
    x = torch.full((2, 3), 7.0)
    assert undrawn(IN_PLACE[name], (x, 0.5), {}, "cpu") is x
    assert (x == 7).all()
