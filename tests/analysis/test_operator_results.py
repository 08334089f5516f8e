"""Operators on the meta device make the same results whether their signature is new or known."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.analysis.on_meta.operator_results import MetaOperators, _results, run_on_meta, tensors_of

ATEN = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


CALLS = {
    "a product": lambda: (ATEN.addmm.default, (meta(3), meta(2, 4), meta(4, 3)), {}),
    "strides": lambda: (ATEN.clone.default, (meta(4, 2).t(),), {"memory_format": torch.preserve_format}),
    "an integer": lambda: (ATEN.mul.Tensor, (meta(2, dtype=torch.int64), 2), {}),
    "a float": lambda: (ATEN.mul.Tensor, (meta(2, dtype=torch.int64), 2.0), {}),
    "a list": lambda: (ATEN.cat.default, ([meta(2, 3), meta(4, 3)],), {}),
    "several results": lambda: (ATEN.native_layer_norm.default, (meta(2, 3), [3], meta(3), meta(3), 1e-5), {}),
}


def facts(results):
    return [(each.shape, each.stride(), each.dtype, each.device.type) for each in tensors_of(results)]


@pytest.mark.parametrize("name", CALLS)
def test_a_known_signature_makes_new_tensors_like_those_of_the_operator(name):
    function, args, named = CALLS[name]()
    direct = function(*args, **named)
    for _ in range(2):
        found = run_on_meta(function, args, named)
        assert facts(found) == facts(direct)
    again = run_on_meta(function, args, named)
    storages = {each.untyped_storage()._cdata for each in (*tensors_of(found), *tensors_of(again))}
    assert len(storages) == 2 * len(tensors_of(direct)), "each result is a tensor of its own"


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is ATEN.addmm.default
        return func(*args, **(kwargs or {}))


def test_an_operator_runs_once_for_each_signature_and_no_mode_sees_it():
    function, args, named = ATEN.addmm.default, (meta(71), meta(2, 4), meta(4, 71)), {}
    before = _results.cache_info().misses
    with Counting() as counting:
        for _ in range(3):
            run_on_meta(function, args, named)
    assert _results.cache_info().misses == before + 1
    assert counting.count == 0


def test_views_and_writes_keep_the_storage_of_their_operand():
    x = meta(2, 3)
    viewed = [run_on_meta(function, (x, [6]), {}) for function in (ATEN.view.default, ATEN._unsafe_view.default)]
    written = run_on_meta(ATEN.add_.Tensor, (x, 1), {})
    assert {each.untyped_storage()._cdata for each in (*viewed, written)} == {x.untyped_storage()._cdata}


IN_PLACE = {
    "a sum": lambda x: (ATEN.add_.Tensor, (x, meta(1, 3)), {}),
    "a product added": lambda x: (ATEN.addmm_.default, (x, meta(2, 4), meta(4, 3)), {"beta": 0.5}),
    "one of a list": lambda x: (ATEN._foreach_mul_.Scalar, ([x, meta(4)], 0.5), {}),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_known_write_returns_its_operand_and_leaves_its_shape(name):
    x = meta(2, 3)
    function, args, named = IN_PLACE[name](x)
    expected = function(*args, **named)
    found = [run_on_meta(function, args, named) for _ in range(2)]
    assert expected is None or expected is x
    assert all(each is expected for each in found)
    assert facts(x) == facts(meta(2, 3))


def test_a_write_that_cannot_be_is_an_error_each_time():
    for _ in range(2):
        with pytest.raises(RuntimeError):
            run_on_meta(ATEN.add_.Tensor, (meta(3), meta(2, 3)), {})


RESHAPED = {
    "a view": lambda: (ATEN.t_.default, (meta(2, 3),), (3, 2)),
    "a size": lambda: (ATEN.resize_.default, (meta(2, 3), [5]), (5,)),
    "the size of a result": lambda: (ATEN._resize_output_.default, (meta(0), [5], torch.device("meta")), (5,)),
}


@pytest.mark.parametrize("name", RESHAPED)
def test_a_known_call_that_changes_a_shape_in_place_changes_that_of_each_operand(name):
    for _ in range(2):
        function, args, shape = RESHAPED[name]()
        run_on_meta(function, args, {})
        assert args[0].shape == shape


def test_a_ctc_loss_has_on_the_meta_device_the_shapes_that_it_has_with_values():
    def results(device):
        x = torch.zeros(7, 3, 5, device=device, requires_grad=True)
        targets, lengths = torch.ones(3, 2, dtype=torch.int64, device=device), torch.full((3,), 7)
        with MetaOperators() if device == "meta" else nullcontext():
            both = torch.ops.aten._ctc_loss(x.log_softmax(2), targets, [7, 7, 7], [2, 2, 2])
            loss = torch.nn.functional.ctc_loss(
                x.log_softmax(2), targets, lengths, torch.full((3,), 2), reduction="sum"
            )
            loss.backward()
        return [each.shape for each in (*both, loss, x.grad)]

    assert results("meta") == results("cpu")
