"""No operator on global tensors is silently wrong: it is equal to one device, or refuses."""

from __future__ import annotations

import pytest
import torch
from cases.operators import outputs, sweep, whole_of
from cases.rarer_operators import EVERY

from shardwright.global_tensor import from_local, placement, rules, sbp

MOST = 3
"""Layouts of each placement, drawn by seed. The committed run of ``benchmarks/global_tensors/operators.py`` took 20;
without ``--most`` it takes up to 400, which is all of most operators."""


@pytest.mark.parametrize("operator", EVERY, ids=lambda operator: operator.name)
def test_an_operator_is_equal_to_one_device_for_every_layout(pools, operator):
    for _, wrong, refused in pools(4).run(sweep_by_name, operator.name, MOST):
        assert not wrong, "\n".join(wrong[:5])
        assert operator.refuses or not refused, "\n".join(refused[:3])


def sweep_by_name(world, name: str, most: int):
    operator = next(each for each in EVERY if each.name == name)
    return sweep(world, operator, most)


def test_every_rule_is_met_by_the_sweep(monkeypatch):
    met, carried_out = set(), rules._execute

    def noted(call, leaves, spec):
        met.add(call.name)
        return carried_out(call, leaves, spec)

    monkeypatch.setattr(rules, "_execute", noted)
    alone = placement("cpu", ranks=[0])
    for operator in EVERY:
        wholes = [whole_of(given, seed) for seed, given in enumerate(operator.inputs)]
        xs = [from_local(x, alone, sbp.broadcast).requires_grad_(x.is_floating_point()) for x in wholes]
        learning = [x for x in xs if x.requires_grad]
        found = [y for y in outputs(operator.function(*xs)) if y.requires_grad]
        if found:
            torch.autograd.grad(found, learning, [torch.ones_like(y) for y in found], allow_unused=True)
        with torch.inference_mode():  # where torch takes fewer operators apart
            operator.function(*(x.detach() for x in xs))
    assert rules.RULES.keys() - met == {"_fused_rms_norm_backward"}  # torch has it on accelerators alone
