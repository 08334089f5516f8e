"""Models that no pattern knows run on shards of their tensors, cut by what their operators do, as one device would."""

from __future__ import annotations

import pytest
import torch
from tests.contract.cases import CHECKS, Case, Pictures, check_equal, check_traffic, job_of, planned
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwright import verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.layout import Layout
from shardwright.models.losses import CrossEntropy, MeanSquaredError
from shardwright.parallelize.planning import StepTraffic, job_for, make_plan, structural_copy
from shardwright.strategies.tensor_parallel import shards_traffic
from shardwright.strategies.tensor_parallel.graph_cuts import graph_cuts
from shardwright.strategies.tensor_parallel.shards_plan import ShardsNote, share_cut, work_cut

WIDTH, HEADS, TOKENS, WORDS = 16, 4, 6, 23


class TransposedLinear(nn.Module):
    """A linear layer whose weight is stored (in, out), as GPT-2's first code has it."""

    def __init__(self, given: int, made: int):
        super().__init__()
        self.made = made
        self.weight = nn.Parameter(torch.randn(given, made) * 0.3)
        self.bias = nn.Parameter(torch.randn(made) * 0.1)

    def forward(self, x):
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view((*x.size()[:-1], self.made))


class FusedBlock(nn.Module):
    """One layer for q, k and v, split by sizes of the whole; scores and softmax written out."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = TransposedLinear(WIDTH, 3 * WIDTH), TransposedLinear(WIDTH, WIDTH)
        self.up, self.down = TransposedLinear(WIDTH, 20), TransposedLinear(20, WIDTH)

    def forward(self, x):
        samples, tokens, width = x.size()
        q, k, v = self.qkv(self.norm(x)).split(width, dim=2)
        q, k, v = (each.view(samples, tokens, HEADS, width // HEADS).transpose(1, 2) for each in (q, k, v))
        scores = q @ k.transpose(-2, -1) / k.size(-1) ** 0.5
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        attended = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).contiguous().view(samples, tokens, width))
        h = self.up(self.norm2(x))
        return x + self.down(0.5 * h * (1 + torch.tanh(h)))


class GroupedBlock(nn.Module):
    """Fewer heads of keys than of queries, rotary positions, a gated MLP; attention by torch's own function."""

    def __init__(self):
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * size), nn.Linear(WIDTH, 2 * size)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def _norm(self, x):
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def _turned(self, x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    def forward(self, x):
        shape = (*x.shape[:-1], -1, WIDTH // HEADS)
        h = self._norm(x)
        q, k, v = (layer(h).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        speeds = torch.tensor([1.0, 0.1, 1.0, 0.1], device=x.device)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * speeds
        q, k = (self._turned(each, angles.cos().to(x.dtype), angles.sin().to(x.dtype)) for each in (q, k))
        k, v = (each[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for each in (k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(*x.shape[:-1], -1))
        h = self._norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class OneKeyBlock(nn.Module):
    """Queries in one layer with the one key and value head that all queries share; a short convolution of all."""

    def __init__(self):
        super().__init__()
        size = WIDTH // HEADS
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH + 2 * size)
        self.short = nn.Conv1d(WIDTH + 2 * size, WIDTH + 2 * size, 3, padding=2, groups=WIDTH + 2 * size)
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x):
        h = self.qkv(self.norm(x)).transpose(1, 2)
        h = self._mixed(h)
        h = h[..., : x.size(1)].transpose(1, 2).reshape(*x.shape[:2], HEADS + 2, WIDTH // HEADS)
        q, k, v = (each.transpose(1, 2) for each in (h[..., :-2, :], h[..., [-2], :], h[..., [-1], :]))
        attended = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(x)))

    def _mixed(self, h):
        return self.short(h)


class OneKeyBlockWithItsOwnConvolution(OneKeyBlock):
    """The same, with code that reads the convolution's weight."""

    def _mixed(self, h):
        weight = self.short.weight.squeeze(1).unsqueeze(1)
        return functional.conv1d(h, weight, self.short.bias, padding=2, groups=h.size(1))


class ModulatedBlock(FusedBlock):
    """A block that one vector for each sample modulates, as in a diffusion transformer."""

    def __init__(self):
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x):
        shift, scale, gate, other = self.modulation(functional.silu(x.mean(1)))[:, None].chunk(4, -1)
        return x + gate * other.tanh() * super().forward(x * (1 + scale) + shift)


class Language(nn.Module):
    def __init__(self, block: type[nn.Module]):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        assert tokens.size(1) <= TOKENS, "too many tokens"
        x = self.words(tokens) + self.places[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OwnCase(Case):
    """A model that is given as it is."""

    @property
    def model(self) -> nn.Module:
        return structural_copy(self.config, torch.Tensor.double)

    @property
    def batches(self):
        draw = torch.Generator().manual_seed(1)
        sizes = [(samples, TOKENS) for samples in self.num_samples]
        return [tuple(torch.randint(WORDS, size, generator=draw) for _ in range(2)) for size in sizes]


def case_of(block: type[nn.Module]) -> OwnCase:
    torch.manual_seed(1)
    return OwnCase(block.__name__, Language(block), CrossEntropy(), num_tokens=TOKENS)


CASES = {block.__name__: case_of(block) for block in (FusedBlock, GroupedBlock, OneKeyBlock, ModulatedBlock)}


LINES = (
    "tp2", "tp4", "tp3", "dp2 tp2", "dp2/zero1 tp2", "dp2/zero3 tp2", "tp2 recompute:full",
    "tp2x2/2d", "tp2x2x2/2.5d", "tp2x2x2/3d", "tp2/sp", "dp2/zero3 tp2x2/2d", "tp3x2/2d recompute:full",
)  # fmt: skip


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_operators_keeps_every_promise(name, line):
    plan, _ = planned(line, CASES[name])
    assert isinstance(plan.notes.get(""), ShardsNote), "the model runs on shards"
    for check in CHECKS:
        check(line, CASES[name])


class TorchBlock(nn.TransformerEncoderLayer):
    """torch's own layer, whose attention reads the weight of a layer inside it without calling that layer."""

    def __init__(self):
        super().__init__(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)


class NamedParts(nn.Module):
    """A block whose attention and layers are entries of a ``ModuleDict``, which has no forward of its own."""

    def __init__(self):
        super().__init__()
        attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        layers = nn.ModuleDict({"attention": attention, "up": nn.Linear(WIDTH, 24), "down": nn.Linear(24, WIDTH)})
        self.parts = nn.ModuleList([layers])

    def forward(self, x):
        for part in self.parts:
            x = x + part["attention"](x, x, x, need_weights=False)[0]
            x = x + part["down"](part["up"](x).relu())
        return x


class SharedTable(nn.Module):
    """A block that reads the weight of a layer which all blocks share, without calling the layer."""

    shared = nn.Linear(WIDTH, 24, bias=False)

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.table = self.shared

    def forward(self, x):
        x = x + self.down(self.up(x).relu())
        return x + functional.linear(x, self.table.weight).tanh() @ self.table.weight


RECOMPUTED = ("tp2/sp recompute:full", "tp2x2/2d recompute:selective", "tp2x2x2/3d recompute:full",
              "pp2/1f1b mb2 tp2/sp recompute:full")  # fmt: skip


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", RECOMPUTED)
def test_a_block_that_is_recomputed_gathers_again_what_other_modules_read_of_its_layers(line):
    case = case_of(TorchBlock)
    plan, _ = planned(line, case)
    assert any(each.everywhere for each in plan.notes[""].stored.values()), "read by another module than its own"
    for check in CHECKS:
        check(line, case)


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", [*RECOMPUTED, "dp2/zero3 recompute:full"])
@pytest.mark.parametrize("block", [NamedParts, SharedTable])
def test_blocks_without_a_forward_and_blocks_that_share_a_table_are_recomputed_under_every_layout(block, line):
    for check in (check_equal, check_traffic):
        check(line, case_of(block))


class Checkpointed(nn.Module):
    """Blocks that torch checkpoints, of which the first gives the others scores of its heads, as T5 does."""

    class Block(nn.Module):
        def __init__(self, is_first):
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.scores = nn.Embedding(2 * TOKENS, HEADS) if is_first else None

        def forward(self, x, scores):
            return checkpoint(self.attend, x, scores, use_reentrant=False)

        def attend(self, x, scores):
            if self.scores is not None:
                places = torch.arange(x.shape[1])
                scores = self.scores(places[:, None] - places + TOKENS).permute(2, 0, 1)[None]
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).movedim((2, 3), (0, 2))
            return x + self.out(((q @ k.mT + scores).softmax(-1) @ v).transpose(1, 2).flatten(2)), scores

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(self.Block(number == 0) for number in range(3))

    def forward(self, tokens):
        x, scores = self.words(tokens), None
        for block in self.blocks:
            x, scores = block(x, scores)
        return self.head(x)


@pytest.mark.sampled(100)
@pytest.mark.parametrize("word", ["full", "selective", "offload:disk"])
@pytest.mark.parametrize("line", ["tp2", "tp2x2/2d", "dp2/zero3 tp2"])
def test_parts_that_a_checkpoint_of_torch_takes_are_parts_when_it_runs_again(line, word):
    torch.manual_seed(1)
    case = OwnCase("checkpointed", Checkpointed(), CrossEntropy(), num_tokens=TOKENS)
    check_equal(f"{line} recompute:{word}", case)


class Aggregated(nn.Module):
    """Convolutions in a row, of which each and all together are read, as in one-shot aggregation (VoVNet)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8 if n == 0 else 12, 12, 3, padding=1, bias=n > 1) for n in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(12) for _ in range(4))
        self.all, self.head = nn.Conv2d(8 + 4 * 12, 8, 1), nn.Linear(8, 5)
        self.stem = nn.Conv2d(4, 8, 1)

    def forward(self, x):
        found = [self.stem(x)]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            found.append(norm(layer(found[-1])).relu())
        return self.head((found[0] + self.all(torch.cat(found, 1))).relu().mean((2, 3)))


class Joined(nn.Module):
    """A network that goes down and up, whose levels are joined again on the way up, by transposed convolutions."""

    def __init__(self):
        super().__init__()
        self.down, self.beside = nn.Conv2d(4, 16, 3, 2, 1), nn.Conv2d(4, 16, 3, 2, 1)
        self.low, self.low_beside = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(16, 32, 1)
        self.up, self.out = nn.ConvTranspose2d(48, 6, 4, 2, 1), nn.Conv2d(6, 3, 3, padding=1)
        self.scale = nn.PReLU()

    def forward(self, x):
        high = self.scale(functional.instance_norm(self.down(x))) + self.beside(x)
        low = self.scale(functional.instance_norm(self.low(high))) + self.low_beside(high)
        return self.out(self.scale(self.up(torch.cat((high, low), 1))))


PICTURES = {
    "aggregated": Pictures("aggregated", make=Aggregated),
    "joined": Pictures("joined", loss=MeanSquaredError(), make=Joined, shape=(4, 6, 6), targets=(3, 6, 6)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("line", ["tp2", "tp3", "dp2 tp2", "dp2/zero3 tp2"])
@pytest.mark.parametrize("name", PICTURES)
def test_activations_are_gathered_for_layers_that_read_a_concatenation_of_parts(name, line):
    plan, _ = planned(line, PICTURES[name])
    note = plan.notes.get("")
    assert isinstance(note, ShardsNote), "the model runs on shards"
    assert share_cut(plan) > 0.4
    assert "all.weight" not in note.shards, "a weight that multiplies what is gathered would be gathered too"
    for check in CHECKS:
        check(line, PICTURES[name])


class KnownBlock(nn.Module):
    """An MLP that the grid modes know."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class ReadsTables(Language):
    """Asks for the size of one table, and computes the head with another."""

    def __init__(self):
        super().__init__(KnownBlock)
        del self.places
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.head = nn.Identity()

    def forward(self, tokens):
        if tokens.size(1) > self.places.weight.shape[0]:
            raise ValueError("too many tokens")
        x = self.words(tokens) + self.places(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return x @ self.words.weight.T


@pytest.mark.parametrize("line", ["tp2", "tp2x2/2d", "tp2x2x2/3d", "pp2 mb2 dp2/zero1 tp2"])
def test_code_may_read_the_weights_and_shapes_of_other_layers(line):
    torch.manual_seed(0)
    case = OwnCase("", ReadsTables(), CrossEntropy(), num_tokens=TOKENS)
    verdict = verify(case.model, line, case.batches, loss=CrossEntropy())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("block", [OneKeyBlock, OneKeyBlockWithItsOwnConvolution])
def test_a_fused_layer_is_cut_by_query_heads_though_all_ranks_hold_its_key_head(block):
    case = case_of(block)
    plan, strategies = planned("tp2", case)
    size = WIDTH // HEADS
    held = {"qkv.weight": (4 * size, WIDTH), "qkv.bias": (4 * size,), "short.weight": (4 * size, 1, 3)}
    for name, shape in held.items():
        assert plan.compute[f"blocks.0.{name}"].local_shape({"tp": 1}) == shape, (
            "two query heads, the key and the value"
        )
    inputs = torch.zeros(2, TOKENS, dtype=torch.int64)
    traffic = StepTraffic(job_of("tp2", case), plan, strategies, inputs).at({"tp": 0})
    sent = [each for found in traffic.values() for each in found]
    assert not [each for each in sent if each.kind == "all_gather" and each.num_bytes > inputs.numel() * WORDS * 8]
    check_equal("tp2", case)


@pytest.mark.parametrize("line", ["tp4", "dp2/zero3 tp2"])
def test_ranks_that_hold_the_same_are_priced_by_one_rehearsal(line, monkeypatch):
    plan, strategies = planned(line, CASES["FusedBlock"])
    rehearsed, count = shards_traffic._rehearsed, []
    monkeypatch.setattr(shards_traffic, "_rehearsed", lambda *given: count.append(given) or rehearsed(*given))
    inputs = torch.zeros(12, TOKENS, dtype=torch.int64)
    traffic = StepTraffic(job_of(line, CASES["FusedBlock"]), plan, strategies, inputs)
    for coord in plan.mesh.coords():
        traffic.at(coord)
    assert len(count) == 2, "only the last ranks of tp hold fewer of the 23 words"


class Doubled(torch.autograd.Function):
    """An activation with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


class OwnActivation(nn.Sequential):
    def forward(self, x):
        up, down = self
        return down(Doubled.apply(up(x)))


def test_layers_around_an_activation_with_a_backward_of_its_own_are_cut():
    model = OwnActivation(nn.Linear(6, 8), nn.Linear(8, 6)).to("meta")
    run = ModelGraph(model, torch.empty(2, 6)).run
    cuts = graph_cuts(model, run.recording, run.axes, 2)
    assert set(cuts.shards) == {"0.weight", "0.bias", "1.weight"}


class OwnAttention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads, self.q, self.k, self.v, self.out = heads, *(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.out((q @ k.transpose(-1, -2)).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


class WithPlaces(nn.Module):
    """Blocks of an attention of its own and a known MLP, and a parameter of positions that every rank holds whole."""

    def __init__(self, inner, width=32, places=256):
        super().__init__()
        self.places = nn.Parameter(torch.zeros(places, width))
        self.attentions = nn.ModuleList(OwnAttention(width) for _ in range(4))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(4)
        )

    def forward(self, x):
        x = x + self.places[: x.shape[1]]
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        return x


def test_attentions_are_cut_whatever_share_known_layers_have():
    shares = []
    for inner in (32, 64, 80, 96, 112, 128):
        job = job_for(WithPlaces(inner), nn.MSELoss(), Layout.parse("tp2"), torch.zeros(8, 6, 32))
        plan, _ = make_plan(job, Layout.parse("tp2"))
        assert all(plan.compute[f"attentions.{i}.q.weight"].cut_dims for i in range(4)), inner
        shares.append(share_cut(plan))
    assert shares == sorted(shares)


class Looked(nn.Module):
    """A table that is most of the parameters, and blocks of code that only a record can cut: all of the work."""

    def __init__(self, width=32):
        super().__init__()
        self.table, self.enter = nn.Embedding(1024, width), nn.Linear(5, width)
        self.ups = nn.ParameterList(torch.randn(width, 4 * width) / 8 for _ in range(3))
        self.downs = nn.ParameterList(torch.randn(4 * width, width) / 8 for _ in range(3))

    def forward(self, x):
        x = self.enter(x) + self.table(torch.arange(x.shape[1])[None])
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + (x @ up).relu() @ down
        return x


def test_what_cuts_most_of_the_work_is_taken_before_a_table_that_is_most_of_the_bytes():
    layout = Layout.parse("tp2")
    plan, _ = make_plan(job_for(Looked(), nn.MSELoss(), layout, torch.zeros(8, 6, 5)), layout)
    assert work_cut(plan) > 0.9
    verdict = verify(Looked(), "tp2", [(torch.randn(8, 6, 5), torch.randn(8, 6, 32))], loss=nn.MSELoss())
    assert verdict.equal, str(verdict)


class Scores(torch.autograd.Function):
    """Attention's scores with a backward of their own, which reads how many features a head has."""

    @staticmethod
    def forward(ctx, q, k):
        scores = (q @ k.transpose(1, 2) / k.shape[2] ** 0.5).softmax(2)
        ctx.save_for_backward(q, k, scores)
        return scores

    @staticmethod
    def backward(ctx, dy):
        q, k, scores = ctx.saved_tensors
        dx = scores * (dy - (dy * scores).sum(2, keepdim=True)) / k.shape[2] ** 0.5
        return dx @ k, dx.transpose(1, 2) @ q


class OwnScores(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.out(Scores.apply(self.q(x), self.k(x)) @ self.v(x))
        return x + self.down(functional.gelu(self.up(x)))


@pytest.mark.parametrize("line", ["tp2", "tp4/2d"])
def test_what_the_backward_of_a_users_function_measures_is_not_cut(line):
    torch.manual_seed(0)
    plans = []
    batch = torch.randn(8, 6, WIDTH), torch.randn(8, 6, WIDTH)
    model = nn.Sequential(OwnScores(), OwnScores())
    verdict = verify(model, line, [batch], loss=MeanSquaredError(), alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    if line == "tp2":
        compute = plans[0].compute
        assert compute["0.k.weight"].local_shape({"tp": 0}) == (WIDTH, WIDTH)
        assert compute["0.v.weight"].local_shape({"tp": 0}) == (WIDTH // 2, WIDTH)


class ByKeyword(nn.Module):
    """Products and attention whose operands are named, in an order of their own."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            functional.linear(bias=each.bias, weight=each.weight, input=x).unflatten(2, (HEADS, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(value=v, query=q, key=k, is_causal=True)
        return x + functional.linear(y.transpose(1, 2).flatten(2), bias=self.out.bias, weight=self.out.weight)


@pytest.mark.parametrize("line", ["tp2", "tp4/2d", "dp2/zero3 tp2"])
def test_operands_may_be_named(line):
    torch.manual_seed(0)
    plans = []
    batch = torch.randn(8, 6, WIDTH), torch.randn(8, 6, WIDTH)
    model = nn.Sequential(ByKeyword(), ByKeyword())
    verdict = verify(model, line, [batch], loss=MeanSquaredError(), alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    assert share_cut(plans[0]) > 0.9


class Gated(nn.Module):
    """A gated linear unit between two layers, by torch's own function, over features or channels."""

    def __init__(self, kind):
        super().__init__()
        made = {"linear": lambda i, o: nn.Linear(i, o), "conv": lambda i, o: nn.Conv1d(i, o, 3, padding=1)}[kind]
        self.up, self.down, self.dim = made(WIDTH, 4 * WIDTH), made(2 * WIDTH, WIDTH), -1 if kind == "linear" else 1

    def forward(self, x):
        return x + self.down(functional.glu(self.up(x), self.dim))


@pytest.mark.parametrize("line", ["tp2", "tp3", "tp4/2d", "dp2/zero3 tp2"])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_layers_around_a_gated_linear_unit_are_cut(kind, line):
    torch.manual_seed(0)
    plans = []
    batch = torch.randn(8, WIDTH, WIDTH), torch.randn(8, WIDTH, WIDTH)
    model = nn.Sequential(Gated(kind), Gated(kind))
    verdict = verify(model, line, [batch], loss=MeanSquaredError(), alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    assert share_cut(plans[0]) > 0.9


class HalvesTurned(torch.autograd.Function):
    """Turns pairs of features as rotary positions do; its backward takes the halves by their numbers."""

    @staticmethod
    def forward(ctx, x):
        return torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1)

    @staticmethod
    def backward(ctx, dy):
        return torch.cat((dy[..., WIDTH // 2 :], -dy[..., : WIDTH // 2]), -1)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.second(HalvesTurned.apply(self.first(x)).tanh())
        return x + self.down(functional.gelu(self.up(x)))


@pytest.mark.parametrize("line", ["tp2", "tp3", "tp4/2d"])
def test_what_the_backward_of_a_users_function_takes_by_numbers_is_not_cut(line):
    torch.manual_seed(0)
    batch = torch.randn(8, 6, WIDTH), torch.randn(8, 6, WIDTH)
    verdict = verify(nn.Sequential(Turned(), Turned()), line, [batch], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class ChecksMethod(nn.Module):
    """A block that checkpoints a method of its own, in which attention and an MLP are cut by what operators do."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def inner(self, x):
        q, k, v = self.qkv(x * self.scale).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("line", ["tp2", "tp3", "tp4/2d", "dp2/zero3 tp2", "pp2/1f1b mb2 tp2", "tp2 recompute:full"])
def test_a_method_that_is_checkpointed_runs_again_as_it_ran(line):
    torch.manual_seed(0)
    plans = []
    batch = torch.randn(8, 6, WIDTH), torch.randn(8, 6, WIDTH)
    # beside blocks that are cut by their record, so that the model's own code runs on shards
    model = nn.Sequential(ChecksMethod(), ByKeyword(), ChecksMethod(), ByKeyword())
    verdict = verify(model, line, [batch], loss=MeanSquaredError(), alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
