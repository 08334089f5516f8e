"""bf16 and fp16: compute dtypes, fp32 master weights, loss scales and skipped steps."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from shardwright import launch, load, parallelize, save
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.models import CrossEntropy, GPTConfig, MeanSquaredError, MLPConfig, build_mlp
from shardwright.models.gpt import GPT
from shardwright.parallelize.planning import StepTraffic, make_plan
from shardwright.plan.plan import Job
from shardwright.verify import verify

WORDS = {"bf16": torch.bfloat16, "fp16": torch.float16}
LINES = (
    "single", "single mb2", "dp2", "dp2/fp32-sums mb2", "tp2", "tp2/sp", "tp2x2/2d", "tp2x1x2/2.5d", "tp2x2x2/3d",
    "pp2/zb-h1 mb2", "dp2/zero1/bucket:0", "dp2/zero2/bucket:0 mb2", "dp3/zero3/bucket:0 mb2",
    "dp2x2/zero3/bucket:0/fp32-sums", "pp2/zb-h1 dp2/zero3/bucket:0 tp2 mb3",
)  # fmt: skip


def gpt(**changes):
    settings = {"num_layers": 2, "width": 12, "num_heads": 2, "vocabulary": 20, "max_tokens": 8, "dropout": 0.1}
    with torch.device("meta"):
        return GPT(GPTConfig(**{**settings, **changes}))


def tokens(batch=6):
    drawn = torch.randint(20, (batch, 7), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


def mlp():
    with torch.device("meta"):
        return build_mlp(MLPConfig(widths=(6, 8, 9, 8, 5)))


def numbers(batch=6):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(batch, 6, generator=draw), torch.randint(5, (batch,), generator=draw)


def on_threads(work, line):
    return launch(work, Layout.parse(line), ranks="threads")


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.sampled(100)
def test_loss_and_gradients_are_those_of_one_device_within_roundings(line, word):
    style = ("gpt2", "llama")[LINES.index(line) % 2]
    verdict = verify(gpt(style=style), f"{line} {word}".removeprefix("single "), [tokens()])
    assert verdict.equal, str(verdict)
    assert verdict.tolerance == 8 * torch.finfo(WORDS[word]).eps
    assert verdict.max_relative_error > 1e-4  # it did compute in few bits


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.sampled(100)
def test_what_is_sent_is_narrow_and_exactly_what_is_said(line, word):
    line = f"{line} {word}".removeprefix("single ")
    inputs, targets = tokens()

    def work(world):
        run = parallelize(gpt(), line, world)
        (batch,) = run.shard([(inputs, targets)])
        with world.recorder.recording() as records:
            run.step(batch)
        job = Job(gpt(), CrossEntropy())
        plan, chosen = make_plan(job, Layout.parse(line))
        stated = Counter()
        for source, each in StepTraffic(job, plan, chosen, inputs).at(run.coord).items():
            for traffic in each:
                stated[source, traffic.kind, traffic.axis, traffic.num_bytes] += traffic.times
        made = Counter((r.source, r.kind, r.axis, r.num_bytes) for r in records if r.source not in ("loss", "core"))
        return stated, made

    for stated, made in on_threads(work, line):
        assert stated == made


@pytest.mark.parametrize("line", ["bf16", "pp2 dp2/zero3 mb2 fp16"])
def test_the_loss_is_taken_in_float32(line):
    class Told(CrossEntropy):
        def forward(self, logits_V, targets):
            seen.append(logits_V.dtype)
            return super().forward(logits_V, targets)

    seen = []

    def work(world):
        run = parallelize(mlp(), line, world, loss=Told())
        (batch,) = run.shard([numbers()])
        run.step(batch)
        run.evaluate(batch)

    on_threads(work, line)
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("line", ["bf16", "dp2/zero1 bf16", "dp2/zero3 bf16", "tp2 bf16"])
def test_parameters_compute_narrow_and_rest_wide_and_what_they_compute_with_is_rounded_from_that(line):
    def work(world):
        run = parallelize(mlp(), line, world)
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3)
        (batch,) = run.shard([numbers()])
        seen = []
        run.model.linear2.register_forward_hook(
            lambda module, *_: seen.append(module._parameters["weight"].detach().clone())
        )
        for _ in range(3):
            run.step(batch)
            optimizer.step()
        state = {value.dtype for each in optimizer.state.values() for value in each.values()}
        return {p.dtype for p in run.model.parameters()}, {p.dtype for p in run.parameters.values()}, state, seen

    for narrow, wide, state, seen in on_threads(work, line):
        assert narrow == {torch.bfloat16}
        assert wide == state == {torch.float32}
        assert not torch.equal(seen[1], seen[2])  # a step of 1e-3 is seen, since none is lost by rounding


def test_small_steps_add_up_in_the_master_weights_where_bf16_alone_would_lose_them():
    def work(world):
        run = parallelize(mlp(), "dp2/zero2 bf16", world)
        optimizer = run.optimizer(torch.optim.SGD, lr=1e-5)
        before = {name: p.detach().clone() for name, p in run.parameters.items()}
        for batch in run.shard([numbers()] * 3):
            run.step(batch)
            optimizer.step()
        moved = [name for name, p in run.parameters.items() if p.numel() and not torch.equal(p, before[name])]
        return len(moved), sum(p.numel() > 0 for p in run.parameters.values())

    for moved, there in on_threads(work, "dp2/zero2 bf16"):
        assert moved == there


@pytest.mark.parametrize(("first", "second"), [("dp2/zero3/bucket:0 bf16", "tp2"), ("tp2", "dp3/zero1 bf16")])
def test_a_checkpoint_holds_the_master_weights_and_any_precision_loads_them(first, second, tmp_path):
    def write(world):
        run = parallelize(mlp(), first, world)
        optimizer = run.optimizer(torch.optim.AdamW)
        run.step(next(run.shard([numbers()])))
        optimizer.step()
        save(tmp_path / "a", run, optimizer)

    def copy(world, line, source, target):
        run = parallelize(mlp(), line, world, seed=7)
        optimizer = run.optimizer(torch.optim.AdamW)
        load(source, run, optimizer)
        save(target, run, optimizer)
        return run.evaluate(next(run.shard([numbers()]))).item()

    from shardwright.checkpoint.loading import read_whole
    from shardwright.checkpoint.manifest import find, read

    on_threads(write, first)
    launch(copy, Layout.parse(second), second, tmp_path / "a", tmp_path / "b", ranks="threads")
    paths = [find(tmp_path / name) for name in "ab"]
    manifests = [read(path) for path in paths]
    assert manifests[0].tensors.keys() == manifests[1].tensors.keys()
    for name in manifests[0].tensors:
        one, other = (read_whole(path, manifest, name) for path, manifest in zip(paths, manifests, strict=True))
        assert one.dtype == torch.float32
        assert torch.equal(one, other), name


def test_a_run_in_fp16_goes_on_with_the_scale_that_it_had_found(tmp_path):
    def train(world, line, steps, restart):
        run = parallelize(mlp(), line, world)
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.01)
        run.loss_scale.value, run.loss_scale.grow_after = 2.0**30, 2
        if restart:
            load(tmp_path, run, optimizer)
        for batch in run.shard([numbers()] * (steps - run.num_steps)):
            run.step(batch)
            optimizer.step()
        if not restart:
            save(tmp_path, run, optimizer)
        return run.loss_scale, run.num_steps

    def both(line, steps, restart):
        return launch(train, Layout.parse(line), line, steps, restart, ranks="threads")[0]

    at_once = both("dp2/zero1 fp16", 18, False)
    (tmp_path / "step-00000018").rename(tmp_path.parent / "aside")
    both("dp2/zero1 fp16", 11, False)
    assert both("tp2 fp16", 18, True) == at_once


# ---- gradients that are not finite


class Overflowing(nn.Module):
    """Overflows in fp16's backward where an input is large."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x):
        return self.layers(x)


