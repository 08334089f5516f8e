"""Joins the model's outputs on the ranks' own samples to its output for all samples, as predictions return it.

Outputs are joined only if all of their tensors are known to be cut by samples, with dim 0 as long as the rank's
samples, and all other values are alike on all ranks. Ranks compare texts that describe their outputs before they send
any. If an output has something else, such as a table, a number or a cache, the caller lets every rank compute the
whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwright.comm.agreement import gather_json, tensor_digest
from shardwright.comm.autograd import cut_to_whole
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.parallelize.rank_check import some_elements
from shardwright.plan.batch_shard import BatchShard
from shardwright.plan.plan import OUTPUT, Plan
from shardwright.runtime.executor import Executor

_ALIKE = (bool, str, type(None))
"""The types of values that ranks may return unchanged. Numbers are left out, since they may count or sum samples."""


class OutputShare(NamedTuple):
    """What ranks compare before they join their outputs: the number of samples, and descriptions of the outputs.

    ``inputs`` are digests of all samples, ``tree`` is the structure of this rank's output, and ``leaves`` describe its
    leaves, with None for one that cannot be joined. ``values`` are digests of its tensors. All four are empty where
    every rank computes the whole.
    """

    num_samples: int
    inputs: Sequence[str] = ()
    tree: str = ""
    leaves: Sequence[str | None] = ()
    values: Sequence[str] = ()


def described(output: Any, num_held: int, inputs: Any = (), num_samples: int = 0) -> OutputShare:
    """Returns a summary of a rank's output, for ranks to compare: structure, shapes, and digests of some elements.

    It has digests of the inputs too. ``output`` is this rank's, for ``num_held`` samples, and ``inputs`` are those of
    all ``num_samples`` samples.
    """
    leaves, tree = tree_flatten(output)
    digests, values = ([tensor_digest(tensor) for tensor in some_elements(source)] for source in (inputs, leaves))
    return OutputShare(num_samples, digests, str(tree), [_described(leaf, num_held) for leaf in leaves], values)


def _described(leaf: Any, num_held: int) -> str | None:
    """Returns a text that is equal on ranks whose leaves can be joined; None if the leaf cannot be."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {list(leaf.shape[1:])}" if leaf.shape[0] == num_held else None
    return repr(leaf) if isinstance(leaf, _ALIKE) else None


def can_join(own: OutputShare, plan: Plan, everyone: Axis, num_held: Sequence[int]) -> bool | None:
    """Returns whether the ranks' outputs, each of its own samples, can be joined; None if that cannot be told yet.

    A tensor that does not hold samples, such as a table, may be as long as a rank's samples by chance. If ranks have
    different numbers of samples, its length shows that on one of them. Otherwise its values may: a table has the same
    on all ranks; but so may samples that are alike, and then the result is None. ``num_held`` are the numbers of
    samples of ranks with different samples; it is empty if all tensors are known to hold samples.

    All ranks call it, and get the same result. ``everyone`` is the axis of all ranks. Only ranks that differ on axes
    that cut samples are compared: others compute copies, which may differ by rounding.

    Traffic: a gather of text. Raises: PlanError, on every rank: ranks were given different inputs.
    """
    shares = [OutputShare(*fields) for fields in gather_json(everyone, own)]
    for group in plan.mesh.groups(plan.row_axes):
        _check_inputs({rank: shares[rank] for rank in group})
    moves = plan.row_moves.get(OUTPUT, ())
    cuts = [axis for axis in plan.row_axes if ("gather", axis) not in moves]
    groups = [[shares[rank] for rank in group] for group in plan.mesh.groups(cuts)]
    if any(None in share.leaves or share[2:4] != first[2:4] for first, *others in groups for share in (first, *others)):
        return False
    if len(set(num_held)) != 1 or not cuts:
        return True
    vary = (
        len(set(digests)) > 1 for group in groups for digests in zip(*(share.values for share in group), strict=True)
    )
    return True if all(vary) else None


def _check_inputs(shares: Mapping[int, OutputShare]) -> None:
    """Raises PlanError if these ranks have different numbers or digests of samples."""
    (first, wanted), *others = shares.items()
    for rank, share in others:
        if share[:2] != wanted[:2]:
            numbers = f"{wanted.num_samples} samples on rank {first}, {share.num_samples} on rank {rank}"
            raise PlanError(
                "ranks were given different inputs to predict",
                given=numbers + (", of other values" if share.num_samples == wanted.num_samples else ""),
                allowed="all samples, equal on every rank: each rank computes its share of them",
                fix="write run.predict(inputs) with the whole batch, from a loader that gives all ranks the same",
            )


def join_parts(output: Any, plan: Plan, axes: Mapping[str, Axis], shard: BatchShard) -> Any:
    """Returns the model's output for the samples that this rank has computed, with their whole features and tokens.

    A tensor without dims in the output depends on these samples alone, and becomes None.

    Traffic: one all-gather over each axis that cuts features or tokens.
    """
    output = tree_map_only(Tensor, lambda tensor: tensor if tensor.dim() else None, output)
    joined: list[str] = []
    for cut in reversed(plan.activations.get(OUTPUT, ())):  # the fastest axis first: its parts are neighbors
        output = axes[cut.axis].all_gather(output, cut.dim, _output_sizes(plan, shard, cut.axis, joined))
        joined.append(cut.axis)
    return shard.join(output, axes, plan.row_moves.get(OUTPUT, ())) if plan.token_axes else output


def join_by_hand(executor: Executor, plan: Plan, axes: Mapping[str, Axis], shard: BatchShard) -> None:
    """Registers a hook by which a user's own call of the model returns the whole output; in steps it stays cut.

    Traffic: in such a call, one all-gather over each axis that cuts features.
    """
    if not plan.activations.get(OUTPUT) or executor.refuses_calls:
        return
    held_by = ref(executor)  # Python cannot collect cycles through such a hook

    def whole(_: nn.Module, inputs: Any, output: Any) -> Any:
        executor, joined = held_by(), list[str]()
        if executor is None or executor.in_action:
            return output
        for cut in reversed(plan.activations[OUTPUT]):
            output = cut_to_whole(output, axes[cut.axis], cut.dim, _output_sizes(plan, shard, cut.axis, joined))
            joined.append(cut.axis)
        return output

    executor.model.register_forward_hook(whole, prepend=True)


def _output_sizes(plan: Plan, shard: BatchShard, axis: str, joined: Sequence[str]) -> list[int]:
    """Returns the size of the output's sharded dim on each rank along ``axis``, after all-gathers over ``joined``."""

    def held(index: int) -> int:
        coords = ({**shard.coord, axis: index, **other} for other in plan.mesh.coords(joined))
        return sum(b - a for at in coords for cut in plan.slices(at)[OUTPUT] for a, b in cut.ranges)

    return [held(index) for index in range(plan.mesh[axis])]
