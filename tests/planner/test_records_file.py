"""What a plan keeps in a file: found again by the same model and code alone, and equal to a rehearsal."""

import pickle
from functools import partial

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.errors import LayoutError
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.planner import records as recording
from shardwright.planner import records_file
from shardwright.planner.plans import plan_layouts
from shardwright.planner.records_file import MOST_VALUES, RecordsFile, default_folder

BATCH = torch.ones(8, 16), torch.zeros(8, dtype=torch.long)


def model(number=4, width=16):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(number)))


def file_of(folder, given, *more):
    return RecordsFile.of(folder, given, CrossEntropy(), *more).path


def said(plans):
    found = plans.to_dict()
    del found["seconds"]
    return found, str(plans.best.records), plans.text()


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


class Opens:
    def __reduce__(self):
        return open, ("/dev/null",)


@pytest.mark.parametrize("content", [b"", b"nothing", pickle.dumps([1]), pickle.dumps({"a": Opens()})])
def test_a_file_of_something_else_counts_as_empty(tmp_path, content):
    file_of(tmp_path, model()).write_bytes(content)
    found = RecordsFile.of(tmp_path, model())
    assert found.find("a", lambda: 7) == 7
    found.save()
    assert RecordsFile.of(tmp_path, model()).find("a", pytest.fail) == 7


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


def called(module, name, argument):
    """A pickle that calls what a module has under a dotted name with a list of texts."""

    def text(value):
        return b"\x8c" + bytes([len(value)]) + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93](" + b"".join(map(text, argument)) + b"e\x85R."


@pytest.mark.parametrize("name", ["subprocess.Popen", "subprocess.run", "ForkServer"])
def test_a_file_that_names_what_is_no_plain_data_of_this_library_runs_nothing(tmp_path, name):
    mark = tmp_path / "ran"
    kept = RecordsFile.of(tmp_path, model())
    kept.path.write_bytes(called("shardwright.fork_server", name, ["touch", str(mark)]))
    assert RecordsFile.of(tmp_path, model()).find("a", lambda: 1) == 1
    assert not mark.exists()


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
