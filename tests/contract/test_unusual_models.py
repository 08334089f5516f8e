"""Models that invite a silent mistake: each is right under tp2, or refused with a reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import launch, parallelize, verify, without_values
from shardwright.errors import PlanError, RankFailedError
from shardwright.layout import Layout
from shardwright.models import CrossEntropy, MeanSquaredError
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job

BATCH = (torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 4]))
TOKENS = (torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[2, 3, 4], [5, 6, 7]]))


class OneVector(nn.Module):
    """A norm over the samples, of features: torch's takes no single sample in training."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.down(functional.relu(self.norm(self.up(x * self.scale))))


class TakesFew(nn.Module):
    """Code that takes four samples at most, as with a cache of so many, and draws for each of them five times."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        assert len(x) <= 4
        h = self.up(x).repeat(5, 1, 1).permute(1, 0, 2)
        h = functional.dropout(h + torch.randn_like(h), 0.5, self.training)
        return self.down(torch.relu(h.reshape(-1, 8)).view(len(x), 5, 8).mean(1))


@pytest.mark.parametrize("line", ["dp4", "dp2 mb2", "dp4 tp2", "dp4 tp2x2/2d"])
@pytest.mark.parametrize("kind", [OneVector, TakesFew])
def test_a_rank_with_one_sample_does_what_it_does_with_several(kind, line):
    torch.manual_seed(0)
    batch, plans = (torch.randn(4, 6), torch.tensor([0, 1, 2, 0])), []
    line = line.replace("mb2", "mb2/own-statistics") if kind is OneVector else line
    verdict = verify(kind(), line, [batch], alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    if kind is OneVector and "tp" in line:
        held = plans[0].compute["up.weight"].local_shape(dict.fromkeys(plans[0].mesh.axes, 0))
        assert held[0] < 16


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate, self.up = nn.Linear(6, 6), nn.Linear(6, 12), nn.Linear(6, 12)
        self.down, self.drop = nn.Linear(12, 6), nn.Dropout(0.1)


class ResidualAroundTheGate(Gated):
    def forward(self, x):
        x = self.first(x)
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class GateInItsOwnModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gated = nn.Linear(6, 6), _GateWithResidual()

    def forward(self, x):
        return self.gated(self.first(x))


class _GateWithResidual(Gated):
    def forward(self, x):
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class OneDropoutInsideAndOutside(Gated):
    def forward(self, x):
        return self.drop(self.down(self.drop(torch.relu(self.up(self.first(x))))))


class Half(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0.5


class SubclassAsTheRow(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.a, self.b = nn.Linear(6, 8), Half(8, 6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        x = self.down(torch.relu(self.up(x)))
        return self.b(torch.relu(self.a(x)))


class OneLayerInTwoPlaces(nn.Module):
    def __init__(self):
        super().__init__()
        self.seq = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        self.again, self.a, self.b = self.seq[0], nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.b(torch.relu(self.a(self.seq(x)))) + self.again(x).mean(-1, keepdim=True)


class ColumnOfAColumn(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        x = self.l1(x)
        return self.b(torch.relu(self.a(self.l3(x * self.l2(x)))))


RIGHT = [
    ResidualAroundTheGate, GateInItsOwnModule, OneDropoutInsideAndOutside, SubclassAsTheRow, OneLayerInTwoPlaces,
    ColumnOfAColumn,
]  # fmt: skip


@pytest.mark.parametrize("line", ["dp2", "tp2", "dp2 tp2"])
@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
@pytest.mark.sampled(8)
def test_an_unusual_model_equals_one_device(kind, line):
    with without_values():
        model = kind()
    verdict = verify(model, line, [BATCH, BATCH])
    assert verdict.equal, str(verdict)


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def encode(self, x):
        return torch.relu(self.up(x))

    def forward(self, x):
        return self.down(self.encode(x))


class Insistent(Coder):
    def __call__(self, x):
        return self.down(self.up(x).softmax(-1))


class LooksInside(nn.Module):
    """What lies between the layers of a pair is seen from outside; another pair is cut all the same."""

    coder: type[nn.Module] = Coder

    def __init__(self):
        super().__init__()
        self.inner, self.pair, self.last = self.coder(), Coder(), nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.pair(self.look(x)))


class Normalises(LooksInside):
    def look(self, x):
        return self.inner.down(functional.normalize(self.inner.encode(x), dim=-1))


class CallsItAndLooks(LooksInside):
    def look(self, x):
        return self.inner(x) + self.inner.encode(x).sum(-1, keepdim=True)


class TakesFeatures(LooksInside):
    def coder(self):
        return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))

    def look(self, x):
        taken = []
        for layer in self.inner:
            x = layer(x)
            taken.append(x.mean(-1, keepdim=True))
        return x * taken[1]


class CallsInItsOwnWay(LooksInside):
    coder = Insistent

    def look(self, x):
        return self.inner(x)


class AsksAndLooks(Normalises):
    def forward(self, x):
        return super().forward(x) if float(x.detach().sum()) < 1e9 else x


LOOKING = [Normalises, CallsItAndLooks, TakesFeatures, CallsInItsOwnWay]


@pytest.mark.parametrize("line", ["tp2", "tp2/sp", "tp2x2/2d", "tp2x2x2/3d", "pp2 tp2 mb2"])
@pytest.mark.parametrize("kind", LOOKING, ids=lambda kind: kind.__name__)
def test_a_pair_that_others_look_into_stays_whole(kind, line):
    with without_values():
        model = kind()
    plan, _ = make_plan(Job(model, CrossEntropy()), Layout.parse(line))
    cut = {name for name, layout in plan.compute.items() if set(layout.axes) - {"pp"}}
    assert "pair.up.weight" in cut
    assert line not in ("tp2", "tp2/sp") or not [name for name in cut if name.startswith("inner.")]
    verdict = verify(model, line, [BATCH, BATCH])
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["tp2", "tp2x2/2d"])
def test_one_that_is_looked_into_by_code_that_cannot_be_followed_is_refused_and_what_that_says_helps(line):
    with without_values():
        model = AsksAndLooks()
    with pytest.raises((PlanError, RankFailedError), match=r"'inner.up' is sharded(.|\n)*--role inner.up=copied"):
        verify(model, line, [BATCH])
    verdict = verify(model, line, [BATCH], roles={"inner.up": "copied"})
    assert verdict.equal, str(verdict)


class SamplesInDimOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.turned, self.plain = (nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 6)) for _ in range(2))

    def forward(self, x):
        return self.plain(self.turned(x.transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize("line", ["dp2 tp2", "tp2/sp"])
def test_layers_that_see_samples_elsewhere_are_right(line):
    with without_values():
        model = SamplesInDimOne()
    verdict = verify(model, line, [(torch.randn(5, 3, 6), torch.randint(6, (5, 3)))])
    assert verdict.equal, str(verdict)


def test_without_an_example_layers_that_see_samples_elsewhere_are_refused_and_what_the_refusal_says_helps():
    model, batch = SamplesInDimOne(), (torch.randn(5, 3, 6), torch.randint(6, (5, 3)))

    def work(world, example):
        run = parallelize(model, "tp2/sp", world, example=example, num_tokens=15)  # few: weights are larger
        return [run.step(part).item() for part in run.shard([batch])]

    with pytest.raises((PlanError, RankFailedError), match=r"does not see them in dim 0(.|\n)*example=inputs"):
        launch(work, 2, None, ranks="threads")
    found = launch(work, 2, batch[0], ranks="threads")
    assert found[0] == found[1]


class Shuffles(nn.Module):
    """Layers of torch's that fail on no samples."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Conv2d(2, 12, 1), nn.Conv2d(12, 3, 1)
        self.norm = nn.InstanceNorm2d(12, affine=True)
        self.larger, self.smaller = nn.PixelShuffle(2), nn.PixelUnshuffle(2)

    def forward(self, x):
        return self.out(self.smaller(self.larger(self.norm(self.into(x))).tanh()))


