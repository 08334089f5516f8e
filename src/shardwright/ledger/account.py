"""Measures one rank's memory over a training step, or predicts it from a rehearsal of the step on the meta device.

The rehearsal builds this rank's part of the model with the code of a real run and takes a step with a fake backend.
Saved activations, unsharded parameters and recomputed blocks are allocated as in a run, but without values. So no
formula repeats what the code does, and the memory of a new strategy is predicted without any code here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from shardwright.analysis.on_meta.meta_device import on_meta
from shardwright.analysis.on_meta.operator_results import cloned, map_tensors
from shardwright.comm.backends.block_sizes import Blocks
from shardwright.comm.backends.fake import fake_world
from shardwright.comm.limits import Ranks
from shardwright.devices import HOST
from shardwright.errors import LayoutError, PlanError
from shardwright.formatting import first_line
from shardwright.function_copies import with_names
from shardwright.layout import Layout
from shardwright.ledger.device_memory import beside_tensors
from shardwright.ledger.tracking import MemoryAccount, OperatorRunner, RehearsalTracker, Tracker, call
from shardwright.models.given_loss import loss_for
from shardwright.parallelize import under_plan
from shardwright.parallelize.planning import job_for, make_plan, narrow_model, num_rows, without_storage
from shardwright.parallelize.rehearsal import values_crossing
from shardwright.parallelize.run import Run
from shardwright.plan.plan import Job, Plan
from shardwright.plan.schedule import Action
from shardwright.runtime.executor import Events, Microbatch
from shardwright.strategies import choose
from shardwright.strategies.pipeline.messages import connected_stages
from shardwright.strategy import Strategy


def measure_memory(
    run: Run,
    batch: Microbatch,
    optimizer: torch.optim.Optimizer,
    device: str | None = None,
    run_operator: OperatorRunner = call,
) -> MemoryAccount:
    """Takes one training step, and returns the memory that this rank held during it, as a :class:`MemoryAccount`.

    The step updates the parameters. Take a step or two before, so that the optimizer's state exists. Every rank calls
    the function. On an accelerator the account also has estimates of the memory held beside tensors; a rehearsal, which
    runs on the meta device, passes the type of the accelerator as ``device``, and may give the function that
    runs each operator (``run_operator``).

    Traffic: that of the step, and one barrier.

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
    with memory_tracked(run, batch, optimizer, device, run_operator) as tracked:
        run.step(batch)
        with tracked.updating():
            optimizer.step()
    return tracked.account()


@dataclass
class MemoryRecording:
    """The memory of a rank during one training step, while the step is taken."""

    _run: Run
    _tracker: Tracker
    _kind: str

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Returns a context for the optimizer's step, in which what is allocated counts as optimizer state."""
        self._tracker.hold("gradients", _gradients(_trainable(self._run)))
        self._tracker.action = "optimizer"
        with self._tracker.making("optimizer"):
            yield
        self._tracker.mark()

    def account(self) -> MemoryAccount:
        """Returns the account of the step."""
        tracker, run = self._tracker, self._run
        if tracker.memory is None:
            return tracker.account()
        num_communicators = _num_communicators(run) if run.world.transport.blocks is None else 0
        return tracker.account(beside_tensors(tracker.memory, self._kind, num_communicators))


@contextmanager
def memory_tracked(
    run: Run,
    batch: Microbatch,
    optimizer: torch.optim.Optimizer,
    device: str | None = None,
    run_operator: OperatorRunner = call,
) -> Iterator[MemoryRecording]:
    """Returns a context in which the caller takes one step, whose memory is tracked; all ranks enter it.

    The arguments are those of :func:`measure_memory`.

    Traffic: a barrier of all ranks.
    """
    run.axes["world"].for_strategy("core").barrier()  # so that no rank still reads the previous step's messages
    kind = device or run.world.device.type
    kind_of_tracker = RehearsalTracker if run.world.device.type == "meta" else Tracker
    counted = run.world.device if kind not in HOST else None
    tracker = kind_of_tracker(run.world.transport.blocks, counted, run_operator)
    tracker.hold("parameters", (*run.parameters.values(), *run.model.parameters(), *run.model.buffers(), *run.kept()))
    tracker.hold("messages", run.receiving())
    tracker.hold("gradients", _gradients(_trainable(run)))
    tracker.hold("optimizer", tree_leaves(list(optimizer.state.values())))
    tracker.hold("batch", tree_leaves((batch.inputs, batch.targets)))
    if run.offload is not None:
        tracker.hold(run.offload.place, run.offload.tensors)  # counted apart: host or disk, not the device's memory
    with _observing(run, tracker), tracker:
        tracker.mark()
        yield MemoryRecording(run, tracker, kind)


