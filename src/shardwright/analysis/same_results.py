"""Tells whether a model's traced calls compute what its own forward computes, by the operators that lead to its output.

A tracer runs code on proxies, of which ``x is None``, ``hasattr(x, "mask")`` or ``type(x) is Tensor`` are not what they
are of values, so that another branch may be traced without an error. Both the traced calls and the forward are run on
the meta device here, and each tensor of the forward's output must be a result of the same operators on the same tensors
among those of the traced calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.analysis.arguments import bind
from shardwright.analysis.batch_norms import ignoring_batch_statistics
from shardwright.analysis.call_graph import ChunkedModel, prepare, run, sites
from shardwright.analysis.copying import copied
from shardwright.analysis.device_moves import OnMeta
from shardwright.analysis.draws import draws_as_known
from shardwright.analysis.kept_attributes import changed_attributes, kept_attributes
from shardwright.analysis.meta_device import on_meta
from shardwright.analysis.module_calls import call_model, may_read_values
from shardwright.analysis.operator_results import leaves_of, tensors_of
from shardwright.analysis.structure import is_inside
from shardwright.analysis.tracer import line_of
from shardwright.dispatch_mode import DispatchMode, without_dispatch_modes
from shardwright.formatting import first_line

_COPIES = frozenset(("aten::clone", "aten::contiguous", "aten::_to_copy", "aten::lift_fresh", "aten::lift_fresh_copy"))
"""Operators whose result is their first operand."""

MOST_COMPARED = 1024
"""The most elements of a constant on the CPU by whose values it is known."""


def unlike_code(model: nn.Module, chunked: ChunkedModel, inputs: Any) -> str:
    """Returns how the traced calls of a model, in their chunks, compute something else than its forward; "" if not.

    They do if an output of the forward is none of their results, or if a module that several chunks call keeps
    something from one call for another. ``inputs`` are a batch's, and may be on the meta device. A model of torch's and
    this library's layers alone, and one whose forward does not run on the meta device, are not looked at.

    >>> from shardwright.analysis.call_graph import CallSite, read_graph
    >>> class Shifted(nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(x) * 2 if hasattr(x, "shift") else super().forward(x)
    >>> model = nn.Sequential(Shifted(3, 3), nn.ReLU()).to("meta")
    >>> unlike_code(model, ChunkedModel(read_graph(model, ["0"]), {}, 1), torch.ones(2, 3))
    'the output of the forward is none of the results of the traced calls'
    >>> unlike_code(model, ChunkedModel(read_graph(model), {CallSite("0"): 0}, 1), torch.ones(2, 3))
    ''
    """
    if all(map(draws_as_known, model.modules())):
        return ""
    given = tree_map_only(Tensor, lambda each: each.to("meta"), inputs)
    own = _copy_of(model)
    before = kept_attributes(own)
    try:
        wanted, _ = _origins_of(own, lambda each: call_model(each, given))
    except Exception:  # of the user's own code, without values: other checks say so where it matters
        return ""
    whole = ChunkedModel(chunked.graph, {site: 0 for _, site in sites(chunked.graph) if site is not None}, 1)
    try:
        _, found = _origins_of(_copy_of(model), lambda each: run(prepare(each, whole, 0), bind(whole, given)))
    except Exception as failure:  # of the code, on a branch that it does not take itself
        return f"the traced calls raise {type(failure).__name__}: {first_line(failure)}{line_of(failure)}"
    if not wanted <= found:
        return "the output of the forward is none of the results of the traced calls"
    chunks: dict[str, set[int | None]] = {}
    for node, chunk in chunked.nodes.items():
        if node.op == "call_module":
            chunks.setdefault(str(node.target), set()).add(chunk)
    for path, name in changed_attributes(before, kept_attributes(own)):
        if any(len(several) > 1 and is_inside(path, called) for called, several in chunks.items()):
            return f"'{path}', which several chunks call, sets '{name}' in each call"
    return ""


def _copy_of(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose tensors are views of the model's, so that code may replace what they show."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    others = [*model.buffers(), *tensors_of([[*vars(each).values()] for each in model.modules()])]
    return copied(model, memo | {id(each): each.detach() for each in others})


def _origins_of(model: nn.Module, call: Callable[[nn.Module], Any]) -> tuple[set[int], set[int]]:
    """Returns the origins of the tensors that ``call(model)`` returns, and of all that it computes."""
    values, origins = may_read_values(model), _Origins()
    with torch.no_grad(), on_meta(model, values=values), OnMeta(), ignoring_batch_statistics(model), origins:
        output = call(model)
    return {origins.of(each) for each in tensors_of(output)}, origins.found


class _Origins(DispatchMode):
    """Gives each tensor a number that is equal for tensors that the same operators have made of the same tensors.

    The number of a storage changes where an operator writes into it; that of a tensor follows from its storage and its
    place there, so a view needs no operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_storage: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._draws = 0
        self.found: set[int] = set()

    def of(self, tensor: Tensor) -> int:
        """Returns the number of a tensor."""
        place = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()) if _has_storage(tensor) else ()
        return hash((self._storage(tensor), place, str(tensor.dtype)))

    def _storage(self, tensor: Tensor) -> int:
        if not _has_storage(tensor):
            return id(tensor)
        key = tensor.untyped_storage()._cdata
        if key not in self._of_storage:
            self._alive.append(tensor)  # so that its storage is that of no other tensor
            self._of_storage[key] = key if tensor.is_meta or tensor.numel() > MOST_COMPARED else _hash_of(tensor)
        return self._of_storage[key]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        given = tensors_of((args, named))
        before = {each.untyped_storage()._cdata for each in given if _has_storage(each)}
        if torch.Tag.nondeterministic_seeded in function.tags:
            self._draws += 1
        origin = hash((function._schema.name.rstrip("_"), self._draws, *self._arguments((args, named))))
        source = given[0] if given else None
        is_copy = source is not None and function._schema.name in _COPIES and _is_whole(source)
        copied_from = self._storage(source) if is_copy and source is not None else 0
        out = function(*args, **named)
        results = tensors_of(out)
        for number, each in enumerate(results):
            if not _has_storage(each):
                continue
            key = each.untyped_storage()._cdata
            if key not in before:
                self._alive.append(each)
                same = is_copy and source is not None and each.dtype == source.dtype
                self._of_storage[key] = copied_from if same else hash((origin, number))
        if function._schema.is_mutable:
            for each in _written(function._schema, args, named):
                place = tuple(each.shape), each.stride(), each.storage_offset()
                self._of_storage[each.untyped_storage()._cdata] = hash((self._storage(each), origin, place))
            results = [*results, *_written(function._schema, args, named)]
        self.found.update(map(self.of, results))
        return out

    def _arguments(self, tree: Any) -> list[object]:
        return [self.of(each) if isinstance(each, Tensor) else each for each in leaves_of(tree, _LEAVES)]


def _hash_of(constant: Tensor) -> int:
    with torch._C.DisableTorchFunction(), without_dispatch_modes():
        return hash((str(constant.dtype), *constant.detach().flatten().tolist()))


_LEAVES = (Tensor, nn.Parameter, int, float, bool, str, torch.dtype)


def _written(schema: Any, args: Any, named: Any) -> list[Tensor]:
    given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | dict(named)
    names = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return [leaf for name in names for leaf in tensors_of(given.get(name)) if _has_storage(leaf)]


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _is_whole(tensor: Tensor) -> bool:
    return _has_storage(tensor) and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
