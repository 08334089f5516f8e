"""Roles that a person gives to single layers: they go before what is found out, or are refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardwright import verify, without_values
from shardwright.checkpoint.manifest import find, read
from shardwright.cli.main import app
from shardwright.errors import LayoutError, PlanError, RankFailedError
from shardwright.layout import Layout
from shardwright.models import CrossEntropy
from shardwright.parallelize.planning import make_plan
from shardwright.plan.layer_overrides import Overrides
from shardwright.plan.plan import Job, Plan
from shardwright.sharding.tensor_layout import TensorLayout

WIDTH, HIDDEN, VOCABULARY = 8, 12, 19


class Scaled(nn.Module):
    """What a trace can follow one way of, and that only if it were the only one."""

    def __init__(self, dropout: float = 0.2):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act, self.drop = nn.SiLU(), nn.Dropout(dropout)

    def forward(self, x, scale=None):
        x = self.drop(self.up(x) * self.act(self.gate(x)))
        return self.down(x if scale is None else x * scale)


class Untraceable(Scaled):
    def forward(self, x):
        x = self.up(x) * self.act(self.gate(x))
        if float(x.detach().sum()) > 1e9 and len(x):  # no trace gets past a question about values
            return x
        return self.down(self.drop(x))


class Block(nn.Module):
    def __init__(self, mlp: type[nn.Module]):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, mlp: type[nn.Module]):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(Block(mlp), Block(mlp))
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.layers(self.token(tokens))
        return self.head(x + self.second(torch.tanh(self.first(x))))


def model(mlp: type[nn.Module] = Scaled) -> nn.Module:
    with without_values():
        return Model(mlp)


def plan_of(line: str, roles: dict[str, str], plain: nn.Module | None = None) -> Plan:
    return make_plan(Job(plain or model(), CrossEntropy(), roles=roles), Layout.parse(line))[0]


def is_cut(plan: Plan, name: str) -> bool:
    return bool(plan.compute[name].axes)


TOKENS = torch.randint(VOCABULARY, (5, 4), generator=torch.Generator().manual_seed(0))
BATCHES = [(TOKENS, TOKENS.roll(1, 1)), (TOKENS[:3], TOKENS[:3].roll(2, 1))]
PAIR = {"layers.*.mlp.up": "column", "layers.*.mlp.gate": "column", "layers.*.mlp.down": "row"}
LINES = ["tp2", "tp3/sp", "tp2x2/2d", "tp2x2x2/3d", "dp2 tp2"]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("mlp", [Scaled, Untraceable])
@pytest.mark.filterwarnings("ignore:.*a decision by a sum")  # Untraceable has one
@pytest.mark.sampled(100)
def test_a_pair_that_no_trace_follows_is_cut_when_asked_for(mlp, line):
    names = [f"layers.{n}.mlp.{layer}.weight" for n in range(2) for layer in ("up", "gate", "down")]
    before = plan_of(line, {}, model(mlp))
    roles = PAIR if mlp is Scaled else {**PAIR, "layers.*.mlp.drop": "column"}
    plan = plan_of(line, roles, model(mlp))
    assert not any(is_cut(before, name) for name in names)
    assert all(is_cut(plan, name) for name in names)
    assert "layers.*.mlp.up = column" in plan.roles["layers.1.mlp.up"].why
    verdict = verify(model(mlp), line, BATCHES, roles=roles)
    assert verdict.equal, str(verdict)


def test_a_pair_with_something_between_that_is_not_elementwise_is_found_out():
    class Mixes(Scaled):
        def forward(self, x, scale=None):
            return self.down(self.act(self.up(x) + self.gate(x)).flip(-1))

    assert all(is_cut(plan_of("tp2", PAIR, model(Mixes)), f"layers.0.mlp.{name}.weight") for name in ("up", "down"))
    verdict = verify(model(Mixes), "tp2", BATCHES, roles=PAIR)
    assert not verdict.equal


def test_a_dropout_between_that_nobody_named_is_found_out():
    verdict = verify(model(Untraceable), "tp2", BATCHES, roles=PAIR)
    assert not verdict.equal


class Turned(nn.Module):
    """No trace gets through; both layers are as wide as each other's input."""

    def __init__(self, hidden: int = HIDDEN):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) if float(x.detach().sum()) < 1e9 else x


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", ["tp3", "tp2x2/2d", "tp2x2x2/3d"])
@pytest.mark.parametrize("hidden", [HIDDEN, WIDTH])
@pytest.mark.filterwarnings("ignore:.*a decision by a sum")  # Turned has one
def test_a_row_that_is_called_before_its_column_is_an_error_that_names_it_and_helps(hidden, line):
    roles = {"layers.*.mlp.up": "row", "layers.*.mlp.down": "column"}
    plain = model(lambda: Turned(hidden))
    message = rf"'layers.0.mlp.up' is called with other features\D*{WIDTH} features, (.|\n)*first be the column"
    with pytest.raises((PlanError, RankFailedError), match=message):
        verify(plain, line, BATCHES, roles=roles)
    other = {"layers.*.mlp.up": "column", "layers.*.mlp.down": "row"}
    verdict = verify(plain, line, BATCHES, roles=other)
    assert verdict.equal, str(verdict)


