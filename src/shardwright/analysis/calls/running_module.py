"""Follows which module's code is running, during a forward and its backward.

A forward enters and leaves modules. A backward runs autograd nodes: each belongs to the module that was running when
the node was made. The nodes that a module has made are those that lead to its outputs and belong to no module yet.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves


@contextmanager
def following_modules(model: nn.Module, tell: Callable[[str], None]) -> Iterator[None]:
    """Returns a context in which ``tell`` is called with the path of the module whose code runs, when it changes.

    The model itself has the path "", as has code outside of it. A module whose ``forward`` is called directly is part
    of its caller. The nodes of the backward are kept until the context ends.

    >>> import torch
    >>> model, paths = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []
    >>> with following_modules(model, paths.append):
    ...     output = model(torch.ones(1, 2))
    ...     paths.append("backward")
    ...     output.sum().backward()
    >>> paths
    ['0', '', '1', '', 'backward', '1', '0', '']
    """
    running, outer, known = "", list[str](), set[Node]()

    def runs(path: str) -> None:
        nonlocal running
        if path != running:
            running = path
            tell(path)

    def claim(values: Any) -> None:
        """Assigns the autograd nodes that lead to ``values`` and belong to no module yet to the running module."""
        path, nodes = running, [leaf.grad_fn for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in known:
                known.add(node)
                node.register_prehook(lambda _: runs(path))
                nodes += [next_node for next_node, _ in node.next_functions]

    def entering(path: str) -> Callable[[nn.Module, Sequence[Any], dict[str, Any]], None]:
        def enter(_: nn.Module, args: Sequence[Any], named: dict[str, Any]) -> None:
            claim((args, named))
            outer.append(running)
            runs(path)

        return enter

    def leave(_: nn.Module, args: Sequence[Any], output: Any) -> None:
        claim(output)
        runs(outer.pop())

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(entering(path), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield
        runs("")
