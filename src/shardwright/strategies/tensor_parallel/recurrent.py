"""Recurrent layers of which each rank computes some hidden units: LSTM, GRU and RNN, packed or not, and their cells.

A rank holds the rows of its units of every gate, in the weights of the input and of the state. Each step needs the
state of all units, so it is gathered after each::

    x, all steps --whole--> | w_ih: rows of some units | --> gates of these units, of all steps --+
                                                                                                  +--> h of these units
    h of the step before ---whole--> | w_hh: rows of some units | --------------------------------+          |
             ^                                                                                               |
             +----------------------------------- all-gather ------------------------------------------------+

What a layer returns is whole: its steps have been gathered already, and the cell state after an LSTM's last step is
gathered then. That of an ``nn.LSTMCell``, which its own rank alone needs, stays cut.

Traffic: for each layer, direction and step, one all-gather of the state forward and one reduce-scatter of its gradient
    backward (samples x units), of the last step none; for each input and each initial state that has a gradient, one
    all-reduce backward; for the cell state of each layer of an LSTM after the last step, one all-gather forward. For
    a cell that code calls itself, one all-gather forward, and backward one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.analysis.calls.recurrent_calls import GATES, CellKind, RecurrentCall, recurrent_call
from shardwright.comm.autograd import cut_to_gathered, cut_to_shared, cut_to_whole
from shardwright.sharding.tensor_shard import is_in_blocks, shard_of, tag, tagged
from shardwright.strategies.tensor_parallel.call_plans import OperandChange
from shardwright.strategies.tensor_parallel.ready_calls import CallHost

Step = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps the gates of the input and of the state, the hidden and the cell state, to the next hidden and cell state.

Shapes: gates (samples, gates * units), else (samples, units). Kinds without a cell state return what they take.
"""


class RecurrentHost(CallHost, Protocol):
    """The methods of a torch function mode that recurrent layers on shards use."""

    def whole(self, x: Tensor) -> Tensor:
        """All-gathers a tensor that is a shard; any other is returned unchanged."""


