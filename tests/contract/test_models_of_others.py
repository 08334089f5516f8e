"""Models as others write them, that know nothing of us: each is cut where it can be, and equals one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from shardwright import verify
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.models.losses import CrossEntropy, MeanSquaredError
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job
from shardwright.report.description import describe
from shardwright.report.show import show_text

SAMPLES, TOKENS, WIDTH, CLASSES = 5, 6, 12, 7


def encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 20, dropout=0.1, activation="gelu", batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(31, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        kind = partial(nn.MultiheadAttention, WIDTH, 4, dropout=0.1, batch_first=True)
        self.attentions = nn.ModuleList([kind(), kind()])
        self.head = nn.Linear(WIDTH, 31)

    def forward(self, tokens):
        x = self.embed(tokens)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            h = norm(x)
            attended, _ = attention(h, h, h, attn_mask=hidden, need_weights=False)
            x = x + attended
        return self.head(x)


class Translating(nn.Module):
    """As torch's example has it: samples in dim 1, with dropout."""

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(31, WIDTH), nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 80)
        encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)  # as it would be all the same, unwarned
        self.transformer = nn.Transformer(WIDTH, 4, 1, 1, 80, custom_encoder=encoder)
        self.head = nn.Linear(WIDTH, 31)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = x.transpose(0, 1)
        hidden = nn.Transformer.generate_square_subsequent_mask(TOKENS, x.device, x.dtype)
        x = self.transformer(torch.tanh(x), x.roll(1, 0), tgt_mask=hidden, tgt_is_causal=True)
        return self.head(x.transpose(0, 1))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.act, self.drop = nn.SiLU(), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.fc2(self.drop(self.act(self.fc1(self.norm(x)))))


class ResidualMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(10, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.out(self.norm(self.blocks(self.stem(x))))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH) * 0.02)
        self.dropout = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 20, 0.1, activation=nn.GELU(), batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.encoder(self.dropout(x + self.positions))
        return self.head(self.norm(x[:, 0]))


def twice(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(2, after), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, gated: bool = False):
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.Sigmoid()) if gated else None
        self.down1, self.down2, self.bottom = twice(2, 4), twice(4, 6), twice(6, 8)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.merge2 = nn.ConvTranspose2d(8, 6, 2, stride=2), twice(12, 6)
        self.up1, self.merge1 = nn.ConvTranspose2d(6, 4, 2, stride=2), twice(8, 4)
        self.out = nn.Conv2d(4, 3, 1)

    def forward(self, images):
        first = self.down1(images)
        second = self.down2(self.pool(first))
        x = self.bottom(self.pool(second))
        if self.gate is not None:
            x = x * self.gate(x.mean(dim=(2, 3)))[:, :, None, None]
        x = self.up2(x)
        x = self.up1(self.merge2(torch.cat([x, second], dim=1)))
        return self.out(self.merge1(torch.cat([x, first], dim=1)))


@dataclass(frozen=True, eq=False)
class Theirs:
    """A model of others, what it sees, and the weights that are cut in every mode; none: it may be refused."""

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    num_classes: int = 0
    num_tokens: int = 0
    cut: tuple[str, ...] = ()

    @property
    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build().double()

    @property
    def loss(self) -> nn.Module:
        return CrossEntropy() if self.num_classes else MeanSquaredError()

    @property
    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        draw = torch.Generator().manual_seed(0)

        def numbers(shape: tuple[int, ...], classes: int) -> torch.Tensor:
            if classes:
                return torch.randint(classes, shape, generator=draw)
            return torch.randn(shape, generator=draw, dtype=torch.float64)

        return [
            (numbers((n, *self.inputs), self.num_tokens), numbers((n, *self.targets), self.num_classes))
            for n in (SAMPLES, SAMPLES - 1)
        ]

    def __str__(self) -> str:
        return self.name


LAYER = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")


