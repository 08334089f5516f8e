"""One rank's memory over a step, measured in a run, or predicted by the same step on the meta device.

The prediction is a rehearsal: this rank's part of the model, made by the code that makes it in a run, takes a step on
the meta device, beside ranks that are not there. What autograd would save, what is gathered, and what is computed again
lie there as they will, but for their values; so nothing is said twice, and a new strategy is in the ledger by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.analysis.meta_device import on_meta
from shardwright.comm.backends.block_sizes import Blocks
from shardwright.comm.backends.fake import fake_world
from shardwright.comm.launch import Ranks
from shardwright.layout import Layout
from shardwright.ledger.attention import NativeAttentionOnMeta
from shardwright.ledger.tracking import Account, Tracker
from shardwright.parallelize import parallelize
from shardwright.parallelize.planning import narrow_model, num_rows, without_storage
from shardwright.parallelize.rehearsal import values_crossing
from shardwright.parallelize.run import Run
from shardwright.plan.plan import Job
from shardwright.plan.schedule import Action
from shardwright.runtime.executor import Events, Microbatch
from shardwright.strategies import choose

Optimizer = torch.optim.Optimizer


def measure_memory(run: Run, batch: Microbatch, optimizer: Optimizer) -> Account:
    """What this rank holds while it takes one step, the optimizer's with it; take a step or two before.

    Every rank calls it. Traffic: beside the step's, one barrier.

    >>> import shardwright as sw
    >>> model = nn.Linear(4, 4)
    >>> def work(world):
    ...     run = sw.parallelize(model, "dp2", world)
    ...     optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
    ...     for batch in run.shard([(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))] * 2):
    ...         account = measure_memory(run, batch, optimizer)
    ...     return account.at_peak()["parameters"], account.at_peak()["optimizer"] >= 160
    >>> sw.launch(work, 2, ranks="threads")[0]
    (80, True)
    """
    run.axes["world"].for_strategy("core").barrier()  # nobody reads any more what the step before sent
    tracker = Tracker(run.world.transport.blocks)
    tracker.hold("parameters", (*run.parameters.values(), *run.model.parameters(), *run.model.buffers(), *run.kept()))
    tracker.hold("gradients", (p.grad for p in _learning(run)))
    tracker.hold("optimizer", tree_leaves(list(optimizer.state.values())))
    tracker.hold("batch", tree_leaves((batch.inputs, batch.targets)))
    if run.offload is not None:
        tracker.hold(run.offload.place, run.offload.tensors)  # not the device's memory: it counts apart
    with _watching(run, tracker), tracker:
        run.step(batch)
        tracker.hold("gradients", (p.grad for p in _learning(run)))
        tracker.action = "optimizer"
        with tracker.making("optimizer"):
            optimizer.step()
        tracker.mark()
    return tracker.account()


def predict_memory(
    job: Job, layout: Any, rank: int, batch: tuple[Any, Any], *, optimizer: Any = torch.optim.AdamW,
    ranks: Ranks = "processes", **options: Any,
) -> Account:  # fmt: skip
    """What one rank will hold while it takes a step on a global batch, of which shapes alone count.

    It is not the first step: the optimizer has its state. ``options`` are the optimizer's. Of torch's recurrent layers
    it knows too little, and warns. Ranks that are processes share one machine's memory: the blocks in which messages
    lie are the most that ranks take which run the same code, however far one is ahead; threads need none.

    >>> batch = (torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))
    >>> from shardwright.models.losses import CrossEntropy
    >>> account = predict_memory(Job(nn.Linear(4, 4), CrossEntropy()), "dp2", 0, batch)
    >>> account.at_peak()["parameters"], account.at_peak()["gradients"]
    (80, 80)
    """
    meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), batch)
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    world = fake_world(rank, layout.num_ranks, blocks=Blocks() if ranks == "processes" else None)
    run = parallelize(
        without_storage(job.model), layout, world, loss=without_storage(job.loss), num_tokens=job.num_tokens,
        roles=job.roles, example=meta[0], seconds=job.seconds,
    )  # fmt: skip
    (mine,) = run.shard([meta])
    if run.plan.stages is not None:
        _expect(run, job, mine, num_rows(meta))
    if any(isinstance(module, nn.RNNBase) for module in run.model.modules()):
        warn("a CPU's kernel for recurrent layers keeps memory that a rehearsal cannot see: more is held", stacklevel=2)
    if options.pop("fused", False):  # there is no such kernel on meta; one parameter after the other takes as little
        options["foreach"] = False
    steps = run.optimizer(optimizer, **{"lr": 1e-3, **options})
    with NativeAttentionOnMeta(), on_meta(run.model):
        run.step(mine)
        steps.step()
        return measure_memory(run, mine, steps)


def _expect(run: Run, job: Job, mine: Microbatch, num_global: int) -> None:
    """Tells a stage what will come from the others, who are not there to tell."""
    apart = job._replace(model=narrow_model(without_storage(job.model), run.plan), loss=without_storage(job.loss))
    inputs = [each.inputs for each in run.pieces(mine)]
    run.rehearse_with(
        mine, values_crossing(apart, run.plan, choose(run.plan.layout), inputs, num_global, run.coord, mine.num_tokens)
    )


def _learning(run: Run) -> list[nn.Parameter]:
    return [p for p in (*run.parameters.values(), *run.model.parameters()) if p.requires_grad]


@contextmanager
def _watching(run: Run, tracker: Tracker) -> Iterator[None]:
    """Tells the tracker what is a gradient, what are logits, and what the executor runs."""
    parameters = _learning(run)

    def gradients() -> None:
        tracker.hold("gradients", (parameter.grad for parameter in parameters))

    def began(action: Action) -> None:
        tracker.action = str(action)

    def ended(action: Action) -> None:
        gradients()
        tracker.mark()

    def one(parameter: Tensor) -> None:
        tracker.hold("gradients", [parameter.grad])

    def output(module: nn.Module, args: tuple[Any, ...]) -> None:
        tracker.hold("logits", tree_leaves(args[0]))
        stack.enter_context(tracker.making("logits"))

    def done(*_: Any) -> None:
        stack.close()

    with ExitStack() as stack, run.observed(Events(before_action=began, after_action=ended)):
        handles: list[Any] = [parameter.register_post_accumulate_grad_hook(one) for parameter in parameters]
        if isinstance(run.loss, nn.Module):
            handles.append(run.loss.register_forward_pre_hook(output))
            handles.append(run.loss.register_forward_hook(done, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
