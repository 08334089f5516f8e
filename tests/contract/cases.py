"""What every strategy is held to, as functions; the models it is held to it on; how its layouts are written.

A check takes a layout line and a case, raises AssertionError where a promise is broken, and takes ``strategies`` to
run others than the line asks for: so the checks themselves can be checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib import import_module
from itertools import combinations
from math import prod
from pathlib import Path
from threading import Lock, RLock
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from one_plan import for_one_rank
from shardwright.comm.launch import launch
from shardwright.errors import LayoutError
from shardwright.layout import Layout, Option
from shardwright.models import AttentionConfig, ConvNetConfig, CrossEntropy, GPTConfig, MLPConfig, entry_of
from shardwright.parallelize import parallelize
from shardwright.parallelize.auto import tokens_of
from shardwright.parallelize.planning import StepTraffic, job_for, make_plan, without_storage
from shardwright.plan.batch_shard import is_sequence
from shardwright.plan.plan import Job, Plan
from shardwright.strategies import STRATEGIES, choose
from shardwright.verify import Verdict, verify

SIZES = (1, 2, 3, 4, 8)
NUM_SAMPLES = (7, 5)  # of the two steps: neither can be divided, and on 8 ranks some have no sample

# ---- layouts

SUPPLIED = {"file": (f"file:{Path(__file__).parent / 'two_stages.csv'}",)}
"""What is written of options whose values are files of the tests; the strategies say all else."""


def written(strategy, name: str) -> tuple[str, ...]:
    """How tests write an option, with its values and with other options."""
    found = strategy.options[name].written(name) or SUPPLIED.get(name, ())
    assert found, f"'{name}' of {strategy.name} has no examples: add some to its file, or to SUPPLIED"
    return found


def of_one_model() -> list[str]:
    """Options whose values name a model's own parts: one of the values fits a model, the others do not."""
    return [name for strategy in STRATEGIES.values() for name, o in strategy.options.items() if o.of_one_model]


def spellings(strategy, size: int) -> list[str]:
    """The factors that ask for ``strategy`` on so many ranks, with each of its options in turn."""
    key = id(strategy), size  # some have no hash
    if key not in _SPELLED:
        _SPELLED[key] = strategy, _spelled(strategy, size)  # with the strategy, so that the id stays taken
    return list(_SPELLED[key][1])


_SPELLED: dict[tuple[int, int], tuple[object, list[str]]] = {}


def _spelled(strategy, size: int) -> list[str]:
    # a default strategy takes its options alone; another one is asked for by its first, which the others join, or by
    # one of these
    first, *rest = ("", *strategy.options) if strategy.default else strategy.options
    names = written(strategy, first) if first else ("",)
    further = [other for each in rest for other in written(strategy, each)]
    found = []
    for option in (*names, *(_joined(names[0], other) for other in further), *further):
        try:
            layout = Layout.parse("/".join(filter(None, [f"{strategy.axis}{size}", option])))
            if layout.num_ranks == size and strategy in choose(layout):
                found.append(str(layout))
        except LayoutError:
            continue
    pinned = [each for name, option in strategy.options.items() for each in _pinned(found[:1], name, option.pins)]
    return [*dict.fromkeys(found), *pinned]


def _joined(options: str, others: str) -> str:
    return "/".join(dict.fromkeys(filter(None, f"{options}/{others}".split("/")))) if options else others


def _pinned(factors: list[str], name: str, pins: Sequence[str]) -> list[str]:
    """The same grids with each of the algorithms that may be pinned."""
    pinned = []
    for factor in (Layout.parse(each).factors[0] for each in factors):
        for value in pins:
            options = tuple(Option(name, value) if o.name == name else o for o in factor.options)
            pinned.append(str(replace(factor, options=options)))
    return pinned


