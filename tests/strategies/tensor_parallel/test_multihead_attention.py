"""``nn.MultiheadAttention`` under every mode: all that its arguments may be, against torch's own forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from threading import local
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from contract.cases import check_shapes, check_traffic
from shardwright import verify, without_values
from shardwright.comm.axis import Axis
from shardwright.comm.launch import launch
from shardwright.errors import LayoutError, PlanError, RankFailedError
from shardwright.keyed_dropout import key_dropout
from shardwright.layout import Layout
from shardwright.models.losses import MeanSquaredError
from shardwright.operators.multihead_attention import HeadShard, multihead
from shardwright.parallelize import parallelize
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job
from shardwright.rng import RngTracker
from shardwright.strategies import STRATEGIES

WIDTH, TOKENS, KEYS, SAMPLES = 12, 4, 3, 5


class Model(nn.Module):
    """A layer, an attention in its own way, and a layer that sees what comes out."""

    def __init__(self, num_heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, num_heads, **{"batch_first": True, **options})

    def forward(self, x):
        return self.after(self.attend(self.before(x)))


class SelfAttention(Model):
    def attend(self, x):
        return x + self.attn(x, x, x, need_weights=False)[0]


class WithoutBias(SelfAttention):
    def __init__(self):
        super().__init__(bias=False)


class ThreeHeads(SelfAttention):
    def __init__(self):
        super().__init__(num_heads=3)


class SamplesInDimOne(Model):
    def __init__(self):
        super().__init__(batch_first=False)

    def attend(self, x):
        x = x.transpose(0, 1)
        return self.attn(x, x, x)[0].view(-1, WIDTH).view(TOKENS, -1, WIDTH).transpose(0, 1)


class MeanWeights(Model):
    def attend(self, x):
        y, weights = self.attn(x, x, x)
        return y + weights @ x


class WeightsOfEachHead(Model):
    def attend(self, x):
        y, weights = self.attn(x, x, x, average_attn_weights=False)
        return y + (weights[:, 1] - 2 * weights[:, 3]) @ x


def _causal() -> torch.Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


class Causal(Model):
    def attend(self, x):
        return self.attn(x, x, x, attn_mask=_causal().to(x.device))[0]


class HintedCausal(Model):
    def attend(self, x):
        return self.attn(x, x, x, attn_mask=_causal().to(x.device), is_causal=True, need_weights=False)[0]


class LearnedMask(Model):
    def __init__(self):
        super().__init__()
        self.bias = nn.Linear(TOKENS, TOKENS, bias=False)

    def attend(self, x):
        return self.attn(x, x, x, attn_mask=self.bias.weight, need_weights=False)[0]


class MaskOfEachSample(Model):
    def __init__(self):
        super().__init__()
        self.bias = nn.Linear(WIDTH, 4 * TOKENS)

    def attend(self, x):
        mask = self.bias(x).unflatten(-1, (4, TOKENS)).transpose(1, 2).flatten(0, 1)
        return self.attn(x, x, x, attn_mask=mask)[0]


class Padding(Model):
    def forward(self, x, padding):
        x = self.before(x)
        return self.after(self.attn(x, x, x, key_padding_mask=padding, need_weights=False)[0])


class PaddingAndMask(Model):
    def forward(self, x, padding):
        x = self.before(x)
        mask = _causal().to(x.device)
        options = {"key_padding_mask": padding, "attn_mask": mask, "is_causal": True, "need_weights": False}
        return self.after(self.attn(x, x, x, **options)[0])


class PaddingAndMaskOfEachSample(MaskOfEachSample):
    def forward(self, x, padding):
        x = self.before(x)
        mask = self.bias(x).unflatten(-1, (4, TOKENS)).transpose(1, 2).flatten(0, 1)
        padding = torch.zeros_like(padding, dtype=x.dtype).masked_fill(padding, -torch.inf)
        return self.after(self.attn(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)[0])


class LearnedPadding(Model):
    def attend(self, x):
        return self.attn(x, x, x, key_padding_mask=x[..., 0], need_weights=False)[0]


class Cross(Model):
    def forward(self, x, memory):
        return self.after(self.attn(self.before(x), memory, memory)[0])


class CrossOfLearned(Model):
    def __init__(self):
        super().__init__()
        self.memory = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory):
        memory = self.memory(memory)
        return self.after(self.attn(self.before(x), memory, memory, need_weights=False)[0])


class ThreeInputs(CrossOfLearned):
    def forward(self, x, memory):
        values = self.memory(memory)
        return self.after(self.attn(self.before(x), memory * 2, values, need_weights=False)[0])


class QueriesAsValues(Model):
    def attend(self, x):
        return self.attn(x, torch.tanh(x), x)[0]


class OtherWidths(Model):
    def __init__(self):
        super().__init__(kdim=5, vdim=7)
        self.k, self.v = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 7)

    def forward(self, x, memory):
        return self.after(self.attn(self.before(x), self.k(memory), self.v(memory))[0])


class OtherWidthsWithoutBias(OtherWidths):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, kdim=5, vdim=7, bias=False, batch_first=True)


class Drops(Model):
    def __init__(self):
        super().__init__(dropout=0.3)

    def attend(self, x):
        return x + self.attn(x, x, x, need_weights=False)[0]


class DropsWeights(Drops):
    def forward(self, x, padding):
        x = self.before(x)
        y, weights = self.attn(x, x, x, key_padding_mask=padding)
        return self.after(y + weights @ x)


class DropsTwice(Drops):
    def attend(self, x):
        mask = _causal().to(x.device)
        x = x + self.attn(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.attn(x, x, x)[0]


class DropsInDimOne(Model):
    def __init__(self):
        super().__init__(dropout=0.3, batch_first=False)

    def attend(self, x):
        x = x.transpose(0, 1)
        return self.attn(x, x, x)[0].transpose(0, 1)


class PartlyFrozen(SelfAttention):
    def __init__(self):
        super().__init__()
        self.attn.in_proj_weight.requires_grad_(False)
        self.attn.out_proj.bias.requires_grad_(False)


CUT = [
    SelfAttention, WithoutBias, ThreeHeads, SamplesInDimOne, MeanWeights, WeightsOfEachHead, Causal, HintedCausal,
    LearnedMask, MaskOfEachSample, Padding, PaddingAndMask, PaddingAndMaskOfEachSample, LearnedPadding, Cross,
    CrossOfLearned, ThreeInputs, QueriesAsValues, OtherWidths, OtherWidthsWithoutBias, Drops, DropsWeights, DropsTwice,
    DropsInDimOne, PartlyFrozen,
]  # fmt: skip


def batches(kind: type[Model]) -> list[Any]:
    """Two global batches for a model: inputs by the names of its arguments."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given = {
        "x": lambda: numbers(SAMPLES, TOKENS, WIDTH),
        "memory": lambda: numbers(SAMPLES, KEYS, WIDTH),
        "padding": lambda: torch.arange(TOKENS) >= torch.tensor([[4], [3], [2], [1], [4]]),
    }
    names = kind.forward.__code__.co_varnames[1 : kind.forward.__code__.co_argcount]
    return [({name: given[name]() for name in names}, numbers(SAMPLES, TOKENS, WIDTH)) for _ in range(2)]


