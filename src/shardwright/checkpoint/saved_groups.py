"""Finds the saved options of an optimizer's param groups; refuses groups that divide the parameters differently."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.saving import optimizer_groups
from shardwright.errors import CheckpointError
from shardwright.parallelize.run import Run


def saved_options(run: Run, optimizer: torch.optim.Optimizer, manifest: Manifest) -> list[Mapping[str, Any]]:
    """Returns the saved options of each of the optimizer's param groups.

    Saved groups are found by the names of their parameters, not by their order, which depends on the pipeline stages
    that saved them: several saved groups with equal options may be one group here. A group without parameters on this
    rank gets the options of the saved group of its number if there are as many groups here as saved ones, else none.
    Parameters that were frozen get the options of the others of their group. Parameters of saved groups that are frozen
    here are left out.

    Raises: CheckpointError: a group has parameters that were saved with different options, or a parameter that was in
        no saved group though it was not frozen; parameters that were saved in one group are in groups of different
        options; or a parameter of a saved group is trained here, but is in no group.
    """
    held, saved = optimizer_groups(run, optimizer), manifest.groups
    place_of = {name: place for place, group in enumerate(saved) for name in group["parameters"]}
    stateful = {name.removeprefix("optimizer/").rpartition("/")[0] for name in manifest.tensors} | set(manifest.scalars)
    may_lack = stateful | set(manifest.frozen)
    group_options: list[Mapping[str, Any]] = []
    taken: dict[int, Mapping[str, Any]] = {}
    for number, group in enumerate(held):
        places = {place_of[name] for name in group["parameters"] if name in place_of}
        every = [saved[place]["options"] for place in sorted(places)]
        divided = any(options != every[0] for options in every[1:])
        new = [n for n in group["parameters"] if n in manifest.tensors and n not in place_of and n not in may_lack]
        if divided or new or any(taken.setdefault(place, group["options"]) != group["options"] for place in places):
            raise _divided(optimizer, saved, held, manifest)
        if not places and len(saved) == len(held):
            every = [saved[number]["options"]]
        group_options.append(every[0] if every else {})
    left_out = place_of.keys() - {name for group in held for name in group["parameters"]} - set(run.plan.frozen)
    if any(name in run.parameters for name in left_out):
        raise _divided(optimizer, saved, held, manifest)
    return group_options


def _divided(
    optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]], held: Sequence[Mapping[str, Any]],
    manifest: Manifest,
) -> CheckpointError:  # fmt: skip
    every = [json.loads(json.dumps(group["options"])) for group in (*saved, *held)]  # tuples are lists in a manifest
    keys = [key for key in every[0] if key != "initial_lr" and any(o.get(key) != every[0][key] for o in every)]
    dims = [{len(manifest.tensors[n][1]) > 1 for n in group["parameters"] if n in manifest.tensors} for group in saved]
    kind, example = type(optimizer).__name__, "{...}"
    if sorted(map(tuple, dims)) == [(False,), (True,)]:  # the usual rule, which can be written down
        matrices, others = (
            {k: saved[dims.index({is_one})]["options"].get(k) for k in keys} for is_one in (True, False)
        )
        common = {key for key in keys if matrices[key] == others[key]}
        matrices, others = ({k: v for k, v in options.items() if k not in common} for options in (matrices, others))
        example = f"{matrices} if len(shape) > 1 else {others}"
    return CheckpointError(
        "the checkpoint's optimizer divides the parameters into other groups",
        given=f"{_described(saved, keys)} in the checkpoint; {_described(held, keys)} in the optimizer",
        allowed="the groups that were saved, under any layout",
        fix=f"write run.optimizer(torch.optim.{kind}, ..., parameters=lambda name, shape: {example}), with the groups "
        "that were saved; or sw.load(path, run), for an optimizer that starts afresh",
    )


def _described(groups: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    """Returns the text "2 groups (9 parameters with lr 0.1, 3 with lr 0.2)"."""
    parts = [
        f"{len(group['parameters'])} {'' if number else 'parameters '}with "
        + ", ".join(f"{key} {group['options'].get(key)}" for key in keys[:4])
        if keys
        else f"{len(group['parameters'])} parameters"
        for number, group in enumerate(groups)
    ]
    return f"{len(groups)} group{'s' if len(groups) > 1 else ''} ({', '.join(parts)})"
