"""What a rank measures for ``calibrate``: products, copies, operators, steps of few blocks, and messages on each axis.

All ranks measure the same at the same moment, so what they share (memory, cores, links) is shared as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.comm.axis import Axis
from shardwright.comm.launch import run_threads
from shardwright.comm.world import World
from shardwright.cost.operators import OperatorRecord
from shardwright.dispatch_mode import DispatchMode
from shardwright.initial_values import without_values
from shardwright.layout import Layout, Precision
from shardwright.models.gpt import GPT, GPTConfig
from shardwright.parallelize import parallelize
from shardwright.parallelize.planning import num_rows, rows
from shardwright.planner.outline import ModelPlans
from shardwright.planner.rehearse import operator_record
from shardwright.planner.stopwatch import Stopwatch, Timing

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

STANDARD = ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (512, 512, 32), (512, 512, 64), (512, 512, 128))
"""The matrix products (rows, columns, summed dim) that are measured beside the model's own. On accelerators rows,
columns and summed dims from 256 on are ``LARGER`` times as large, since small products leave most multiprocessors
idle."""

LARGER = 8
MOST_PRODUCTS, MOST_OPERATORS = 12, 60
"""The most shapes of the model's matrix products, and the most of all its operators, that are measured: the costliest
ones (:attr:`_KeptOperator.cost`)."""

COPIES = tuple(2**n for n in range(20, 31, 2))
MESSAGES = tuple(2**n for n in range(12, 30, 2))
"""The sizes of copies and of messages that are measured, in bytes; on CPUs the largest are left out."""

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send")

TINY = (2, 8)
"""The numbers of blocks of two models that are so small that their steps take as long as launching their operators."""

FEW_BLOCKS = 3
"""The number of repeated blocks with which a step of the model is timed, if the model has more."""


class CalibrationJob(NamedTuple):
    """What is measured: a model's step on ``batch``, a microbatch, and messages over the axes of ``layout``'s mesh.

    ``build`` returns the model and its loss as its first two values. A step of one sample is measured too, if the batch
    has more. No measurement begins after ``limit_s`` seconds.
    """

    build: Callable[[], Any]
    batch: tuple[Any, Any]
    layout: Layout
    precision: Precision = "fp32"
    limit_s: float = 80.0


class CallTime(NamedTuple):
    """One operator of the model's step: what it is priced by, how often it was called, and its measured seconds.

    ``timing`` is None if it was not measured: the time limit had passed, or a single call takes too long.
    """

    operator: OperatorRecord
    times: int
    timing: Timing | None


class StepTime(NamedTuple):
    """The measured seconds of a step of a model with a number of blocks on a number of samples.

    ``passes`` are those of the forward and backward, ``update`` those of the optimizer's step. ``blocks`` is 0 for the
    whole model.
    """

    blocks: int
    samples: int
    passes: Timing
    update: Timing


class LinkTiming(NamedTuple):
    """The measured seconds of one collective, or send, of a number of bytes over an axis of the mesh.

    ``stride`` is the difference between the numbers of neighboring ranks of the axis.
    """

    axis: str
    kind: str
    ranks: int
    stride: int
    num_bytes: int
    timing: Timing


@dataclass
class Measurements:
    """What the ranks have measured; the same on every rank.

    ``products`` has the rows, columns and summed dim of each product, and ``copies`` the bytes of each copy. ``start``
    is the time of launching one operator. ``overlap`` is by how much computation takes longer beside an all-reduce, as
    a share of the all-reduce's time; None if it was not measured.
    """

    products: list[tuple[tuple[int, int, int], Timing]] = field(default_factory=list)
    copies: list[tuple[int, Timing]] = field(default_factory=list)
    start: Timing | None = None
    tiny: list[StepTime] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    calls: list[CallTime] = field(default_factory=list)
    links: list[LinkTiming] = field(default_factory=list)
    overlap: float | None = None


def measure_rank(world: World, job: CalibrationJob) -> Measurements:
    """Returns what this rank has measured together with all others; every rank gets the same.

    All ranks of the layout must call it, with the same job.
    """
    everyone = world.everyone()
    watch, measurements = Stopwatch(everyone, job.limit_s), Measurements()
    dtype = DTYPES[job.precision]
    measurements.start = watch.timed(_tiny_operators(world.device), parts=300)
    calls = _measure_steps(world, job, watch, measurements)
    measurements.overlap = _measure_messages(world, job.layout, watch, measurements)
    _measure_products(world.device, dtype, watch, measurements, calls)
    _measure_copies(world.device, watch, measurements)
    for call in calls[:MOST_OPERATORS]:
        measurements.calls.append(CallTime(call.operator, call.times, watch.timed(call.again)))
    return measurements


def _tiny_operators(device: torch.device) -> Callable[[], None]:
    x, function = torch.zeros(4, device=device), torch.ops.aten.add_.Scalar

    def call() -> None:
        for _ in range(300):
            function(x, 1.0)

    return call


# ---- steps


def _measure_steps(world: World, job: CalibrationJob, watch: Stopwatch, found: Measurements) -> list[_KeptOperator]:
    """Times steps of tiny models and of the model with few blocks; returns the model's operators, costliest first."""
    operators: list[_KeptOperator] = []

    def work(inner: World, built: tuple[Any, Any], blocks: int, batch: tuple[Any, Any], precision: Precision) -> None:
        run = parallelize(built[0], Layout((), 1, precision), inner, loss=built[1], example=batch[0])
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-5)
        (part,) = run.shard([batch])

        def step() -> None:
            run.step(part)

        timings = watch.timed_in_turn([step, optimizer.step])
        if not timings:
            return
        (found.tiny if built[0] in tiny else found.steps).append(StepTime(blocks, num_rows(batch), *timings))
        if batch is job.batch:
            with _KeptOperators() as keeping:
                step()
                optimizer.step()
            operators[:] = sorted(keeping.kept.values(), key=lambda operator: -operator.cost)

    with without_values():
        model, loss = job.build()[:2]
        tiny = [tiny_model(number) for number in TINY]
        few = num_blocks_of(model)
    for number, small_model in zip(TINY, tiny, strict=True):
        run_threads(work, 1, (small_model, loss), number, tiny_batch(), "fp32", device=world.device)
    one = rows(job.batch[0], 0, 1), rows(job.batch[1], 0, 1)
    for batch in (one, job.batch) if num_rows(job.batch) > 1 else (job.batch,):
        with without_values():
            built = shortened(model, few), loss
        run_threads(work, 1, built, few, batch, job.precision, device=world.device)
    return operators


