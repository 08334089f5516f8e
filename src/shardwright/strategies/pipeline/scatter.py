"""The option ``scatter``: ranks that hold a value alike each send a part of it, and all-gather the parts on arrival.

::

    pp2/1f1b/scatter tp2     stage 0, tp 0: x[0:4]  --> stage 1, tp 0: x[0:4] --\\
                             stage 0, tp 1: x[4:8]  --> stage 1, tp 1: x[4:8] --- all-gather over tp: x[0:8] on both

Between stages, often between nodes, each value then crosses once and not once for each rank. A value that tensor
parallelism cuts is sent as it lies: its parts cross once already. A value is whole if it has the shape that it would
have if no layer were cut, which a forward of the plain model on the meta device finds.

Source: Narayanan et al. 2021, arXiv:2104.04473, section 4.1 (scatter/gather optimization).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.analysis.chunks.arguments import bind
from shardwright.analysis.chunks.call_graph import ChunkedModel, prepare, run
from shardwright.analysis.objects.copying import copied
from shardwright.analysis.on_meta.meta_device import on_meta
from shardwright.analysis.on_meta.module_calls import may_read_values
from shardwright.errors import PlanError
from shardwright.formatting import first_line
from shardwright.mesh import balanced

WholeShapes = Mapping[str, tuple[torch.Size, ...]]
"""By the name of a value that chunks send each other, the shapes that its tensors have if no layer is cut."""


def part_sizes(num_elements: int, num_ranks: int) -> list[int]:
    """Returns how many of a tensor's elements each rank sends: a balanced division.

    >>> part_sizes(7, 3)
    [3, 2, 2]
    """
    return [stop - start for start, stop in pairwise(balanced(num_elements, num_ranks))]


def may_scatter(num_elements: int, num_ranks: int) -> bool:
    """Returns whether a whole tensor is large enough to be sent in parts: each rank has at least one element."""
    return num_elements >= num_ranks > 1


def whole_shapes(plain: nn.Module, chunked: ChunkedModel, inputs: Any) -> WholeShapes:
    """Returns the shapes of the tensors that chunks send each other if no layer is cut, by the names of the values.

    ``plain`` is the one-device model on the meta device, in the dtypes of computation, and ``chunked`` its traced
    calls. ``inputs`` are a rank's own, of which the batch is cut as the layout says.

    Raises: PlanError: the model does not run on the meta device.

    >>> from shardwright.analysis.chunks.call_graph import CallSite, read_graph
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU()).to("meta")
    >>> chunked = ChunkedModel(read_graph(model), {CallSite("0"): 0, CallSite("1"): 1}, 2)
    >>> whole_shapes(model, chunked, torch.ones(5, 2))
    {'_0': (torch.Size([5, 3]),)}
    """
    model = copied(plain, {}).eval()  # a BatchNorm in training refuses one sample
    meta_inputs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs)
    names = {value for edge in chunked.edges for value in edge.values}
    last = max((edge.source for edge in chunked.edges), default=-1)
    crossed: dict[str, Any] = {}
    try:
        with torch.no_grad(), on_meta(model, values=may_read_values(model)):
            for chunk in range(last + 1):
                values = {**bind(chunked, meta_inputs), **crossed}
                run(prepare(model, chunked, chunk), values)
                crossed.update({name: value for name, value in values.items() if name in names})
    except Exception as failure:  # of the user's own code, without values
        raise PlanError(
            "'scatter' cannot tell which values between stages are whole",
            given=f"{type(failure).__name__}: {first_line(failure)}",
            allowed="a model that runs on the meta device, where tensors have no values",
            fix="leave out scatter: each rank then sends what it holds",
        ) from failure
    return {
        name: tuple(leaf.shape for leaf in tree_leaves(crossed[name]) if isinstance(leaf, Tensor)) for name in names
    }