def broken(batch, value):
    """A batch with ``value``, which is not finite, in one sample: one rank of many holds it."""
    inputs, targets = numbers(batch)
    inputs[0, 0] = value
    return inputs, targets


@pytest.mark.parametrize(
    "line", ["fp16", "pp2 dp2 tp2 mb2 fp16", "dp4/zero2/bucket:0 fp16", "dp2x2/zero3/bucket:0 fp16"]
)
def test_a_step_that_is_not_finite_on_one_rank_is_left_out_by_all(line):
    torch.manual_seed(0)
    model = Overflowing()

    def work(world):
        run = parallelize(model, line, world)
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
        scales, moved, factor = [run.loss_scale.value], [], [1.0, float("inf"), 1.0]
        if world.rank == 0:
            next(run.model.parameters()).register_hook(lambda gradient: gradient * factor[run.num_steps])
        for batch in run.shard([numbers(8)] * 3):
            before = {name: p.detach().clone() for name, p in run.parameters.items()}
            run.step(batch)
            run.clip_grad_norm_(1.0)
            optimizer.step()
            moved.append(any(not torch.equal(p, before[name]) for name, p in run.parameters.items()))
            scales.append(run.loss_scale.value)
        return run.num_skipped, run.num_steps, scales, moved

    for skipped, steps, scales, moved in on_threads(work, line):
        assert (skipped, steps) == (1, 3)
        assert scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
        assert moved == [True, False, True]