@dataclass(frozen=True, eq=False)
class Case:
    """What the contract's checks are held to."""

    kind: type[Model]
    loss: nn.Module

    @property
    def model(self) -> nn.Module:
        with without_values():
            return self.kind().double()

    @property
    def batches(self) -> list[Any]:
        return batches(self.kind)


def is_cut(case: Case, line: str) -> bool:
    plan, _ = make_plan(Job(case.model, case.loss), Layout.parse(line))
    return bool(plan.compute["attn.out_proj.weight"].axes)


def check_equal(kind: type[Model], line: str) -> None:
    case = Case(kind, MeanSquaredError())
    assert is_cut(case, line)
    verdict = verify(case.model, line, case.batches, loss=case.loss)
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["tp3/sp", "tp2x2/2d"])
@pytest.mark.parametrize("kind", CUT, ids=lambda kind: kind.__name__)
@pytest.mark.sampled(100)
def test_an_attention_cut_by_heads_equals_torchs(kind, line):
    check_equal(kind, line)


@pytest.mark.parametrize(
    "line", ["tp3", "dp2 tp2 mb2", "tp2x2x2/2.5d", "tp2x2x2/3d", "tp2x2/2d:summa", "tp4/sp/regather"]
)
@pytest.mark.parametrize("kind", [PaddingAndMaskOfEachSample, ThreeInputs, DropsWeights, DropsInDimOne])
@pytest.mark.sampled(100)
def test_an_attention_cut_by_heads_equals_torchs_in_every_mode(kind, line):
    check_equal(kind, line)


