"""Reads calls of torch's recurrent functions: sequences, states and weights of LSTMs, GRUs and plain RNNs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

CellKind = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]

_LAYERS: Mapping[Callable[..., Any], CellKind] = {
    torch.lstm: "lstm", torch.gru: "gru", torch.rnn_tanh: "rnn_tanh", torch.rnn_relu: "rnn_relu",
}  # fmt: skip
_CELLS: Mapping[Callable[..., Any], CellKind] = {
    torch.lstm_cell: "lstm", torch.gru_cell: "gru", torch.rnn_tanh_cell: "rnn_tanh", torch.rnn_relu_cell: "rnn_relu",
}  # fmt: skip

GATES: Mapping[CellKind, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""The number of gates of each kind of layer: a weight has so many rows for each hidden unit."""

RECURRENT = frozenset((*_LAYERS, *_CELLS))
"""The recurrent functions of torch."""


class RecurrentCall(NamedTuple):
    """A call of a recurrent function of torch, of all layers of an ``nn.LSTM`` or of one step of an ``nn.LSTMCell``.

    Shapes: input (steps, samples, features), with ``batch_first`` (samples, steps, features), packed (rows, features),
    of a cell (samples, features); each of ``states`` (layers * directions, samples, units), of a cell (samples, units).

    ``weights`` lists, for each layer and direction, the weight of the input (gates * units, features), the weight of
    the state (gates * units, units), and their biases if there are any. ``batch_sizes`` has the number of rows of a
    packed sequence in each step.
    """

    kind: CellKind
    is_cell: bool
    input: Tensor
    states: tuple[Tensor, ...]
    weights: Sequence[Sequence[Tensor]]
    batch_sizes: Tensor | None = None
    dropout: float = 0.0
    bidirectional: bool = False
    batch_first: bool = False


def recurrent_call(function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> RecurrentCall | None:
    """Returns the parts of a call of a recurrent function; None for other functions, and for calls that are not read.

    Not read are calls of layers with projected outputs (``proj_size``), and calls with keyword arguments.

    >>> layer = torch.nn.LSTM(3, 4, num_layers=2)
    >>> args = torch.ones(5, 1, 3), (torch.zeros(2, 1, 4),) * 2, layer._flat_weights, True, 2, 0.0, True, False, False
    >>> call = recurrent_call(torch.lstm, args, {})
    >>> call.kind, [[tuple(weight.shape) for weight in each[:2]] for each in call.weights]
    ('lstm', [[(16, 3), (16, 4)], [(16, 4), (16, 4)]])
    """
    if named:
        return None
    if function in _CELLS:
        input, states, *weights = args
        all_states = tuple(states) if isinstance(states, tuple | list) else (states,)
        return RecurrentCall(
            _CELLS[function], True, input, all_states, [[weight for weight in weights if weight is not None]]
        )
    if function not in _LAYERS or len(args) != 9:
        return None
    is_packed = _is_packed(args)
    input, sizes = args[:2] if is_packed else (args[0], None)
    states, params, _, num_layers, dropout, is_training, bidirectional, *first = args[2 if is_packed else 1 :]
    num_weights = len(params) // (num_layers * (2 if bidirectional else 1))
    if num_weights not in (2, 4):
        return None
    weights = [params[start : start + num_weights] for start in range(0, len(params), num_weights)]
    all_states = tuple(states) if isinstance(states, tuple | list) else (states,)
    return RecurrentCall(
        _LAYERS[function], False, input, all_states, weights, sizes, dropout if is_training else 0.0,
        bool(bidirectional), bool(first and first[0]),
    )  # fmt: skip


def _is_packed(args: tuple[Any, ...]) -> bool:
    """Returns whether layers are called with a packed sequence; its second argument is the number of rows per step."""
    return isinstance(args[1], Tensor) and not isinstance(args[3], bool)


def with_given_states(
    function: Any, args: tuple[Any, ...], change: Callable[[Tensor], Tensor], is_input: Callable[[Tensor], bool]
) -> tuple[Any, ...]:
    """Returns the arguments of a recurrent function with ``change`` applied to its initial states.

    The cell state of an ``nn.LSTMCell`` is left as it is, unless it is an input of the model.
    """
    place = 2 if function in _LAYERS and _is_packed(args) else 1
    states = args[place]
    if isinstance(states, Tensor):
        return (*args[:place], change(states), *args[place + 1 :])
    first, cells = states
    changed = change(first), cells if function in _CELLS and not is_input(cells) else change(cells)
    return (*args[:place], changed, *args[place + 1 :])


def with_states(function: Any, results: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns the results of a recurrent function with ``change`` applied to its outputs and states.

    The cell state of an ``nn.LSTMCell``, which the next step takes, is left as it is.
    """
    if isinstance(results, Tensor):
        return change(results)
    kept = results[1:] if function in _CELLS else ()
    return (*map(change, results[: len(results) - len(kept)]), *kept)
