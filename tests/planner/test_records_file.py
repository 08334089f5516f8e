"""What a plan keeps in a file: found again by the same model and code alone, and equal to a rehearsal."""

import json
import os
from collections import Counter
from functools import partial
from hashlib import sha256
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardwright.analysis.objects.marked_inputs import packed
from shardwright.cli.main import app
from shardwright.cost.operators import OperatorRecord
from shardwright.errors import LayoutError
from shardwright.layout import Layout, Option
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.plan.schedule import Action, Schedule
from shardwright.planner import kept_values, records_file
from shardwright.planner import records as recording
from shardwright.planner.kept_values import from_nodes, to_text
from shardwright.planner.model_digest import MOST_VALUES
from shardwright.planner.plans import plan_layouts
from shardwright.planner.records_file import RecordsFile, default_folder
from shardwright.planner.rehearse import WaitRecord

BATCH = torch.ones(8, 16), torch.zeros(8, dtype=torch.long)


def model(number=4, width=16):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(number)))


def file_of(folder, given, *more):
    return RecordsFile.of(folder, given, CrossEntropy(), *more).path


def said(plans):
    found = plans.to_dict()
    del found["seconds"]
    return found, str(plans.best.records), plans.text()


@pytest.mark.sampled(0)
def test_a_second_plan_of_the_same_model_rehearses_nothing_and_finds_the_same(tmp_path, monkeypatch):
    counted, rehearse = [], recording.rehearse
    monkeypatch.setattr(recording, "rehearse", lambda *given: counted.append(given) or rehearse(*given))
    price = partial(plan_layouts, cluster="a100-80gb:1x2", batch=BATCH, fix="dp2", most_priced=3)
    alone, first, again = (price(model(), keep_in=folder) for folder in (None, tmp_path, tmp_path))
    before = len(counted)
    assert said(alone) == said(first) == said(again)
    assert len(counted) == before > 3
    other = price(model(), cluster="h100-80gb:1x2", keep_in=tmp_path)  # records know no cluster
    layouts = {str(each.layout) for each in first.layouts}
    assert layouts & {str(each.layout) for each in other.layouts}
    assert len(counted) - before < before / 2
    assert [row["step_s"] for row in said(other)[0]["layouts"]] == [
        row["step_s"] for row in said(price(model(), cluster="h100-80gb:1x2"))[0]["layouts"]
    ]


def test_a_file_is_that_of_one_model_and_batch(tmp_path):
    few, long = torch.ones(1, 16), torch.ones(1, 32)
    frozen, named, told, other, tied = (model() for _ in range(5))
    frozen[0].weight.requires_grad = False
    named[0].setting = 3
    told[0].register_buffer("table", torch.zeros(3))
    other[0].register_buffer("table", torch.ones(3))
    tied[1].weight = tied[0].weight
    changed = [model(5), model(width=17), model().bfloat16(), model().eval(), frozen, named, told, other, tied]
    found = [file_of(tmp_path, each, few) for each in (model(), *changed)]
    found += [file_of(tmp_path, model(), long), file_of(tmp_path, model(), few, "cuda")]
    found += [RecordsFile.of(tmp_path, model(), nn.MSELoss(), few).path]
    assert None not in found
    assert len(set(found)) == len(found)
    assert file_of(tmp_path, model(), few) == found[0]
    config = GPTConfig(num_layers=2, width=16, num_heads=2, vocabulary=8, max_tokens=8)
    gpts = [file_of(tmp_path, GPT(config), few) for _ in range(2)]
    assert gpts[0] == gpts[1] != found[0]


def test_a_file_is_that_of_one_state_of_the_code(tmp_path, monkeypatch):
    (tmp_path / "own_model_of_kept.py").write_text("import own_help_of_kept\nfrom torch.nn import Linear as Own\n")
    helps = tmp_path / "own_help_of_kept.py"
    helps.write_text("SIZE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = __import__("own_model_of_kept").Own(2, 2)
    before = file_of(tmp_path, own)
    helps.write_text("SIZE = 22\n")  # a file of the user's that the model's class is not even in
    after = file_of(tmp_path, own)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "9.9")
        assert len({before, after, file_of(tmp_path, own)}) == 3
    monkeypatch.setattr(records_file, "_OURS", tmp_path)  # this library's own files
    assert file_of(tmp_path, own) not in (before, after)