@pytest.mark.parametrize("line", ["dp4", "pp2/1f1b mb4", "tp2x2x2/3d"])
def test_ranks_without_samples_run_layers_that_torch_runs_on_some_alone(line):
    model = nn.Sequential(Shuffles(), nn.Flatten(), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 5))
    verdict = verify(model, line, [(torch.randn(2, 2, 2, 2), torch.tensor([0, 3]))])
    assert verdict.equal, str(verdict)


class Enlarged(nn.Module):
    """Shuffles in code that is recorded to be cut into stages."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Shuffles() for _ in range(3))
        self.joined = nn.ModuleList(nn.Conv2d(3, 2, 1) for _ in range(3))

    def forward(self, x):
        assert x.size(1) == 2
        for block, joined in zip(self.blocks, self.joined, strict=True):
            x = x + joined(block(x))
        return x


@pytest.mark.parametrize("line", ["pp2 mb2 dp2 tp2", "pp2 mb3 tp2", "pp2 dp3"])
def test_stages_without_samples_run_layers_that_torch_runs_on_some_alone(line):
    verdict = verify(Enlarged(), line, [(torch.randn(2, 2, 2, 2),) * 2], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class TiedByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 4)

    def forward(self, tokens):
        return functional.linear(self.table(tokens), self.table.weight)


class HasAMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.register_buffer("mask", torch.ones(5))

    def _init_weights(self, module):
        if module is self.layer:
            module.reset_parameters()

    def forward(self, x):
        return self.layer(x) * self.mask


def test_a_head_that_reads_a_table_needs_an_example_of_the_inputs():
    def work(world):
        with without_values():
            run = parallelize(TiedByFunction(), "tp2", world)
        run.predict(TOKENS[0])

    assert verify(TiedByFunction(), "tp2", [TOKENS]).equal
    with pytest.raises((PlanError, RankFailedError), match="is read by other code than its own layer"):
        launch(work, 2, ranks="threads")


def test_a_mask_that_a_constructor_fills_has_its_values_in_a_model_built_without():
    with without_values():
        model = HasAMask()
    assert verify(model, "dp2", [BATCH]).equal


def test_a_token_outside_the_table_is_refused_as_on_one_device():
    with without_values():
        model = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 16))
    wrong = (torch.tensor([[1, 99]]), torch.tensor([[1, 2]]))
    with pytest.raises((IndexError, RankFailedError)):
        verify(model, "tp2", [wrong])