COPIES = {
    "one of a pair": ("first", ["first.weight"]),
    "the head": ("head", ["head.weight", "head.bias"]),
    "a table": ("token", ["token.weight"]),
    "a module with all inside": ("la*0.mlp", ["layers.0.mlp.up.weight", "layers.0.mlp.down.weight"]),
    "everything in layers": ("layers", [f"layers.{n}.{name}.weight" for n in range(2) for name in ("norm", "mlp.up")]),
    "all that ends so": ("*.norm", ["layers.0.norm.weight", "layers.1.norm.bias"]),
}


@pytest.mark.parametrize("line", ["tp2", "tp3/sp", "tp2x2/2d", "tp2x2x2/3d"])
@pytest.mark.parametrize("what", COPIES)
@pytest.mark.sampled(100)
def test_what_is_to_be_copied_stays_whole_and_right(what, line):
    pattern, names = COPIES[what]

    class Followed(Scaled):
        def forward(self, x):
            return super().forward(x)

    plain = model(Followed)
    plan = plan_of(line, {pattern: "copied"}, plain)
    assert not [name for name in names if is_cut(plan, name)]
    assert plan.notes
    for name in names:
        role = plan.roles[name.rpartition(".")[0]]
        assert (role.name, f"{pattern} = copied" in role.why) == ("copied", True)
    verdict = verify(plain, line, BATCHES, roles={pattern: "copied"})
    assert verdict.equal, str(verdict)


def test_each_of_these_would_be_cut_in_some_mode_if_nothing_was_said():
    class Followed(Scaled):
        def forward(self, x):
            return super().forward(x)

    plan = plan_of("tp2x2/2d", {}, model(Followed))
    assert not [name for _, names in COPIES.values() for name in names if not is_cut(plan, name)]


@pytest.mark.parametrize("line", ["tp2", "tp2x2/2d"])
def test_attentions_and_convolutions_may_be_copied_too(line):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(nn.Conv1d(WIDTH, HIDDEN, 1), nn.ReLU(), nn.Conv1d(HIDDEN, WIDTH, 1))
            self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))

        def forward(self, x):
            x = self.conv(x.transpose(1, 2)).transpose(1, 2)
            return self.mlp(self.attn(x, x, x)[0])

    names = ["conv.0.weight", "conv.2.weight", "attn.in_proj_weight", "attn.out_proj.weight"]
    roles = {"conv": "copied", "attn": "copied"}
    assert all(is_cut(plan_of(line, {}, Both()), name) for name in names)
    assert not any(is_cut(plan_of(line, roles, Both()), name) for name in names)
    batch = (torch.randn(5, 4, WIDTH), torch.randint(WIDTH, (5, 4)))
    assert verify(Both(), line, [batch], roles=roles).equal


def test_of_several_patterns_the_last_one_counts_and_a_name_goes_before_what_it_is_in():
    said = Overrides.of(model(), {"layers.*": "copied", "*.1.mlp.[ug]*": "column", "*.1.mlp.dow*": "row"}).by_module
    assert said["layers.1.mlp.down"] == ("row", "*.1.mlp.dow*")
    with pytest.raises(LayoutError):
        Overrides.of(model(), {"layers.1.mlp.down": "row", "layers.1.mlp.*": "column"})
    overrides = Overrides.of(model(), {**PAIR, "layers.0": "copied"})
    assert "layers.0.norm" in overrides.copied
    assert "layers.0.mlp.up" not in overrides.copied
    assert [chain.row for chain in overrides.chains] == ["layers.0.mlp.down", "layers.1.mlp.down"]


WRONG = {
    "an unknown role": ({"head": "colum"}, "no such role for 'head'", "write head = column"),
    "a name that is not there": ({"layer.0.mlp.up": "copied"}, "no module of the model is called", "layers.0.mlp.up"),
    "a name like no other": ({"nothere": "copied"}, "no module of the model", "write one of token, layers, layers.0,"),
    "a number for a name": ({3: "copied"}, "roles are a table of names and roles", "given:   3"),
    "a list": (["first"], "roles are a table of names and roles", "given:   ['first']"),
    "a row before its column": (
        {"first": "row", "second": "column"},
        "'first' does not take what 'second' gives",
        "write first = column and second = row",
    ),
    "a pattern of nothing": ({"blocks.*": "copied"}, "no module of the model is called 'blocks.*'", "fix:"),
    "a row alone": ({"second": "row"}, "'second' makes no pair", "beside it nothing"),
    "a column alone": ({"first": "column"}, "'first' makes no pair", "beside it nothing"),
    "widths that differ": ({"first": "column", "head": "row"}, "'head' makes no pair", "'first' 8 -> 12"),
    "layers of two modules": ({"first": "column", "layers.0.mlp.down": "row"}, "makes no pair", "fix:"),
    "a column of two rows": ({"first": "column", "second": "row", "head": "column"}, "'head' makes no pair", "fix:"),
    "a norm": ({"layers.0.norm": "column"}, "'layers.0.norm' cannot be a column", "LayerNorm"),
    "a block": ({"layers.0": "row"}, "'layers.0' cannot be a row", "give the layers inside it roles"),
}


