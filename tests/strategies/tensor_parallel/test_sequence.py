"""Sequences cut instead of samples: equal to one device, every rank with work, and nothing that mixes tokens unseen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from contract.cases import (
    ATTENTION,
    CHECKS,
    FUSED,
    Case,
    check_equal,
    check_refused,
    check_traffic,
)
from shardwright.comm.launch import launch
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout
from shardwright.models import GPT, Attention, AttentionConfig, CrossEntropy, GPTConfig, MeanSquaredError, entry_of
from shardwright.models.gpt import Positions
from shardwright.parallelize import parallelize
from shardwright.parallelize.auto import samples_of
from shardwright.parallelize.layer_alone import layer_alone
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import OUTPUT, Job
from shardwright.report.description import describe
from shardwright.report.show import show_text
from shardwright.strategies.tensor_parallel.attention import HeadsNote
from shardwright.train.config import TrainConfig
from shardwright.train.loop import train
from shardwright.train.progress import read_metrics
from shardwright.verify import verify

TOKENS = 11  # a prime: no cut of it is even


def gpt(name, style, loss=None, **settings):
    """A language model with dropout, on batches of one sample and of three."""
    config = GPTConfig(
        style=style, vocabulary=19, max_tokens=TOKENS, num_layers=2, hidden=13, dropout=0.2,
        **{"num_heads": 4, "width": 16, **settings},
    )  # fmt: skip
    return Case(name, config, loss or CrossEntropy(), num_tokens=TOKENS, num_samples=(1, 3), ignored=some)


def some(targets):
    """Every third target, and those at the start of the sequence: all that some ranks have."""
    ignored = torch.arange(targets.numel()).view(targets.shape) % 3 == 0
    ignored[:, :4] = True
    return ignored


CAUSAL = gpt("tied", "gpt2")
GROUPED = gpt("grouped heads", "llama", CrossEntropy(label_smoothing=0.1), num_kv_heads=2, tied=False)
ONE_KV = gpt("one kv head", "llama", num_heads=3, num_kv_heads=1, width=18)
ONE_HEAD = Case(
    "one head",
    AttentionConfig(width=8, num_heads=1, dropout=0.2),
    MeanSquaredError(),
    num_tokens=TOKENS,
    num_samples=(1, 3),
)
BOTH_WAYS = Case(
    "not causal",
    AttentionConfig(width=12, num_heads=2, causal=False, dropout=0.2),
    entry_of(AttentionConfig()).loss(),
    num_tokens=TOKENS,
    num_samples=(1, 2),
)
CASES = (CAUSAL, GROUPED, ONE_KV, BOTH_WAYS)

LINES = (
    "tp2x2/2d/seq", "tp2x3/2d:summa/seq/regather", "tp2x2x2/2.5d:summa/seq", "tp2x2x2/3d/seq",
    "tp2x2x2/3d:classic/seq", "tp3/seq", "dp2 tp2x1/2d/seq mb2",
)  # fmt: skip

EVERY = pytest.mark.parametrize("case", CASES, ids=str)
EVERY_LINE = pytest.mark.parametrize("line", LINES)


# ---- the promises


@EVERY
@EVERY_LINE
@pytest.mark.sampled(100)
def test_sequences_that_are_cut_keep_every_promise(line, case):
    for check in CHECKS:
        check(line, case)


@pytest.mark.parametrize("case", [ATTENTION, FUSED], ids=str)
@pytest.mark.parametrize("line", ["tp2x3/2d/seq", "tp2x2x2/2.5d/seq", "tp2x2x2/3d:classic/seq"])
@pytest.mark.sampled(5)
def test_heads_of_which_there_are_fewer_than_ranks_are_shared_as_where_samples_are_cut(line, case):
    check_equal(line, case)
    check_traffic(line, case)


def test_a_head_that_several_ranks_share_sees_the_tokens_of_all():
    line = "tp2x2x2/3d/seq"
    plan, _ = make_plan(Job(ONE_HEAD.model, ONE_HEAD.loss), Layout.parse(line))
    assert plan.roles[""].name == "inside a head"
    assert plan.notes[""].tokens.gathers
    check_equal(line, ONE_HEAD)
    check_traffic(line, ONE_HEAD)


def gathered_over(line, case, num_tokens):
    plan, _ = make_plan(Job(case.model, case.loss, num_tokens), Layout.parse(line))
    notes = [note.tokens for note in plan.notes.values() if isinstance(note, HeadsNote)]
    return {tuple(each.axis for each in note.gathers) for note in notes}


def test_keys_and_values_are_gathered_over_the_axes_that_cut_tokens_where_heads_are():
    assert gathered_over("tp2x2/2d:summa/seq", CAUSAL, 11) == {("row",)}
    assert gathered_over("tp2x2x2/2.5d:summa/seq", CAUSAL, 11) == {("row", "depth")}
    assert gathered_over("tp2x2x2/3d:classic/seq", CAUSAL, 11) == {("col", "depth")}  # axes that changed their roles
    assert gathered_over("tp2x2/2d/seq", CAUSAL, 100_000) == {("row",)}  # to move weights is cheaper
    assert gathered_over("tp2x2/2d/seq", CAUSAL, 11) == {()}  # four heads on four ranks: the tokens are gathered


# ---- every rank has work, and what it needs of it


def test_every_rank_computes_its_share_of_one_sample():
    def work(world):
        run = parallelize(CAUSAL.model, "tp2x2x2/2.5d/seq", world)
        seen = []
        run.model.blocks[1].norm2.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
        (batch,) = run.shard(CAUSAL.batches[:1])
        run.step(batch)
        return tuple(batch.inputs.shape), seen[0]

    found = launch(work, Layout.parse("tp2x2x2/2.5d"), ranks="threads")
    assert found == [((1, n), (1, n, 8)) for n in (3, 3, 3, 3, 3, 3, 2, 2)]


@EVERY
@pytest.mark.parametrize("line", ["tp2x2/2d:summa/seq", "tp2x2x2/3d/seq", "dp2 tp2x1/2d/seq"])
@pytest.mark.sampled(100)
def test_predictions_and_evaluated_losses_are_those_of_one_device(line, case):
    torch.manual_seed(0)
    model = entry_of(case.config).factory(case.config).double()
    (inputs, targets), (more, _) = case.batches
    with torch.no_grad():
        model.eval()
        loss_sum, count = case.loss(model(inputs), targets)

    def work(world):
        run = parallelize(model, line, world, loss=case.loss)
        (batch,) = run.shard([(inputs, targets)])
        # a person's prompt may be shorter than the axes that cut it
        return run.evaluate(batch), [run.predict(each) for each in (more, more[:, :3], more[:, :1])]

    for loss, outputs in launch(work, Layout.parse(line), ranks="threads"):
        torch.testing.assert_close(loss, loss_sum / count, rtol=1e-12, atol=0)
        for output, each in zip(outputs, (more, more[:, :3], more[:, :1]), strict=True):
            torch.testing.assert_close(output, model(each), rtol=0, atol=1e-12)


def test_an_output_whose_tokens_are_gathered_out_of_order_comes_back_in_order():
    line, num_tokens = "tp2x3x1/3d/seq", 40  # so many that the head gathers the slower axis and not the faster one
    plan, _ = make_plan(Job(GROUPED.model, GROUPED.loss, num_tokens), Layout.parse(line))
    assert plan.row_moves[OUTPUT] == (("gather", "depth"),)
    torch.manual_seed(0)
    model = GPT(GROUPED.config).double().eval()
    (inputs, _), _ = GROUPED.batches

    def work(world):
        return parallelize(model, line, world, loss=GROUPED.loss, num_tokens=num_tokens).predict(inputs)

    for output in launch(work, Layout.parse(line), ranks="threads"):
        torch.testing.assert_close(output, model(inputs), rtol=0, atol=1e-12)


@pytest.mark.sampled(0)
def test_a_run_on_one_sample_a_step_trains_to_the_losses_of_one_device(tmp_path, monkeypatch):
    cut = []

    def noted(*args, **named):
        run = parallelize(*args, **named)
        cut.append(dict(run.plan.inputs))
        return run

    monkeypatch.setattr("shardwright.train.loop.parallelize", noted)

    def losses(layout):
        config = TrainConfig(
            layout=layout, settings={"num_layers": "1", "width": "16", "dropout": "0.1"}, batch=1, seq=TOKENS, steps=3,
            warmup=0, eval_every=3, eval_batches=1,
        )  # fmt: skip
        train(config, tmp_path / layout.replace("/", "-"), ranks="threads")
        rows = read_metrics(tmp_path / layout.replace("/", "-"))
        return [row["loss"] for row in rows] + [rows[-1]["eval_loss"]]

    assert losses("tp2x2/2d") == pytest.approx(losses("single"), rel=1e-5)
    assert cut == [{"row": 1}] * 4 + [{}]


# ---- when sequences are cut


def inputs_of(line, job):
    return dict(make_plan(job, Layout.parse(line))[0].inputs)


def few(model, num_samples, num_tokens=TOKENS):
    return Job(model, CrossEntropy(), num_tokens, num_samples=num_samples)


def test_sequences_are_cut_where_samples_are_known_to_be_too_few():
    for line in ("tp2x2/2d", "tp2x2x2/3d", "tp3/sp", "dp2 tp2x2/2d mb2"):
        plan, _ = make_plan(few(CAUSAL.model, None), Layout.parse(line))
        rows = {axis: dim for axis, dim in plan.inputs.items() if axis != "dp"}
        parts = torch.tensor([plan.mesh[axis] for axis in rows]).prod().item()
        assert set(rows.values()) == {0}, "the number of samples is unknown"
        for num_samples in range(1, 6):
            found = inputs_of(line, few(CAUSAL.model, num_samples, 5 * TOKENS))
            assert found == plan.inputs | dict.fromkeys(rows, int(num_samples < parts))


def test_sequences_that_are_too_short_to_be_cut_are_not_cut_unasked():
    assert inputs_of("tp2x2x2/3d", few(CAUSAL.model, 2, 6)) == {"depth": 0, "row": 0}
    assert inputs_of("tp2x2x2/3d", few(CAUSAL.model, 2, 8)) == {"depth": 1, "row": 1}


def test_what_cannot_be_laid_out_by_tokens_is_laid_out_by_samples_unasked():
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), Looking(8, 2))
    job = Job(model, MeanSquaredError(), 64, num_samples=1)
    assert inputs_of("tp2x2/2d", job) == {"row": 0}  # a custom attention may mix tokens
    with pytest.raises(LayoutError, match="'3'"):
        make_plan(job, Layout.parse("tp2x2/2d/seq"))


def test_an_axis_that_cuts_no_rows_has_nothing_to_do_with_it():
    assert inputs_of("tp1x4/2d/seq", few(CAUSAL.model, 1)) == {}
    assert inputs_of("tp4", few(CAUSAL.model, 1)) == {}
    assert inputs_of("dp4", few(CAUSAL.model, 1)) == {"dp": 0}


def test_a_batch_tells_how_many_sequences_the_smallest_microbatch_has():
    tokens = torch.zeros(7, TOKENS, dtype=torch.int64)
    for line, expected in [("tp4", 7), ("dp2 tp4", 3), ("dp2 tp4 mb2", 1), ("dp8 tp4 mb2", 1)]:
        assert samples_of(tokens, Layout.parse(line)) == expected
    assert samples_of(torch.zeros(7, 9), Layout.parse("tp4")) is None


def test_verify_and_a_layout_that_is_shown_know_the_batch():
    assert verify(CAUSAL.model, "tp2x2/2d", CAUSAL.batches[:1]).equal
    job = few(CAUSAL.model, samples_of(CAUSAL.batches[0][0], Layout.parse("tp2x2/2d")))
    found = describe(job, Layout.parse("tp2x2/2d"), inputs=CAUSAL.batches[0][0])
    assert [(rank["samples"], rank["tokens_of_each"]) for rank in found["ranks"]] == [(1, 6), (1, 6), (1, 5), (1, 5)]
    assert found["layers"][0]["why"] == "each sample's tokens cut over row, not the samples"
    text = show_text(found)
    assert "1, 5 tokens of each" in text
    assert "(input)" in text


def test_show_says_what_attention_gathers():
    plan, _ = make_plan(Job(CAUSAL.model, CAUSAL.loss), Layout.parse("tp2x2x2/2.5d:summa/seq"))
    assert plan.roles["blocks.0.attention"].why.endswith("keys and values of all tokens gathered over row depth")


# ---- what is not a plain model of ours


class Twice(nn.Module):
    """The same attention called two times."""

    def __init__(self):
        super().__init__()
        self.attention = Attention(8, 2, rotary=True, dropout=0.2)
        self.first, self.second = self.attention, self.attention
        self.up, self.gain = nn.Linear(8, 12), nn.Parameter(torch.linspace(0.5, 1, 8))
        self.down = nn.Linear(12, 8)

    def forward(self, x):
        x = x + self.first(x) * self.gain
        return x + self.down(self.up(self.second(x)).relu())


@pytest.mark.parametrize("line", ["tp2x2/2d/seq", "tp2x2x2/2.5d/seq", "tp2/seq"])
@pytest.mark.sampled(3)
def test_an_attention_whose_heads_are_not_cut_gathers_too(line):
    torch.manual_seed(0)
    batches = [(torch.randn(n, TOKENS, 8), torch.randn(n, TOKENS, 8)) for n in (1, 2)]
    verdict = verify(Twice(), line, batches, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)
    copied = verify(CAUSAL.model, line, CAUSAL.batches, roles={"blocks.0.attention": "copied"})
    assert copied.equal, str(copied)


class Written(nn.Module):
    """Two layers and what ``body(module, x)`` makes of them."""

    def __init__(self, body, **extra):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        for name, value in extra.items():
            setattr(self, name, value)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def plain(x, m):
    return m.down(m.up(x).relu())


class Looking(Attention):
    """Somebody's own attention."""

    def forward(self, x):
        return super().forward(x) + x.mean(1, keepdim=True)


