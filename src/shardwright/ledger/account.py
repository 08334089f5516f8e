"""One rank's memory over a step: measured in a run, or predicted by a rehearsal of the same step on the meta device.

The rehearsal builds this rank's part of the model with the code of a real run and takes a step beside a fake backend.
Saved activations, unsharded parameters and recomputed blocks are allocated as in a run, but without values. So no
formula restates what the code does, and a new strategy is predicted without any code here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.analysis.meta_device import on_meta
from shardwright.comm.backends.block_sizes import Blocks
from shardwright.comm.backends.fake import fake_world
from shardwright.comm.launch import Ranks
from shardwright.layout import Layout
from shardwright.ledger.tracking import Account, Tracker
from shardwright.parallelize import parallelize
from shardwright.parallelize.planning import narrow_model, num_rows, without_storage
from shardwright.parallelize.rehearsal import values_crossing
from shardwright.parallelize.run import Run
from shardwright.plan.plan import Job
from shardwright.plan.schedule import Action
from shardwright.rng import with_names
from shardwright.runtime.executor import Events, Microbatch
from shardwright.strategies import choose


def measure_memory(run: Run, batch: Microbatch, optimizer: torch.optim.Optimizer) -> Account:
    """Takes one training step and returns the memory that this rank held during it. Take a step or two before.

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
    run.axes["world"].for_strategy("core").barrier()  # so that no rank still reads the previous step's messages
    tracker = Tracker(run.world.transport.blocks)
    tracker.hold("parameters", (*run.parameters.values(), *run.model.parameters(), *run.model.buffers(), *run.kept()))
    tracker.hold("gradients", (p.grad for p in _trainable(run)))
    tracker.hold("optimizer", tree_leaves(list(optimizer.state.values())))
    tracker.hold("batch", tree_leaves((batch.inputs, batch.targets)))
    if run.offload is not None:
        tracker.hold(run.offload.place, run.offload.tensors)  # counted apart: host or disk, not the device's memory
    with _observing(run, tracker), tracker:
        run.step(batch)
        tracker.hold("gradients", (p.grad for p in _trainable(run)))
        tracker.action = "optimizer"
        with tracker.making("optimizer"):
            optimizer.step()
        tracker.mark()
    return tracker.account()


def predict_memory(
    job: Job, layout: Any, rank: int, batch: tuple[Any, Any], *, optimizer: Any = torch.optim.AdamW,
    ranks: Ranks = "processes", **options: Any,
) -> Account:  # fmt: skip
    """Returns what one rank will hold during a step on a global batch, of which only shapes and dtypes matter.

    It is the second step, so the optimizer's state exists. ``options`` are the optimizer's. Recurrent layers are
    predicted too low, with a warning. Ranks that are processes send messages through shared-memory blocks: predicted is
    the most that such a rank can take, however far one rank runs ahead. Ranks that are threads need none.

    >>> batch = (torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))
    >>> from shardwright.models.losses import CrossEntropy
    >>> account = predict_memory(Job(nn.Linear(4, 4), CrossEntropy()), "dp2", 0, batch)
    >>> account.at_peak()["parameters"], account.at_peak()["gradients"]
    (80, 80)
    """
    meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), batch)
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    world = fake_world(rank, layout.num_ranks, blocks=Blocks(at_most=True) if ranks == "processes" else None)
    run = parallelize(
        without_storage(job.model), layout, world, loss=without_storage(job.loss), num_tokens=job.num_tokens,
        roles=job.roles, example=meta[0], seconds=job.seconds,
    )  # fmt: skip
    (microbatch,) = run.shard([meta])
    if run.plan.stages is not None:
        # the fake backend delivers nothing, so this stage is given the shapes that the other stages would send
        apart = job._replace(model=narrow_model(without_storage(job.model), run.plan), loss=without_storage(job.loss))
        inputs = [piece.inputs for piece in run.pieces(microbatch)]
        given = (apart, run.plan, choose(run.plan.layout), inputs, num_rows(meta), run.coord, microbatch.num_tokens)
        run.rehearse_with(microbatch, [each.values for each in values_crossing(*given)])
    if any(isinstance(module, nn.RNNBase) for module in run.model.modules()):
        warn("a CPU's kernel for recurrent layers keeps memory that a rehearsal cannot see: more is held", stacklevel=2)
    if options.pop("fused", False):  # no such kernel on meta; one parameter after the other takes as little memory
        options["foreach"] = False
    steps = run.optimizer(optimizer, **{"lr": 1e-3, **options})
    with _NativeAttentionOnMeta(), on_meta(run.model, values=False):
        run.step(microbatch)
        steps.step()
        return measure_memory(run, microbatch, steps)


def _trainable(run: Run) -> list[nn.Parameter]:
    return [p for p in (*run.parameters.values(), *run.model.parameters()) if p.requires_grad]


@contextmanager
def _observing(run: Run, tracker: Tracker) -> Iterator[None]:
    """Inside of this context, the tracker is notified of gradients, of logits, and of the executor's actions."""
    parameters = _trainable(run)

    def begin(action: Action) -> None:
        tracker.action = str(action)

    def end(action: Action) -> None:
        tracker.hold("gradients", (parameter.grad for parameter in parameters))
        tracker.mark()

    def add_gradient(parameter: Tensor) -> None:
        tracker.hold("gradients", [parameter.grad])

    def begin_loss(module: nn.Module, args: tuple[Any, ...]) -> None:
        tracker.hold("logits", tree_leaves(args[0]))
        stack.enter_context(tracker.making("logits"))  # what the loss itself allocates is as large as the logits

    def end_loss(*_: Any) -> None:
        stack.close()

    with ExitStack() as stack, run.observed(Events(before_action=begin, after_action=end)):
        handles: list[Any] = [parameter.register_post_accumulate_grad_hook(add_gradient) for parameter in parameters]
        if isinstance(run.loss, nn.Module):
            handles.append(run.loss.register_forward_pre_hook(begin_loss))
            handles.append(run.loss.register_forward_hook(end_loss, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _NativeAttentionOnMeta(TorchFunctionMode):
    """Runs attention on the meta device by the fused CPU kernel, which keeps q, k, v, y and one number per query.

    Without it torch takes the unfused path on meta, which keeps all attention weights.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            return _attend(*args, **named)
        if func is functional.multi_head_attention_forward:  # torch shows a mode no calls inside of this function
            return with_names(func, scaled_dot_product_attention=_attend)(*args, **named)
        return func(*args, **named)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    fused = q.is_meta and q.dim() == 4 and dropout_p == 0 and min(q.numel(), k.numel()) > 0
    if not fused or q.shape[-1] != v.shape[-1] or (attn_mask is not None and attn_mask.requires_grad):
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)  # the kernel adds its mask to the scores
    y: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return y
