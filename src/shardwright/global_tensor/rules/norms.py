"""Sharding rules of normalizations: samples may be split, but not the dims over which statistics are computed.

Batch norm in training computes statistics over the samples, so a split batch is refused; in evaluation it computes
none.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwright.global_tensor.rules.call import Letter, OperatorCall, ShardingDecision, Way, decide, refusal, to_letter


def _layer_norm(call: OperatorCall) -> ShardingDecision:
    """The rule of ``native_layer_norm`` and ``_fused_rms_norm``: splits a dim before the normalized ones."""
    before = len(call.shapes[0]) - len(call.arg("normalized_shape"))
    ways: list[Way] = [(call.letters(input=dim), (dim,) * len(call.outputs)) for dim in range(before)]
    return decide(call, ways)


def _layer_norm_backward(call: OperatorCall) -> ShardingDecision:
    before = len(call.shapes[0]) - len(call.arg("normalized_shape"))
    names = [name for name in call.names if name not in ("weight", "bias")]
    ways: list[Way] = []
    for dim in range(before):
        cut = {name: dim for name in names if call.place(name) is not None}
        ways.append((call.letters(**cut), (dim, *("P",) * (len(call.outputs) - 1))))
    return decide(call, ways)


def _group_norm(call: OperatorCall) -> ShardingDecision:
    return decide(call, [(call.letters(input=0), (0, 0, 0))], _run_group_norm)


def _group_norm_backward(call: OperatorCall) -> ShardingDecision:
    cut = call.letters(grad_out=0, input=0, mean=0, rstd=0)
    return decide(call, [(cut, (0, "P", "P"))], _run_group_norm)


def _run_group_norm(
    call: OperatorCall, decision: ShardingDecision, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # the argument N, the number of samples, becomes that of this rank's samples
    samples = next(x for x in args if isinstance(x, Tensor)).shape[0]
    return call.func(*call.with_arg("N", samples, args), **kwargs)


_PER_CHANNEL = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd")


def _channels(call: OperatorCall, **also: Letter) -> tuple[Letter, ...]:
    """Returns the letters that split the channels, in all tensors that have them."""
    return call.letters(input=1, **also, **{name: 0 for name in _PER_CHANNEL if name in call.names})


def _batch_norm(call: OperatorCall) -> ShardingDecision:
    num, saved = len(call.shapes[0]), call.outputs[1:]
    if not call.arg("training"):
        # no statistics are computed: their outputs are empty, whatever shape the meta device gives them
        call.outputs = [call.outputs[0], *(None if output is None else output.new_empty(0) for output in saved)]
        ways: list[Way] = [(call.letters(input=dim), (dim, "B", "B")) for dim in range(num) if dim != 1]
        return decide(call, [*ways, (_channels(call), (1, "B", "B"))], _run_evaluation)
    if any(to_letter(one) not in ("B", "P", 1) for one in call.tensors[0].sbp):
        raise refusal(call, "its statistics are computed over samples and spatial dims", "split channels, evaluation")
    decision = decide(call, [(_channels(call), (1, 0, 0))])
    for name in ("running_mean", "running_var"):  # written in place, so they must have the layout of the channels
        place = call.place(name)
        if place is not None and call.tensors[place].sbp != decision.ins[place]:
            raise refusal(call, f"'{name}' is written to, and would have to be redistributed")
    return decision


def _run_evaluation(
    call: OperatorCall, decision: ShardingDecision, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    out, *_ = call.func(*args, **kwargs)
    return out, out.new_empty(0), out.new_empty(0)


def _batch_norm_backward(call: OperatorCall) -> ShardingDecision:
    ways: list[Way] = []
    if not call.arg("train"):
        cut = [dim for dim in range(len(call.shapes[0])) if dim != 1]
        ways = [(call.letters(grad_out=dim, input=dim), (dim, "P", "P")) for dim in cut]
    saved = call.place("save_mean")
    if saved is None or call.tensors[saved].numel():
        ways.append((_channels(call, grad_out=1), (1, 0, 0)))
    else:
        ways.append((call.letters(grad_out=1, input=1, weight=0, running_mean=0, running_var=0), (1, 0, 0)))
    return decide(call, ways)


def _weight_norm(call: OperatorCall) -> ShardingDecision:
    """The rule that splits the dim whose norms are kept, which are computed over all other dims."""
    dim = call.dim()
    return decide(call, [((dim,) * len(call.tensors), (dim,) * len(call.outputs))])


RULES = {
    **dict.fromkeys(("_weight_norm_interface", "_weight_norm_interface_backward"), _weight_norm),
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _layer_norm),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _layer_norm_backward),
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
}
