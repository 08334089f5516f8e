"""Exponential moving averages of a run's parameters (EMA), under every layout: each rank averages what it stores."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from shardwright.errors import PlanError, explain
from shardwright.models.settings import check_fraction
from shardwright.parallelize.rank_state import RankState

KEY = "average"
"""The name of an average in the optimizer's state of its parameter, which checkpoints save like Adam's moments."""


class Averages:
    """Exponential moving averages of the parameters that an optimizer updates; ``Run.average`` makes them.

    After the optimizer's first step an average equals the parameter, as in torch's ``AveragedModel``. Each later step
    sets it to ``decay * average + (1 - decay) * parameter``. A step that fp16 skips does not count. A parameter that
    has had no gradient so far has no average yet; the parameter itself is used in its place. Buffers are not averaged.

    With ``from_initial`` an average starts as the parameter is before its first update, as timm's ``ModelEma`` does.
    """

    def __init__(
        self, run: RankState, optimizer: torch.optim.Optimizer, decay: float, *, from_initial: bool = False
    ) -> None:
        check_fraction("decay", decay, 0.999)
        own = {id(parameter): name for name, parameter in run.parameters.items()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]) and own:
            raise PlanError(
                "an optimizer of other tensors has no averages of the run's parameters",
                given=f"{type(optimizer).__name__} over tensors that are not in run.parameters",
                allowed="an optimizer of this run",
                fix=f"write optimizer = run.optimizer(torch.optim.{type(optimizer).__name__}, lr=...)",
            )
        if run.offload is not None:
            raise PlanError(
                "parameters are not averaged where their state is offloaded",
                given=f"an average under {run.plan.layout}",
                allowed="layouts without /offload",
                fix="leave out /offload, or average the checkpoints of a run",
            )
        self._run, self.optimizer, self.decay, self.from_initial = run, optimizer, decay, from_initial
        self._before: dict[nn.Parameter, Tensor] = {}
        self.is_applied = False
        self.has_started = any(KEY in state for state in optimizer.state.values())
        """Whether a step has counted, on any rank; a pipeline stage may have had no gradients in it."""
        self._num_skipped = run.num_skipped
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._update)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for group in self.optimizer.param_groups for p in group["params"])

    @torch.no_grad()
    def _begin(
        self, _: torch.optim.Optimizer, args: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> None:
        """Copies, before an optimizer's step, the parameters whose averages begin with this step.

        Raises: PlanError: the averages are applied.
        """
        if self.is_applied:
            raise PlanError(
                "an optimizer steps from the parameters, and not from their averages",
                given=f"{type(self.optimizer).__name__}.step() inside of averages.applied()",
                allowed="evaluate, predict, state_dict, and save without this optimizer",
                fix="end the block before the next step",
            )
        started = self.from_initial or self.has_started
        # a closure computes gradients later, in the step itself
        later = any(map(callable, args[1:])) or (named or {}).get("closure") is not None
        begin = [p for p in self._parameters() if started and KEY not in self.optimizer.state.get(p, {})]
        self._before = {p: p.clone() for p in begin if later or p.grad is not None}

    @torch.no_grad()
    def _update(self, *_: Any) -> None:
        num_skipped, self._num_skipped = self._num_skipped, self._run.num_skipped
        if num_skipped != self._num_skipped and all(p.grad is None for p in self._parameters()):
            return  # a step that fp16 skips
        self.has_started = True
        state = self.optimizer.state
        averages: list[Tensor] = []
        values: list[Tensor] = []
        for parameter in self._parameters():
            if KEY not in state.get(parameter, {}):
                if parameter.grad is None:  # an optimizer begins the state of a parameter when that is empty
                    continue
                first = self._before.get(parameter)
                state[parameter][KEY] = parameter.clone() if first is None else first
            averages.append(state[parameter][KEY])
            values.append(parameter)
        self._before = {}
        if averages:
            torch._foreach_lerp_(averages, values, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Returns a context in which the run's parameters are their averages; all ranks enter it together.

        Inside, ``evaluate``, ``predict``, ``state_dict`` and ``save`` without an optimizer use the averages. The
        optimizer may not step, nor be saved or loaded: its averages are the parameters meanwhile. Afterwards, the
        parameters are again what they were.

        Traffic: none itself; ZeRO unshards the averages, and afterwards the parameters, before they are used.
        Raises: PlanError: the averages are applied already.
        """
        if self.is_applied:
            raise PlanError(
                "averages are applied once at a time",
                given="averages.applied() inside of averages.applied()",
                allowed="one block, and another after its end",
                fix="leave out the inner block: the parameters are the averages there already",
            )
        pairs = [(p, state[KEY]) for p in self._parameters() if KEY in (state := self.optimizer.state.get(p, {}))]
        self._swap(pairs)
        self.is_applied = True
        try:
            yield
        finally:
            self.is_applied = False
            self._swap(pairs)

    @torch.no_grad()
    def _swap(self, pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
        for parameter, average in pairs:
            value = parameter.clone()
            parameter.copy_(average)
            average.copy_(value)
        self._run.changed()


def _warn_of_lack(path: str, stacklevel: int) -> None:
    warnings.warn(
        explain(
            f"'{path}' has no averages of parameters: they begin with the values after the next step",
            given="a checkpoint of a run without run.average, or saved without its optimizer",
            allowed="averages that begin here, or a checkpoint that has them",
            fix="load a checkpoint of sw.save(folder, run, optimizer) after run.average(optimizer), to go on with its "
            "averages",
        ),
        stacklevel=stacklevel,
    )


def _written(decay: float, *, from_initial: bool) -> str:
    return f"run.average(optimizer, {decay}{', from_initial=True' if from_initial else ''})"


class RunAverages:
    """The averages that a run has made: an :class:`Averages` for each optimizer, freed together with the optimizer."""

    def __init__(self) -> None:
        self._made: WeakSet[Averages] = WeakSet()
        # if the last loaded checkpoint has no averages: the step at which it was loaded, and its path
        self._lacked: tuple[int, str] | None = None
        # until the optimizer's first step: the path of the checkpoint from which it has averages that no run keeps yet
        self._to_keep: WeakKeyDictionary[torch.optim.Optimizer, str] = WeakKeyDictionary()

    def get(
        self, run: RankState, optimizer: torch.optim.Optimizer, decay: float, *, from_initial: bool = False
    ) -> Averages:
        """Returns the averages of ``optimizer``; the first call makes them.

        The optimizer's state holds one average of each parameter.

        Raises: PlanError: the optimizer has averages with another decay or start already; and as :class:`Averages`.
        """
        for made in self._made:
            if made.optimizer is optimizer:
                if (made.decay, made.from_initial) == (decay, from_initial):
                    return made
                before = _written(made.decay, from_initial=made.from_initial)
                raise PlanError(
                    "an optimizer has one average of each parameter",
                    given=f"{_written(decay, from_initial=from_initial)} after {before}",
                    allowed="the same decay and start, or an optimizer without averages",
                    fix=f"write {before}, or make a new optimizer for another decay or start",
                )
        made = Averages(run, optimizer, decay, from_initial=from_initial)
        made.has_started |= optimizer in self._to_keep
        self._made.add(made)
        if self._lacked is not None and self._lacked[0] == run.num_steps and run.world.rank == 0:
            _warn_of_lack(self._lacked[1], stacklevel=4)
        return made

    def note_load(self, run: RankState, optimizer: torch.optim.Optimizer | None, path: str, *, loads: bool) -> None:
        """Warns, on rank 0, if a loaded checkpoint has averages and the run has none, or the reverse.

        ``loads`` says that the checkpoint has averages. :meth:`Run.average` may still be called after the load, so the
        warning may come later: in that call, if the checkpoint has no averages, or in the first step of ``optimizer``,
        if the run has none. That step also drops the loaded averages, which nothing would update.
        """
        is_first = run.world.rank == 0
        averaged = [made for made in self._made if made.optimizer is optimizer]
        is_averaged = bool(averaged)
        for made in averaged:
            made.has_started = loads
        self._lacked = None if loads or optimizer is None or is_averaged else (run.num_steps, path)
        if optimizer is not None and run.offload is None and loads and not is_averaged:
            self._to_keep[optimizer] = path
            optimizer.register_step_pre_hook(partial(self._drop_unkept, warns=is_first))
        elif not is_first:
            return
        elif is_averaged and not loads:
            _warn_of_lack(path, stacklevel=4)
        elif loads and not is_averaged:
            warnings.warn(
                explain(
                    f"'{path}' has averages of parameters, which are not loaded",
                    given="sw.load(path, run), without an optimizer"
                    if optimizer is None
                    else f"a run under {run.plan.layout}",
                    allowed="averages in an optimizer's state without /offload, or in place of the parameters",
                    fix="write sw.load_weights(run, path, averages=True) for the averages as parameters, and "
                    "sw.load_weights(run, path) for the parameters without this warning",
                ),
                stacklevel=3,
            )

    def _drop_unkept(self, optimizer: torch.optim.Optimizer, *_: Any, warns: bool) -> None:
        path = self._to_keep.pop(optimizer, None)
        if path is None or any(made.optimizer is optimizer for made in self._made):
            return
        if not [state.pop(KEY) for state in optimizer.state.values() if KEY in state] or not warns:
            return
        warnings.warn(
            explain(
                f"the averages of parameters in '{path}' end here: the run that has loaded them keeps none",
                given=f"{type(optimizer).__name__}.step() without run.average(optimizer)",
                allowed="a run that goes on with the averages, or without any",
                fix="write averages = run.average(optimizer, decay) before the first step, to go on with them",
            ),
            stacklevel=2,
        )

    def check_not_applied(self, optimizer: torch.optim.Optimizer | None, *, verb: str) -> None:
        """Raises PlanError inside of ``applied()``, where weights and averages of ``optimizer`` have changed places."""
        if any(made.is_applied and made.optimizer is optimizer for made in self._made):
            raise PlanError(
                "inside of averages.applied() the optimizer's state has the parameters in place of their averages",
                given=f"{verb} with {type(optimizer).__name__} inside of averages.applied()",
                allowed=f"{verb} without the optimizer inside, or with it after the block",
                fix=f"call {verb} after the block; the checkpoint has the averages in the optimizer's state",
            )
