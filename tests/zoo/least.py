"""The least that the largest stage of a model can hold, over all cuts at the calls where a pipeline may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.errors import LayoutError
from shardwright.plan.event_stages import UNEVEN
from shardwright.plan.plan import Plan
from shardwright.strategies.pipeline import event_cut
from shardwright.strategies.pipeline.balance import StageShares
from zoo.models import ZooModel

EXACT = 1e-4
"""How near the least share of a V is found."""


def least_shares(model: ZooModel, plan: Plan) -> dict[str, float]:
    """The least largest share of parameters, and that of cuts whose stages have at most 1.25 times even work.

    Under a V they are bounds that no cut can be below, since a table that two stages hold is counted once. A share that
    no cut has is left out, and so are the shares of a model whose forward cannot be recorded.
    """
    assert plan.schedule is not None, "the layout has stages"
    samples = len(model.build()[2][1]) // plan.layout.num_microbatches
    shares = shares_of_calls(model, plan.schedule.stage_of, max(1, samples // dict(plan.mesh.axes).get("dp", 1)))
    if shares is None:
        return {}
    kinds = {"least": float("inf"), "least_even": UNEVEN}
    found = {name: least(shares, most_work) / shares.num_stages for name, most_work in kinds.items()}
    return {name: round(share, 3) for name, share in found.items() if share <= 1}


def shares_of_calls(model: ZooModel, stage_of: Sequence[int], samples: int) -> StageShares | None:
    """The shares of the smallest calls at which chunks may begin; None if the forward cannot be recorded."""
    kept: list[StageShares] = []

    def kept_shares(*given: Any) -> StageShares:
        kept.append(StageShares(*given))
        return kept[-1]

    module, _, (inputs, _) = model.build()
    example = tree_map_only(Tensor, lambda tensor: tensor[:samples], inputs)
    with patch.object(event_cut, "FINEST", (0.0,)), patch.object(event_cut, "StageShares", kept_shares):
        try:
            event_cut.cut_events(without_values(module).train(), len(stage_of), example, stage_of=stage_of)
        except LayoutError:
            return None
    return kept[0]


def without_values(module: nn.Module) -> nn.Module:
    """The module with its tensors on the meta device, where tied ones stay tied, as they do not by ``to``."""
    kept = [*module.parameters(), *module.buffers()]
    meta = {id(each): each.detach().to("meta") for each in kept}
    meta |= {
        id(each): nn.Parameter(meta[id(each)], each.requires_grad) for each in kept if isinstance(each, nn.Parameter)
    }
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            held.update({name: meta[id(each)] for name, each in held.items() if each is not None})
    return module


def least(shares: StageShares, most_work: float) -> float:
    """The least share, over an even one, that the stage with the most parameters can have.

    >>> uses, sizes = [{"a"}, {"b"}, {"c"}, {"a"}], {"a": 2, "b": 1, "c": 3}
    >>> least(StageShares([1, 1, 1, 1], uses, sizes, (0, 1)), 2.0)  # a, b | c, a: 5 of 6 on the second of two stages
    1.6666666666666665
    >>> round(least(StageShares([1, 1, 1, 1], uses, sizes, (0, 1, 1, 0)), 2.0), 2)  # a, a | b, c
    1.33
    """
    if len(shares.stage_of) > shares.num_stages:
        low, high = 1.0, float(shares.num_stages)
        if shares.folded_within(most_work, high) is None:
            return float("inf")
        while high - low > EXACT:
            middle = (low + high) / 2
            low, high = (middle, high) if shares.folded_within(most_work, middle) is None else (low, middle)
        return high

    @cache
    def of_rest(first: int, num_stages: int) -> float:
        stops = range(first + 1, shares.num_calls + 1) if num_stages > 1 else [shares.num_calls]
        runs = [(*shares.of_run(first, stop), stop) for stop in stops]
        return min(
            (
                max(held, of_rest(stop, num_stages - 1) if num_stages > 1 else 0.0)
                for work, held, stop in runs
                if work <= most_work + 1e-9
            ),
            default=float("inf"),
        )

    return of_rest(0, shares.num_stages)
