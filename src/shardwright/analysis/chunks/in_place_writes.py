"""Makes in-place writes explicit in a traced graph, so that code on another pipeline stage reads the written tensor.

A traced graph shows ``y.add_(1)`` as a call whose result is not used. :func:`follow_writes` changes later readers of
``y`` to read the result of that call, so that a cut between the two sends the written tensor. The model's inputs are
cloned before a write, because every chunk has them and must not see another chunk's writes.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx, nn

from shardwright.errors import LayoutError

VIEWS = frozenset((
    "T", "chunk", "detach", "diagonal", "expand", "expand_as", "flatten", "getitem", "mT", "movedim", "narrow",
    "permute", "reshape", "select", "split", "squeeze", "swapaxes", "t", "transpose", "unbind", "unflatten",
    "unsqueeze", "view", "view_as",
))  # fmt: skip
"""Names of functions and methods whose result may share memory with their first argument."""
OPERATORS = frozenset((
    "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub", "itruediv",
    "ixor",
))  # fmt: skip
"""The functions of ``operator`` that write into their first argument; there, a ``_`` at the end of a name, as in
``and_``, does not mean a write."""
MARKS = frozenset(("requires_grad_", "share_memory_"))
"""Methods of tensors whose names end in ``_`` although they change no value."""


def put(tensor: Tensor, place: Any, value: Any) -> Tensor:
    """Writes ``value`` to ``tensor[place]`` and returns ``tensor``, for fx graphs, in which a write is an expression.

    >>> import torch
    >>> put(torch.zeros(2), 1, 3.0)
    tensor([0., 3.])
    """
    tensor[place] = value
    return tensor


def name_of(node: fx.Node) -> str:
    """Returns the bare name of the function or method that a node calls, or an empty string for other nodes."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def written_by(node: fx.Node, model: nn.Module) -> fx.Node | None:
    """Returns the node into whose value ``node`` writes in place, or None if ``node`` writes to no argument.

    A node writes if its function or method has a name such as ``add_`` or ``iadd``, if it calls :func:`put`, or if its
    function or module has ``inplace=True``. It writes to its first argument.
    """
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    in_place = _writes_by_name(node)
    if node.op == "call_module":
        in_place = getattr(model.get_submodule(str(node.target)), "inplace", False) is True
    return first if in_place else None


def writes_first(node: fx.Node) -> bool:
    """Returns whether a node calls a function or method that writes into its first argument."""
    return _writes_by_name(node) or node.target is operator.setitem


def _writes_by_name(node: fx.Node) -> bool:
    name = name_of(node)
    if getattr(node.target, "__module__", "") == operator.add.__module__:
        return name in OPERATORS
    in_place = name.endswith("_") and not name.endswith("__") and name not in MARKS
    return in_place or node.target is put or (node.op == "call_function" and node.kwargs.get("inplace") is True)


def follow_writes(graph: fx.Graph, model: nn.Module) -> None:
    """Changes an fx graph so that reads of a value after an in-place write to it use the result of the write.

    An input of the model is cloned before it is written to. Writes to parameters and buffers are left as they are. The
    graph is changed in place; ``x[i] = y`` becomes a call of :func:`put`.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is operator.setitem:
            node.target = put
        written = written_by(node, model)
        if written is None or written.op == "get_attr":
            continue
        if written.op == "placeholder":
            with graph.inserting_before(node):
                copy = graph.call_method("clone", (written,))
            _read_instead(copy, written, graph)
            written = copy
        _read_instead(node, written, graph)


def _read_instead(new: fx.Node, old: fx.Node, graph: fx.Graph) -> None:
    """Replaces ``old`` by ``new`` in all nodes after ``new``."""
    nodes = list(graph.nodes)
    later = set(nodes[nodes.index(new) + 1 :])
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user in later)


def check_writes(graph: fx.Graph, chunk_of: Any, model: nn.Module) -> None:
    """Raises LayoutError if one chunk writes to memory that another chunk then reads through another view of it.

    ``chunk_of`` maps each node to its pipeline chunk, or to None if every chunk computes the node. A write by a node
    that every chunk computes counts as a write by another chunk.
    """
    # maps a node to the node that allocated its memory, as far as the names of functions show views
    root: dict[fx.Node, fx.Node] = {}
    writes: list[tuple[fx.Node, fx.Node]] = []
    for node in graph.nodes:
        for read in node.all_input_nodes:
            for write, into in writes:
                elsewhere = chunk_of[node] != chunk_of[write] or chunk_of[write] is None
                if root[read] is root[into] and not _comes_from(read, write, root) and elsewhere:
                    raise LayoutError(
                        f"the code of {type(model).__name__} writes into a view of a value that other stages read",
                        given=f"{name_of(write) or write.target} on '{into.name}'",
                        allowed="writes into a value that is then read under its own name",
                        fix="write the result into a new tensor: y = y.relu() in place of y.relu_()",
                    )
        written = written_by(node, model)
        shares = name_of(node) in VIEWS or written is not None
        first = node.all_input_nodes[0] if node.all_input_nodes else None
        root[node] = root[first] if shares and first is not None else node
        if written is not None:
            writes.append((node, written))


def _comes_from(value: fx.Node, write: fx.Node, root: dict[fx.Node, fx.Node]) -> bool:
    """Whether a value is the result of ``write`` or a view of it."""
    while value is not write:
        inputs = value.all_input_nodes
        if not inputs or root[value] is value:
            return False
        value = inputs[0]
    return True