def further_sizes(strategy, size: int) -> list[str]:
    """Factors of more than one number: replicas of slices."""
    return [
        str(Layout.parse(f"{strategy.axis}{sizes}/{text}"))
        for name, option in strategy.options.items()
        for sizes in option.sizes
        for text in written(strategy, name)
        if prod(map(int, sizes.split("x"))) == size
    ]


def spelling(strategy, size: int) -> str:
    """The plainest factor that asks for ``strategy`` on so many ranks."""
    found = spellings(strategy, size)
    assert found, f"no layout line asks for {strategy.name} on {size} ranks: add examples to its options"
    return found[0]


def whole_size(strategy) -> int:
    """The fewest ranks on which every axis of the strategy is longer than one; 2 where it has one axis."""
    for size in SIZES[1:]:
        factor = Layout.parse(spelling(strategy, size)).factor(strategy.axis)
        if factor is not None and all(n > 1 for n in factor.sizes):
            return size
    raise AssertionError(f"{strategy.name} has an axis of one rank on any of {SIZES}")


def pairs() -> list[tuple]:
    """Any two strategies of different axes."""
    return [(a, b) for a, b in combinations(STRATEGIES.values(), 2) if a.axis != b.axis]


# ---- models


@dataclass(frozen=True, eq=False)
class Case:
    """A model, on the meta device, its loss, and two global batches."""

    name: str
    config: object
    loss: nn.Module
    num_microbatches: int = 1
    num_tokens: int = 5
    ignored: Callable[[torch.Tensor], torch.Tensor] | None = None
    frozen: tuple[str, ...] = field(default=())
    num_samples: tuple[int, ...] = NUM_SAMPLES

    @property
    def model(self) -> nn.Module:
        """A copy, to be changed at will."""
        return without_storage(self._built)

    @cached_property
    def _built(self) -> nn.Module:
        entry = entry_of(self.config)
        assert entry is not None
        with torch.device("meta"):
            model = entry.factory(self.config)
        for name in self.frozen:
            model.get_parameter(name).requires_grad_(False)
        return model.double()

    @property
    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        entry = entry_of(self.config)
        assert entry is not None
        generator = torch.Generator().manual_seed(0)
        found = []
        for num_samples in self.num_samples:
            inputs, targets = entry.example_batch(self.config, num_samples, self.num_tokens, generator)
            targets = targets.clone()
            if self.ignored is not None:
                targets[self.ignored(targets)] = self.loss.ignore_index
            if inputs.is_floating_point():
                inputs = inputs.double()
            found.append((inputs, targets.double() if targets.is_floating_point() else targets))
        return found

    @property
    def has_sequences(self) -> bool:
        """Whether samples are sequences, which a layout may cut; pictures have more dims."""
        inputs = self.batches[0][0]
        return is_sequence(inputs) and inputs.dim() < 4

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Pictures(Case):
    """A model made by a function, on random pictures; ``targets`` is the shape of a sample's, none for one class."""

    config: object = None
    loss: nn.Module = field(default_factory=CrossEntropy)
    make: Callable[[], nn.Module] = nn.Identity
    shape: tuple[int, ...] = (4, 6, 7)
    targets: tuple[int, ...] | None = None

    @cached_property
    def _built(self) -> nn.Module:
        with torch.device("meta"):
            return self.make().double()

    @property
    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        found = []
        for num in NUM_SAMPLES:
            inputs = torch.randn(num, *self.shape, generator=generator, dtype=torch.float64)
            if self.targets is None:
                targets = torch.randint(5, (num,), generator=generator)
            else:
                targets = torch.randn(num, *self.targets, generator=generator, dtype=torch.float64)
            found.append((inputs, targets))
        return found


def _some(targets: torch.Tensor) -> torch.Tensor:
    """All of the first two samples, and of the others every third target."""
    ignored = torch.arange(targets.numel()).view(targets.shape) % 3 == 0
    ignored[:2] = True
    return ignored