class Holder(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held


class Repeats(nn.Linear):
    times = 1

    def forward(self, x):
        for _ in range(self.times):
            x = super().forward(x) * LIMIT
        return x


LIMIT = 1
OTHER = 1


def test_a_file_is_that_of_the_plain_settings_of_classes_and_of_where_they_are_defined(tmp_path, monkeypatch):
    path = file_of(tmp_path, Repeats(4, 4))
    assert file_of(tmp_path, Repeats(4, 4)) == path
    monkeypatch.setattr(Repeats, "times", 8)
    of_class = file_of(tmp_path, Repeats(4, 4))
    monkeypatch.setitem(globals(), "LIMIT", 2)
    of_global = file_of(tmp_path, Repeats(4, 4))
    assert len({path, of_class, of_global}) == 3
    monkeypatch.setitem(globals(), "OTHER", 2)  # which the code of the class does not name
    assert file_of(tmp_path, Repeats(4, 4)) == of_global


class Settings:
    """What a program keeps its settings in: the class, an object of it, and one inside of another."""

    times, unused = 1, 1


CONFIG = SimpleNamespace(model=Settings(), times=1)


def times_of_config():
    return CONFIG.model.times


class ReadsConfig(nn.Linear):
    def forward(self, x):
        for _ in range(times_of_config() * Settings.times * CONFIG.times):
            x = super().forward(x)
        return x


@pytest.mark.parametrize("holder", [Settings, CONFIG, CONFIG.model])
def test_a_file_is_that_of_the_settings_that_code_reads_of_objects_and_in_functions_that_it_calls(
    tmp_path, monkeypatch, holder
):
    path = file_of(tmp_path, ReadsConfig(4, 4))
    assert file_of(tmp_path, ReadsConfig(4, 4)) == path
    monkeypatch.setattr(holder, "times", 8)
    changed = file_of(tmp_path, ReadsConfig(4, 4))
    assert changed != path
    monkeypatch.setattr(holder, "unused", 8, raising=False)
    assert file_of(tmp_path, ReadsConfig(4, 4)) == changed


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal])
def test_a_model_with_parametrizations_is_planned_though_nothing_of_it_is_kept(wrap, tmp_path):
    given = nn.Sequential(wrap(nn.Linear(16, 16)), nn.Linear(16, 4))
    found = plan_layouts(given, "a100-80gb:1x2", BATCH, layout="dp2", keep_in=tmp_path)
    assert str(found.best.layout) == "dp2"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "held", [lambda x: x, torch.zeros(MOST_VALUES + 1), type("Made", (nn.Module,), {"__module__": "nowhere"})()]
)
def test_of_a_model_that_cannot_be_told_from_others_nothing_is_kept(tmp_path, held):
    assert RecordsFile.of(tmp_path, Holder(held)).path is None
    assert RecordsFile.of(None, model()).path is None


def test_a_refusal_is_kept_as_it_was_said(tmp_path):
    def refused():
        raise LayoutError("no such cut", given="3", allowed="2", fix="write 2")

    first = RecordsFile.of(tmp_path, model())
    with pytest.raises(LayoutError) as one:
        first.find("a", refused)
    first.save()
    with pytest.raises(LayoutError) as two:
        RecordsFile.of(tmp_path, model()).find("a", pytest.fail)
    assert (one.value.what, str(one.value)) == (two.value.what, str(two.value))


def found_in(folder):
    return RecordsFile.of(folder, model()).find("a", lambda: "nothing")


@pytest.mark.parametrize("content", [b"", b"nothing", b"\xff" * 99, b'{"code":[],"found":[["dict","a",8]]}'])
def test_a_file_of_something_else_counts_as_empty(tmp_path, content):
    RecordsFile.of(tmp_path, model()).path.write_bytes(content)
    found = RecordsFile.of(tmp_path, model())
    assert found.find("a", lambda: 7) == 7
    found.save()
    assert found_in(tmp_path) == 7


def content_of(nodes):
    """A whole file with these nodes, and with the checksum that belongs to them."""
    content = json.dumps({"code": [], "found": nodes}).encode()
    return sha256(content).hexdigest().encode() + b"\n" + content