@dataclass(frozen=True)
class OfFewTokens:
    """A strategy for so few tokens that these are moved, and not weights."""

    right: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.right, name)

    def place(self, job: Job, plan: Any) -> Any:
        return self.right.place(job._replace(num_tokens=1), plan)


@pytest.mark.parametrize("line", ["tp2", "tp3/sp"])
@pytest.mark.parametrize("kind", CUT, ids=lambda kind: kind.__name__)
@pytest.mark.sampled(100)
def test_an_attention_sends_and_holds_what_the_plan_says(kind, line):
    case, strategies = Case(kind, MeanSquaredError()), [OfFewTokens(STRATEGIES["tensor_1d"])]
    assert is_cut(case, line)
    check_shapes(line, case, strategies)
    check_traffic(line, case, strategies)


@pytest.mark.parametrize("line", ["tp2x2/2d", "tp2x2x2/3d", "tp2x2/2d/regather"])
@pytest.mark.parametrize("kind", [OtherWidths, MaskOfEachSample, SamplesInDimOne, PartlyFrozen])
@pytest.mark.sampled(100)
def test_an_attention_on_a_grid_sends_and_holds_what_the_plan_says(kind, line):
    case = Case(kind, MeanSquaredError())
    check_shapes(line, case)
    check_traffic(line, case)


# ---- inside a head


class SeesNothing(Padding):
    """Of one sample every key is hidden."""

    def forward(self, x, padding):
        return super().forward(x, padding | padding[:, 1:2])


class LearnsValuesAlone(OtherWidthsWithoutBias):
    """No gradient flows into its scores."""

    def __init__(self):
        super().__init__()
        for module in (self.before, self.k):
            module.requires_grad_(False)
        for name in ("q_proj_weight", "k_proj_weight"):
            self.attn.get_parameter(name).requires_grad_(False)


INSIDE = [
    WithoutBias, ThreeHeads, MeanWeights, WeightsOfEachHead, HintedCausal, LearnedMask, PaddingAndMaskOfEachSample,
    LearnedPadding, ThreeInputs, LearnsValuesAlone, DropsWeights, DropsInDimOne, SeesNothing,
]  # fmt: skip


@pytest.mark.sampled(100)
@pytest.mark.parametrize("kind", INSIDE, ids=lambda kind: kind.__name__)
def test_fewer_heads_than_ranks_are_cut_inside(kind):
    check_equal(kind, "tp5")


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", ["tp6/sp", "tp2x5/2d:summa", "tp2x1x5/2.5d", "tp1x2x5/3d/regather", "dp2 tp5 mb2"])
def test_fewer_heads_than_ranks_are_cut_inside_in_every_mode(line):
    check_equal(PaddingAndMaskOfEachSample, line)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("kind", "line"),
    [(LearnsValuesAlone, "tp5"), (LearnedPadding, "tp5"), (WeightsOfEachHead, "tp2x5/2d"), (PartlyFrozen, "tp2x5/2d")],
)
def test_parts_of_heads_send_and_hold_what_the_plan_says(kind, line):
    strategies = [OfFewTokens(STRATEGIES["tensor_1d" if line == "tp5" else "tensor_2d"])]
    case = Case(kind, MeanSquaredError())
    assert is_cut(case, line)
    check_shapes(line, case, strategies)
    check_traffic(line, case, strategies)


