"""Finds parameters that a loss reads beside the model's output, as a penalty over the weights does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.axes import mesh_axes
from shardwright.errors import PlanError
from shardwright.plan.plan import Plan


def now_in_graph() -> int:
    """Returns autograd's sequence number now: nodes that this thread makes later have larger ones."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).neg().grad_fn
    assert node is not None, "gradients are enabled"
    return node._sequence_nr()


def leaves_read(loss_sum: Tensor, output: Any, since: int) -> list[Tensor]:
    """Returns the leaf tensors, other than the model's output, that a loss has read itself.

    ``since`` is the result of :func:`now_in_graph` before the loss was computed. Autograd nodes that are older, such as
    those of the output, or of a term that a module has kept for the loss, are not followed to their leaves.

    >>> weight, output = nn.Parameter(torch.ones(1)), nn.Linear(1, 1)(torch.ones(1, 1))
    >>> kept, since = weight.exp(), now_in_graph()
    >>> loss_sum = output.sum() + kept.sum()
    >>> len(leaves_read(loss_sum, output, since)), len(leaves_read(loss_sum + weight.abs().sum(), output, since))
    (0, 1)
    """
    outputs = {id(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
    waiting, seen, leaves = [loss_sum.grad_fn], set[Any](), list[Tensor]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # only the nodes of leaf tensors have it
        if isinstance(variable, Tensor):
            leaves += [variable] if id(variable) not in outputs else []
        elif node._sequence_nr() > since:
            waiting += [following for following, _ in node.next_functions]
    return leaves


class ParametersRead(TorchDispatchMode):
    """A dispatch mode that collects, in ``leaves``, the parameters requiring gradients whose values a loss reads.

    Those that it reads after ``detach()`` count too: ``model.head.weight.detach().norm()`` passes the weight no
    gradient, but depends on its values. Parameters in the model's ``output`` are left out.

    >>> weight, output = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    >>> with ParametersRead(output) as used:
    ...     _ = weight.detach() * output
    >>> used.leaves == [weight]
    True
    """

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.leaves: list[Tensor] = []
        self._outputs = {id(leaf) for leaf in tree_leaves(output)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        parameters = [x for x in tree_leaves((args, kwargs)) if isinstance(x, nn.Parameter) and x.requires_grad]
        self.leaves += [parameter for parameter in parameters if id(parameter) not in self._outputs]
        return func(*args, **(kwargs or {}))


def check_reads(
    leaves: Collection[Tensor], model: nn.Module, stored: Mapping[str, Tensor], is_plain: Callable[[Tensor], bool],
    plan: Plan,
) -> None:  # fmt: skip
    """Raises PlanError if a loss reads other parameters than it would read on one device.

    ``leaves`` are the tensors that the loss reads beside the output. Errors are: a tensor of the plain model
    (``is_plain``), which no step trains; and a parameter of the run's ``model``, or a ``stored`` one, unless each rank
    computes with the whole parameter and trains it.
    """
    computing = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {id(parameter): name for name, parameter in stored.items()} | computing
    for leaf in leaves:
        name = own.get(id(leaf))
        if name is None and not is_plain(leaf):
            continue  # a tensor of neither model, such as a teacher's parameter that was not frozen
        if name is not None and id(leaf) in computing and _is_whole(name, plan):
            continue
        raise PlanError(
            "the loss reads parameters beside the model's output, which gives another gradient than on one device",
            given=f"a parameter of the plain model, which no step of the run trains, under {plan.layout}"
            if name is None
            else f"the parameter '{name}', of which ranks hold parts, or which one stage has, under {plan.layout}",
            allowed="penalties that the model returns as a part of its output; the optimizer's weight_decay",
            fix="compute the penalty in the model's forward, from its own parameters, and return it with the output",
        )


def _is_whole(name: str, plan: Plan) -> bool:
    """Returns whether each rank computes with the whole parameter, and trains that one itself."""
    cut = {*plan.compute[name].axes} - {*mesh_axes("copies")}
    is_stored = plan.state[name].parameter == plan.compute[name]
    return plan.stages is None and not cut and is_stored and plan.stored_dtypes[name] == plan.compute_dtypes[name]
