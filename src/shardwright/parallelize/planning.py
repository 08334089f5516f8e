"""From a plain model and a layout to a plan: pure, on the meta device, equal on every rank."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.errors import GridError, LayoutError, explain
from shardwright.grid.overrides import overrides_of
from shardwright.layout import Layout
from shardwright.mesh import Coord
from shardwright.models.structure import Visit, Visits, observe
from shardwright.parallelize.advice import advised
from shardwright.parallelize.auto import settle
from shardwright.parallelize.rehearsal import crossings
from shardwright.pipeline import Samples, samples
from shardwright.pipeline.samples import microbatch_samples
from shardwright.product import forget_batches
from shardwright.strategies import choose
from shardwright.strategy import Batch, Job, Plan, Strategy, Traffic, check_table


def hollow(model: nn.Module) -> nn.Module:
    """A copy of the model's structure on the meta device: modules are new, no values are copied.

    >>> hollow(nn.Linear(2, 2)).weight.device.type
    'meta'
    """
    return _copied(model, lambda tensor: tensor.to("meta"))


def twin(model: nn.Module) -> nn.Module:
    """A copy of the model's structure that shares its values: changing its modules leaves the original alone.

    >>> model = nn.Linear(2, 2)
    >>> other = twin(model)
    >>> other is model, other.weight.data_ptr() == model.weight.data_ptr()
    (False, True)
    """
    return _copied(model, lambda tensor: tensor.detach())


def _copied(model: nn.Module, change: Any) -> nn.Module:
    memo: dict[int, Any] = {id(p): nn.Parameter(change(p), requires_grad=p.requires_grad) for p in model.parameters()}
    memo.update({id(b): change(b) for b in model.buffers()})
    return copy.deepcopy(model, memo)


def make_plan(
    job: Job, layout: Layout, strategies: Sequence[Strategy] | None = None
) -> tuple[Plan, tuple[Strategy, ...]]:
    """Every strategy of the layout refines the plan in turn.

    Raises: LayoutError: what cannot be laid out; no message has been sent by then.

    >>> plan, strategies = make_plan(Job(nn.Linear(2, 2), nn.Identity()), Layout.parse("dp2"))
    >>> plan.inputs, plan.mesh.size
    ({'dp': 0}, 2)
    """
    layout = settle(layout, lambda tried: make_plan(job, tried)[0])
    strategies = choose(layout) if strategies is None else tuple(strategies)
    whole = job._replace(model=hollow(job.model))
    if layout.num_microbatches > 1:
        for name, module in whole.model.named_modules():
            check_table(name, module, f"mb{layout.num_microbatches}", ["scale_grad_by_freq"])
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise LayoutError(
                    explain(
                        f"'{name}' computes statistics over the batch, which 'mb' cuts",
                        given=f"{type(module).__name__} under {layout}",
                        allowed="layers that treat each sample alone",
                        fix="use GroupNorm or LayerNorm, or leave out mb",
                    )
                )
    overrides_of(whole)  # names that the model does not have are refused under any layout
    plan = Plan.of(whole, layout)
    for strategy in strategies:
        try:
            plan = strategy.place(whole, plan)
        except GridError as error:
            raise advised(error, whole, layout) from None
    return plan, strategies


def example_of(inputs: Any, layout: Layout) -> Any:
    """One microbatch of one model copy, on the meta device, of a global batch's inputs; None stays None.

    >>> example_of(torch.zeros(8, 3), Layout.parse("dp2 mb2")).shape
    torch.Size([2, 3])
    """
    if inputs is None:
        return None
    data = layout.factor("dp")
    share = layout.num_microbatches * (data.size if data is not None else 1)
    return rows(tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs), 0, -(-num_rows(inputs) // share))


def local_samples(plan: Plan, coord: Coord, num_samples: int) -> range:
    """The places in the global batch of the samples that ``coord`` computes: nested balanced cuts of dim 0.

    >>> plan, _ = make_plan(Job(nn.Linear(2, 2), nn.Identity()), Layout.parse("dp2"))
    >>> local_samples(plan, {"dp": 1}, 5)
    range(3, 5)
    """
    return samples.local_samples(plan.mesh, plan.row_axes, coord, num_samples)


def rows(tree: Any, start: int, stop: int) -> Any:
    """Rows of every tensor of a batch: views."""
    return tree_map_only(Tensor, lambda tensor: tensor[start:stop], tree)


def num_rows(tree: Any) -> int:
    """How many samples a batch has.

    >>> num_rows((torch.zeros(3, 2), {"mask": torch.zeros(3)}))
    3
    """
    sizes: set[int] = set()
    tree_map_only(Tensor, lambda tensor: sizes.add(tensor.shape[0]), tree)
    if len(sizes) != 1:
        raise LayoutError(
            explain(
                "the tensors of a batch have different numbers of samples",
                given=sorted(sizes),
                allowed="one number in dim 0 of all",
                fix="give every tensor of the batch the samples in dim 0",
            )
        )
    return sizes.pop()


def expected_traffic(
    job: Job, plan: Plan, strategies: Sequence[Strategy], inputs: Any, coord: Coord
) -> dict[str, tuple[Traffic, ...]]:
    """What each strategy says that one step on this global batch sends from the rank at ``coord``."""
    whole = hollow(job.model)
    forget_batches(whole)
    on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs)
    num_global = num_rows(inputs)
    shares = microbatch_samples(local_samples(plan, coord, num_global), plan.layout.num_microbatches)
    visits = tuple(_on_stage(observe(whole, rows(on_meta, s.start, s.stop)), plan, coord) for s in shares)
    element_bytes = next(whole.parameters()).element_size()
    mine = [rows(on_meta, share.start, share.stop) for share in shares]
    apart = job._replace(model=hollow(job.model), loss=hollow(job.loss))
    crossing = crossings(apart, plan, strategies, mine, num_global, coord)
    batch = Batch(visits, element_bytes, in_hand(plan, coord, num_global), crossing)
    return {s.name: tuple(t for t in s.traffic(plan, batch, coord) if t.num_bytes) for s in strategies}


def _on_stage(visits: Visits, plan: Plan, coord: Coord) -> Visits:
    """The calls that this rank's chunks make, of all that the model makes."""
    if plan.stages is None or plan.schedule is None:
        return visits
    chunks = set(plan.schedule.chunks_of(coord["pp"]))
    sites: dict[str, list[bool]] = {}
    for node, chunk in plan.stages.chunked.nodes.items():
        if node.op == "call_module":
            sites.setdefault(str(node.target), []).append(chunk is None or chunk in chunks)
    found: dict[str, tuple[Visit, ...]] = {}
    for path, calls in visits.items():
        caller = next((p for p in sites if f"{path}.".startswith(f"{p}.")), None)
        if caller is not None:
            mine = sites[caller]
            each = len(calls) // len(mine)  # calls of a module inside, for each call of the one around it
            found[path] = tuple(call for i, call in enumerate(calls) if mine[min(i // max(each, 1), len(mine) - 1)])
    return found


def in_hand(plan: Plan, coord: Coord, num_global: int) -> tuple[Samples, ...]:
    """The samples of each microbatch of a global batch, as ``coord`` sees them."""
    found = tuple(Samples(plan.mesh, plan.row_axes, coord) for _ in range(plan.layout.num_microbatches))
    for number, each in enumerate(found):
        each.begin(num_global, number, len(found))
    return found


def numbers_per_sample(targets: Any) -> int:
    """How many targets a sample has: what a loss counts where none is ignored.

    >>> numbers_per_sample(torch.zeros(0, 5, 2)), numbers_per_sample({"class": torch.zeros(3)})
    (10, 1)
    """
    sizes: list[int] = []
    tree_map_only(Tensor, lambda tensor: sizes.append(prod(tensor.shape[1:])), targets)
    return sizes[0] if sizes else 1


def on_device(tree: Any, device: torch.device) -> Any:
    """A batch on the rank's device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)
