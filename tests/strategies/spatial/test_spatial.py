"""Pictures cut in space: equal to one device, priced as sent, and in shares that add up."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contract.cases import (
    CONVNET,
    Case,
    Pictures,
    check_divides,
    check_equal,
    check_names,
    check_refused,
    check_shapes,
    check_traffic,
)
from shardwright import Layout, launch, parallelize, verify
from shardwright.errors import LayoutError, PlanError, RankFailedError
from shardwright.models import ConvNetConfig, build_convnet
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job
from shardwright.strategies.spatial.maps import follow
from strategies.spatial.pictures import (
    CASES,
    RESNET,
    SEEN_FIRST,
    SHARED,
    SHRINKING,
    SQUEEZED,
    STRIDED,
    UNET,
    WIDE,
    ResNet,
    Untraceable,
    head,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # torch's own copy

CHECKS = (check_equal, check_divides, check_shapes, check_traffic, check_names)


HARDEST = (RESNET, STRIDED, WIDE, UNET, SHRINKING, SQUEEZED)
EVERY = [(case, line) for case in CASES for line in ("tp3/spatial", "dp2 tp2/spatial")]
EVERY += [(case, line) for case in HARDEST for line in ("tp2/spatial", "tp8/spatial", "dp2 tp4/spatial")]


@pytest.mark.parametrize(("case", "line"), EVERY, ids=str)
@pytest.mark.sampled(100)
def test_a_model_of_pictures_cut_in_space_keeps_every_promise(case, line):
    for check in CHECKS:
        check(line, case)


@pytest.mark.parametrize("line", ["tp2/spatial mb2", "dp2 tp3/spatial mb3", "tp1/spatial"])
@pytest.mark.parametrize("case", [SQUEEZED, SHARED, UNET, CONVNET], ids=str)
@pytest.mark.sampled(5)
def test_microbatches_change_nothing(case, line):
    for check in CHECKS:
        check(line, case)


@pytest.mark.parametrize("line", ["tp2/spatial", "tp3/spatial", "dp2 tp4/spatial"])
def test_the_convnet_of_cifar_10_equals_one_device(line):
    with torch.device("meta"):
        model = build_convnet(ConvNetConfig())
    generator = torch.Generator().manual_seed(0)
    batch = (torch.randn(3, 3, 32, 32, generator=generator), torch.randint(10, (3,), generator=generator))
    verdict = verify(model, line, [batch, batch])
    assert verdict.equal, str(verdict)


# ---- in stages

STAGED = [
    (UNET, "pp2/gpipe tp2/spatial mb2"),  # skips cross the cut; one crosses two
    (UNET, "pp3/1f1b dp2 tp2/spatial mb3"),
    (UNET, "pp2/interleaved:v2 tp3/spatial mb2"),
    (UNET, "pp2/zb-v tp2/spatial mb3"),
    (RESNET, "pp2 tp3/spatial"),  # statistics over what the tp ranks of one stage hold
    (RESNET, "pp3 dp2 tp2/spatial"),
    (STRIDED, "pp2/zb-h1 tp3/spatial mb2"),
    (SHRINKING, "pp3 tp3/spatial"),  # whole from the middle of a stage on
    (SQUEEZED, "pp2 tp3/spatial mb2"),
    (SHARED, "pp2 tp2/spatial mb2"),  # layers that several chunks call
    (SHARED, "pp2/interleaved:v2 tp3/spatial mb2"),
    (SEEN_FIRST, "pp2/gpipe tp2/spatial mb2"),
    (SEEN_FIRST, "pp2/zb-v tp3/spatial mb2"),
]


@pytest.mark.parametrize(("case", "line"), STAGED, ids=str)
@pytest.mark.sampled(100)
def test_cut_maps_cross_from_stage_to_stage_as_they_lie(case, line):
    for check in CHECKS:
        check(line, case)


@pytest.mark.parametrize("line", ["pp2 tp2/spatial", "pp3/gpipe tp3/spatial mb2"])
def test_predictions_of_stages_are_those_of_one_device(line):
    inputs = UNET.batches[0][0]
    ((expected,),) = (on_ranks(UNET, "dp1", lambda run: run.predict(inputs)),)
    for predicted in on_ranks(UNET, line, lambda run: run.predict(inputs)):
        assert torch.allclose(predicted, expected, rtol=1e-10, atol=1e-12)


class Blocked(nn.Module):
    """A block that can be followed, in a model whose code as a whole cannot: it is one layer, and takes whole maps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x):
        return self.inner(x)