class Blocks(nn.Module):
    """Blocks that ``make`` gives, one after the other, between two layers: numbers of 8 features in, 5 out."""

    def __init__(self, make, num=3, num_in=8):
        super().__init__()
        self.first = nn.Linear(num_in, 8)
        self.blocks = nn.ModuleList(make() for _ in range(num))
        self.last = nn.Linear(8, 5)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _gpt(style: str, **settings) -> GPTConfig:
    small = {
        "vocabulary": 19,
        "max_tokens": 6,
        "num_layers": 2,
        "num_heads": 2,
        "width": 10,
        "hidden": 11,
        "dropout": 0.1,
    }
    return GPTConfig(style=style, **{**small, **settings})


MLP = Case("mlp", MLPConfig(widths=(7, 13, 11, 9, 5), dropout=0.1), CrossEntropy(label_smoothing=0.1))
DEEP = Case("deep mlp", MLPConfig(widths=(9,) * 10, activation="tanh", dropout=0.1), CrossEntropy(), num_microbatches=3)
ATTENTION = Case(
    "attention", AttentionConfig(width=12, num_heads=1, causal=False, dropout=0.1), entry_of(AttentionConfig()).loss()
)
FUSED = Case(
    "fused grouped attention",
    AttentionConfig(width=8, num_heads=6, num_kv_heads=2, head_dim=3, fused=True, dropout=0.1),
    entry_of(AttentionConfig()).loss(),
    num_microbatches=3,
)
CONVNET = Case(
    "convnet",
    ConvNetConfig(image_channels=2, image_size=10, channels=(3, 4), kernel=3, hidden=(9, 11), num_classes=5),
    CrossEntropy(),
)
GPT2 = Case("gpt2 tied", _gpt("gpt2"), CrossEntropy(), ignored=_some)
GPT2_APART = Case(
    "gpt2 apart", _gpt("gpt2", tied=False, bias=False), CrossEntropy(label_smoothing=0.1), num_microbatches=3
)
LLAMA_GROUPED = Case(
    "llama grouped heads",
    _gpt("llama", num_heads=4, num_kv_heads=2, width=16, tied=False, num_layers=1),
    CrossEntropy(ignore_index=3, label_smoothing=0.2),
    ignored=_some,
)
LLAMA_ONE_KV = Case(
    "llama one kv head",
    _gpt("llama", num_heads=3, num_kv_heads=1, width=18),
    CrossEntropy(ignore_index=-1),
    num_microbatches=3,
    ignored=_some,
)
FROZEN = Case(
    "gpt2 partly frozen",
    _gpt("gpt2", num_layers=1),
    CrossEntropy(),
    frozen=("position.weight", "norm.weight", "blocks.0.mlp.up.weight", "blocks.0.attention.qkv.bias"),
)

CASES = (MLP, DEEP, ATTENTION, FUSED, CONVNET, GPT2, GPT2_APART, LLAMA_GROUPED, LLAMA_ONE_KV, FROZEN)
PAIR_CASES = (DEEP, GPT2, LLAMA_ONE_KV, CONVNET)
OPTION_CASES = (GPT2, CONVNET)
"""With these every option is tried: one or the other fits any strategy."""


def line_of(case: Case, *factors: str) -> str:
    """The layout line, with as many microbatches as the case wants."""
    return " ".join(factors) + (f" mb{case.num_microbatches}" if case.num_microbatches > 1 else "")


# ---- what two steps do on every rank


@dataclass(frozen=True)
class Found:
    """What one rank holds after two steps, and what each sent: in the second the order of the layers is known."""

    shapes: dict[str, tuple[int, ...]]
    stored: dict[str, tuple[int, ...]]
    gradients: dict[str, tuple[int, ...]]
    names: frozenset[str]
    recorded: tuple[Counter, ...]


ASIDE = ("loss", "clip", "core")
"""Sources that no strategy speaks for."""