def _layers(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{n}.{name}" for n in range(2) for name in LAYER)


THEIRS = [
    Theirs("encoder, norm last", lambda: encoder(False), (TOKENS, WIDTH), (TOKENS, WIDTH), cut=_layers("layers")),
    Theirs("encoder, norm first", lambda: encoder(True), (TOKENS, WIDTH), (TOKENS, WIDTH), cut=_layers("layers")),
    Theirs(
        "attention", Attending, (TOKENS,), (TOKENS,), num_classes=31, num_tokens=31,
        cut=("attentions.0.in_proj_weight", "attentions.1.out_proj.weight", "embed.weight"),
    ),
    Theirs(
        "residual mlp", ResidualMLP, (10,), (), num_classes=CLASSES,
        cut=tuple(f"blocks.{n}.{name}.weight" for n in range(3) for name in ("fc1", "fc2")),
    ),
    Theirs("vision transformer", VisionTransformer, (3, 8, 8), (), num_classes=CLASSES, cut=_layers("encoder.layers")),
    Theirs(
        "encoder and decoder", Translating, (TOKENS,), (TOKENS,), num_classes=31, num_tokens=31,
        cut=(
            *(f"transformer.encoder.layers.0.{name}" for name in LAYER), "head.weight",
            *(f"transformer.decoder.layers.0.{name}" for name in (*LAYER, "multihead_attn.in_proj_weight")),
        ),
    ),
    Theirs("u-net", UNet, (2, 8, 8), (3, 8, 8)),
    Theirs("u-net with a gate", lambda: UNet(gated=True), (2, 8, 8), (3, 8, 8), cut=("gate.0.weight", "gate.2.weight")),
]  # fmt: skip


def lays_out(job: Job, line: str) -> bool:
    try:
        make_plan(job, Layout.parse(line))
    except LayoutError:
        return False
    return True


LINES = ["tp2", "tp3", "tp4/sp", "tp2x2/2d", "tp2x2x2/2.5d", "tp2x2x2/3d", "dp2 tp2"]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("theirs", THEIRS, ids=str)
@pytest.mark.sampled(11)
def test_a_model_of_others_equals_one_device(theirs, line):
    job = Job(theirs.model, theirs.loss)
    if not theirs.cut and not lays_out(job, line):
        with pytest.raises(LayoutError, match=r"no layer of the model can be cut(.|\n)*allowed:(.|\n)*fix:"):
            make_plan(job, Layout.parse(line))
        return
    plan, _ = make_plan(job, Layout.parse(line))
    uncut = [name for name in theirs.cut if not set(plan.compute[name].axes) - {"dp"}]
    assert not uncut, {name: plan.roles[name.rpartition(".")[0]] for name in uncut}
    verdict = verify(theirs.model, line, theirs.batches, loss=theirs.loss)
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize(
    "line", ["dp2", "dp3 mb2", "dp3/zero1/bucket:0", "dp2/zero3/bucket:0 mb2", "dp2/zero3/bucket:0 recompute:*"]
)
@pytest.mark.parametrize("theirs", THEIRS, ids=str)
def test_a_model_of_others_that_is_copied_or_rests_in_slices_equals_one_device(theirs, line):
    verdict = verify(theirs.model, line, theirs.batches, loss=theirs.loss)
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["tp2", "tp2x2/2d", "tp2x2x2/3d"])
@pytest.mark.parametrize("theirs", [theirs for theirs in THEIRS if theirs.cut], ids=str)
@pytest.mark.sampled(21)
def test_show_says_of_every_layer_what_was_done_and_why(theirs, line):
    job = Job(theirs.model, theirs.loss)
    description = describe(job, Layout.parse(line))
    told = {layer["module"]: layer for layer in description["layers"]}
    for path, module in job.model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            assert told[path]["role"], path
            assert told[path]["why"], path
    shapes = {parameter["name"]: parameter for parameter in description["parameters"]}
    for name in theirs.cut:
        assert shapes[name]["local_shapes"] != [shapes[name]["shape"]], name
    text = show_text(description, width=200)
    assert not [layer["role"] for layer in told.values() if layer["role"] not in text]