def _num_communicators(run: Run) -> int:
    """Returns the number of NCCL communicators that this rank is a member of.

    Each group of an axis has one. Each pair of pipeline stages that exchange messages has two, one for each direction.
    """
    num_groups = len({frozenset(axis.ranks) for axis in run.axes.values() if axis.size > 1})
    schedule, stages = run.plan.schedule, run.plan.stages
    if schedule is None or stages is None:
        return num_groups
    pairs = connected_stages(schedule, stages.chunked.edges)
    return num_groups + 2 * sum(run.coord["pp"] in pair for pair in pairs)


def predict_memory(
    job: Job, layout: Any, rank: int, batch: tuple[Any, Any], *, optimizer: Any = torch.optim.AdamW,
    ranks: Ranks = "processes", device: str = "cpu", **options: Any,
) -> MemoryAccount:  # fmt: skip
    """Returns the account of the memory that rank ``rank`` will hold during a training step, without running it.

    The step is rehearsed on the meta device. ``batch`` is a pair of global inputs and targets. Only its shapes and
    dtypes matter, unless the model's code does not run without values of inputs. The step is the second one, so that
    the state of ``optimizer`` exists; ``options`` are the optimizer's options. The memory of recurrent layers is
    predicted too low, with a warning.

    ``ranks`` says whether ranks will be processes or threads. Processes on a CPU send messages through blocks of shared
    memory. The prediction has the most bytes that these blocks can take, however far one rank runs ahead of the others.
    For an accelerator as ``device``, such as "cuda", the account has estimates of the memory held beside tensors
    instead.

    Raises: LayoutError: the layout does not fit the model. PlanError: the model's own code, or the loss, does not run
        without values of activations, or of inputs on the meta device.

    >>> batch = (torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))
    >>> from shardwright.models.losses import CrossEntropy
    >>> account = predict_memory(Job(nn.Linear(4, 4), CrossEntropy()), "dp2", 0, batch)
    >>> account.at_peak()["parameters"], account.at_peak()["gradients"]
    (80, 80)
    """
    arguments = dict(optimizer=optimizer, ranks=ranks, device=device, **options)
    with rehearsed(job, layout, rank, batch, **arguments) as (run, microbatch, steps):
        return measure_memory(run, microbatch, steps, device)


@dataclass(frozen=True)
class JobPlan:
    """The plan of a job and the strategies that made it, reused to run steps of several ranks on the meta device."""

    plan: Plan
    strategies: Sequence[Strategy]
    crossing: list[Mapping[str, Any]] = field(default_factory=list)
    """The values that stages send each other in each microbatch, by name, as meta tensors.

    The first rehearsal fills the list, and later rehearsals read it. So all rehearsals must be of the same batch, and
    of ranks that differ only in their pipeline stage.
    """


@contextmanager
def rehearsed(
    job: Job, layout: Any, rank: int, batch: tuple[Any, Any], *, optimizer: Any = torch.optim.AdamW,
    ranks: Ranks = "processes", device: str = "cpu", planned: JobPlan | None = None, first_step: bool = True,
    **options: Any,
) -> Iterator[tuple[Run, Microbatch, torch.optim.Optimizer]]:  # fmt: skip
    """Returns a context in which one rank's steps are rehearsed: run on the meta device, without values or messages.

    The context yields the rank's :class:`Run`, its part of the batch and the optimizer. One step has been taken when
    the context begins, so that optimizer state exists. Without ``first_step``, only the optimizer has made a step, with
    gradients of all parameters, which takes half of the time. The arguments are as in :func:`predict_memory`;
    ``planned`` is the plan of the job, if it was made before.

    Raises: as :func:`predict_memory`.
    """
    with ExitStack() as inside:
        with rehearsal_errors_explained():
            rehearsal = inside.enter_context(
                _rehearsed(job, layout, rank, batch, optimizer, ranks, device, planned, first_step, options)
            )
        yield rehearsal  # outside of the inner context, so that errors of the caller's own block are not explained


@contextmanager
def rehearsal_errors_explained() -> Iterator[None]:
    """Returns a context in which errors of the model's own code, which runs without values, become PlanErrors."""
    try:
        yield
    except (LayoutError, PlanError):
        raise
    # the last two are raised by lookups and checks in the model's code
    except (RuntimeError, TypeError, ValueError, LookupError, AssertionError) as failure:
        raise PlanError(
            "a step of the model cannot be rehearsed without values on such a batch",
            given=f"{type(failure).__name__}: {first_line(failure)}",
            allowed="code that runs on the meta device, or on the values of the inputs of a real batch like those of "
            "training",
            fix="do not read values of activations or parameters (.item(), .tolist()) in forward, and check the shapes "
            "of the batch",
        ) from failure