def test_a_scale_that_is_too_large_comes_down_until_gradients_fit():
    torch.manual_seed(0)
    model = Overflowing()

    def work(world):
        run = parallelize(model, "dp2/zero1 fp16", world)
        run.loss_scale.value = 2.0**40
        while run.num_skipped == run.num_steps:
            run.step(next(run.shard([numbers()])))
        return run.num_skipped, run.loss_scale.value

    (first, second) = on_threads(work, "dp2/zero1 fp16")
    assert first == second
    assert first[0] > 5
    assert first[1] == 2.0 ** (40 - first[0])


@pytest.mark.parametrize("line", ["single", "dp2/zero2/bucket:0", "pp2 dp2 mb2", "tp2 bf16"])
def test_a_stop_names_a_parameter_on_every_rank_where_it_is_asked_for(line):
    torch.manual_seed(0)
    model = Overflowing()

    def work(world):
        run = parallelize(model, line, world, stop_at_nan=True)
        run.step(next(run.shard([numbers()])))
        with pytest.raises(PlanError, match="the gradient of 'layers") as stopped:
            run.step(next(run.shard([broken(6, float("nan"))])))
        return str(stopped.value)

    texts = set(on_threads(work, line))
    assert len(texts) == 1
    assert "is not finite in step 1" in texts.pop()


def test_wide_sums_are_those_of_microbatches_gradients_too():
    def work(world, line):
        run = parallelize(mlp(), line, world)
        run.step(next(run.shard([numbers(64)])))
        return torch.cat([p.grad.flatten() for p in run.parameters.values()])

    plain, wide = (f"dp1/zero1{word} bf16 mb32" for word in ("", "/fp32-sums"))
    exact, narrow, summed = (launch(work, 1, line, ranks="threads")[0] for line in ("mb32", plain, wide))
    assert (summed - exact).norm() < 0.7 * (narrow - exact).norm()


class Counts(nn.Module):
    """A layer that counts its calls in a buffer of floats, and scales by another one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("num_calls", torch.tensor(256.0))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        self.num_calls += 1
        return self.layer(x) * self.scale


def test_a_count_without_dims_keeps_its_dtype_and_changes_none():
    model = Counts()

    def work(world):
        run = parallelize(model, "dp2 bf16", world, loss=MeanSquaredError())
        (batch,) = run.shard([(torch.ones(4, 4), torch.zeros(4, 4))])
        for _ in range(3):
            run.step(batch)
        return run.state_dict()["num_calls"], run.model(torch.ones(1, 4, dtype=torch.bfloat16)).dtype

    for count, dtype in launch(work, 2, ranks="threads"):
        assert count.dtype == torch.float32
        assert count.item() == 259.0
        assert dtype == torch.bfloat16
