"""Models that no layout can run are refused in words, on every rank and by ``verify``; odd ones that can be run are."""

from __future__ import annotations

import pickle
import warnings
from copy import copy, deepcopy

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import launch, parallelize, verify
from shardwright.errors import LayoutError, PlanError, RankFailedError
from shardwright.models.losses import MeanSquaredError

LOSS = MeanSquaredError()
BATCH = (torch.randn(5, 6), torch.randn(5, 6))
LINES = ["single", "dp2", "tp2", "pp2 mb1"]


def pair():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.pair = nn.utils.weight_norm(nn.Linear(6, 6)), pair()

    def forward(self, x):
        return self.pair(self.layer(x))


def compiled_in_place(model):
    model[0].compile(backend="eager")
    return model


REFUSED = {
    "a lazy layer": (lambda: nn.Sequential(nn.LazyLinear(6), *pair()), "'0.weight' has no shape yet"),
    "a sparse table": (lambda: nn.Sequential(nn.Embedding(9, 6, sparse=True), *pair()), "table '0' is sparse"),
    "a sparse bag": (lambda: nn.Sequential(nn.EmbeddingBag(9, 6, sparse=True), *pair()), "table '0' is sparse"),
    "a compiled model": (lambda: torch.compile(pair(), backend="eager"), "the model is compiled already"),
    "a compiled layer": (lambda: compiled_in_place(pair()), "the module '0' is compiled already"),
    "a model in DataParallel": (lambda: nn.DataParallel(pair()), r"already\n.*DataParallel\n.*\n.*its \.module"),
    "a script": (lambda: torch.jit.script(pair()), "the model is TorchScript"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm", "ignore:Lazy modules", "ignore:.*torch.jit.script")
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_run_is_refused_by_name(name, line):
    build, words = REFUSED[name]
    with pytest.raises(PlanError, match=words):
        verify(build(), line, [BATCH], loss=LOSS)
    with pytest.raises((PlanError, RankFailedError), match=words):
        launch(lambda world: parallelize(build(), line, world, loss=LOSS), 2 - (line == "single"), ranks="threads")


class Penalised(nn.Module):
    """A loss of its own, and what a part that it holds weighs."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, outputs, targets):
        total, count = LOSS(outputs, targets)
        return total + count * sum(each.square().sum() for each in self.part.parameters()), count


def test_a_loss_with_parameters_that_want_gradients_is_refused_by_name():
    model = pair()
    for loss, name in ((Penalised(model), "part.0.weight"), (Penalised(nn.PReLU()), "part.weight")):
        with pytest.raises(PlanError, match=f"never be trained: '{name}'"):
            verify(model, "dp2", [BATCH], loss=loss, launcher=lambda *_: pytest.fail("ran"))
        with pytest.raises(PlanError, match=f"never be trained: '{name}'"):
            launch(lambda world, loss=loss: parallelize(model, "single", world, loss=loss), 1, ranks="threads")
    frozen = Penalised(nn.PReLU().requires_grad_(False))
    assert verify(model, "dp2", [BATCH], loss=frozen).equal


@pytest.mark.parametrize("line", LINES)
def test_a_model_without_anything_to_train_predicts_and_evaluates_but_takes_no_step(line):
    model = pair().double().requires_grad_(False)  # two sums in float32 are not equal to the tolerance of a float
    whole = BATCH[0].double(), BATCH[1].double()
    with pytest.raises(PlanError, match="no parameter of the model requires a gradient"):
        verify(model, line, [whole], loss=LOSS)

    def work(world):
        run = parallelize(model, line, world, loss=LOSS)
        (batch,) = run.shard([whole])
        with pytest.raises(PlanError, match="no parameter of the model requires a gradient"):
            run.step(batch)
        return run.evaluate(batch), run.predict(whole[0])

    for loss, output in launch(work, 2 - (line == "single"), ranks="threads"):
        torch.testing.assert_close(output, model(whole[0]))
        torch.testing.assert_close(float(loss), nn.functional.mse_loss(model(whole[0]), whole[1]).item())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("line", ["single", "dp2", "tp2", "tp2x2/2d", "pp2 mb1", "dp2 tp2"])
def test_layers_without_features_equal_one_device(line):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 0), nn.ReLU(), nn.Linear(0, 6), *pair())
    verdict = verify(model, line, [BATCH] * 2, loss=LOSS)
    assert verdict.equal, str(verdict)


@pytest.mark.filterwarnings("ignore:.*spectral_norm")
@pytest.mark.parametrize("line", ["dp2", "tp2", "tp2x2/2d", "pp2 mb1"])
def test_a_layer_that_computes_its_weight_before_each_forward_stays_whole(line):
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)), *pair())
    verdict = verify(model, line, [BATCH] * 2, loss=LOSS)
    assert verdict.equal, str(verdict)


def refused(call):
    with pytest.raises(PlanError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", 2), "str as work"),
        ((None, 2), "NoneType as work"),
        ((2, print), "int as work"),
        ((print, 0), "0 ranks"),
        ((print, print), "ranks\n  allowed: a number of ranks from 1 on"),
        ((print, True), "True ranks\n  allowed: a number of ranks from 1 on"),
    ],
)
def test_wrong_arguments_of_launch_are_refused_with_the_line_to_write(arguments, words):
    text = refused(lambda: sw.launch(*arguments, ranks="threads"))
    assert words in text
    assert "write sw.launch(train, 'dp2', ranks='threads')" in text
    assert "ranks='thread'" in refused(lambda: sw.launch(print, 2, ranks="thread"))


@pytest.mark.parametrize(
    ("swap", "words"),
    [
        (lambda model, world: ("dp2", model, world), "'model' of parallelize is none\n  given:   str: 'dp2'"),
        (lambda model, world: (nn.Linear, "dp2", world), "write Linear(...)"),
        (lambda model, world: (model, None, world), "'layout' of parallelize is none"),
        (lambda model, world: (model, {"tensor": 2}, world), "Layout.from_dict"),
        (
            lambda model, world: (model, "dp2", None),
            "write sw.launch(lambda world: sw.parallelize(model, 'dp2', world)",
        ),
    ],
)
def test_wrong_arguments_of_parallelize_are_refused_on_every_rank(swap, words):
    model = nn.Linear(4, 3)
    for text in sw.launch(lambda w: refused(lambda: sw.parallelize(*swap(model, w))), 2, ranks="threads"):
        assert words in text


def test_habits_of_other_libraries_are_told_what_a_run_has_instead():
    model = nn.Linear(4, 3)

    def work(world):
        run = sw.parallelize(model, "dp2", world)
        assert "write run.optimizer(torch.optim.AdamW" in refused(lambda: run.optimizer("adamw"))
        wrong = torch.optim.SGD(model.parameters(), lr=0.1)
        assert "write run.optimizer(torch.optim.AdamW" in refused(lambda: run.optimizer(wrong))
        assert "write run.shard([(inputs, targets)])" in refused(
            lambda: next(run.shard((torch.ones(2, 4), torch.zeros(2))))
        )
        for name, line in (("zero_grad", "run.accumulate"), ("save", "write sw.save("), ("to", "device already")):
            with pytest.raises(AttributeError, match=f"a run has no '{name}'") as caught:
                getattr(run, name)
            assert line in str(caught.value)
        assert not hasattr(run, "unknown")
        with pytest.raises(TypeError, match=r"write run\.predict\(inputs\), or run\.step\(batch\) to train"):
            run(torch.ones(2, 4))
        assert "fix:     write sw.save(folder, run, optimizer)" in refused(lambda: sw.save(run, "folder"))
        assert "fix:     write sw.load(path, run, optimizer)" in refused(lambda: sw.load(run, "folder"))
        assert "fix:     write sw.load_weights(run, source)" in refused(lambda: sw.load_weights("folder", run))
        assert "given:   torch.nn.modules.linear.Linear" in refused(lambda: sw.save_weights(model, "folder"))

    sw.launch(work, 2, ranks="threads")


@pytest.mark.parametrize("line", ["single", "dp2/zero3", "tp2"])
def test_a_plain_model_that_is_read_after_training_is_told_to_have_its_old_values(line):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    batch = (torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))

    def work(world):
        run = sw.parallelize(model, line, world)
        assert run.model._compiled_call_impl is None
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        part = next(run.shard([batch]))
        run.step(part)
        if reads:
            model.eval().state_dict()  # no update yet: they are equal
            world.everyone().barrier()
        optimizer.step()
        return run.state_dict()

    def trained():
        return sw.launch(work, line, ranks="threads")[0]

    reads = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = trained()
    reads = False
    with pytest.warns(UserWarning, match=r"state_dict\(\) is of the plain model, which still has the values of before"):
        assert torch.equal(model.state_dict()["0.bias"], model[0].bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.state_dict()  # it was said once
        trained()
        model.load_state_dict(state)
        model.eval().state_dict()  # the trained values
        trained()
    with pytest.warns(UserWarning, match=r"(?s)eval\(\) is of the plain model.*write run\.evaluate\(batch\)"):
        model.eval()
    trained()
    with pytest.warns(UserWarning, match=r"(?s)a call is of the plain model.*write run\.evaluate\(batch\)") as caught:
        model(batch[0])
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch[0])  # it was said once
        trained()
        other = pickle.loads(pickle.dumps(model))
        for copied in (deepcopy(model), copy(model), other):
            copied(batch[0])  # a copy is not the model that was given
        model.load_state_dict(state)
        assert torch.equal(model(batch[0]), nn.functional.linear(model[0](batch[0]).relu(), *model[2].parameters()))
        assert model._compiled_call_impl is None


class Sized(nn.Module):
    def forward(self, rows, scale=1.0):
        return rows * scale


def test_a_batch_with_names_that_the_forward_lacks_says_which_and_the_line_to_write():
    model = nn.Sequential(nn.Linear(4, 2), Sized())
    batch = {"x": torch.ones(2, 4), "y": torch.zeros(2, dtype=torch.int64)}

    def work(world):
        run = sw.parallelize(model, "dp2", world)
        text = refused(lambda: next(run.shard([batch], "y")))
        assert "given:   a dict with x, by which the model is called as model(**inputs)" in text
        assert "run.shard(batches, targets=lambda batch: (batch['x'], batch['y']))" in text
        run.step(next(run.shard([batch], lambda batch: (batch["x"], batch["y"]))))

    sw.launch(work, 2, ranks="threads")
    text = refused(lambda: sw.verify(model, "dp2", [batch]))
    assert "write sw.verify(model, layout, batches, targets='y')" in text
    assert "no argument 'x'" in refused(lambda: sw.verify(model, "dp2", [batch], targets="y"))
    assert sw.verify(model, "dp2", [batch], targets=lambda batch: (batch["x"], batch["y"])).equal


class Loops(nn.Module):
    """A forward that only a recording on an example follows, and a head, an MLP and an embedding in no chain."""

    def __init__(self):
        super().__init__()
        self.token, self.up, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)

    def forward(self, ids):
        h = self.token(ids)
        for _ in range(ids.shape[1]):
            h = torch.stack([h, self.up(h)]).sum(0)
        return self.head(h)


@pytest.mark.parametrize("line", ["pp2 mb2", "tp2/sp"])
def test_an_error_that_an_example_avoids_shows_the_line_with_it(line):
    model, inputs = Loops(), torch.zeros(4, 3, dtype=torch.int64)

    def work(world, **options):
        try:
            sw.parallelize(model, line, world, **options)
        except LayoutError as failure:
            return str(failure)
        return "works"

    for text in sw.launch(work, 2, ranks="threads"):
        assert "fix:     write sw.parallelize(model, layout, world, example=inputs)" in text
    assert sw.launch(lambda world: work(world, example=inputs), 2, ranks="threads") == ["works"] * 2


class NamesHide(nn.Module):
    """Keeps layers in a plain list, and their parameters where ``parameters()`` finds them, as N-BEATS does."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = [nn.Linear(6, 8), nn.Linear(8, 6)], nn.Linear(6, 6)
        self.parameters = nn.ParameterList(each for layer in self.layers for each in layer.parameters())

    def forward(self, x):
        return self.head(self.layers[1](torch.relu(self.layers[0](x))))


@pytest.mark.parametrize("line", ["tp2", "pp2/1f1b mb2", "dp2"])
def test_a_child_that_has_the_name_of_a_method_is_refused_where_modules_are_divided(line):
    if line == "dp2":
        assert verify(NamesHide(), line, [BATCH], loss=LOSS).equal
        return
    with pytest.raises(PlanError, match="'parameters' cannot be reached by its name"):
        verify(NamesHide(), line, [BATCH], loss=LOSS)


class Computes(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x):
        return self.function(self.layer(x))


NARROW = [
    lambda y: torch.fft.fft(y).real,
    lambda y: y @ torch.eye(6),
    lambda y: nn.functional.layer_norm(y.float(), (6,), torch.ones_like(y[0])).to(y.dtype),  # as CLIP's norms
]


@pytest.mark.parametrize("function", NARROW)
def test_code_that_torch_does_not_run_in_bf16_is_named(function):
    with pytest.raises(PlanError, match="does not run in bf16") as failure:
        verify(Computes(function), "dp2 bf16", [BATCH], loss=LOSS)
    assert "test_checks.py" in str(failure.value)
    assert "leave out bf16" in str(failure.value)
    assert verify(Computes(lambda y: torch.fft.fft(y.float()).real.to(y.dtype)), "dp2 bf16", [BATCH], loss=LOSS).equal


class InFloat32(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(6, 6)

    def forward(self, x):
        return self.layer(x.float()[None])[0][0].to(x.dtype)


def test_a_recurrent_layer_whose_input_is_float32_is_named_in_bf16():
    with pytest.raises(PlanError, match="does not run in bf16"):
        verify(InFloat32(), "dp2 bf16", [BATCH], loss=LOSS)


def test_a_scatter_of_float32_into_bf16_is_named():
    def adds(y):
        return torch.zeros_like(y).scatter(1, torch.zeros(len(y), 1, dtype=torch.int64), torch.ones(len(y), 1)) + y

    with pytest.raises(PlanError, match="does not run in bf16"):
        verify(Computes(adds), "dp2 bf16", [BATCH], loss=LOSS)


@pytest.mark.parametrize("text", ["no such thing", "expected scalar type Long but found Float"])
def test_an_error_of_the_models_own_is_raised_as_it_is_in_bf16_too(text):
    def fails(y):
        raise RuntimeError(text)

    model = Computes(fails)

    def work(world):
        run = parallelize(model, "dp2 bf16", world, loss=LOSS)
        run.step(next(run.shard([BATCH])))

    with pytest.raises(RankFailedError, match=text):
        launch(work, 2, ranks="threads")


def test_a_batch_norm_of_one_value_in_a_microbatch_of_its_own_is_refused():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    with pytest.raises(PlanError, match="one value for each channel of a microbatch"):
        verify(model, "mb5/own-statistics", [BATCH], loss=LOSS)

    def work(world):
        run = parallelize(model, "mb2/own-statistics", world, loss=LOSS)
        run.step(next(run.shard([(BATCH[0][:2], BATCH[1][:2])])))

    with pytest.raises(PlanError, match="one value for each channel of a microbatch"):
        launch(work, 1, ranks="threads")


def test_an_assertion_of_a_dtype_is_explained_under_a_layout_in_another():
    class Strict(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            assert y.dtype in (torch.float32, torch.float64), "one dtype alone"
            return y

    batch = torch.ones(4, 4), torch.ones(4, 4)
    assert verify(Strict(4, 4), "dp2", [batch], loss=MeanSquaredError()).equal
    with pytest.raises(PlanError, match="does not run in bf16") as failure:
        verify(Strict(4, 4), "dp2 bf16", [batch], loss=MeanSquaredError())
    assert "AssertionError: one dtype alone" in str(failure.value)