def test_a_grid_on_which_some_rank_would_hold_no_row_of_a_projection_is_refused():
    with pytest.raises(LayoutError, match=r"can be cut over row=2 col=5(.|\n)*fix: .*or write tp5x2/2d"):
        is_cut(Case(LearnsValuesAlone, MeanSquaredError()), "tp2x5/2d")


def test_one_sum_of_the_output_goes_forward_and_one_of_each_input_backward():
    for kind, num_backward in [(SelfAttention, 1), (CrossOfLearned, 2), (ThreeInputs, 2), (Padding, 1)]:
        case = Case(kind, MeanSquaredError())

        def work(world, case=case):
            run = parallelize(case.model, "tp2", world, loss=case.loss)
            (batch,) = run.shard(case.batches[:1])
            with world.recorder.recording() as records:
                run.step(batch)
            return [record.kind for record in records if record.source == "tensor_1d"]

        assert launch(work, 2, ranks="threads")[0] == ["all_reduce"] * (1 + num_backward)


# ---- what travels while something is multiplied


class Multiplications(TorchDispatchMode):
    """While it is on: how many of ``messages`` are under way whenever something is multiplied."""

    KINDS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.bmm)

    def __init__(self, messages: list[Any]) -> None:
        super().__init__()
        self.messages, self.found = messages, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in self.KINDS:
            self.found.append(sum(pending._finish is not None for pending in self.messages))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("line", ["tp2", "tp2x2/2d", "tp2x2x2/3d:classic"])
def test_messages_of_an_attention_travel_while_it_multiplies_unless_the_layout_says_otherwise(line, monkeypatch):
    own = local()

    def counted(start):
        def begin(axis, *args, **named):
            started = start(axis, *args, **named)
            own.messages.append(started[1] if isinstance(started, tuple) else started)
            return started

        return begin

    for name in [name for name in vars(Axis) if name.endswith("_async")]:
        monkeypatch.setattr(Axis, name, counted(getattr(Axis, name)))
    case = Case(MeanWeights, MeanSquaredError())

    def work(world, line):
        own.messages = []
        run = parallelize(case.model, line, world, loss=case.loss, num_tokens=1)
        (batch,) = run.shard(case.batches[:1])
        with Multiplications(own.messages) as multiplications:
            run.step(batch)
        return max(multiplications.found)

    num_ranks = Layout.parse(line).num_ranks
    assert max(launch(work, num_ranks, line, ranks="threads")) > 0
    assert max(launch(work, num_ranks, f"{line}/no-overlap", ranks="threads")) == 0


# ---- dropout of attention weights


def test_attention_weights_are_dropped_by_keys_that_know_no_layout():
    model, rng = nn.MultiheadAttention(WIDTH, 4, dropout=0.5, batch_first=True), RngTracker(seed=1, samples=range(3))
    x = torch.randn(3, TOKENS, WIDTH)
    kept = model.eval()(x, x, x)[0]
    key_dropout(model.train(), rng)

    def dropped(samples: range, **options: Any) -> torch.Tensor:
        rng.samples, rows = samples, x[samples.start :]
        return model(rows, rows, rows, **options)[0]

    whole = dropped(range(3))
    assert not torch.allclose(whole, kept)
    torch.testing.assert_close(dropped(range(3), need_weights=False), whole)
    torch.testing.assert_close(dropped(range(1, 3)), whole[1:])
    assert not torch.allclose(model(x[1:], x[1:], x[1:])[0], whole[1:])  # a second call drops others