def tiny_model(number: int) -> nn.Module:
    """Returns a GPT of ``number`` blocks that is so small that its step takes as long as launching its operators."""
    return GPT(GPTConfig(width=8, num_layers=number, num_heads=2, max_tokens=4, vocabulary=16))


def tiny_batch() -> tuple[Tensor, Tensor]:
    """Returns a batch of one sample for :func:`tiny_model`."""
    tokens = torch.zeros(1, 4, dtype=torch.long)
    return tokens, tokens


def num_blocks_of(model: nn.Module) -> int:
    """Returns the number of repeated blocks with which the model's steps are timed; 0 stands for the whole model."""
    blocks = ModelPlans(model).blocks
    return FEW_BLOCKS if blocks is not None and blocks.number > FEW_BLOCKS else 0


def shortened(model: nn.Module, number: int) -> nn.Module:
    """Returns a copy of the model on the meta device with ``number`` of its repeated blocks; for 0 the model itself."""
    return ModelPlans(model).shortened(number) if number else model


class _KeptOperator:
    """An operator of a step, kept with the shapes of its tensors so that it can be called again."""

    def __init__(self, function: Any, args: Any, named: Any, operator: OperatorRecord) -> None:
        self.function, self.operator, self.times = function, operator, 0
        self.args, self.named = tree_map_only(Tensor, _OperandLike, (args, named))
        self.made: Any = None

    @property
    def cost(self) -> float:
        """The estimated cost of all its calls, in bytes of memory traffic, of which one counts as 16 FLOPs."""
        return self.times * (self.operator.flops / 16 + self.operator.num_bytes)

    def again(self) -> None:
        """Calls the operator, on tensors of the same sizes."""
        if self.made is None:
            self.made = tree_map_only(_OperandLike, lambda operand: operand.tensor(), (self.args, self.named))
        args, named = self.made
        with torch.no_grad():
            self.function(*args, **named)


class _OperandLike:
    """A tensor's shape, strides and dtype; if it is not of floats also its values, since they may be indices."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.strides, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.whole = None if tensor.is_floating_point() else tensor.detach().clone()

    def tensor(self) -> Tensor:
        """Returns the kept tensor, or else a new one of this shape and dtype with random floats from 0 to 1."""
        if self.whole is not None:
            return self.whole
        size = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True) if n)
        return torch.rand(size, device=self.device).to(self.dtype).as_strided(self.shape, self.strides)


class _KeptOperators(DispatchMode):
    """Keeps each different operator that runs inside the mode, and how often it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[object, _KeptOperator] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = function(*args, **named)
        operator = operator_record(function, args, named, out)
        if operator is not None and function._overloadpacket is not torch.ops.aten._local_scalar_dense:
            key = (function, repr(tree_map_only(Tensor, lambda t: (t.shape, t.stride(), t.dtype), (args, named))))
            if key not in self.kept:
                self.kept[key] = _KeptOperator(function, args, named, operator)
            self.kept[key].times += 1
        return out


