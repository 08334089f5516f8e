"""How often the gradients of a flat parameter are copied until NCCL sends them, and what they sum to."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nccl_rules import Variant
from pretend_nccl import over_nccl
from shardwright.comm.launch import run_threads
from shardwright.strategies.zero.flat_parameter import FlatParameter

SHAPES = {"first": (2, 3), "second": (3,), "unreached": (2,), "last": (3, 1)}


class CountsCopies(TorchDispatchMode):
    """Counts the operators that copy tensors, and the elements that each has written."""

    def __init__(self):
        super().__init__()
        self.calls, self.elements = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in ("cat", "copy_", "_to_copy"):
            self.calls[name] += 1
            self.elements[name] += found.numel()
        return found


def summed(world, fp32_sums, num_microbatches):
    """What a rank copies in a step, and its part of the sum."""
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    flat = FlatParameter(parameters, world.everyone(), keeps_buffer=False, dtype=torch.bfloat16, fp32_sums=fp32_sums)
    copies = CountsCopies()
    with copies:
        for _ in range(num_microbatches):
            for number, (name, parameter) in enumerate(parameters.items()):
                if name != "unreached":
                    gradient = torch.full_like(parameter, 1 + number + world.rank)
                    with torch._C.DisableTorchFunctionSubclass():  # as autograd does
                        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            flat.accumulate_wide()
        pending = flat.reduce_scatter()
    return copies, pending.wait()


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_wide_gradients_are_converted_into_the_buffer_that_is_sent(num_microbatches):
    with over_nccl(Variant()):
        found = run_threads(summed, 2, True, num_microbatches)
    for copies, _ in found:
        assert copies.calls == {"copy_": 3}
        assert copies.elements == {"copy_": 12}


def test_gradients_of_autograd_are_joined_by_one_copy():
    with over_nccl(Variant()):
        found = run_threads(summed, 2, False, 1)
    for copies, _ in found:
        assert copies.calls == {"cat": 1}
        assert copies.elements == {"cat": 14}


@pytest.mark.parametrize("fp32_sums", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_the_parts_of_the_sum_are_the_gradients_of_all_ranks(fp32_sums, num_microbatches):
    expected = [num_microbatches * each for each in (3.0,) * 6 + (5.0,) * 3 + (-0.0,) * 2 + (9.0,) * 3]
    with over_nccl(Variant()):
        parts = [part for _, part in run_threads(summed, 2, fp32_sums, num_microbatches)]
    assert {part.dtype for part in parts} == {torch.float32 if fp32_sums else torch.bfloat16}
    whole = torch.cat(parts)
    assert whole.tolist() == expected
    assert whole.signbit().tolist() == [each == 0 for each in expected]