def test_a_share_of_the_weights_is_dropped_and_the_rest_is_made_larger():
    model, rng = (
        nn.MultiheadAttention(WIDTH, 4, dropout=0.25, batch_first=True),
        RngTracker(seed=1, samples=range(50)),
    )
    key_dropout(model, rng)
    x = torch.zeros(50, 20, WIDTH)
    weights = model(x, x, x, average_attn_weights=False)[1]
    assert (weights == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
    assert weights.mean().item() == pytest.approx(1 / 20, rel=0.01)


# ---- what stays whole


class WithLearnedKeys(SelfAttention):
    def __init__(self):
        Model.__init__(self, add_bias_kv=True, dropout=0.2)
        self.pair = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))

    def attend(self, x):
        return self.pair(super().attend(x))


class WithZeroKeys(WithLearnedKeys):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, add_zero_attn=True, batch_first=True)


class Subclassed(nn.MultiheadAttention):
    def forward(self, *args, **named):
        y, weights = super().forward(*args, **named)
        return y * 2, weights


class OfAnotherKind(WithLearnedKeys):
    def __init__(self):
        super().__init__()
        self.attn = Subclassed(WIDTH, 4, batch_first=True)


class Narrow(WithLearnedKeys):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.attn = nn.MultiheadAttention(2, 1, batch_first=True)

    def attend(self, x):
        return self.leave(super(WithLearnedKeys, self).attend(self.enter(x)))


class UsedTwice(WithLearnedKeys):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.again = self.attn


WHOLE = {
    WithLearnedKeys: "add_bias_kv=True gives it keys",
    WithZeroKeys: "add_zero_attn=True gives it keys",
    OfAnotherKind: "not torch's own forward",
    Narrow: "1 heads of 2 elements cannot be cut over tp=3: one axis cuts at most 2 parts",
    UsedTwice: "used elsewhere too",
}


@pytest.mark.parametrize("kind", WHOLE, ids=lambda kind: kind.__name__)
def test_what_is_not_known_stays_whole_is_right_and_show_says_why(kind):
    case = Case(kind, MeanSquaredError())
    plan, _ = make_plan(Job(case.model, case.loss), Layout.parse("tp3"))
    assert not is_cut(case, "tp3")
    assert WHOLE[kind] in plan.roles["attn"].why
    verdict = verify(case.model, "tp3", case.batches, loss=case.loss)
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_a_model_with_nothing_else_to_cut_is_refused_by_what_keeps_its_attention_whole(option):
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(WIDTH, 4, **{option: True})

        def forward(self, x):
            return self.attn(x, x, x)[0]

    with pytest.raises(LayoutError, match=f"'attn' is kept whole: {option}=True"):
        make_plan(Job(Alone(), MeanSquaredError()), Layout.parse("tp2"))


# ---- beside layers whose features are cut


Layer = partial(nn.Linear, WIDTH, WIDTH)


class Block(nn.Module):
    """Its code can be followed, and hands cut features to the attention."""

    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        h = self.norm(x)
        return x + self.attn(h, h, h, need_weights=False)[0]


class InOrder(Block):
    """All arguments by their places, and nothing beside it that would want them whole."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        h = self.norm(x)
        return self.attn(self.q(h), self.k(h), self.v(h))[0]


@pytest.mark.parametrize("line", ["tp2x2/2d", "tp2x2x2/3d"])
@pytest.mark.parametrize("block", [Block, InOrder])
def test_cut_features_are_joined_before_the_module_that_attends(block, line):
    with without_values():
        model = nn.Sequential(*(each() for _ in range(2) for each in (Layer, block)), Layer())
    plan, _ = make_plan(Job(model.double(), MeanSquaredError()), Layout.parse(line))
    assert {type(plan.notes[path]).__name__ for path in ("1", "3")} == {"GatherNote"}
    assert all(plan.compute[name].axes for name in ("0.weight", "1.attn.in_proj_weight", "3.attn.out_proj.weight"))
    assert plan.roles["4"].name == "copied"  # whole in and whole out
    given = [(inputs["x"], targets) for inputs, targets in batches(SelfAttention)]
    verdict = verify(model, line, given, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


# ---- who else reads the weights


class Borrows(SelfAttention):
    def attend(self, x):
        return super().attend(x) @ self.attn.in_proj_weight[:WIDTH]


def test_weights_that_something_else_reads_stay_whole():
    plans = []
    verdict = verify(
        Case(Borrows, MeanSquaredError()).model, "tp2", batches(Borrows), loss=MeanSquaredError(),
        alter=lambda run: plans.append(run.plan),
    )  # fmt: skip
    assert verdict.equal, str(verdict)
    assert not plans[0].compute["attn.in_proj_weight"].axes


class Encoder(nn.Module):
    """torch's encoder, which evaluates by a path of its own, with and without a mask of keys."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)

    def forward(self, x, padding):
        return self.encoder(x) + self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.parametrize("line", ["tp2", "tp4/sp", "tp2x2/2d"])
