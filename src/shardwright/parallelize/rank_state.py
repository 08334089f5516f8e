"""``RankState``: what one rank holds of a model under a layout, for ``Run`` and for functions that read or fill it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from shardwright.comm.axis import Axis
from shardwright.comm.world import World
from shardwright.plan.plan import Job, Plan
from shardwright.runtime.applied import AppliedStrategy
from shardwright.runtime.executor import Events, Executor


class RankState:
    """One rank's part of a model, and where each part lies; a :class:`Run` trains it.

    Its attributes are those of :class:`Run`, which says what they are.
    """

    def __init__(
        self, job: Job, plan: Plan, world: World, axes: Mapping[str, Axis], executor: Executor,
        applied: Sequence[AppliedStrategy] = (),
    ) -> None:  # fmt: skip
        self.model, self.loss = job.model, job.loss
        self.plan, self.world, self.axes = plan, world, axes
        stored = {name: p for strategy in applied for name, p in strategy.parameters.items()}
        # on a stage that holds no part of a tied parameter, its second name may come first: it is not listed
        self.parameters: Mapping[str, nn.Parameter] = {
            name: stored.get(name, p) for name, p in self.model.named_parameters() if name in plan.state or p.numel()
        }
        self.offload = next((strategy.offload for strategy in applied if strategy.offload is not None), None)
        self._applied, self._executor = applied, executor
        self.coord = plan.mesh.coord(world.rank)
        self.num_steps = 0

    @property
    def num_skipped(self) -> int:
        """The number of steps skipped so far, as fp16 skips one whose gradients are not finite."""
        return 0

    @contextmanager
    def observed(self, events: Events) -> Iterator[None]:
        """Returns a context in which steps also call the callbacks in ``events``, after those of the strategies."""
        before = self._executor.events
        self._executor.events = (*before, events)
        try:
            yield
        finally:
            self._executor.events = before

    def _check_written(self) -> None:
        """Raises PlanError if a copy of a parameter was written to, where the next step reads the parameter itself."""
        for strategy in self._applied:
            strategy.check(False)

    def changed(self) -> None:
        """Marks unsharded and low-precision copies of parameters as out of date, so that they are renewed before use.

        All ranks call it after writing to :attr:`parameters`. Optimizers of the run, and functions that load
        parameters, call it themselves.
        """
        for events in self._executor.events:
            events.after_optimizer()

    def kept(self) -> Iterator[Tensor]:
        """Yields ZeRO's buffers of unsharded parameters, which stay in memory between steps beside the parameters."""
        return (tensor for strategy in self._applied for tensor in strategy.kept())

    def receiving(self) -> Iterator[Tensor]:
        """Yields the buffers into which pipeline stages receive large messages, which stay in memory between steps."""
        return (tensor for strategy in self._applied for tensor in strategy.receiving())

    def summing(self) -> Iterator[Tensor]:
        """Yields the tensors in which ZeRO adds up gradients, before they become the ``.grad`` of the parameters."""
        return (tensor for strategy in self._applied for tensor in strategy.summing())