def test_no_stage_begins_inside_a_block_before_which_maps_are_gathered():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), Blocked(), Untraceable(), *head(4))
    batches = Pictures("blocked", shape=(4, 9, 7)).batches
    assert verify(model.double(), "pp2/cut:0,1 tp2/spatial", batches).equal
    assert verify(model, "pp2/cut:0,1.inner.2", batches).equal
    text = check_refused("pp2/cut:0,1.inner.2 tp2/spatial", model)
    assert "under a layout that treats '1' as one layer" in text
    assert "fix:     write cut:0,1" in text


# ---- what is cut


def maps(case: Case, parts: int = 2):
    found = follow(case.model, parts)
    assert found is not None
    return found


def named(found, numbers):
    return [found.steps[number].path for number in sorted(numbers)]


def test_only_the_output_of_a_u_net_is_gathered():
    found = maps(UNET)
    settled = found.settled()
    assert settled.take == {len(found.steps) - 1}
    assert not settled.give
    assert all(number in settled.work for numbers in found.calls.values() for number in numbers)


def test_weights_of_channels_are_shared_where_a_module_made_them_and_used_with_rows_alone():
    assert named(maps(SQUEEZED), maps(SQUEEZED).settled().share) == ["gate"]
    by_functions, seen = (next(case for case in CASES if case.name == f"squeezed {name}") for name in NAMES)
    assert named(maps(by_functions), maps(by_functions).settled().share) == ["fc2"]
    assert not maps(seen).settled().share
    assert named(maps(seen), maps(seen).settled().give) == ["conv"]


NAMES = ("by functions", "and seen")


def test_a_function_that_wants_a_whole_map_has_it_gathered_after_the_module_that_made_it():
    found = maps(SHARED)
    settled = found.settled()
    assert named(found, settled.give) == ["norm"]
    (value,) = settled.give
    assert found.steps[settled.blame[value]].path == "max_pool2d"


@pytest.mark.parametrize(("parts", "rows"), [(2, [8, 4, 2]), (3, [8, 4]), (8, [8])])
def test_a_map_of_fewer_rows_than_ranks_is_gathered_before_the_layer_that_would_give_it(parts, rows):
    found = maps(SHRINKING, parts)
    settled = found.settled(16)
    convolutions = [n for n in sorted(settled.work) if found.steps[n].resize is not None]
    assert [settled.rows[number] for number in convolutions] == rows
    (first,) = settled.take
    assert found.steps[first].num_rows(rows[-1]) < parts
    assert len(found.settled().work) > len(settled.work)  # of a larger picture more is cut


def shapes_seen(case: Case, line: str, kinds: tuple[type[nn.Module], ...]):
    """On each rank, the shapes of what modules of these kinds put out in a forward."""

    def work(world):
        run = parallelize(case.model, line, world, loss=case.loss, check_every=0)
        seen: dict[str, tuple[int, ...]] = {}
        for path, module in run.model.named_modules():
            if isinstance(module, kinds):
                module.register_forward_hook(lambda m, a, y, path=path: seen.update({path: tuple(y.shape)}))
        run.step(next(run.shard(case.batches[:1])))
        return seen

    return launch(work, Layout.parse(line), ranks="threads")


def test_every_map_lies_in_balanced_rows():
    found = shapes_seen(STRIDED, "tp3/spatial", (nn.Conv2d, nn.MaxPool2d))
    rows = {path: [each[path][2] for each in found] for path in found[0]}
    assert rows == {"0": [3, 3, 3], "2": [2, 2, 1], "4": [2, 2, 1], "6": [1, 1, 1]}  # 9, 5, 5 and 3 rows