def read(folder, content):
    """What is found in a file with this content, or None for one that counts as empty."""
    (folder / "file").write_bytes(content)
    return records_file._read(folder / "file") or None


def test_a_file_of_which_one_bit_has_flipped_counts_as_empty(tmp_path):
    whole = content_of([["dict", "a", 7]])
    assert read(tmp_path, whole) == {"a": 7}
    for place, byte in enumerate(whole):
        for bit in (0, 7):
            assert read(tmp_path, whole[:place] + bytes([byte ^ 1 << bit]) + whole[place + 1 :]) is None, place
    assert read(tmp_path, whole[:-1]) is None


@pytest.mark.parametrize(
    "nodes",
    [
        [["RecordsFile", None], ["dict", "a", [0]]],  # a class of this library that is not kept
        [["subprocess.run", "true"], ["dict", "a", [0]]],
        [["type", "Made"], ["dict", "a", [0]]],
        [["Layout", {"__class__": 1}], ["dict", "a", [0]]],
        [["StoredMisfit", "SystemExit", "what", "", "", ""], ["dict", "a", [0]]],
        [["dict", "a", [1]], ["tuple"]],
        [["dict", "a"]],
        [["dict", ["b"], 7]],
        [["tuple", "a", 7]],
        [],
        {"a": 7},
        None,
    ],
)
def test_a_whole_file_that_names_what_is_not_kept_counts_as_empty(tmp_path, nodes):
    assert read(tmp_path, content_of(nodes)) is None
    assert read(tmp_path, content_of([["Option", "zero1", None], ["dict", "a", [0]]])) == {"a": Option("zero1")}


def test_a_file_sets_nothing_of_a_class(tmp_path):
    before = {each: dict(vars(each)) for each in (RecordsFile, *kept_values._classes())}
    for kind in (*before, type, object, "RecordsFile.save", "setattr", "__build__"):
        name = kind if isinstance(kind, str) else kind.__name__
        for items in ([], ["save"], [{"save": 1}], [[0], "save", "x"], *(["save"] * n for n in range(3, 9))):
            read(tmp_path, content_of([["dict", "save", 1], [name, *items], ["dict", "a", [1]]]))
    assert {each: dict(vars(each)) for each in before} == before


def test_what_is_kept_comes_back_equal_and_of_the_same_classes():
    layout = Layout.parse("pp2/1f1b mb8 dp2x2/zero1 bf16")
    shared = {"n": 1}
    given = {
        ("layout", "a", 8, None): (layout, Schedule("x", ((Action("F", 0),),), (0,), 1), WaitRecord(2)),
        "sizes": (1, 1.0, True, None, -0.0, float("inf"), 1 << 70, "\ud800\n"),
        "ones": ((1,), (1.0,), (True,)),
        "counted": Counter({"a": 2}),
        "dicts": (shared, shared, {"n": 1}, {OperatorRecord("matmul", 1, 2): ()}),
    }
    found = from_nodes(json.loads(to_text(given)))
    assert found == given
    assert repr(found) == repr(given)
    assert found["dicts"][0] is found["dicts"][1] is not found["dicts"][2]
    with pytest.raises(TypeError, match="Size"):
        to_text({"a": torch.Size([1])})


def test_what_a_file_cannot_hold_is_found_and_not_written(tmp_path):
    circle = {}
    circle["itself"] = circle
    for value in (circle, object()):
        found = RecordsFile.of(tmp_path, model())
        assert found.find("a", lambda value=value: value) is value
        found.save()
        assert not list(tmp_path.iterdir())


def test_a_folder_keeps_few_files_and_one_that_cannot_be_written_to_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(records_file, "MOST_FILES", 3)
    for number in range(5):
        found = RecordsFile.of(tmp_path, model(), number)
        found.find("a", lambda: 1)
        found.save()
    assert len(list(tmp_path.iterdir())) == 3
    (tmp_path / "file").touch()
    found = RecordsFile.of(tmp_path / "file", model())
    assert found.find("a", lambda: 2) == 2
    found.save()


