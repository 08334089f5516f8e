"""Checks that code which runs on copies of a model does not change the model itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from shardwright.errors import PlanError


@contextmanager
def left_untouched(model: nn.Module, *, replaced_only: bool = False) -> Iterator[None]:
    """Returns a context in which copies of a model run; at its end it is an error if the model itself was written to.

    With ``replaced_only``, copies may share the model's memory: it is an error only if tensors or gradients of the
    model were replaced.

    Code in a copy can write to the model if it reaches a module by a global name, or by a list in which a class keeps
    all of its instances. Buffers that were replaced are put back. If the code raised an error of its own, that error is
    the cause of the PlanError.

    Raises: PlanError: a parameter or a buffer of ``model`` has changed, or a parameter has got a gradient.

    >>> layer = nn.Linear(2, 2)
    >>> with left_untouched(layer):
    ...     layer(layer.weight.detach()).sum().backward()
    Traceback (most recent call last):
    shardwright.errors.PlanError: code in a copy of the model has used the model itself: 'weight' has changed
      ...
    """
    before = _marks(model, replaced_only)
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        yield
    except Exception as failure:
        _check(model, before, _marks(model, replaced_only), buffers, failure)
        raise
    _check(model, before, _marks(model, replaced_only), buffers, None)


def _marks(model: nn.Module, replaced_only: bool) -> dict[str, tuple[int, ...]]:
    """Returns ids and version counters of a model's tensors and gradients, which change if code trains the model."""
    tensors = [(name, tensor) for named in (model.named_parameters, model.named_buffers) for name, tensor in named()]
    pairs = ((name, (tensor, *([] if tensor.grad is None else [tensor.grad]))) for name, tensor in tensors)
    return {n: tuple(x for t in pair for x in (id(t), 0 if replaced_only or t.is_inference() else t._version))
            for n, pair in pairs}  # fmt: skip


def _check(
    model: nn.Module, before: Mapping[str, tuple[int, ...]], after: Mapping[str, tuple[int, ...]],
    buffers: list[tuple[nn.Module, dict[str, Tensor | None]]], failure: Exception | None,
) -> None:  # fmt: skip
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if not changed:
        return
    for module, own in buffers:
        module._buffers.update(own)
    raise PlanError(
        f"code in a copy of the model has used the model itself: '{changed[0]}' has changed",
        given=f"{len(changed)} parameters or buffers that a forward or a step wrote to, or gave a gradient",
        allowed="models whose copies are models of their own",
        fix="reach modules and tensors by attributes of modules, in a loop over self.modules() to reset them all, and "
        "not by global names or a list that a class keeps",
    ) from failure