def attended(m, x):
    return m.down(nn.functional.scaled_dot_product_attention(*[m.up(x).relu()] * 3))


def mixing():
    """Models that mix tokens, or may; the module that must be named, and a word on what it does."""
    pairs = nn.Linear(8, 8), nn.Linear(8, 8)
    rows = nn.Parameter(torch.rand(TOKENS, 8))
    return {
        "a custom attention": (nn.Sequential(*pairs, Looking(8, 2)), "2", "Looking"),
        "torch's attention": (nn.TransformerEncoder(encoder_layer(), 1), "the model", "TransformerEncoder"),
        "attention by function": (Written(attended), "the model", "scaled_dot_product_attention"),
        "a convolution": (nn.Sequential(*pairs, nn.Conv1d(TOKENS, TOKENS, 3, padding=1)), "2", "Conv1d"),
        "a batch norm": (nn.Sequential(*pairs, nn.BatchNorm1d(TOKENS)), "2", "BatchNorm1d"),
        "a group norm": (nn.Sequential(*pairs, nn.GroupNorm(1, TOKENS)), "2", "GroupNorm"),
        "a norm over tokens": (nn.Sequential(*pairs, nn.LayerNorm([TOKENS, 8])), "2", "LayerNorm"),
        "a custom elementwise layer": (nn.Sequential(*pairs, Cumulative()), "2", "cumsum"),
        "a mean over tokens": (Written(lambda m, x: m.down(m.up(x)) + x.mean(1, keepdim=True)), "the model", "mean"),
        "positions of one's own": (Written(lambda m, x: plain(x + m.rows, m), rows=rows), "the model", "[11, 8]"),
        "a length": (Written(lambda m, x: plain(x, m) / x.shape[1]), "the model", "shape"),
        "a flip": (Written(lambda m, x: plain(x, m) + x.flip(1)), "the model", "flip"),
        "code that cannot be followed": (
            Written(lambda m, x: plain(x, m) if x.sum() < 1e9 else x),
            "the model",
            "Written",
        ),
        "something left out": (nn.Sequential(*pairs, Optional()), "2", "Optional"),
    }


