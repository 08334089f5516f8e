"""Checks a run before each of its steps: that all ranks are alike, that it trains, and that its loss is finite."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from shardwright.errors import PlanError
from shardwright.parallelize.rank_check import bit_sums, check_ranks, is_compared
from shardwright.parallelize.rank_state import RankState
from shardwright.parallelize.step_checks import dropout_warning, hooks_warning, idle_hooks_warning
from shardwright.parallelize.step_guard import StepGuard
from shardwright.runtime.applied import AppliedStrategy
from shardwright.runtime.executor import Microbatch

LOG = logging.getLogger("shardwright")


class StepChecker:
    """Checks before each step of one run.

    ``guard`` keeps what the checks need of the steps before, and ``applied`` are the strategies' own checks. Ranks are
    compared in steps that ``check_every`` selects. If the run ``watches_loss``, it warns once of a loss that is not
    finite.
    """

    def __init__(
        self, guard: StepGuard, applied: Sequence[AppliedStrategy], check_every: int, *, watches_loss: bool
    ) -> None:
        self._guard, self._applied = guard, applied
        self._check_every, self._watches_loss = check_every, watches_loss
        self._is_new = True

    def before_step(self, run: RankState, batch: Microbatch) -> None:
        """Compares the ranks' parameters, batches and rates; called before each step of ``run`` on ``batch``.

        Before the first step, the first rank logs dropout and hooks of the model that a step does not run as written.
        The run's own number of steps says which step comes next.

        Traffic: in the steps in which ranks are compared, that of :func:`check_ranks`.
        Raises: PlanError: the code is under inference mode, or ranks differ.
        """
        if torch.is_inference_mode_enabled():
            raise PlanError(
                "a step inside of torch.inference_mode() has no backward",
                given="run.step or run.accumulate under inference mode",
                allowed="steps outside of it; run.evaluate and run.predict need no mode",
                fix="take the step out of the block",
            )
        if self._is_new and run.world.rank == 0:
            idle = idle_hooks_warning(run.model, run.parameters, run.plan)
            for warning in filter(None, (dropout_warning(run.model), hooks_warning(run.model, run.plan), idle)):
                LOG.warning("%s", warning)
        self._is_new = False
        earlier, compares = self._guard.count_samples(batch.num_global), is_compared(run.num_steps, self._check_every)
        if compares:
            self._compare_ranks(run, batch, earlier)
        if self._watches_loss:
            self._watches_loss = not self._guard.warns_of_loss(run.num_steps, may_wait=compares)

    def _compare_ranks(self, run: RankState, batch: Microbatch, earlier: str) -> None:
        """Raises PlanError if ranks differ; warns if nothing has trained. ``earlier`` is as in :func:`check_ranks`."""
        if run.world.device.type == "meta":
            return
        for strategy in self._applied:
            strategy.check(True)
        values = bit_sums({name: p for name, p in run.parameters.items() if name not in run.plan.offloaded})
        trained = (name for name, p in run.parameters.items() if p.requires_grad and p.numel() and name in values)
        if run.world.size > 1:
            updates = self._guard.updates.lines(), self._guard.updates_of_all.lines()
            check_ranks(run.plan, run.axes, run.parameters, values, batch, run.num_steps, earlier, updates)
        # after the comparison, which is a collective: a filter may turn the warning into an error of one rank alone
        self._guard.warn_if_unchanged({name: values[name] for name in trained})
