"""Recurrent functions on the weights of some hidden units: the same as torch's on one device, and so the gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from shardwright.comm.launch import run_on_threads
from shardwright.mesh import Mesh, balanced
from shardwright.sharding.tensor_shard import held, shard_of, tag, tagged
from shardwright.strategies.tensor_parallel.shards_mode import ShardsMode

STEPS, SAMPLES, FEATURES, UNITS = 4, 3, 5, 7


def rows_of(size: int, gates: int) -> bytes:
    """The rank that holds each row of a weight of ``UNITS`` hidden units."""
    starts = balanced(UNITS, size)
    return b"".join(bytes([rank]) * (starts[rank + 1] - starts[rank]) for rank in range(size)) * gates


def put_parts(layer: nn.Module, size: int, rank: int) -> None:
    """Replaces a layer's weights by those of a rank's hidden units."""
    for name, weight in list(layer.named_parameters()):
        rows = rows_of(size, len(weight) // UNITS)
        part = nn.Parameter(weight.detach()[list(held(rows, rank))].clone())
        tag(part, shard_of(weight.shape, (rows, None)[: weight.dim()]))
        setattr(layer, name, part)


def leaves_of(results) -> list[torch.Tensor]:
    """The tensors of what a layer returns."""
    if isinstance(results, torch.Tensor):
        return [results]
    parts = [results.data] if isinstance(results, PackedSequence) else results
    return [leaf for each in parts for leaf in ([each] if isinstance(each, torch.Tensor) else leaves_of(each))]


def total_of(layer, x, states):
    """What a layer gives, and a sum of all of it with weights."""
    found = leaves_of(layer(x, tuple(states) if isinstance(layer, nn.LSTM | nn.LSTMCell) else states[0]))
    return found, sum(
        (each * torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view(each.shape)).sum() for each in found
    )


def gradients_of(total, layer, x, states):
    """The gradients of a sum for the input, the first states and the weights."""
    return torch.autograd.grad(total, [x.data if isinstance(x, PackedSequence) else x, *states, *layer.parameters()])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("form", ["steps first", "batch first", "packed", "one sample", "cell"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_some_hidden_units_on_each_rank_give_what_torch_gives_and_its_gradients(kind, form, size):
    generator = torch.Generator().manual_seed(0)
    options = {} if form == "cell" else {"num_layers": 2, "bidirectional": True, "batch_first": form == "batch first"}
    layer = getattr(nn, f"{kind}Cell" if form == "cell" else kind)(FEATURES, UNITS, **options).double()
    shape = {"batch first": (SAMPLES, STEPS), "cell": (SAMPLES,), "one sample": (STEPS,)}.get(form, (STEPS, SAMPLES))
    lead = () if form == "cell" else (4,)
    lead = lead if form == "one sample" else (*lead, SAMPLES)
    x = torch.randn(*shape, FEATURES, dtype=torch.float64, generator=generator)
    first = [torch.randn(*lead, UNITS, dtype=torch.float64, generator=generator) for _ in range(1 + (kind == "LSTM"))]

    def inputs():
        given = x.clone().requires_grad_()
        packed = pack_padded_sequence(given, torch.tensor([4, 2, 1])) if form == "packed" else given
        return packed, [each.clone().requires_grad_() for each in first]

    given = inputs()
    expected, total = total_of(layer, *given)
    expected_gradients = gradients_of(total, layer, *given)
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}

    def work(axes):
        own = getattr(nn, type(layer).__name__)(FEATURES, UNITS, **options).double()
        own.load_state_dict(weights)
        put_parts(own, size, axes["tp"].index)
        given = inputs()
        with ShardsMode(axes["tp"]) as mode:
            found, total = total_of(own, *given)
        whole = [mode.whole(each) for each in found]
        return whole, gradients_of(total, own, *given), [tagged(each) is not None for each in found]

    for rank, (found, gradients, cut) in enumerate(run_on_threads(Mesh(tp=size), work)):
        torch.testing.assert_close(found, expected)
        assert cut == [kind == "LSTM" and form == "cell" and number == 1 for number in range(len(found))]
        for got, wanted in zip(gradients, expected_gradients, strict=True):
            if got.shape != wanted.shape:
                wanted = wanted[list(held(rows_of(size, len(wanted) // UNITS), rank))]
            torch.testing.assert_close(got, wanted)


def test_weights_that_are_cut_in_another_way_are_gathered():
    layer, x = nn.GRU(FEATURES, UNITS), torch.randn(STEPS, SAMPLES, FEATURES)
    expected, _ = layer(x)
    weight = layer.weight_hh_l0.detach()

    def work(axes):
        own = nn.GRU(FEATURES, UNITS)
        own.load_state_dict(layer.state_dict())
        columns = rows_of(2, 1)
        part = nn.Parameter(weight[:, list(held(columns, axes["tp"].index))].clone())
        tag(part, shard_of(weight.shape, (None, columns)))
        own.weight_hh_l0 = part
        with ShardsMode(axes["tp"]) as mode:
            return own(x)[0], mode.gathered["gru"]

    for found, times in run_on_threads(Mesh(tp=2), work):
        torch.testing.assert_close(found, expected)
        assert times == 1


def test_nothing_is_put_together_for_cudnn():
    layer = nn.LSTM(FEATURES, UNITS)

    def work(axes):
        put_parts(layer, 1, 0)
        with ShardsMode(axes["tp"]):
            return torch._cudnn_rnn_flatten_weight(layer._flat_weights, 4, FEATURES, 2, UNITS, 0, 1, False, False)

    assert run_on_threads(Mesh(tp=1), work) == [None]