def recurrent_on_shards(host: RecurrentHost, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Returns what a recurrent function of torch returns, where ranks hold the weights of some hidden units each.

    Outputs and states are whole; the cell state of an ``nn.LSTMCell`` is a shard, cut by units. Weights that are cut in
    another way are all-gathered, and all ranks compute the whole.
    """
    call = recurrent_call(function, args, named)
    cuts = [] if call is None else [_cut_of(weights, call.kind, host.axis.size) for weights in call.weights]
    if call is None or cuts[0] is None or any(cut != cuts[0] for cut in cuts):
        return host.on_whole(function, args, named)
    shard = _RecurrentShard(host, call.kind, cuts[0])
    return shard.cell(call) if call.is_cell else shard.layers(call)


def _cut_of(weights: Sequence[Tensor], kind: CellKind, size: int) -> bytes | None:
    """Returns the rank that holds each hidden unit, if all weights of a layer have the rows of its units in each gate.

    Each rank must have some units, next to each other. None if not.
    """
    shards = [tagged(weight) for weight in weights]
    rows = shards[0].cuts[0] if shards[0] is not None else None
    if rows is None:
        return None
    cut = rows[: len(rows) // GATES[kind]]
    cuts = cut * GATES[kind], None
    fits = all(shard is not None and shard.cuts == cuts[: len(shard.shape)] for shard in shards)
    return cut if fits and is_in_blocks(cut, size) else None


class _RecurrentShard:
    """The hidden units of recurrent layers that a rank computes: those that ``cut`` gives to it."""

    def __init__(self, host: RecurrentHost, kind: CellKind, cut: bytes) -> None:
        self.host, self.axis, self.cut = host, host.axis, cut
        self.step, self.has_cells = _STEPS[kind], kind == "lstm"
        self.sizes = [cut.count(rank) for rank in range(host.axis.size)]

    def layers(self, call: RecurrentCall) -> tuple[Tensor, ...]:
        """Returns the outputs of the last layer, the hidden states of all and an LSTM's cell states, all whole."""
        turns = call.batch_first and call.batch_sizes is None
        x = self.host.whole(call.input)
        x = x.transpose(0, 1) if turns else x
        sizes = None if call.batch_sizes is None else call.batch_sizes.tolist()
        first = self.host.whole(call.states[0]).unbind(0)
        first_cells = self._own(call.states[1]).unbind(0) if self.has_cells else first
        states, cells = list[Tensor](), list[Tensor]()
        ways = 2 if call.bidirectional else 1
        for start in range(0, len(call.weights), ways):
            walks = [
                self._walk(x, first[n], first_cells[n], call.weights[n], sizes, backwards=n > start)
                for n in range(start, start + ways)
            ]
            outputs, of_layer, own_cells = zip(*walks, strict=True)
            x = torch.cat(outputs, -1) if ways > 1 else outputs[0]
            states += of_layer
            if self.has_cells:  # gathered by layer: with dropout between, each layer is a call
                cells.append(cut_to_whole(torch.stack(own_cells), self.axis, 2, self.sizes))
            if call.dropout and start + ways < len(call.weights):
                x = functional.dropout(x, call.dropout)
        x = x.transpose(0, 1) if turns else x
        return (x, torch.stack(states), *([torch.cat(cells)] if cells else []))

    def cell(self, call: RecurrentCall) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the whole hidden state after one step, and for an LSTM the cell state of this rank's units."""
        x, state = self.host.whole(call.input), self.host.whole(call.states[0])
        w_ih, w_hh, *biases = call.weights[0]
        own = self._own(state)
        own, cells = self.step(
            functional.linear(self._shared(x), w_ih, *biases[:1]),
            functional.linear(self._shared(state), w_hh, *biases[1:]),
            own,
            self._own(call.states[1]) if self.has_cells else own,
        )
        state = cut_to_whole(own, self.axis, own.dim() - 1, self.sizes)
        return (state, self._tagged(cells)) if self.has_cells else state

    def _walk(
        self, x: Tensor, state: Tensor, cells: Tensor, weights: Sequence[Tensor], sizes: list[int] | None, *,
        backwards: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns the outputs of all steps of one layer in one direction, and the hidden and cell state after them.

        Shapes: x (steps, samples, features), or with ``sizes``, the rows of each step, (rows, features); state
        (samples, units); cells (samples, own units). Outputs as x, with units in place of features.
        """
        w_ih, w_hh, *biases = weights
        gates = functional.linear(self._shared(x), w_ih, *biases[:1])
        steps = gates.unbind(0) if sizes is None else gates.split(sizes)
        own, whole = self._own(state), self._shared(state)
        owns, wholes = list[Tensor](), list[Tensor]()
        for now in reversed(steps) if backwards else steps:
            rows = len(now)  # long sequences come first: those that have ended, or not begun, are left out
            of_state = functional.linear(_first(whole, rows), w_hh, *biases[1:])
            own_now, cells_now = self.step(now, of_state, _first(own, rows), _first(cells, rows))
            whole_now = cut_to_shared(own_now, self.axis, 1, self.sizes)
            owns.append(own_now)
            wholes.append(whole_now.detach())
            own, cells, whole = _replaced(own, own_now), _replaced(cells, cells_now), _replaced(whole, whole_now)
        in_order = slice(None, None, -1) if backwards else slice(None)
        joined = torch.stack if sizes is None else torch.cat
        outputs = self._known(joined(owns[in_order]), joined(wholes[in_order]))
        return outputs, self._known(own, whole.detach()), cells

    def _shared(self, x: Tensor) -> Tensor:
        """Returns a whole tensor that each rank uses for its own units, so that its gradients are summed."""
        return self.host.changed(x, OperandChange(0, "copy"), gradient_is_new=False)

    def _known(self, own: Tensor, whole: Tensor) -> Tensor:
        return cut_to_gathered(own, whole, self.axis, own.dim() - 1, self.sizes)

    def _own(self, x: Tensor) -> Tensor:
        """Returns the elements of this rank's units, of a whole tensor or of a shard, whose last dim has units."""
        shard, dim = tagged(x), x.dim() - 1
        if shard is not None and shard.cuts == (*(None,) * dim, self.cut):
            return x
        return self.host.changed(self.host.whole(x), OperandChange(0, "slice", dim, self.cut), gradient_is_new=False)

    def _tagged(self, x: Tensor) -> Tensor:
        tag(x, shard_of((*x.shape[:-1], len(self.cut)), (*(None,) * (x.dim() - 1), self.cut)))
        return x


def _first(x: Tensor, rows: int) -> Tensor:
    return x if len(x) == rows else x[:rows]


def _replaced(x: Tensor, first: Tensor) -> Tensor:
    return first if len(first) == len(x) else torch.cat([first, x[len(first) :]])


def _lstm(gates: Tensor, of_state: Tensor, state: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    into, forget, new, out = (gates + of_state).chunk(4, -1)
    cells = forget.sigmoid() * cells + into.sigmoid() * new.tanh()
    return out.sigmoid() * cells.tanh(), cells


def _gru(gates: Tensor, of_state: Tensor, state: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    (reset, keep, new), (own_reset, own_keep, own_new) = gates.chunk(3, -1), of_state.chunk(3, -1)
    candidate = (new + (reset + own_reset).sigmoid() * own_new).tanh()
    return candidate + (keep + own_keep).sigmoid() * (state - candidate), cells


def _rnn(activation: Callable[[Tensor], Tensor], gates: Tensor, of_state: Tensor, state: Tensor, cells: Tensor
         ) -> tuple[Tensor, Tensor]:  # fmt: skip
    return activation(gates + of_state), cells


_STEPS: Mapping[CellKind, Step] = {
    "lstm": _lstm, "gru": _gru, "rnn_tanh": partial(_rnn, torch.tanh), "rnn_relu": partial(_rnn, torch.relu),
}  # fmt: skip
