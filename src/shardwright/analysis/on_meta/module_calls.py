"""Records the input and output shapes of every module call in one forward of the unsharded model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from shardwright.analysis.calls.autograd_graph import nodes_behind
from shardwright.analysis.calls.reentrant_checkpoints import without_reentry
from shardwright.analysis.calls.scripted_functions import see_scripted_functions
from shardwright.analysis.objects.marked_inputs import is_wrapped, unmarked
from shardwright.analysis.on_meta.meta_device import on_meta


class AttentionCall(NamedTuple):
    """The sizes of the tensors in one call of ``nn.MultiheadAttention``, in elements per sample.

    ``inputs`` has, for each distinct input, its number of tokens, its number of features, and whether it needs a
    gradient. ``padding`` is the size of the key padding mask, ``mask`` that of an attention mask for each sample, and
    ``shared_mask`` that of an attention mask for all samples if it needs a gradient. ``weights`` is the size of the
    returned attention weights, and ``scores`` that of one head's scores. The size of a tensor that the call does not
    have is 0. A field that ends in ``_learns`` or ``_learn`` says whether that tensor needs a gradient.
    """

    num_samples: int
    inputs: tuple[tuple[int, int, bool], ...]
    padding: int = 0
    padding_learns: bool = False
    mask: int = 0
    mask_learns: bool = False
    shared_mask: int = 0
    weights: int = 0
    weights_learn: bool = False
    scores: int = 0
    scores_learn: bool = False

    def shape(self, width: int) -> tuple[int, int, int]:
        """Returns the shape of the queries and of the output: (samples, tokens, ``width``)."""
        return self.num_samples, self.inputs[0][0], width


def attention_call(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> AttentionCall:
    """Returns the tensor sizes of one call of an ``nn.MultiheadAttention`` with these arguments.

    ``weights_learn`` is False, because the call alone does not show whether the returned weights are used.

    >>> attention, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.zeros(3, 5, 4)
    >>> call = attention_call(attention, x, x, x)
    >>> call.num_samples, call.inputs, call.weights, call.scores
    (3, ((5, 4, False),), 25, 25)
    """
    batched = query.dim() == 3
    tokens = int(module.batch_first and batched)
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None  # torch then ignores the mask in favor of the hint
    inputs = {id(x): (x.shape[tokens], x.shape[-1], x.requires_grad) for x in (query, key, value)}
    num_scores = query.shape[tokens] * key.shape[tokens]
    by_sample = attn_mask is not None and attn_mask.dim() == 3
    learns = attn_mask is not None and attn_mask.requires_grad
    padding_learns = key_padding_mask is not None and key_padding_mask.requires_grad
    heads = 1 if average_attn_weights else module.num_heads
    return AttentionCall(
        query.shape[1 - tokens] if batched else 1,
        tuple(inputs.values()),
        padding=key.shape[tokens] if key_padding_mask is not None else 0,
        padding_learns=padding_learns,
        mask=module.num_heads * num_scores if by_sample else 0,
        mask_learns=learns,
        shared_mask=num_scores if learns and not by_sample else 0,
        weights=heads * num_scores if need_weights else 0,
        scores=num_scores,
        scores_learn=learns or padding_learns or query.requires_grad or key.requires_grad,
    )


def leads_to(value: Tensor, results: Any) -> bool:
    """Returns whether a backward from the tensors in ``results`` would pass through the activation ``value``.

    >>> one = torch.ones(1, requires_grad=True) * 2
    >>> leads_to(one, {"sum": one + 1}), leads_to(one, one.detach())
    (True, False)
    """
    return value.grad_fn in nodes_behind(leaf for leaf in tree_flatten(results)[0] if isinstance(leaf, Tensor))


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: the shapes of its first input (``x_shape``) and of its output (``y_shape``).

    ``element_bytes`` is the output's bytes per element, and ``needs_gradient`` says whether the input needs a gradient.
    For an ``nn.MultiheadAttention`` and its output projection, both shapes are (samples, tokens, width) even without
    ``batch_first``, and ``needs_gradient`` says whether the output needs one. ``call`` has the sizes of the attention's
    tensors; it is None for other modules. ``num_forwards`` is 2 if activation checkpointing recomputes the call in the
    backward.
    """

    x_shape: tuple[int, ...]
    y_shape: tuple[int, ...]
    element_bytes: int
    needs_gradient: bool
    call: AttentionCall | None = field(default=None, repr=False)
    num_forwards: int = field(default=1, repr=False)


ModuleCalls = Mapping[str, tuple[ModuleCall, ...]]
"""The calls of each module in one forward, by module name."""


_OWN_CODE = ("torch.nn.", "shardwright.models.")