class Cumulative(nn.ReLU):
    def forward(self, x):
        return super().forward(x.cumsum(1))


class Optional(nn.Module):
    def forward(self, x, mask=None):
        return x if mask is None else x * mask


def encoder_layer():
    return nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)


@pytest.mark.parametrize("name", mixing())
def test_what_may_mix_tokens_is_refused_by_name_and_unasked_keeps_its_samples(name):
    torch.manual_seed(0)
    model, path, what = mixing()[name]
    text = check_refused("tp2x2/2d/seq", model, loss=MeanSquaredError())
    assert f"'{path}' is not known to treat each token alone" in text
    assert what in text
    try:
        make_plan(Job(model, MeanSquaredError()), Layout.parse("tp2x2/2d"))
    except LayoutError:
        return
    model.eval() if name == "torch's attention" else model.train()
    x = torch.randn(1, TOKENS, 8)
    verdict = verify(model, "tp2x2/2d", [(x, torch.randn(1, TOKENS, 8))], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


def test_an_output_that_is_not_one_tensor_of_tokens_is_refused():
    for body in (lambda m, x: (m.down(m.up(x)), x), lambda m, x: m.rows(m.places(x))):
        model = Written(body, rows=nn.Embedding(TOKENS, 8), places=Positions(TOKENS))
        assert "its output is not known to be one tensor of tokens" in check_refused("tp2x2/2d/seq", model)


class Shifted(CrossEntropy):
    """The next token's loss, from one tensor of tokens."""

    def forward(self, logits, targets):
        return super().forward(logits[:, :-1], targets[:, 1:])


def test_a_loss_that_may_look_at_other_tokens_is_refused():
    text = check_refused("tp2x2/2d/seq", CAUSAL.model, loss=Shifted())
    assert "'(loss)' is not known to treat each token alone" in text
    assert "given:   Shifted under tp2x2/2d/seq" in text
    assert verify(CAUSAL.model, "tp2x2/2d", CAUSAL.batches, loss=Shifted()).equal  # samples are cut, one rank idles


def test_a_layer_alone_is_refused():
    def work(world):
        with pytest.raises(LayoutError, match="a layer alone has samples, and no sequences"):
            layer_alone(nn.Linear(4, 4), "tp2x2/2d/seq", world)

    launch(work, 4, ranks="threads")


# ---- batches that are no sequences, or too short


def tokens(*shape):
    return torch.zeros(shape, dtype=torch.int64)


WRONG = {
    "short": ((tokens(1, 3), tokens(1, 3)), PlanError, "3 tokens over depth=2 row=2"),
    "of several lengths": ((tokens(1, 8), tokens(1, 7)), LayoutError, r"int64 \[1, 8\], int64 \[1, 7\]"),
    "without tokens": ((torch.zeros(8, 8), tokens(8, 8)), LayoutError, r"float32 \[8, 8\], int64 \[8, 8\]"),
    "with targets for samples": ((tokens(8, 8), tokens(8)), LayoutError, r"int64 \[8, 8\], int64 \[8\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_batch_that_cannot_be_cut_is_refused_on_every_rank_before_anything_is_sent(name):
    batch, kind, words = WRONG[name]

    def work(world):
        run = parallelize(CAUSAL.model, "tp2x2x2/3d/seq", world)
        with world.recorder.recording() as records, pytest.raises(kind, match=words):
            next(run.shard([batch]))
        return len(records)

    assert launch(work, 8, ranks="threads") == [0] * 8


def test_a_sequence_longer_than_the_learned_positions_is_refused_though_each_part_is_short():
    model = GPT(CAUSAL.config)

    def work(world):
        run = parallelize(model, "tp2x2/2d/seq", world)
        (batch,) = run.shard([(tokens(1, TOKENS + 1), tokens(1, TOKENS + 1))])
        with pytest.raises(PlanError, match="longer than the learned positions"):
            run.step(batch)

    launch(work, 4, ranks="threads")