def _found(run, recorded: Sequence[Counter]) -> Found:
    return Found(
        shapes={name: tuple(p.shape) for name, p in run.model.named_parameters()},
        stored={name: tuple(p.shape) for name, p in run.parameters.items()},
        gradients={name: tuple(p.grad.shape) for name, p in run.parameters.items() if p.grad is not None},
        names=frozenset(run.state_dict(full=False)),
        recorded=tuple(recorded),
    )


def two_steps(
    line: str, case: Case, strategies: Sequence | None = None, alter: Callable | None = None
) -> tuple[Verdict, list[Found]]:
    """How two steps compare with one device's, and what each rank holds and sends.

    ``alter`` changes each rank's run before it starts.
    """
    runs, recorded = {}, {}

    def watch(run):
        rank, step = run.world.rank, run.step
        runs[rank], recorded[rank] = run, []

        def recorded_step(batch):
            with run.world.recorder.recording() as records:
                loss = step(batch)
            made = ((r.source, r.kind, r.axis, r.num_bytes) for r in records if r.source not in ASIDE)
            recorded[rank].append(Counter(made))
            return loss

        run.step = recorded_step
        if alter is not None:
            alter(run)

    verdict = verify(case.model, line, case.batches, loss=case.loss, strategies=strategies, alter=watch)
    return verdict, [_found(runs[rank], recorded[rank]) for rank in sorted(runs)]


@cache
def _known_steps(line: str, case: Case) -> tuple[Verdict, list[Found]]:
    with known_once(line, case):
        return two_steps(line, case)


@contextmanager
def known_once(line: str, case: Case) -> Iterator[None]:
    """Within it, ``verify`` takes the plan that is known of a case, its records, and what one device trains it to."""
    with planned_once({str(Layout.parse(line)): planned(line, case)}), one_device_once(case), observed_once(case):
        yield


@contextmanager
def one_device_once(case: Case) -> Iterator[None]:
    """One device trains a case alike under every layout, but those whose microbatches have their own statistics."""
    verify = import_module("shardwright.verify")
    train = verify.reference

    def known(
        plain: nn.Module, loss: nn.Module, batches: list, seed: int, plan: Plan, *more: object, **named: object
    ) -> object:
        if plan.layout.own_statistics:
            return train(plain, loss, batches, seed, plan, *more, **named)
        if case not in _ONE_DEVICE:
            _ONE_DEVICE[case] = train(plain, loss, batches, seed, plan, *more, **named)
        return _ONE_DEVICE[case]

    with mock.patch.object(verify, "reference", known):
        yield


_ONE_DEVICE: dict[Case, object] = {}


@contextmanager
def planned_once(known: dict[str, tuple[Plan, tuple]] | None = None) -> Iterator[None]:
    """Ranks that are threads share the plan that the first of them makes, or that is known by the layout's line.

    Planning takes longer than the steps of a small model, and each rank would do it again. That ranks which plan for
    themselves agree is held by every test that does not come here: those of processes, and all but the contract's.
    """
    lock, found = Lock(), dict(known or {})

    def once(job: Job, layout: Layout, strategies: Sequence | None = None) -> tuple[Plan, tuple]:
        assert strategies is None, "other strategies have other plans"
        with lock:
            if str(layout) not in found:
                found[str(layout)] = make_plan(job, layout)
            plan, chosen = found[str(layout)]
            return for_one_rank(plan), chosen

    modules = [import_module(f"shardwright.{name}") for name in ("parallelize", "verify")]
    with mock.patch.object(modules[0], "make_plan", once), mock.patch.object(modules[1], "make_plan", once):
        yield


def _steps(line: str, case: Case, strategies: Sequence | None) -> tuple[Verdict, list[Found]]:
    return _known_steps(line, case) if strategies is None else two_steps(line, case, strategies)


def job_of(line: str, case: Case) -> Job:
    """What :func:`shardwright.verify.verify` has laid out."""
    layout, (inputs, _) = Layout.parse(line), case.batches[0]
    return job_for(case.model, case.loss, layout, inputs, tokens_of(inputs, layout))