@pytest.mark.parametrize("line", ["tp2", "dp2", "single"])
@pytest.mark.parametrize("what", WRONG)
def test_roles_that_cannot_be_are_refused_under_any_layout(what, line):
    roles, first, more = WRONG[what]
    with pytest.raises(LayoutError) as caught:
        plan_of(line, roles)
    assert first in str(caught.value).splitlines()[0]
    assert more in str(caught.value)


def test_columns_of_inputs_of_different_widths_are_no_pair():
    layers = {"a": nn.Linear(4, HIDDEN), "b": nn.Linear(WIDTH, HIDDEN), "down": nn.Linear(HIDDEN, WIDTH)}
    with pytest.raises(LayoutError, match="'down' makes no pair"):
        Overrides.of(nn.ModuleDict(layers), {"a": "column", "b": "column", "down": "row"})


def test_a_pair_that_is_too_narrow_is_refused_and_not_copied():
    with pytest.raises(LayoutError, match=r"'first' cannot be cut as was asked\n.*12 features cannot be cut"):
        plan_of("tp13", {"first": "column", "second": "row", "layers": "copied"})


def test_a_pair_whose_parameters_are_used_elsewhere_is_refused():
    plain = model()
    plain.first.weight = plain.layers[0].mlp.up.weight
    with pytest.raises(LayoutError, match="used elsewhere too"):
        plan_of("tp2", {"first": "column", "second": "row"}, plain)


def test_roles_change_no_tensor_layout_without_tp():
    layouts = plan_of("dp2", PAIR).compute.values()
    assert all(each == TensorLayout.whole(each.shape) for each in layouts)


# ---- the command

MODEL = ["--model", "gpt", "--set", "num_layers=1", "--set", "width=16", "--set", "num_heads=2", "--batch", "4"]
COMMAND = ["--layout", "tp2", *MODEL, "--seq", "8"]


def shown(*more: str) -> dict[str, dict[str, str]]:
    found = CliRunner().invoke(app, ["show", *COMMAND, "--json", *more])
    assert found.exit_code == 0, found.output
    return {layer["module"]: layer for layer in json.loads(found.stdout)["layers"]}


def test_the_command_takes_roles_from_flags_and_from_a_file(tmp_path):
    name = "blocks.0.mlp.up"
    assert shown()[name]["role"] != "copied"
    by_flag = shown("--role", "blocks.*.mlp.*=copied")[name]
    assert (by_flag["role"], "roles say blocks.*.mlp.* = copied" in by_flag["why"]) == ("copied", True)
    (tmp_path / "run.toml").write_text('[roles]\n"blocks.*.mlp.*" = "copied"\n')
    assert shown("--config", str(tmp_path / "run.toml"))[name] == by_flag


@pytest.mark.sampled(0)
def test_verify_and_train_take_roles_and_a_resumed_run_keeps_them(tmp_path):
    role = ["--role", "blocks.*.mlp*=copied"]
    verified = CliRunner().invoke(app, ["verify", *COMMAND, *role, "--json"])
    assert verified.exit_code == 0, verified.output
    assert json.loads(verified.stdout)["equal"]
    out = ["--out", str(tmp_path), "--ranks", "threads", "--json"]
    trained = CliRunner().invoke(app, ["train", *COMMAND, *role, "--steps", "2", *out])
    assert trained.exit_code == 0, trained.output
    assert json.loads((tmp_path / "run.json").read_text())["options"]["roles"] == {"blocks.*.mlp*": "copied"}
    stored = read(find(tmp_path / "checkpoints")).tensors
    assert len(stored["blocks.0.attention.o.weight"][2]) == 2
    assert len(stored["blocks.0.mlp.up.weight"][2]) == 1  # copied: one rank has stored it whole
    again = CliRunner().invoke(app, ["train", "--resume", "--steps", "3", *out])
    assert again.exit_code == 0, again.output
    assert "blocks.*.mlp* = copied" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("role", ["blocks.0.mlp.up", "=row", "blocks.0.mlp.up=rows", "blocks.9=copied"])
def test_the_command_refuses_roles_that_cannot_be(role):
    found = CliRunner().invoke(app, ["verify", *COMMAND, "--role", role])
    assert found.exit_code == 2
    assert all(word in found.stderr for word in ("given:", "allowed:", "fix:"))


def test_a_file_whose_roles_are_no_table_is_refused(tmp_path):
    (tmp_path / "run.toml").write_text('roles = "copied"\n')
    found = CliRunner().invoke(app, ["show", *COMMAND, "--config", str(tmp_path / "run.toml")])
    assert found.exit_code == 2
    assert "a table [roles]" in found.stderr