def test_the_command_keeps_what_it_found_unless_it_is_to_begin_afresh(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    line = ["plan", "--model", "mlp", "--cluster", "a100-80gb:1x2", "--layout", "dp2"]
    assert CliRunner().invoke(app, [*line, "--fresh"]).exit_code == 0
    assert not default_folder().exists()
    found = [CliRunner().invoke(app, line) for _ in range(2)]
    assert [each.exit_code for each in found] == [0, 0]
    assert found[0].stdout == found[1].stdout
    assert len(list(default_folder().iterdir())) == 1


class Masked(nn.Module):
    """Takes its path by a value of its inputs, so that it is recorded on these."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.down(self.up(x)) if int(x[0, 0]) == 1 else self.down(x)


def test_what_depends_on_the_values_of_a_batch_is_not_kept(tmp_path):
    price = partial(plan_layouts, Masked(), "a100-80gb:1x2", BATCH, layout="dp2")
    price(keep_in=tmp_path)
    assert not list(tmp_path.iterdir())


def later(path):
    """Sets the time of a file to a second later than it was."""
    at = os.stat(path).st_mtime_ns + 10**9
    os.utime(path, ns=(at, at))


def test_a_change_of_code_that_is_imported_during_the_work_is_seen(tmp_path, monkeypatch):
    helps = tmp_path / "late_help_of_kept.py"
    helps.write_text("SIZE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    kept = RecordsFile.of(tmp_path / "kept", model())
    kept.find("a", lambda: __import__("late_help_of_kept").SIZE)
    kept.save()
    monkeypatch.delitem(__import__("sys").modules, "late_help_of_kept")  # as in another process, before its work
    assert RecordsFile.of(tmp_path / "kept", model()).path == kept.path
    assert found_in(tmp_path / "kept") == 1
    later(helps)
    assert found_in(tmp_path / "kept") == "nothing"


def test_nothing_is_kept_if_loaded_code_changes_during_the_work(tmp_path, monkeypatch):
    helps = tmp_path / "early_help_of_kept.py"
    helps.write_text("SIZE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert __import__("early_help_of_kept").SIZE == 1
    kept = RecordsFile.of(tmp_path / "kept", model())
    kept.find("a", lambda: later(helps))
    kept.save()
    assert not (tmp_path / "kept").exists()
    monkeypatch.delitem(__import__("sys").modules, "early_help_of_kept")


def test_the_packages_of_helpers_and_of_the_loss_are_in_what_is_kept(tmp_path, monkeypatch):
    site = tmp_path / "site-packages"
    for name in ("loss_of_kept", "help_of_kept"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("from torch import nn\n\n\nclass Own(nn.MSELoss):\n    pass\n")
        (site / name / "more.py").write_text("")
        for path in (site / name).iterdir():
            os.utime(path, (1, 1))
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(records_file, "_installed", lambda: (str(site),))
    loss = __import__("loss_of_kept.more").Own()
    file_with = partial(RecordsFile.of, tmp_path / "kept", model())
    kept = file_with(loss)
    later(site / "loss_of_kept" / "more.py")
    assert file_with(loss).path != kept.path
    kept = file_with(loss)
    __import__("help_of_kept")
    kept.find("a", lambda: 1)
    kept.save()
    assert file_with(loss).find("a", lambda: 2) == 1
    later(site / "help_of_kept" / "__init__.py")  # of this package only functions are called: it has another version
    assert file_with(loss).path == kept.path
    assert file_with(loss).find("a", lambda: 2) == 2
    os.utime(site / "loss_of_kept" / "__init__.py")  # later than this process has begun: its classes may be older
    assert file_with(loss).path is None
    for name in ("loss_of_kept", "loss_of_kept.more", "help_of_kept"):
        monkeypatch.delitem(__import__("sys").modules, name)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x, patches):
        self.layer(patches)  # whose rows are not added up: samples would meet where each has one
        return self.layer(x)


def test_a_file_is_that_of_the_rows_of_all_packed_samples(tmp_path):
    x, y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    for counts in ([1, 1, 1, 1], [1, 3, 0, 2], [1, 1, 1, 1]):
        batch = (x, packed(torch.ones(sum(counts), 3), counts)), y
        plan_layouts(Reads(), "a100-80gb:1x2", batch, layout="dp2", keep_in=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
