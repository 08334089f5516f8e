"""Hooks see what they see on one device, but for samples of other ranks; where they could not, layers stay whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import launch, parallelize, verify
from shardwright.errors import LayoutError, RankFailedError
from shardwright.layout import Layout
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.models.losses import MeanSquaredError

WIDTH = 12
LOSS = MeanSquaredError()
BATCH = (torch.randn(5, 3, WIDTH), torch.randn(5, 3, WIDTH))
LINES = ["dp2", "tp2", "tp2/sp", "tp2x2/2d", "pp2 mb1"]

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Gated(nn.Module):
    """Two columns that share one input."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.act, self.down = nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


def model():
    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Pair(), nn.LayerNorm(WIDTH), Gated(), Pair(), attention)


def mixes(x):
    """What needs all the features of x."""
    return x * x.softmax(-1) if isinstance(x, torch.Tensor) else x


HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda m, args, y: mixes(y)),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda m, args: (mixes(args[0]), *args[1:])),
    "backward": lambda m: m.register_full_backward_hook(lambda m, dx, dy: tuple(map(mixes, dx))),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda m, dy: tuple(map(mixes, dy))),
}
PATHS = [("1.up", "2", "3.down", "5.linear1"), ("0", "1.act", "3.gate", "5.dropout"), ("1", "1.down", "3", "5")]
NO_USE = {("0", "backward")}  # torch warns: no gradient goes into the model


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.sampled(100)
def test_a_hook_that_mixes_features_gives_what_it_gives_on_one_device(line, kind):
    for paths in PATHS:
        hooked = model()
        for path in paths:
            if (path, kind) not in NO_USE:
                HOOKS[kind](hooked.get_submodule(path))
        verdict = verify(hooked, line, [BATCH], loss=LOSS)
        assert verdict.equal, f"{paths}: {verdict}"


@pytest.mark.parametrize("line", ["dp2", "tp2", "tp2x2/2d"])
def test_a_hook_on_the_whole_model_sees_whole_logits(line):
    seen = []
    gpt = GPT(GPTConfig(vocabulary=19, max_tokens=6, num_layers=1, num_heads=2, width=8, hidden=16))
    gpt.register_forward_hook(lambda m, args, y: seen.append(y.shape[-1]))
    tokens = torch.randint(19, (4, 6))

    def work(world):
        run = parallelize(gpt, line, world, loss=CrossEntropy())
        run.step(next(run.shard([(tokens, tokens)])))

    launch(work, Layout.parse(line), ranks="threads")
    assert set(seen) == {19}


@pytest.mark.parametrize("kind", ["forward", "forward pre", "backward pre"])
@pytest.mark.parametrize("line", ["tp2", "tp1x2/2d", "tp2x2/2d"])
def test_a_hook_on_the_whole_model_gives_what_it_gives_on_one_device(line, kind):
    hooked = model()
    HOOKS[kind](hooked)
    verdict = verify(hooked, line, [BATCH], loss=LOSS)
    assert verdict.equal, str(verdict)


def test_a_hook_on_the_whole_model_is_refused_in_a_pipeline():
    hooked = model()
    HOOKS["forward"](hooked)
    with pytest.raises((LayoutError, RankFailedError), match="no rank calls it as a whole"):
        verify(hooked, "pp2 mb1", [BATCH], loss=LOSS)


def test_hooks_are_not_run_when_the_model_is_read():
    seen = []
    watched = model()
    for module in watched[1].modules():
        module.register_forward_hook(lambda m, args, y: seen.append(type(y)))
    launch(lambda world: parallelize(watched, "tp2", world, loss=LOSS), 2, ranks="threads")
    assert not seen


def test_layers_without_hooks_are_cut_all_the_same():
    hooked = model()
    HOOKS["forward"](hooked[1].act)

    def work(world):
        return {
            name: tuple(p.shape) for name, p in parallelize(hooked, "tp2", world, loss=LOSS).model.named_parameters()
        }

    shapes = launch(work, 2, ranks="threads")[0]
    assert shapes["1.up.weight"] == (24, 12)
    assert shapes["4.up.weight"] == (12, 12)


class Collecting(nn.Module):
    """Adds to its output what hooks have kept: what the second block was given, and what it gave."""

    def __init__(self):
        super().__init__()
        self.blocks, self.kept = nn.ModuleList(Pair() for _ in range(8)), {}
        self.blocks[1].register_forward_pre_hook(lambda m, args: self.kept.update(given=args[0]))
        self.blocks[1].register_forward_hook(self.keep)

    def keep(self, module, args, y):
        self.kept["gave"] = y

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x + self.kept["given"] * self.kept["gave"]


@pytest.mark.parametrize("line", ["tp2", "pp2/1f1b mb2", "pp4/zb-v mb4", "pp2/1f1b mb2 tp2"])
def test_what_hooks_keep_for_later_code_is_there_on_every_stage(line):
    batches = [(torch.randn(8, 3, WIDTH), torch.randn(8, 3, WIDTH)) for _ in range(2)]
    verdict = verify(Collecting(), line, batches, loss=LOSS)
    assert verdict.equal, str(verdict)
