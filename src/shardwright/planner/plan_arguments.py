"""Checks the arguments of ``plan_layouts`` before anything is rehearsed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, get_args

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.axes import layout_axes
from shardwright.cost.cluster import Cluster
from shardwright.errors import LayoutError, PlanError, fix_for
from shardwright.layout import OWN, Layout, Precision
from shardwright.parallelize.auto import num_shares
from shardwright.parallelize.planning import num_rows
from shardwright.strategies import STRATEGIES


def check_kinds(model: Any, cluster: Any, fix: Any, without: Any) -> None:
    """Raises PlanError if an argument is of another type than ``plan_layouts`` takes.

    >>> check_kinds(nn.Linear(2, 2), "a100-80gb:1x2", "tp2", ["offload"])
    >>> check_kinds(nn.Linear, "a100-80gb:1x2", "", ())
    Traceback (most recent call last):
    shardwright.errors.PlanError: a plan is of a model
      given:   the class Linear
      allowed: a torch.nn.Module
      fix:     write Linear(...) with its arguments
    """
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type)
        raise PlanError(
            "a plan is of a model",
            given=f"the class {model.__name__}" if is_class else f"{type(model).__name__}",
            allowed="a torch.nn.Module",
            fix=f"write {model.__name__}(...) with its arguments" if is_class else "give the model itself",
        )
    if not isinstance(cluster, Cluster | str):
        raise PlanError(
            "a plan is for a cluster",
            given=repr(cluster),
            allowed="text such as 'a100-80gb:128x8', the name of a TOML file, or a Cluster",
            fix="write plan_layouts(model, 'a100-80gb:1x8', batch)",
        )
    if not isinstance(fix, str):
        raise PlanError(
            "fix is the parts of a layout line that must hold",
            given=repr(fix),
            allowed="text",
            fix="write fix='tp8 dp/zero1', or leave it out",
        )
    if isinstance(without, str):
        raise PlanError(
            "without is a list of words",
            given=repr(without),
            allowed="axes and options, such as ['zb-v', 'offload']",
            fix=f"write without={without.replace(',', ' ').split()}",
        )


def check_numbers(memory_limit: float, tokens: int, most_priced: int, top: int) -> None:
    """Raises PlanError for a ``memory_limit`` outside of 0 to 1, and for numbers of tokens or layouts that are too low.

    >>> check_numbers(0.92, 0, 4, 10)
    >>> check_numbers(92, 0, 4, 10)
    Traceback (most recent call last):
    shardwright.errors.PlanError: memory_limit is a share of the device's memory
      given:   92
      allowed: from 0 to 1
      fix:     write memory_limit=0.92
    """
    if not 0 <= memory_limit <= 1:
        raise PlanError(
            "memory_limit is a share of the device's memory",
            given=memory_limit,
            allowed="from 0 to 1",
            fix=f"write memory_limit={memory_limit / 100:g}"
            if 10 <= memory_limit <= 100
            else "write memory_limit=0.92",
        )
    for name, value, least in (("tokens", tokens, 0), ("most_priced", most_priced, 1), ("top", top, 1)):
        if not value >= least:
            raise PlanError(
                f"{name} is a number of {'tokens of the batch' if name == 'tokens' else 'layouts'}",
                given=value,
                allowed=f"{least} or more",
                fix=f"write {name}={least}, or leave it out",
            )


def check_batch(batch: tuple[Any, Any]) -> int:
    """Returns the number of samples of a batch of inputs and targets.

    Raises: LayoutError: its inputs have no tensor, it has no sample, or its tensors have different numbers of samples.

    >>> import torch
    >>> check_batch((torch.ones(4, 8), torch.ones(4)))
    4
    """
    inputs = [leaf for leaf in tree_leaves(batch[0]) if isinstance(leaf, Tensor)]
    number = num_rows(batch) if inputs else 0
    if not number:
        raise LayoutError(
            "a plan is for a batch with samples",
            given="a batch of no sample" if inputs else "inputs without a tensor",
            allowed="tensors with the samples in dim 0, of which only shapes and dtypes matter",
            fix="write plan_layouts(model, cluster, (torch.zeros(64, ...), targets))",
        )
    return number


def check_words(layout: Layout | None, fix: str, without: Sequence[str]) -> None:
    """Raises PlanError for unknown names in ``fix`` or ``without``, and if one of them is given beside a ``layout``."""
    if layout is not None and (fix or without):
        raise PlanError(
            "a layout that is given is not searched",
            given=f"{layout}, fix '{fix}', without '{','.join(without)}'",
            allowed="a layout, or parts that must hold and words to leave out",
            fix="leave out --fix and --without",
        )
    names = {
        *layout_axes(),
        *(name for strategy in STRATEGIES.values() for name in strategy.options),
        "recompute",
        "mb",
    }
    precisions = get_args(Precision)
    fixed = [part.partition(":")[0] for word in fix.split() for part in word.split("/")]
    parts = {*names, *precisions, "compile", "single", OWN}
    strange = next((head for head in fixed if not _is_known(head, parts)), None)
    if strange is not None:
        raise PlanError(
            "no axis, option or precision of --fix has this name",
            given=strange,
            allowed=", ".join(sorted(parts)),
            fix=fix_for(strange, sorted(parts)),
        )
    for word in without:
        head = word.partition(":")[0]
        if not _is_known(head, names):
            other = next(precision for precision in precisions if precision != word)
            raise PlanError(
                "no axis and no option has this name",
                given=word,
                allowed=", ".join(sorted(names)),
                fix=fix_for(head, sorted(names))
                if word not in precisions
                else f"write --fix {other}: a search is in one precision",
            )


def _is_known(word: str, known: Collection[str]) -> bool:
    """Returns whether a word of a layout line names an axis, perhaps with its sizes, or an option."""
    return word in known or word.rstrip("0123456789x") in known


def check_ranks(layout: Layout, cluster: Cluster) -> None:
    """Raises LayoutError if the layout is for another number of ranks than the cluster has."""
    if layout.num_ranks != cluster.num_ranks:
        raise LayoutError(
            "the cluster has another number of ranks than the layout",
            given=f"{layout}: {layout.num_ranks} ranks on {cluster}: {cluster.num_ranks}",
            allowed=f"layouts for {cluster.num_ranks} ranks",
            fix=f"write --cluster {cluster.with_ranks(layout.num_ranks)}",
        )


def check_samples(layout: Layout, batch: int) -> None:
    """Raises LayoutError for a batch with fewer samples than model copies times microbatches."""
    shares = num_shares(layout)
    if batch < shares:
        raise LayoutError(
            "the batch is smaller than the parts that it is cut into",
            given=f"{batch} samples under {layout}: {shares // layout.num_microbatches} model copies, "
            f"{layout.num_microbatches} microbatches each",
            allowed=f"{shares} samples or more, or fewer copies and microbatches",
            fix=f"write --batch {shares}",
        )