@contextmanager
def _rehearsed(
    job: Job, layout: Any, rank: int, batch: tuple[Any, Any], optimizer: Any, ranks: Ranks, device: str,
    planned: JobPlan | None, first_step: bool, options: dict[str, Any],
) -> Iterator[tuple[Run, Microbatch, torch.optim.Optimizer]]:  # fmt: skip
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    has_blocks = ranks == "processes" and device in HOST
    world = fake_world(rank, layout.num_ranks, blocks=Blocks(at_most=True) if has_blocks else None)
    if planned is None:
        plain, loss = without_storage(job.model), without_storage(loss_for(job.loss, job.model))
        job = job_for(plain, loss, layout, batch[0], job.num_tokens, job.roles)._replace(seconds=job.seconds)
        planned = JobPlan(*make_plan(job, layout))
    job = job._replace(stands_for="" if device in HOST else device)
    run = under_plan(job, planned.plan, planned.strategies, world)
    # as in a run on the CPU, a rank's part is a view of the whole batch; values stay if the model's code needs them
    moved: dict[int, Tensor] = {}  # by id: a model that computes its loss has the labels among its inputs too
    on_meta_device = map_tensors(batch, lambda tensor: moved.setdefault(id(tensor), tensor.to("meta")))
    inputs = cloned(batch[0]) if run.plan.reads_values else on_meta_device[0]
    (microbatch,) = run.shard([(inputs, on_meta_device[1])])
    if run.plan.stages is not None:
        # the fake backend delivers nothing, so this stage is given the shapes that the other stages would send
        crossing = planned.crossing
        if not crossing:
            crossing += _crossing(job, run, microbatch, num_rows(batch))
        run.rehearse_with(microbatch, crossing, first_step=first_step)
    if any(isinstance(module, nn.RNNBase) for module in run.model.modules()):
        warn("a CPU's kernel for recurrent layers keeps memory that a rehearsal cannot see: more is held", stacklevel=2)
    if options.pop("fused", False):  # meta has no fused kernel; a loop over parameters takes as little memory
        options["foreach"] = False
    elif device not in HOST and "foreach" in signature(optimizer).parameters:
        options.setdefault("foreach", True)  # torch's default on accelerators, which takes more memory
    steps = run.optimizer(optimizer, **{"lr": 1e-3, **options})
    values, guess = run.plan.reads_values, None
    if not values and job.graph is not None and job.graph.needs_constants:
        values, guess = True, job.graph.guess
    # a rehearsal has no values for a router to choose by: all experts are taken to get the same number of tokens
    with on_meta(run.model, values=values, guess=guess, spread=True, instead=NATIVE_ATTENTION):
        if first_step:
            run.step(microbatch)
        else:
            for parameter in run.parameters.values():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        steps.step()
        yield run, microbatch, steps


def _crossing(job: Job, run: Run, microbatch: Microbatch, num_global: int) -> list[Mapping[str, Any]]:
    apart = job._replace(model=narrow_model(without_storage(job.model), run.plan), loss=without_storage(job.loss))
    inputs = [piece.inputs for piece in run.pieces(microbatch)]
    arguments = (apart, run.plan, choose(run.plan.layout), inputs, num_global, run.coord, microbatch.num_tokens)
    return [rehearsal.values for rehearsal in values_crossing(*arguments)]


def _trainable(run: Run) -> list[nn.Parameter]:
    return [p for p in (*run.parameters.values(), *run.model.parameters()) if p.requires_grad]


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    with torch._C.DisableTorchFunctionSubclass():  # reading the attribute of a sharded parameter would raise
        return [parameter.grad for parameter in parameters]


@contextmanager
def _observing(run: Run, tracker: Tracker) -> Iterator[None]:
    """Returns a context in which the tracker is notified of gradients, of logits, and of the executor's actions."""
    parameters = _trainable(run)

    def begin(action: Action) -> None:
        tracker.action = str(action)

    def end(action: Action) -> None:
        with torch._C.DisableTorchFunction():  # else the function modes of a rehearsal would handle each read
            tracker.hold("gradients", (*_gradients(parameters), *run.summing()))
        tracker.mark()

    def add_gradient(parameter: Tensor) -> None:
        tracker.hold("gradients", [parameter.grad, *run.summing()])

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


def _attend_heads(*args: Any, **named: Any) -> Any:
    # torch's own function hides its inner calls from function modes, so a copy runs that calls ``_attend``
    return with_names(functional.multi_head_attention_forward, scaled_dot_product_attention=_attend)(*args, **named)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    q, k, v = query, key, value  # the parameters have torch's names, which callers may use
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


NATIVE_ATTENTION: Mapping[Callable[..., Any], Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _attend,
    functional.multi_head_attention_forward: _attend_heads,
}
"""For ``on_meta``: runs attention by the fused CPU kernel, which keeps q, k, v, y and one number per query.

Without it torch takes the unfused path on the meta device, which keeps all attention weights."""
