"""Walks the graph that autograd has recorded: lists its nodes, and the parameters that a backward would reach."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def node_of(tensor: Tensor) -> Any:
    """Returns the node of autograd's graph that made a tensor, or None.

    None is also returned for a view that code made without gradients, as a function of its own does in its forward, and
    whose base it has changed with gradients since. Torch has no node for it, and raises if asked.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def nodes_behind(tensors: Iterable[Tensor]) -> list[Any]:
    """Returns every autograd node through which a backward of ``tensors`` would pass, each once.

    A tensor without a ``grad_fn``, such as a leaf, adds none.

    >>> import torch
    >>> x = torch.ones(1, requires_grad=True)
    >>> [node.name() for node in nodes_behind([(x * 2).exp()])]
    ['ExpBackward0', 'MulBackward0', 'torch::autograd::AccumulateGrad']
    """
    return nodes_from(tensor.grad_fn for tensor in tensors)


def nodes_from(starts: Iterable[Any]) -> list[Any]:
    """Returns every autograd node that ``starts`` lead to, themselves included, each once; None adds none.

    >>> import torch
    >>> y = torch.ones(1, requires_grad=True) * 2
    >>> [node.name() for node in nodes_from([y.grad_fn, None])]
    ['MulBackward0', 'torch::autograd::AccumulateGrad']
    """
    to_visit = [*starts]
    nodes: dict[Any, None] = {}
    while to_visit:
        node = to_visit.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            to_visit += [before for before, _ in node.next_functions]
    return list(nodes)


def leaves_behind(tensors: Iterable[Tensor]) -> set[int]:
    """Returns the ids of the leaf tensors, such as parameters, to which a backward of ``tensors`` would add a gradient.

    A leaf that is itself among ``tensors`` is not found, because its ``grad_fn`` is None.

    >>> import torch
    >>> x, y = (torch.ones(1, requires_grad=True) for _ in range(2))
    >>> leaves_behind([x * 2]) == {id(x)}
    True
    """
    return {id(node.variable) for node in nodes_behind(tensors) if hasattr(node, "variable")}