def test_evaluation_does_not_take_torchs_path_past_the_cut_weights(line):
    torch.manual_seed(0)
    model, (batch, _), loss = Encoder().double(), batches(Padding), MeanSquaredError()
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            loss_sum, count = loss(model.eval()(**batch[0]), batch[1])
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

    def work(world):
        run = parallelize(model, line, world, loss=loss)
        return run.evaluate(next(run.shard([batch]))).item()

    for found in launch(work, Layout.parse(line).num_ranks, ranks="threads"):
        assert found == pytest.approx(loss_sum.item() / int(count), rel=1e-10)
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert model.encoder.use_nested_tensor  # the person's own model is as it was
    assert model.encoder.layers[0].activation_relu_or_gelu


# ---- without samples


@pytest.mark.parametrize("line", ["dp6", "dp2 tp2x2/2d mb2"])
@pytest.mark.parametrize("kind", [Padding, PaddingAndMaskOfEachSample])
def test_ranks_without_samples_attend_to_nothing_under_masks_of_each_sample(kind, line):
    case = Case(kind, MeanSquaredError())
    verdict = verify(case.model, line, case.batches, loss=case.loss)
    assert verdict.equal, str(verdict)
    check_traffic(line, case)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=str)
def test_a_sequence_without_samples_attends_as_torchs(batch_first, options):
    module = nn.MultiheadAttention(WIDTH, 4, batch_first=batch_first)
    x, memory = torch.randn(TOKENS, WIDTH), torch.randn(KEYS, WIDTH)
    hidden = torch.randn(4, TOKENS, KEYS) > 1
    hidden[..., 0] = False  # each token attends to something: attention to nothing is not a number
    masks = {"key_padding_mask": torch.tensor([False, True, False]), "attn_mask": hidden}
    given = {name: functional._canonical_mask(mask, name, None, "", x.dtype) for name, mask in masks.items()}
    for mask in (masks, given):
        expected = module(x, memory, memory, **mask, **options)
        found = multihead(module, HeadShard((0, 1, 2, 3)), x, memory, memory, **mask, **options)
        torch.testing.assert_close(found, expected)


@pytest.mark.sampled(0)
def test_a_sequence_without_samples_cannot_gather_them_and_says_so():
    class Lonely(Model):
        def attend(self, x):
            return torch.stack([self.attn(each, each, each)[0] for each in x])

    class OfFirst(Model):
        def attend(self, x):
            return x + self.attn(x[0], x[0], x[0])[0]

    for line in ("tp2", "tp2/sp"):  # where ranks have other samples, what is called for each is not shared by them
        verdict = verify(Case(Lonely, MeanSquaredError()).model, line, batches(Lonely), loss=MeanSquaredError())
        assert verdict.equal, str(verdict)
    with (
        pytest.raises((PlanError, RankFailedError), match="attention without a dim of samples"),
        pytest.warns(UserWarning, match="takes select over all samples"),
    ):
        verify(Case(OfFirst, MeanSquaredError()).model, "tp2/sp", batches(OfFirst), loss=MeanSquaredError())