# ---- products and copies


def _measure_products(
    device: torch.device, dtype: torch.dtype, watch: Stopwatch, found: Measurements, calls: Sequence[_KeptOperator]
) -> None:
    model_products = {call.operator.dims[1:]: None for call in calls if call.operator.part == "matmul"}
    scale = LARGER if device.type != "cpu" else 1
    standard = ((scale * m, scale * n, k * (scale if k >= 256 else 1)) for m, n, k in STANDARD)
    for m, n, k in dict.fromkeys((*list(model_products)[:MOST_PRODUCTS], *standard)):
        x, y = torch.rand(m, k, device=device).to(dtype), torch.rand(k, n, device=device).to(dtype)
        timing = watch.timed(lambda x=x, y=y: x @ y)  # type: ignore[misc]
        if timing is not None:
            found.products.append(((m, n, k), timing))


def _measure_copies(device: torch.device, watch: Stopwatch, found: Measurements) -> None:
    for size in COPIES if device.type != "cpu" else COPIES[:4]:
        x = torch.zeros(size // 4, device=device)
        y = torch.zeros_like(x)
        timing = watch.timed(lambda x=x, y=y: y.copy_(x))  # type: ignore[misc]
        if timing is not None:
            found.copies.append((size, timing))


# ---- messages


def _measure_messages(world: World, layout: Layout, watch: Stopwatch, found: Measurements) -> float | None:
    """Times messages of each kind and size over each axis of two or more ranks, and adds them to ``found.links``.

    It returns :func:`_overlap` of the first axis on which that could be measured, or None if there is none.
    """
    mesh, overlap = layout.mesh, None
    most = MESSAGES if world.device.type != "cpu" else MESSAGES[:-2]
    for name in mesh.axes:
        if mesh[name] < 2:
            continue
        axis = world.axis(name, mesh.groups(name))
        stride = axis.ranks[1] - axis.ranks[0]
        axis.connect([(i, i + 1) for i in range(0, axis.size - 1, 2)])
        for kind in KINDS:
            for size in most:
                message = _message(axis, kind, size)
                if kind == "send":  # two messages, there and back; in an odd number of ranks the last has no partner
                    timing = watch.timed(message, parts=2, takes_part=axis.index ^ 1 < axis.size)
                else:
                    timing = watch.timed(message)
                if timing is None:
                    break
                found.links.append(LinkTiming(name, kind, axis.size, stride, size, timing))
        overlap = _overlap(axis, watch) if overlap is None else overlap
    return overlap


def _message(axis: Axis, kind: str, size: int) -> Callable[[], object]:
    """Returns a function that runs a collective on ``size`` bytes, or sends them to the rank's neighbor and back.

    For a send, ranks are paired (0 with 1, 2 with 3, ...); in an odd number of ranks the last does nothing.
    """
    x = torch.zeros(size // 4, device=axis.device)
    part = x[: len(x) // axis.size]
    if kind == "all_reduce":
        return lambda: axis.all_reduce(x)
    if kind == "all_gather":
        return lambda: axis.all_gather(part)
    if kind == "reduce_scatter":
        whole = x[: len(part) * axis.size]
        return lambda: axis.reduce_scatter(whole)

    def there_and_back() -> None:
        other = axis.index ^ 1
        if other >= axis.size:
            return
        if axis.index < other:
            axis.send(x, other)
        axis.receive(x.shape, x.dtype, other)
        if axis.index > other:
            axis.send(x, other)

    return there_and_back


def _overlap(axis: Axis, watch: Stopwatch, size: int = 2**22) -> float | None:
    """Returns by how much products take longer beside an all-reduce, as a share of its time; None if not timed."""
    x = torch.zeros(size // 4, device=axis.device)
    side = 512 if axis.device.type == "cpu" else 4096
    y = torch.rand(side, side, device=axis.device)
    once, alone = watch.timed(lambda: y @ y), watch.timed(lambda: axis.all_reduce(x))
    if once is None or alone is None:
        return None
    number = 1 + int(1.5 * alone.seconds / once.seconds)

    def products() -> None:
        for _ in range(number):
            y @ y

    def both() -> None:
        pending = axis.all_reduce_async(x)
        products()
        pending.wait()

    computed, together = watch.timed(products), watch.timed(both)
    if computed is None or together is None:
        return None
    return min(1.0, max(0.0, (together.seconds - computed.seconds) / alone.seconds))