def planned(line: str, case: Case, strategies: Sequence | None = None) -> tuple[Plan, tuple]:
    """The plan, and the strategies that made it. Raises LayoutError if the layout does not fit the model."""
    if strategies is not None:
        return make_plan(job_of(line, case), Layout.parse(line), strategies)
    found = _known_plan(line, case)
    if isinstance(found, LayoutError):
        raise found
    return found


@cache
def _known_plan(line: str, case: Case) -> tuple[Plan, tuple] | LayoutError:
    try:
        with observed_once(case):
            return make_plan(job_of(line, case), Layout.parse(line))
    except LayoutError as refusal:
        return refusal


# ---- the promises


def lays_out(line: str, case: Case, strategies: Sequence | None = None) -> bool:
    """Whether the layout fits the model."""
    try:
        planned(line, case, strategies)
    except LayoutError:
        return False
    return True


def check_equal(line: str, case: Case, strategies: Sequence | None = None, alter: Callable | None = None) -> None:
    """Promise 1: loss, every gradient, and the parameters after two steps are those of one device."""
    verdict, _ = two_steps(line, case, strategies, alter) if alter else _steps(line, case, strategies)
    assert verdict.tolerance == 1e-10
    assert verdict.steps == 2
    assert verdict.equal, str(verdict)


STORED = ("parameter", "gradient", "optimizer")
"""What a rank stores between steps, each with a tensor layout of its own."""


def _divided(plan: Plan, axis: str) -> set[tuple[str, str]]:
    """What the plan cuts over ``axis``."""
    found = {("compute", name) for name, layout in plan.compute.items() if axis in layout.axes}
    for name, layouts in plan.state.items():
        found |= {(part, name) for part in STORED if axis in getattr(layouts, part).axes}
    return found | ({("inputs", "")} if axis in plan.inputs else set())


def check_divides(line: str, case: Case, strategies: Sequence | None = None) -> None:
    """Promise 2: every axis divides something, and every strategy something that was whole before it."""
    layout = Layout.parse(line)
    job = job_of(line, case)
    plan, (whole, chosen) = Plan.of(job, layout), planned(line, case, strategies)
    idle = {axis for axis in plan.mesh.axes if plan.mesh[axis] > 1}
    for number, strategy in enumerate(chosen, 1):
        with observed_once(case):
            before, plan = plan, whole if number == len(chosen) else strategy.place(job, plan)
        factor = layout.factor(strategy.axis)
        assert factor is not None
        axes = [axis for axis in factor.mesh_axes if plan.mesh[axis] > 1]
        busy = {axis for axis in axes if _divided(plan, axis) - _divided(before, axis)}
        assert busy or not axes, f"{strategy.name} divides nothing over {axes} under {line}"
        idle -= busy
    assert not idle, f"nothing is divided over {sorted(idle)} under {line}"


def check_shapes(line: str, case: Case, strategies: Sequence | None = None) -> None:
    """Promise 3: each rank holds the shapes that the plan says, in compute and stored between steps."""
    plan, _ = planned(line, case, strategies)
    trained = {name for name, p in case.model.named_parameters() if p.requires_grad}
    for rank, found in enumerate(_steps(line, case, strategies)[1]):
        coord = plan.mesh.coord(rank)
        said = {name: layout.local_shape(coord) for name, layout in plan.compute.items() if layout.pieces(coord)}
        assert found.shapes == said, f"rank {rank} under {line} computes with other shapes"
        said = {name: plan.state[name].parameter.local_shape(coord) for name in said}
        assert found.stored == said, f"rank {rank} under {line} stores other shapes"
        said = {name: plan.state[name].gradient.local_shape(coord) for name in said if name in trained}
        assert found.gradients == said, f"rank {rank} under {line} has gradients of other shapes"


