"""No operator on global tensors is silently wrong: it is equal to one device, or refuses."""

from __future__ import annotations

import pytest
from tests_dist.operators import OPERATORS, sweep

MOST = 3
"""Layouts of each placement, drawn by seed. The committed run of ``benchmarks/global_tensors/operators.py`` took 12;
without ``--most`` it takes up to 400, which is all of most operators."""


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_an_operator_is_equal_to_one_device_for_every_layout(pools, operator):
    for _, wrong, refused in pools(4).run(sweep_by_name, operator.name, MOST):
        assert not wrong, "\n".join(wrong[:5])
        assert operator.refuses or not refused, "\n".join(refused[:3])


def sweep_by_name(world, name: str, most: int):
    operator = next(each for each in OPERATORS if each.name == name)
    return sweep(world, operator, most)
