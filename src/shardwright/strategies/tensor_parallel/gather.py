"""Gathers cut features where whole ones are needed: before a module that is not cut, and at the model's output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from shardwright.analysis.on_meta.module_calls import ModuleCall
from shardwright.errors import PlanError
from shardwright.forward_stack import Rung, record
from shardwright.plan.traffic import Traffic
from shardwright.strategies.tensor_parallel.apply import Applying
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.note import OperatorNote
from shardwright.strategies.tensor_parallel.traffic import RankTraffic


@dataclass(frozen=True)
class GatherNote(OperatorNote):
    """The all-gathers of features before a module that takes whole inputs.

    ``arguments`` has the cut of each of the module's inputs; None for one that is whole.
    """

    arguments: tuple[Features | None, ...]

    def apply(self, rank: Applying, path: str, module: Any) -> None:
        """Makes the module all-gather its inputs in a hook, before other hooks; it may not write into them.

        A forward that does raises PlanError.
        """
        gathered: list[tuple[Any, int]] = []

        def version(x: Any) -> int:
            return -1 if x.is_inference() else int(x._version)

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            whole = tuple(rank.whole(arg, features) for arg, features in zip(args, self.arguments, strict=True))
            kept = (arg for arg, features in zip(whole, self.arguments, strict=True) if features is not None)
            gathered[:] = [(arg, version(arg)) for arg in kept]
            return whole

        def leave(*_: Any) -> None:
            overwritten = any(version(arg) != before for arg, before in gathered)
            gathered.clear()
            if overwritten:
                raise PlanError(
                    f"'{path}' writes into its input, which is a gathered copy: the features are cut over tp",
                    given="an input changed in place",
                    allowed="modules that do not change inputs, or a layout that does not cut features between layers",
                    fix="write x = x * 2 for x.mul_(2), or lay tp out without rows and columns: tp4",
                )

        module.register_forward_pre_hook(enter, prepend=True)  # before other hooks, which then see whole features
        module.register_forward_hook(leave)
        record(module, Rung.GATHER, "gathers the features of its inputs", by=rank.mode.name)

    def traffic(self, here: RankTraffic, path: str, call: ModuleCall) -> Iterator[Traffic]:
        """Yields the all-gathers of one call; the backward takes its part of the gradient and sends nothing."""
        # hooks are outside of a recomputed module: its second forward gathers nothing
        times = 1 if path in here.plan.recomputed else call.num_forwards
        for features in self.arguments:
            if features is not None:
                yield from _gathers(features, here, call.x_shape, call.element_bytes, times)


@dataclass(frozen=True)
class OutputNote(OperatorNote):
    """The all-gathers of the features of the model's output, which are cut as ``features`` says."""

    features: Features

    def apply(self, rank: Applying, path: str, module: Any) -> None:
        """Makes the model all-gather the features of its output, in a hook before other hooks."""
        hook = lambda _, args, output: rank.whole(output, self.features)  # noqa: E731
        module.register_forward_hook(hook, prepend=True)
        record(module, Rung.GATHER, "gathers the features of the output", by=rank.mode.name)

    def traffic(self, here: RankTraffic, path: str, call: ModuleCall) -> Iterator[Traffic]:
        """Yields the all-gathers of one forward of the model."""
        yield from _gathers(self.features, here, call.y_shape, call.element_bytes, 1)

    def called_as(self, path: str) -> str:
        """Returns the path of the module whose calls cause these all-gathers: "", the whole model."""
        return ""


def _gathers(
    features: Features, here: RankTraffic, shape: Sequence[int], element_bytes: int, times: int
) -> Iterator[Traffic]:
    for axis, sizes in features.joins(here.coord):
        yield Traffic("all_gather", axis, prod(shape[:-1]) * sum(sizes) * element_bytes, here.plan.mesh[axis], times)