def may_read_values(model: nn.Module) -> bool:
    """Returns whether code of a model may read values of tensors, such as masks.

    Torch's modules other than its attention read none, and neither do the modules of ``shardwright.models``.
    """
    return any(
        not type(m).__module__.startswith(_OWN_CODE) or isinstance(m, nn.MultiheadAttention) for m in model.modules()
    )


def record_module_calls(model: nn.Module, inputs: Any) -> ModuleCalls:
    """Runs one forward and returns the calls of every module, by module name.

    If the model and ``inputs`` are on the meta device, the forward computes no values. A condition on values, such as
    whether a mask is all ones, is then taken as true, or as false if the code raises an error otherwise. A call is left
    out if it takes no tensor or returns anything but one tensor, unless the module is an ``nn.MultiheadAttention``. The
    output projection of ``nn.MultiheadAttention``, which torch uses without calling it, is listed as called.

    >>> model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2)).to("meta")
    >>> module_calls = record_module_calls(model, torch.empty(5, 2, device="meta"))
    >>> module_calls["1"]
    (ModuleCall(x_shape=(5, 8), y_shape=(5, 2), element_bytes=4, needs_gradient=True),)
    """
    calls: defaultdict[str, list[ModuleCall]] = defaultdict(list)
    weights: list[tuple[str, int, Tensor]] = []

    def record(path: str, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if isinstance(module, nn.MultiheadAttention):  # returns a pair, and uses out_proj's weight without a call
            call = attention_call(module, *args, **named)
            shape, learns = call.shape(module.embed_dim), output[0].requires_grad
            if output[1] is not None:
                weights.append((path, len(calls[path]), output[1]))
            outer = ModuleCall(shape, shape, output[0].element_size(), learns, call)
            calls[path].append(outer)
            calls[f"{path}.out_proj".lstrip(".")].append(replace(outer, call=None))
            return
        x = next((a for a in (*args, *named.values()) if isinstance(a, Tensor)), None)
        if x is not None and isinstance(output, Tensor):
            y_shape = tuple(output.shape)
            calls[path].append(ModuleCall(tuple(x.shape), y_shape, output.element_size(), x.requires_grad))

    handles = [
        module.register_forward_hook(partial(record, path), with_kwargs=True) for path, module in model.named_modules()
    ]
    # each way is (whether values are kept, the guess for conditions); masks of long sequences take megabytes in each
    # layer, so values are kept first only if code may read them
    ways = [(True, True), (True, False)] if may_read_values(model) else [(False, True), (True, True), (True, False)]
    try:
        for values, guess in ways:
            try:
                with torch.enable_grad(), on_meta(model, values=values, guess=guess):
                    result = call_model(model, inputs)
                break
            except Exception:  # the model's code may raise any error after a wrong guess
                if (values, guess) == ways[-1]:
                    raise
                calls.clear()
                weights.clear()
    finally:
        for handle in handles:
            handle.remove()
    for path, number, tensor in weights:  # whether returned weights are used shows only after the whole forward
        attention = calls[path][number]
        assert attention.call is not None, "an attention was called"
        call = attention.call._replace(weights_learn=leads_to(tensor, result))
        calls[path][number] = replace(attention, call=call)
    return {path: tuple(module_calls) for path, module_calls in calls.items()}


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Calls a model with a batch's inputs and returns its output; reentrant checkpoints run without reentry.

    The inputs are one value, a tuple or list of arguments, or a dict of named arguments. For checkpoints see
    ``analysis/calls/reentrant_checkpoints.py``; :func:`call_plainly` leaves them as they are. From the first call on,
    functions of ``torch.jit.script`` run as ``analysis/calls/scripted_functions.py`` says.

    >>> call_model(nn.Identity(), (torch.ones(1),))
    tensor([1.])
    """
    see_scripted_functions()
    with without_reentry():
        return call_plainly(model, inputs)


def call_plainly(model: nn.Module, inputs: Any) -> Any:
    """Calls a model with a batch's inputs as plain torch does, and returns its output."""
    args, named = given_to(inputs)
    return model(*args, **named)


def given_to(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Splits a batch's inputs into positional and named arguments, as :func:`call_model` passes them to the model.

    Marks are replaced by the tensors and lists that they mark. Dicts and lists inside are copies, because code may pop
    entries from them, and a batch is passed to several calls.

    >>> given_to(1), given_to([1, 2]), given_to({"x": 3})
    (((1,), {}), ((1, 2), {}), ((), {'x': 3}))
    """
    inputs = (unmarked(inputs),) if is_wrapped(inputs) else unmarked(inputs)
    if isinstance(inputs, Mapping):
        return (), {name: _with_own_containers(value) for name, value in inputs.items()}
    return tuple(map(_with_own_containers, inputs if isinstance(inputs, tuple | list) else (inputs,))), {}


def _with_own_containers(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _with_own_containers(entry) for key, entry in value.items()}
    return kind(map(_with_own_containers, value)) if kind is list or kind is tuple else value
