import sys
import types

import pytest
import torch

from shardwright.errors import PlanError
from shardwright.initial_values import without_values
from shardwright.models import MODELS, GPTConfig, build, configure, entry_of, read_config
from shardwright.models.settings import parse_value


@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_takes_its_example_batch_into_its_loss(name):
    entry = MODELS[name]
    config = entry.config()
    inputs, targets = entry.example_batch(config, 3, 6, torch.Generator().manual_seed(0))
    loss_sum, count = entry.loss()(build(name, {})(inputs), targets)
    loss_sum.backward()
    assert (loss_sum.dim(), count.dim(), count.item() % 3) == (0, 0, 0)
    assert entry_of(config) is entry


@pytest.mark.parametrize("name", MODELS)
def test_example_batches_depend_on_the_generator_only(name):
    entry = MODELS[name]
    batches = [entry.example_batch(entry.config(), 2, 4, torch.Generator().manual_seed(s)) for s in (3, 3, 4)]
    assert all(torch.equal(a, b) for a, b in zip(batches[0], batches[1], strict=True))
    assert not torch.equal(batches[0][0], batches[2][0])


def test_settings_may_be_text_or_values():
    text = {"style": "llama", "num_layers": "2", "dropout": "0.1", "tied": "false", "theta": "5e5"}
    values = {"style": "llama", "num_layers": 2, "dropout": 0.1, "tied": False, "theta": 500000}
    expected = GPTConfig(style="llama", num_layers=2, dropout=0.1, tied=False, theta=5e5)
    assert configure("gpt", text) == read_config(GPTConfig, values) == expected


def test_an_unknown_setting_names_the_nearest_known_one():
    with pytest.raises(PlanError, match="fix:     write num_layers"):
        build("gpt", {"num_layer": 2})


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("x", int),
        (2.5, int),
        (True, int),
        ("maybe", bool),
        (1, bool),
        ("1,x", tuple[int, ...]),
        pytest.param(10**400, float, id="400 digits"),
        pytest.param(10**5000, float, id="5000 digits as a float"),
        pytest.param(10**5000, int, id="5000 digits"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(value, hint):
    with pytest.raises(PlanError, match="does not have the right type"):
        parse_value("setting", value, hint)


def test_a_word_that_is_no_choice_is_answered_with_the_nearest_choice():
    with pytest.raises(PlanError, match="write style=llama"):
        build("gpt", {"style": "lama"})


@pytest.mark.parametrize(
    ("text", "hint", "expected"),
    [
        ("3", int | None, 3),
        ("none", int | None, None),
        ("a", int | str, "a"),
        ("7", int | str, 7),
        ("[1, 2]", tuple[int, ...], (1, 2)),
        ("(1,2)", None, (1, 2)),
        ("word", None, "word"),
    ],
)
def test_texts_are_read_by_the_type_hint(text, hint, expected):
    assert parse_value("setting", text, hint) == expected


@pytest.fixture
def own_module(monkeypatch):
    module = types.ModuleType("own_models")
    module.network = lambda width=4, **more: torch.nn.Linear(width, more.get("out", 1))
    module.strict = lambda width: torch.nn.Linear(width, 1)
    module.nothing = lambda: 3
    module.looks = lambda: torch.nn.Linear(3 if torch.rand(3).sum().item() > 0 else 4, 1)
    module.fails = lambda: {}["width"]
    module.refuses = lambda: build("gtp", {})
    monkeypatch.setitem(sys.modules, "own_models", module)


@pytest.mark.usefixtures("own_module")
def test_a_factory_of_any_package_is_called_with_the_settings():
    assert build("own_models:network", {"width": "8", "out": "2"}).weight.shape == (2, 8)


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("own_models:netwrk", {}, "write own_models:network"),
        ("own_models:nothing", {}, "makes no model"),
        ("builtins:dict", {}, "makes no model"),
        ("builtins:dict", {"x": 1}, "makes no model"),
        ("builtins:print", {}, "makes no model"),
        ("builtins:int", {"x": "1"}, "failed to build its model"),
        ("own_models:strict", {"widht": 1}, "fix:     write width"),
        ("no_such_package_at_all:factory", {}, "cannot import"),
        ("gtp", {}, "write gpt"),
    ],
)
def test_what_builds_no_model_is_refused_with_a_fix(name, settings, message):
    with pytest.raises(PlanError, match=message):
        build(name, settings)


@pytest.mark.usefixtures("own_module")
def test_a_factory_that_looks_at_values_where_there_are_none_is_told_what_and_where():
    assert build("own_models:looks", {}).in_features == 3
    with without_values(), pytest.raises(PlanError) as refusal:
        build("own_models:looks", {})
    text = str(refusal.value)
    assert text.startswith("'own_models:looks' failed to build its model without values\n  given:   NoValuesError: ")
    assert "reads values" in text
    assert "test_models.py:" in text
    assert "looks at no values" in text


@pytest.mark.usefixtures("own_module")
def test_a_factory_that_fails_in_any_other_way_is_told_what_and_where():
    with pytest.raises(PlanError, match=r"KeyError: 'width'\n.*test_models.py:\d+, in <lambda>"):
        build("own_models:fails", {})
    with pytest.raises(PlanError, match="no such model"):
        build("own_models:refuses", {})
    with pytest.raises(PlanError, match=r"TypeError: .* missing .*'in_features'"):
        build("torch.nn:Linear", {"out_features": 3})


def test_a_module_that_fails_while_it_is_imported_is_refused(tmp_path, monkeypatch):
    (tmp_path / "half_written.py").write_text("def factory(:")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PlanError, match="cannot import 'half_written'\n  given:   half_written:factory: SyntaxError"):
        build("half_written:factory", {})