def check_traffic(line: str, case: Case, strategies: Sequence | None = None) -> None:
    """Promise 3: each rank makes the calls that the strategies say: source, kind, axis, bytes, number."""
    plan, chosen = planned(line, case, strategies)
    job, (_, every) = job_of(line, case), _steps(line, case, strategies)
    for number, (inputs, _) in enumerate(case.batches):
        traffic_at = StepTraffic(job, plan, chosen, inputs).at
        for rank, found in enumerate(every):
            expected: Counter = Counter()
            with observed_once(case):
                said_by = traffic_at(plan.mesh.coord(rank))
            for source, said in said_by.items():
                for traffic in said:
                    expected[source, traffic.kind, traffic.axis, traffic.num_bytes] += traffic.times
            recorded = found.recorded[number]
            unsaid, unmade = recorded - expected, expected - recorded
            assert not unsaid, (
                f"rank {rank} under {line} makes calls that traffic() does not state in step {number}: {dict(unsaid)}"
            )
            assert not unmade, f"rank {rank} under {line} does not make in step {number}: {dict(unmade)}"


@contextmanager
def observed_once(case: Case) -> Iterator[None]:
    """What the plain model calls, on samples of one shape, is the same under every layout: it is recorded once.

    These are the calls of modules and, for the jobs of all ranks, of operators. Ranks that record for themselves are
    held to agree where ranks plan for themselves (:func:`planned_once`).
    """
    planning, graphs = (
        import_module(f"shardwright.{name}") for name in ("parallelize.planning", "analysis.model_graph")
    )
    with ExitStack() as stack:
        for module, name in ((planning, "record_module_calls"), (graphs, "_run_or_failure")):
            known = partial(_observed, case, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, known))
        yield


def _observed(case: Case, record: Callable, model: nn.Module, inputs: object, *more: object) -> object:
    leaves, tree = tree_flatten(inputs)
    if not all(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
        return record(model, inputs, *more)
    dtype = next(model.parameters()).dtype
    key = (case, record, tuple((leaf.shape, leaf.dtype) for leaf in leaves), str(tree), dtype, more)
    with _OBSERVING:  # ranks are threads, of which one records
        if key not in _OBSERVED:
            _OBSERVED[key] = record(model, inputs, *more)
        return _OBSERVED[key]


_OBSERVED: dict[tuple, object] = {}
_OBSERVING = RLock()


def check_names(line: str, case: Case, strategies: Sequence | None = None) -> None:
    """Promise 4: ``state_dict()`` has the one-device model's keys, and no others."""
    known = set(case.model.state_dict())
    _, found = _steps(line, case, strategies)
    for rank, each in enumerate(found):
        assert each.names <= known, f"rank {rank} under {line} adds {sorted(each.names - known)}"
    missing = known - frozenset().union(*(each.names for each in found))
    assert not missing, f"no rank under {line} holds {sorted(missing)}"


CHECKS = (check_equal, check_divides, check_shapes, check_traffic, check_names)
"""Promises 1 to 4."""


def check_refused(
    line: str,
    model: nn.Module,
    *,
    loss: nn.Module | None = None,
    num_ranks: int | None = None,
    strategies: Sequence | None = None,
) -> str:
    """Promise 5: LayoutError with the same words on every rank, before anything is sent; returns the words."""

    def work(world):
        with world.recorder.recording() as records:
            try:
                parallelize(model, line, world, loss=loss, strategies=strategies)
            except LayoutError as refusal:
                return str(refusal), len(records)
        return None, len(records)

    found = launch(work, num_ranks or Layout.parse(line).num_ranks, ranks="threads")
    texts = {text for text, _ in found}
    assert None not in texts, f"{sum(text is None for text, _ in found)} of {len(found)} ranks accept {line}"
    assert len(texts) == 1, f"the ranks refuse {line} in different words"
    assert not any(num for _, num in found), f"something was sent before {line} was refused"
    (text,) = texts
    assert all(word in text for word in ("given:", "allowed:", "fix:")), text
    return text
