"""Tells whether a model's traced calls compute what its own forward computes, by the operators that lead to its output.

A tracer runs code on proxies. ``x is None``, ``hasattr(x, "mask")`` or ``type(x) is Tensor`` may answer otherwise for a
proxy than for a tensor, so the trace may take another branch without an error. Here both the traced calls and the
forward run on the meta device. The tensors of both outputs must come from the same operators on the same tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.analysis.chunks.arguments import bind
from shardwright.analysis.chunks.call_graph import ChunkedModel, prepare, run, sites
from shardwright.analysis.objects.copying import copied
from shardwright.analysis.objects.own_attributes import own_attributes
from shardwright.analysis.on_meta.device_moves import OnMeta
from shardwright.analysis.on_meta.meta_device import on_meta
from shardwright.analysis.on_meta.module_calls import call_model, may_read_values
from shardwright.analysis.on_meta.operator_results import tensors_of
from shardwright.analysis.random_numbers.draws import draws_as_known
from shardwright.analysis.traced.batch_norms import ignoring_batch_statistics
from shardwright.analysis.traced.structure import is_known
from shardwright.analysis.traced.tracer import line_of
from shardwright.dispatch_mode import DispatchMode, without_dispatch_modes
from shardwright.formatting import first_line
from shardwright.operator_schemas import written_arguments

_COPIES = frozenset(("aten::clone", "aten::contiguous", "aten::_to_copy", "aten::lift_fresh", "aten::lift_fresh_copy"))
"""Operators that copy their first operand, and change at most its dtype or its strides."""

Origin = int
"""A number that is equal for two tensors if the same operators computed them from the same tensors."""


def difference_from_forward(model: nn.Module, chunked: ChunkedModel, inputs: Any) -> str:
    """Returns how the traced calls of a model, in their chunks, differ from its forward, as text; "" if they do not.

    They differ if other operators make the output, or if a module that several chunks call keeps something from one
    call for another. ``inputs`` are those of a batch, and may be on the meta device. Not checked, with the result "",
    are models made only of torch's and this library's layers, and models whose forward does not run on the meta device.

    >>> from shardwright.analysis.chunks.call_graph import CallSite, read_graph
    >>> class Shifted(nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(x) * 2 if hasattr(x, "shift") else super().forward(x)
    >>> model = nn.Sequential(Shifted(3, 3), nn.ReLU()).to("meta")
    >>> difference_from_forward(model, ChunkedModel(read_graph(model, ["0"]), {}, 1), torch.ones(2, 3))
    'the traced calls give another output than the forward'
    >>> difference_from_forward(model, ChunkedModel(read_graph(model), {CallSite("0"): 0}, 1), torch.ones(2, 3))
    ''
    """
    if all(map(draws_as_known, model.modules())):
        return ""
    whole = ChunkedModel(chunked.graph, {site: 0 for _, site in sites(chunked.graph) if site is not None}, 1)
    numbers: dict[object, Origin] = {}
    try:
        meta_inputs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs)
        forward_origins, values = _origins(model, partial(_run_forward, meta_inputs), meta_inputs, numbers)
    except Exception:  # the user's code does not run without values: other checks say so where that matters
        return ""
    try:
        traced = partial(_run_whole, whole, meta_inputs)
        traced_origins, _ = _origins(model, traced, meta_inputs, numbers, values=values)
    except Exception as failure:  # the traced branch raises, which the forward itself does not take
        return f"the traced calls raise {type(failure).__name__}: {first_line(failure)}{line_of(failure)}"
    if forward_origins != traced_origins:
        return "the traced calls give another output than the forward"
    in_chunks = partial(_run_chunks, chunked, meta_inputs)
    if chunked.num_chunks > 1 and _origins(model, in_chunks, meta_inputs, numbers, values=values)[0] != forward_origins:
        return "a stage writes in place into a tensor that it sends, or that another stage reads under another name"
    chunks: dict[str, set[int | None]] = {}
    for node, chunk in chunked.nodes.items():
        if node.op == "call_module":
            chunks.setdefault(str(node.target), set()).add(chunk)
    paths = [path for path, several in chunks.items() if len(several) > 1]
    kept = _keeping_state(model, meta_inputs, _of_own_code(model, paths), numbers, forward_origins, values=values)
    return f"a call of '{min(kept)}' in one chunk keeps something for its call in another" if kept else ""


def _run_forward(inputs: Any, model: nn.Module, _: _OperatorFollower) -> Any:
    return call_model(model, inputs)


def _run_whole(whole: ChunkedModel, inputs: Any, model: nn.Module, _: _OperatorFollower) -> Any:
    return run(prepare(model, whole, 0), bind(whole, inputs))


def _run_chunks(chunked: ChunkedModel, inputs: Any, model: nn.Module, follower: _OperatorFollower) -> Any:
    """Runs the chunks one after the other, each on copies of the inputs and of what earlier chunks send it."""
    sent: dict[tuple[int, int], dict[str, Any]] = {}
    output = None
    for chunk in range(chunked.num_chunks):
        values = bind(chunked, tree_map_only(Tensor, follower.copy_of, inputs))
        for (_, target), received in sent.items():
            if target == chunk:
                values.update(received)
        output = run(prepare(model, chunked, chunk), values)
        for edge in chunked.edges:
            if edge.source == chunk:
                crossing = {name: values[name] for name in edge.values}
                sent[chunk, edge.target] = tree_map_only(Tensor, follower.copy_of, crossing)
    return output


def modules_keeping_state(model: nn.Module, inputs: Any, paths: list[str]) -> dict[str, str]:
    """Returns the modules at ``paths`` whose calls depend on what an earlier call in the same forward left behind.

    A call can leave something behind in the module's attributes. To find such modules, the forward is run again so that
    each call of the module finds its attributes as they were before the forward. The module counts if the forward then
    gives another output, or raises. So a counter that no code reads does not count, nor a table that each call would
    compute alike. The value in the result is the name of an attribute that a call changes and that is a number or a
    text; it is "" if calls change only other attributes, such as tensors.

    >>> class Twice(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.mean, self.calls, self.layer = None, 0, nn.Linear(3, 3)
    ...     def forward(self, x):
    ...         self.calls += 1
    ...         x = self.layer(x) if self.mean is None else x + self.mean
    ...         self.mean = x.mean()
    ...         return x
    >>> model = nn.Sequential(twice := Twice(), nn.ReLU(), twice).to("meta")
    >>> modules_keeping_state(model, torch.ones(2, 3, device="meta"), ["0", "1"])
    {'0': 'calls'}
    """
    numbers: dict[object, Origin] = {}
    own_paths = _of_own_code(model, paths)
    try:
        origins, values = _origins(model, partial(_run_forward, inputs), inputs, numbers) if own_paths else ([], False)
    except Exception:  # of the user's own code, without values
        return {}
    return _keeping_state(model, inputs, own_paths, numbers, origins, values=values)


def _of_own_code(model: nn.Module, paths: list[str]) -> list[str]:
    """Returns the ``paths`` of modules that are, or contain, a module of a class of the user's own."""
    return [path for path in paths if not all(map(is_known, model.get_submodule(path).modules()))]


def _keeping_state(
    model: nn.Module, inputs: Any, paths: list[str], numbers: dict[object, Origin], wanted: list[Origin], *,
    values: bool,
) -> dict[str, str]:  # fmt: skip
    """Returns the result of :func:`modules_keeping_state`; ``wanted`` are the origins of the forward's outputs."""
    attributes: dict[str, str] = {}
    for path in paths:
        changed: list[str] = []
        try:
            alone, _ = _origins(model, partial(_call_isolated, path, inputs, changed), inputs, numbers, values=values)
        except Exception:  # a call lacks what an earlier call would have left behind
            alone = None
        if alone != wanted:
            attributes[path] = changed[0] if changed else ""
    return attributes


def _call_isolated(path: str, inputs: Any, changed: list[str], model: nn.Module, _: _OperatorFollower) -> Any:
    """Calls a model so that each call of the module at ``path`` finds the attributes that the module has now.

    The names of attributes that are numbers or texts, and that a call changes, are appended to ``changed``.
    """
    module = model.get_submodule(path)
    before = {submodule: {name: _shallow_copy(value) for name, value in own_attributes(submodule).items()}
              for submodule in module.modules()}  # fmt: skip

    def restore(*_: Any) -> None:
        for submodule, attributes in before.items():
            for name in own_attributes(submodule):
                delattr(submodule, name)
            vars(submodule).update({name: _shallow_copy(value) for name, value in attributes.items()})

    def compare(*_: Any) -> None:
        for submodule, attributes in before.items():
            now = own_attributes(submodule)
            plain = (name for name, value in now.items() if isinstance(value, bool | int | float | str))
            changed.extend(name for name in plain if name not in attributes or now[name] != attributes[name])

    module.register_forward_pre_hook(restore)
    module.register_forward_hook(compare)
    return call_model(model, inputs)


def _shallow_copy(value: Any) -> Any:
    """Returns a shallow copy of a container or of an object with attributes, and any other value itself."""
    is_container = isinstance(value, list | dict | set)
    is_plain = hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type) and not callable(value)
    return copy.copy(value) if is_container or is_plain else value


def _origins(
    model: nn.Module, call: Callable[[nn.Module, _OperatorFollower], Any], inputs: Any, numbers: dict[object, Origin],
    *, values: bool | None = None,
) -> tuple[list[Origin], bool]:  # fmt: skip
    """Returns the origins of the tensors that ``call`` returns for a copy of the model, and whether values were kept.

    ``numbers`` has the origins given so far. ``values`` says whether small constants have values, which code may read.
    If it is None, constants have values only if the call fails without them.
    """
    if values is None:
        try:
            return _origins(model, call, inputs, numbers, values=False)
        except Exception:  # the user's code may read values
            if not may_read_values(model):
                raise
            return _origins(model, call, inputs, numbers, values=True)
    own = _copy_of(model)
    follower = _OperatorFollower(numbers, [*own.parameters(), *own.buffers(), *tensors_of(inputs)])
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(on_meta(own, values=values))
        stack.enter_context(OnMeta())
        stack.enter_context(ignoring_batch_statistics(own))
        stack.enter_context(follower)
        output = call(own, follower)
    return [follower.of(tensor) for tensor in tensors_of(output)], values


def _copy_of(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose tensors are views of the model's, so that code may replace their ``.data``."""
    others = [*model.buffers(), *tensors_of([[*own_attributes(module).values()] for module in model.modules()])]
    memo: dict[int, Any] = {id(tensor): tensor.detach() for tensor in others}
    memo |= {
        id(parameter): nn.Parameter(parameter.detach(), parameter.requires_grad) for parameter in model.parameters()
    }
    return copied(model, memo)


class _OperatorFollower(DispatchMode):
    """Numbers tensors by the operators that have made them, and storages, whose numbers change with each write.

    The number of a tensor follows from its storage and its place there, so a view needs no operator. ``numbers`` maps
    what has been numbered so far to its number. ``leaves`` are the tensors that a forward starts from: parameters,
    buffers and inputs. A tensor that depends on no leaf and on no random number is a constant. A trace may hold the
    value of a constant where the forward runs the operators that make it, so all constants of the same shape and dtype
    get the same number.
    """

    def __init__(self, numbers: dict[object, Origin], leaves: list[Tensor]) -> None:
        super().__init__()
        self._numbers = numbers
        self._of_storage: dict[int, object] = {}
        self._alive: list[Tensor] = [*leaves]  # keeps storages alive, so that no other storage gets their address
        self._draws = 0
        for leaf in filter(_has_storage, leaves):
            key = leaf.untyped_storage()._cdata
            self._of_storage[key] = "leaf", key

    def of(self, tensor: Tensor) -> Origin:
        """Returns the origin of a tensor."""
        kind = tuple(tensor.shape), str(tensor.dtype)
        if not _has_storage(tensor):
            self._alive.append(tensor)
            return self._number(("leaf", id(tensor)))
        storage = self._storage(tensor)
        if storage == _CONSTANT:
            return self._number((_CONSTANT, kind))
        return self._number((storage, kind, tensor.stride(), tensor.storage_offset()))

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a tensor with a storage of its own, of the same origin: what another stage receives."""
        copy = tensor.clone()
        if _has_storage(tensor):
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            with without_dispatch_modes():
                copy.data = copy.detach().set_(tensor.untyped_storage().clone(), *place)
            self._of_storage[copy.untyped_storage()._cdata] = self._storage(tensor)
            self._alive.append(copy)
        return copy

    def _number(self, what: object) -> Origin:
        return self._numbers.setdefault(what, len(self._numbers))

    def _storage(self, tensor: Tensor) -> object:
        key = tensor.untyped_storage()._cdata
        if key not in self._of_storage:
            self._alive.append(tensor)
            self._of_storage[key] = _CONSTANT
        return self._of_storage[key]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, schema = kwargs or {}, function._schema
        operands = [operand for operand in tensors_of((args, named)) if _has_storage(operand)]
        before = {operand.untyped_storage()._cdata for operand in operands}
        draws = torch.Tag.nondeterministic_seeded in function.tags
        self._draws += draws
        is_constant = not draws and all(self._storage(operand) == _CONSTANT for operand in operands)
        parts = (*self._parts(args), *self._parts(named))
        made = self._number((schema.name.rstrip("_"), self._draws if draws else 0, parts))
        source = operands[0] if operands and schema.name in _COPIES and _is_whole(operands[0]) else None
        copied_from = None if source is None else self._storage(source)
        out = function(*args, **named)
        for number, tensor in enumerate(tensors_of(out)):
            key = tensor.untyped_storage()._cdata if _has_storage(tensor) else None
            if key is None or key in before:
                continue
            self._alive.append(tensor)
            is_same = source is not None and tensor.dtype == source.dtype
            self._of_storage[key] = copied_from if is_same else _CONSTANT if is_constant else ("made", made, number)
        for number, tensor in enumerate(written_arguments(function, args, named, Tensor)):
            if _has_storage(tensor) and not is_constant:
                self._write(tensor, ("made", made, number), args[1] if schema.name == "aten::copy_" else None)
        return out

    def _write(self, tensor: Tensor, value: object, source: Any) -> None:
        """Gives the storage of a tensor another number after an operator has written into the tensor.

        ``value`` stands for what the operator computed. If the operator copied from a tensor ``source`` of the same
        shape and dtype, the number follows from the number of ``source`` instead. If the operator wrote into the whole
        storage, the tensor gets the number that the operator's result would have without the write.
        """
        key, place = tensor.untyped_storage()._cdata, (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        is_alike = isinstance(source, Tensor) and (source.shape, source.dtype) == (tensor.shape, tensor.dtype)
        if is_alike and _has_storage(source):
            if (source.untyped_storage()._cdata, source.storage_offset()) == (key, tensor.storage_offset()):
                return  # a copy onto itself, with which `x[0] += 1` ends: the sum is in its place already
            value = self._storage(source) if _is_whole(source) else ("view", self.of(source))
        before = self._number(("storage", self._of_storage.get(key)))
        self._of_storage[key] = value if _is_whole(tensor) else ("written", value, place, before)

    def _parts(self, tree: Any) -> Iterator[object]:
        """Yields the arguments of an operator with their types, and in place of tensors their origins."""
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in items:
            if isinstance(value, Tensor):
                yield key, "tensor", self.of(value)
            elif isinstance(value, list | tuple):
                yield key, "list", tuple(self._parts(value))
            elif not isinstance(value, torch.device | torch.layout | torch.Generator):
                yield key, type(value).__name__, repr(value)


_CONSTANT = "constant"


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