class Alive(TorchDispatchMode):
    """Counts the bytes that are made while it lasts and still held by something; those of ``before`` are not new."""

    def __init__(self, before: torch.Tensor) -> None:
        super().__init__()
        self._before = before.untyped_storage()._cdata
        self._held: dict[int, tuple[int, weakref.ref]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self._held.values())

    def __torch_dispatch__(self, function, types, args=(), named=None):
        result = function(*args, **(named or {}))
        # in place nothing is made: a rank that is a thread may copy into what another one has made
        for tensor in tree_leaves(result) if not function._schema.is_mutable else ():
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._held and key != self._before:
                    gone = weakref.ref(storage, lambda _, key=key: self._held.pop(key))
                    self._held[key] = storage.nbytes(), gone
        return result


def held_for_backward(line: str, model: nn.Module, x: torch.Tensor) -> list[int]:
    def work(world):
        run = parallelize(model, line, world, check_every=0)
        run.rng.samples = range(len(x))
        with Alive(x) as alive:
            output = run.model(x)
        assert output.requires_grad
        run.axes["world"].barrier()  # until then what was sent may still be on its way
        return alive.num_bytes

    return launch(work, Layout.parse(line), ranks="threads")


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_what_a_rank_keeps_of_cut_maps_is_its_share_and_its_halos(parts):
    channels, rows, width, halo = 5, 64, 32, 2
    model = nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=1, padding=1),
        nn.Conv2d(channels, channels, 5, padding=2), nn.Tanh(), nn.Conv2d(channels, channels, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    x = torch.randn(1, channels, rows, width)
    (whole,) = held_for_backward("dp1", model, x)
    row_bytes = channels * width * 4
    halos = (1 + 1 + 2 + 1) * halo * row_bytes  # of one, one, two and one rows on either side
    mean = 100  # a number of each channel
    assert whole >= 5 * rows * row_bytes  # four maps that layers keep, and the pool's indices, which are int64
    for found in held_for_backward(f"tp{parts}/spatial", model, x):
        assert found <= whole / parts + halos + mean


def test_windows_read_rows_of_neighbours_alone():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def work(world):
        run = parallelize(model, "tp4/spatial", world, check_every=0)
        (batch,) = run.shard([(torch.randn(2, 4, 12, 5), torch.zeros(2, dtype=torch.int64))])
        with world.recorder.recording() as records:
            run.step(batch)
        return [(r.kind, r.num_bytes) for r in records if r.kind in ("send", "receive")]

    row_bytes = 2 * 4 * 5 * 4
    found = launch(work, 4, ranks="threads")
    assert [sorted(each) for each in found] == [
        sorted([("send", row_bytes), ("receive", row_bytes)] * num_neighbours) for num_neighbours in (1, 2, 2, 1)
    ]  # forward only: the picture needs no gradient


# ---- beside training


def on_ranks(case: Case, line: str, look):
    def work(world):
        run = parallelize(case.model, line, world, loss=case.loss, check_every=0)
        for batch in run.shard(case.batches):
            run.step(batch)
        return look(run)

    return launch(work, Layout.parse(line), ranks="threads")


@pytest.mark.sampled(0)
@pytest.mark.parametrize("case", [RESNET, UNET, SHRINKING, SQUEEZED], ids=str)
def test_predictions_and_running_statistics_are_those_of_one_device(case):
    inputs = case.batches[0][0]

    def look(run):
        return run.predict(inputs), {name: buffer.clone() for name, buffer in run.model.named_buffers()}

    ((expected, buffers),) = on_ranks(case, "dp1", look)
    for line in ("tp3/spatial", "dp2 tp2/spatial", "tp8/spatial"):
        for predicted, found in on_ranks(case, line, look):
            assert torch.allclose(predicted, expected, rtol=1e-10, atol=1e-12)
            for name, buffer in buffers.items():
                assert torch.allclose(found[name], buffer, rtol=1e-10, atol=1e-12), name


class Conditioned(nn.Module):
    """A second input, and several outputs of which some are maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.fc = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 4, 3), nn.Linear(3, 6)

    def forward(self, image, about):
        y = self.first(image) + self.fc(about)[:, :, None, None]
        return {"maps": [self.first(image), image * 2], "classes": self.last(y).mean((2, 3))}


class EveryOutput(nn.Module):
    def forward(self, output, targets):
        one, two = output["maps"]
        total = nn.functional.cross_entropy(output["classes"], targets, reduction="sum")
        return total + one.square().sum() + (two * one[:, :4]).sum(), torch.tensor(len(targets))


@pytest.mark.parametrize("line", ["tp2/spatial", "dp2 tp3/spatial"])
def test_other_inputs_stay_whole_and_every_output_is_gathered(line):
    generator = torch.Generator().manual_seed(0)
    inputs = (torch.randn(5, 4, 7, 6, generator=generator), torch.randn(5, 3, generator=generator))
    verdict = verify(Conditioned(), line, [(inputs, torch.arange(5) % 4)] * 2, loss=EveryOutput())
    assert verdict.equal, str(verdict)
    named_inputs = {"about": inputs[1], "image": inputs[0]}
    assert verify(Conditioned(), line, [(named_inputs, torch.arange(5) % 4)], loss=EveryOutput()).equal


def test_what_roles_keep_whole_takes_whole_maps():
    verdict = verify(ResNet(), "tp2/spatial", RESNET.batches, roles={"blocks.1": "copied"})
    assert verdict.equal, str(verdict)
    plan, _ = make_plan(Job(RESNET.model, RESNET.loss, roles={"blocks.1.conv1": "copied"}), Layout.parse("tp2/spatial"))
    assert plan.roles["blocks.1.conv1"].why.startswith("roles say")
    assert plan.roles["blocks.0.conv2"].name == "rows"


class Careless(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.relu = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.one(x)
        z = self.two(y)
        return (z + self.relu(y)).mean((2, 3))


@pytest.mark.parametrize("line", ["dp1", "tp2/spatial"])
def test_a_picture_that_is_changed_in_place_after_it_was_read_is_an_error_as_on_one_device(line):
    model = Careless()

    def work(world):
        run = parallelize(model, line, world, check_every=0)
        run.step(next(run.shard([(torch.randn(2, 4, 9, 9), torch.zeros(2, dtype=torch.int64))])))

    with pytest.raises((RuntimeError, PlanError, RankFailedError), match=r"in.?place"):
        launch(work, Layout.parse(line), ranks="threads")


# ---- what is said and what is refused


def test_show_says_what_is_cut_and_where_maps_become_whole():
    roles = make_plan(Job(SHARED.model, SHARED.loss), Layout.parse("tp2/spatial"))[0].roles
    assert (
        roles["conv"].why
        == "each rank computes its rows, 2 of others' read at each cut; whole where fewer than 2 would come out"
    )
    assert (roles["norm"].name, roles["fc1"].name) == ("rows, then gathers", "copied")
    assert roles["norm"].why.endswith("its output is gathered over tp: 'max_pool2d' takes whole maps")
    roles = make_plan(Job(RESNET.model, RESNET.loss), Layout.parse("tp2/spatial"))[0].roles
    assert roles["blocks.0.norm1"].why == "statistics of all rows, combined over tp"


def why(case: Case, line: str, num_rows: int) -> dict[str, str]:
    """What is said of each layer, for pictures of so many rows."""
    picture = torch.empty(1, case.shape[0], num_rows, 9, device="meta")
    roles = make_plan(Job(case.model, case.loss, example=picture), Layout.parse(line))[0].roles
    return {path: f"{role.name}: {role.why}" for path, role in roles.items()}


def test_show_names_the_rows_and_the_halo_of_each_rank_where_an_example_is_given():
    said = why(STRIDED, "tp3/spatial", 17)
    assert said["0"] == "rows: of 9 rows the ranks compute 3+3+3, and read 2+5+3 of others'"  # kernel 7, stride 2
    assert said["6"] == "rows: of 3 rows the ranks compute 1+1+1, and read 0+1+1 of others'"
    said = why(UNET, "tp2/spatial", 12)
    assert said["up1"] == "rows: of 6 rows the ranks compute 3+3, and read 0+1 of others'"  # from 2 and 1
    said = why(SHRINKING, "tp8/spatial", 16)
    assert said["0"] == "rows: of 8 rows the ranks compute 1+1+1+1+1+1+1+1, and read 0+1+1+1+1+1+1+1 of others'"
    assert said["4"] == "gathers: its input is gathered over tp: fewer than 8 rows would come out"
    assert said["8"] == "copied: every rank computes it whole: there are too few rows to cut"
    said = why(WIDE, "tp11/spatial", 35)
    assert said["1"] == "rows: of 35 rows the ranks compute 3 to 4 each, and read 3 to 6 each of others'"


def test_a_picture_known_to_have_fewer_rows_than_ranks_is_refused_before_anything_runs():
    with pytest.raises(LayoutError, match="allowed: tp from 1 to 7"):
        why(STRIDED, "tp8/spatial", 7)


class TurnedFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return self.conv(x.permute(0, 3, 1, 2)).mean((2, 3))


class Branching(TurnedFirst):
    def forward(self, x):
        return self.conv(x).mean((2, 3)) if x.sum() < 1e9 else x


class OtherwiseInTraining(TurnedFirst):
    def forward(self, x):
        return self.conv(x.roll(1, 2) if self.training else x).mean((2, 3))


REFUSED = {
    "no convolution": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 4)), "without a convolution"),
    "turned first": (TurnedFirst, "'permute' takes the whole picture before any convolution"),
    "branching": (Branching, "whose code depends on values"),
    "otherwise in training": (OtherwiseInTraining, "or on whether it trains"),
    "flattened first": (
        lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 4, 1)),
        "it goes to no convolution as a picture",
    ),
    "a convolution that is the whole model": (lambda: nn.Conv2d(4, 4, 3), "'conv2d' takes the whole picture"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("line", ["tp2/spatial", "dp2 tp3/spatial"])
def test_a_model_without_a_map_to_cut_is_refused_on_every_rank(name, line):
    make, words = REFUSED[name]
    text = check_refused(line, make())
    assert words in text
    assert "cut in space" in text


@pytest.mark.parametrize("line", ["tp4/spatial", "pp2 tp4/spatial"])
def test_a_picture_with_fewer_rows_than_ranks_is_refused_on_every_rank_before_anything_is_sent(line):
    model = nn.Sequential(nn.Conv2d(4, 4, 1), *head(4))

    def work(world):
        run = parallelize(model, line, world, check_every=0)
        (batch,) = run.shard([(torch.ones(2, 4, 3, 9), torch.zeros(2, dtype=torch.int64))])
        with world.recorder.recording() as records:
            try:
                run.step(batch)
            except LayoutError as refusal:
                return str(refusal), len(records)
        return None

    num_ranks = Layout.parse(line).num_ranks
    found = launch(work, num_ranks, ranks="threads")
    assert found == [found[0]] * num_ranks
    text, num_sent = found[0]
    assert num_sent == 0
    assert "given:   'input' of shape [2, 4, 3, 9], tp=4" in text
    assert "allowed: tp from 1 to 3" in text


class WithADefault(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1), *head(4))

    def forward(self, x, weights=None):
        return self.body(x) if weights is None else self.body(x) * weights[:, None]


@pytest.mark.parametrize("inputs", [torch.ones(2, 4), (torch.ones(2, 4, 5, 5), torch.ones(2))], ids=["flat", "two"])
def test_a_call_that_was_not_followed_is_refused(inputs):
    targets = torch.zeros(2, dtype=torch.int64)
    model = WithADefault()
    assert verify(model, "tp2/spatial", [(torch.ones(2, 4, 5, 5), targets)]).equal
    with pytest.raises((PlanError, RankFailedError), match="other arguments than its code was traced with"):
        launch(
            lambda world: parallelize(model, "tp2/spatial", world, check_every=0).predict(inputs), 2, ranks="threads"
        )


def test_options_of_other_modes_do_not_go_with_spatial():
    for line in ("tp2/spatial/sp", "tp2/regather/spatial"):
        with pytest.raises(LayoutError):
            make_plan(Job(CONVNET.model, CONVNET.loss), Layout.parse(line))
