"""Checkpoints that are damaged, made by another person, old, or read while something fails."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shardwright.checkpoint import loading, locking
from shardwright.checkpoint.loading import load
from shardwright.checkpoint.manifest import MANIFEST, checksum, find, read, signed, steps_in
from shardwright.checkpoint.optimizer_trial import check_options
from shardwright.checkpoint.saving import save
from shardwright.comm.launch import launch
from shardwright.errors import CheckpointError
from shardwright.initial_values import without_values
from shardwright.parallelize import parallelize
from shardwright.weights import stores
from shardwright.weights.saving import save_weights

OLD = Path(__file__).parent / "version_1"


class Held:
    """A small model and its optimizer on one rank, and all that a load may change of them."""

    def __init__(self, world, line="single", steps=2):
        with without_values():  # ranks on threads share the generator of random numbers
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.run = parallelize(model, line, world, seed=9)
        self.optimizer = self.run.optimizer(torch.optim.AdamW, lr=1e-2)
        for _ in range(steps):
            self.run.step(next(self.run.shard([(torch.ones(4, 3).cumsum(0), torch.tensor([0, 1, 0, 1]))])))
            self.optimizer.step()

    def state(self):
        """Every value, as one text."""
        state = {name: p.tolist() for name, p in self.run.parameters.items()}
        buffers = {name: buffer.tolist() for name, buffer in self.run.model.named_buffers()}
        return json.dumps([state, buffers, str(self.optimizer.state_dict()), self.run.num_steps, self.run.rng.seed])


def one(work, *args):
    return launch(work, 1, *args, ranks="threads")[0]


def refused(world, path, line="single"):
    """The text of the refusal, which leaves everything as it was; "" if the checkpoint was loaded."""
    mine = Held(world, line)
    before = mine.state()
    try:
        load(path, mine.run, mine.optimizer)
    except CheckpointError as refusal:
        assert mine.state() == before
        return str(refusal)
    return ""


@pytest.fixture
def old(tmp_path):
    """A copy of the checkpoint that the first version of the format wrote."""
    shutil.copytree(OLD, tmp_path / "old")
    return tmp_path / "old"


def changed(folder, change, *, new=False):
    """Changes the entries of the manifest of version 1; ``new`` makes it one of today, with a checksum."""
    path = find(folder) / MANIFEST
    found = json.loads(path.read_text())
    change(found)
    version = 2 if found["version"] else 0
    path.write_text(signed(json.dumps({**found, "version": version}, indent=1)) if new else json.dumps(found))


# ---- old checkpoints


@pytest.mark.parametrize("line", ["single", "dp2/zero3"])
def test_a_checkpoint_of_the_first_version_which_has_no_checksum_is_loaded(line):
    def work(world):
        mine = Held(world, line)
        assert load(OLD, mine.run, mine.optimizer) == {"note": "kept"}
        names = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
        for name, parameter in mine.run.parameters.items():
            number, state = names.index(name), mine.optimizer.state[parameter]
            assert (parameter == number + 0.5).all()
            assert (state["exp_avg"] == 10 + number).all()
            assert (state["exp_avg_sq"] == 20 + number).all()
            assert state["step"] == 1
        assert mine.run.model[1].running_mean.tolist() == [7.0] * 4
        return mine.run.num_steps, mine.run.rng.seed, mine.optimizer.param_groups[0]["lr"]

    ranks = 2 if line != "single" else 1
    assert launch(work, ranks, ranks="threads") == [(6, 5, 0.25)] * ranks


def test_a_shape_of_more_dims_than_torch_computes_with_is_refused_before_any_part_is_read(old):
    changed(old, WRONG["a shape of too many dims"], new=True)
    with pytest.raises(CheckpointError, match=r"'0.bias' has shape \[4, 1, 1"):
        read(find(old))


def test_tensors_without_elements_are_exported_without_planning_a_read_of_each(old, tmp_path, monkeypatch):
    """A manifest of another person may list hundreds of thousands of them."""
    changed(old, lambda m: m["tensors"].update(empty={"dtype": "float32", "shape": [0, 3], "pieces": []}), new=True)
    planned, usual = [], stores.read_pieces

    def read_pieces(folder, manifest, name, *others):
        planned.append(name)
        usual(folder, manifest, name, *others)

    monkeypatch.setattr(stores, "read_pieces", read_pieces)
    assert "empty" in save_weights(old, tmp_path / "out.pt").names
    assert "empty" not in planned
    assert "0.bias" in planned
    assert torch.load(tmp_path / "out.pt", weights_only=True)["empty"].shape == (0, 3)


# ---- damage


def test_every_flipped_bit_of_a_checkpoint_is_an_error_and_changes_nothing(tmp_path):
    def write(world):
        mine = Held(world, "dp2/zero1")
        save(tmp_path / "run", mine.run, mine.optimizer, extra={"note": [1.5, "two"]})

    launch(write, 2, ranks="threads")
    draw, files = random.Random(0), sorted(find(tmp_path / "run").iterdir())
    assert one(refused, tmp_path / "run") == ""

    def flips(world):
        mine = Held(world)
        before = mine.state()
        for number in range(300):
            file = files[number % len(files)]
            content = file.read_bytes()
            place = draw.randrange(8 * len(content))
            flipped = bytearray(content)
            flipped[place // 8] ^= 1 << place % 8
            file.write_bytes(flipped)
            with pytest.raises(CheckpointError):
                load(tmp_path / "run", mine.run, mine.optimizer)
            file.write_bytes(content)
        assert mine.state() == before

    one(flips)


def _first(table):
    return next(iter(table.values()))


WRONG = {
    "an entry too many": lambda m: m.update(more=1),
    "a step before the first": lambda m: m.update(step=-1),
    "a step that no run reaches": lambda m: m.update(step=2**63),
    "a step that is true": lambda m: m.update(step=True),
    "a seed that no generator takes": lambda m: m.update(seed=10**30),
    "files as a list": lambda m: m.update(files=[]),
    "a file without a checksum": lambda m: _first(m["files"]).pop("sha256"),
    "a negative size": lambda m: _first(m["files"]).update(bytes=-1),
    "a dtype that is a function": lambda m: m["tensors"]["0.bias"].update(dtype="load"),
    "a shape that is huge": lambda m: m["tensors"]["0.bias"].update(
        shape=[10**12], pieces=[[[0], [10**12], "part-00000.safetensors", "0.bias#0"]]
    ),
    "a shape of too many dims": lambda m: m["tensors"]["0.bias"].update(
        shape=[4, *[1] * 64], pieces=[[[0] * 65, [4, *[1] * 64], "part-00000.safetensors", "0.bias#0"]]
    ),
    "a piece outside of the shape": lambda m: m["tensors"]["0.bias"]["pieces"][0].__setitem__(1, [5]),
    "two pieces of one entry": lambda m: m["tensors"]["0.bias"]["pieces"][0].__setitem__(3, "0.weight#0"),
    "a moment of no parameter": lambda m: m["tensors"].update(
        {"optimizer/x/exp_avg": m["tensors"].pop("optimizer/0.bias/exp_avg")}
    ),
    "a moment of another shape": lambda m: m["tensors"].update(
        {"optimizer/2.bias/exp_avg": m["tensors"].pop("optimizer/0.bias/exp_avg")}
    ),
    "a scalar of no dtype": lambda m: m["scalars"]["0.bias"].update(step=["load", 1.0]),
    "a scalar that is text": lambda m: m["scalars"]["0.bias"].update(step=["float32", "1"]),
    "options that replace parameters": lambda m: m["groups"][0]["options"].update(params=[]),
    "no groups": lambda m: m.update(groups=[]),
    "version 0": lambda m: m.update(version=0),
    "groups as a table": lambda m: m.update(groups={}),
    "a manifest nested deeply": lambda m: m.update(extra=1),
    "a rate that is text": lambda m: m["groups"][0]["options"].update(lr="x"),
    "a rate that is not a number": lambda m: m["groups"][0]["options"].update(lr=math.nan),
    "a rate without end": lambda m: m["groups"][0]["options"].update(lr=math.inf),
    "a rate that is true": lambda m: m["groups"][0]["options"].update(lr=True),
    "a rate below 0": lambda m: m["groups"][0]["options"].update(lr=-0.5),
    "a first rate without end": lambda m: m["groups"][0]["options"].update(initial_lr=math.inf),
    "a first rate below 0": lambda m: m["groups"][0]["options"].update(initial_lr=-0.1),
    "an eps without end below 0": lambda m: m["groups"][0]["options"].update(eps=-math.inf),
    "an eps without end": lambda m: m["groups"][0]["options"].update(eps=math.inf),
    "a decay without end": lambda m: m["groups"][0]["options"].update(weight_decay=math.inf),
    "a parameter twice in a group": lambda m: m["groups"][0]["parameters"].append("0.bias"),
    "a parameter in two groups": lambda m: m["groups"].append(m["groups"][0]),
    "a step count below 0": lambda m: m["scalars"]["0.bias"].update(step=["float32", -1.0]),
    "a step count that is not a number": lambda m: m["scalars"]["0.bias"].update(step=["float32", math.nan]),
    "a step count that no run reaches": lambda m: m["scalars"]["0.bias"].update(step=["float32", 1e300]),
    "several step counts": lambda m: m["scalars"]["0.bias"].update(step=["float32", [1.0, 2.0]]),
    "betas that are not numbers": lambda m: m["groups"][0]["options"].update(betas=[math.nan, 0.9]),
}


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.sampled(2)
def test_a_manifest_outside_of_the_schema_is_refused_and_changes_nothing(old, name, new):
    changed(old, WRONG[name], new=new)
    if name == "a manifest nested deeply":
        (find(old) / MANIFEST).write_text("[" * 100_000)
    assert "is broken" in one(refused, old) or "of another model" in one(refused, old)


UNFIT = {
    "a moment of one parameter is missing": lambda m: m["tensors"].pop("optimizer/0.bias/exp_avg"),
    "no scalars": lambda m: m["scalars"].clear(),
    "a step count that is no tensor": lambda m: m["scalars"]["0.bias"].update(step=["", "x"]),
    "a parameter of no group": lambda m: m["groups"][0]["parameters"].remove("0.bias"),
}


@pytest.mark.parametrize("line", ["single", "dp2/zero3", "dp2/zero3/offload:disk"])
@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.sampled(6)
def test_state_with_which_the_optimizer_could_not_step_is_refused_and_changes_nothing(old, name, line):
    changed(old, UNFIT[name], new=True)
    for told in launch(refused, 1 if line == "single" else 2, old, line, ranks="threads"):
        assert "cannot step with the state of" in told or "no param group has '0.bias'" in told


class Own(torch.optim.AdamW):
    """An optimizer of a user's own, whose constructor takes other arguments."""

    def __init__(self, params, rates):
        super().__init__(params, **rates)


IMPOSSIBLE = [
    {"eps": -1e-8},
    {"weight_decay": -0.1},
    {"betas": [1.0, 0.9]},
    {"betas": [0.9, -0.5]},
    {"betas": 0.9},
    {"betas": ["x", 0.9]},
    {"fused": True, "foreach": True},
]


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("options", IMPOSSIBLE, ids=str)
@pytest.mark.sampled(4)
def test_options_that_the_optimizers_constructor_refuses_are_refused_and_change_nothing(old, options, steps):
    changed(old, lambda m: m["groups"][0]["options"].update(options), new=True)

    def work(world):
        mine = Held(world, steps=steps)
        before = mine.state()
        with pytest.raises(CheckpointError, match="AdamW refuses the options of a param group"):
            load(old, mine.run, mine.optimizer)
        assert mine.state() == before

    one(work)


def test_options_are_checked_by_the_class_of_torch_that_a_users_optimizer_is_made_from():
    one_parameter, bad = [nn.Parameter(torch.ones(3))], {"eps": -1.0}
    for optimizer in (torch.optim.AdamW(one_parameter), Own(one_parameter, {"lr": 0.1})):
        group = optimizer.param_groups[0]
        check_options(optimizer, group, {"eps": 0.5, "initial_lr": 1.0, "lr": 0.0})
        with pytest.raises(ValueError, match="AdamW refuses"):
            check_options(optimizer, group, bad)
    check_options(optimizer, {**group, "eps": -2.0}, bad)  # which the user has set already
    check_options(torch.optim.Adafactor(one_parameter), {"eps": (None, 1e-3)}, {"eps": [None, 1e-3]})


class NeedsClosure(torch.optim.SGD):
    """An optimizer of which no step can be tried."""

    def step(self, closure):
        return super().step(closure)


class Slow(torch.optim.SGD):
    """An optimizer that reads an attribute of its own once it has state."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.share = 0.5

    def step(self, closure=None):
        slow = {p: s["momentum_buffer"] * self.share for p, s in self.state.items() if "momentum_buffer" in s}
        super().step()
        return slow


@pytest.mark.parametrize("kind", [NeedsClosure, Slow])
def test_an_optimizer_whose_steps_cannot_be_tried_is_loaded(tmp_path, kind):
    def work(world):
        with without_values():
            model = nn.Linear(3, 2)
        run = parallelize(model, "single", world, seed=9)
        optimizer = run.optimizer(kind, lr=1e-2, momentum=0.9)
        run.step(next(run.shard([(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))])))
        optimizer.step(None)
        save(tmp_path, run, optimizer)
        before = str(optimizer.state_dict())
        optimizer.state.clear()
        load(tmp_path, run, optimizer)
        assert str(optimizer.state_dict()) == before

    one(work)


@pytest.mark.parametrize("fails_at", [0, 5, 11])
@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), RuntimeError("x"), MemoryError()])
@pytest.mark.parametrize("line", ["dp2", "dp2/zero3/offload:disk"])
@pytest.mark.sampled(3)
def test_a_load_that_fails_while_one_rank_reads_leaves_every_rank_as_it_was(monkeypatch, line, failure, fails_at):
    plain, count = loading.read_pieces, 0

    def fails(folder, manifest, name, pieces, local):
        nonlocal count
        if line == "dp2" or "optimizer" in name:
            count += 1
        if count > 2 * fails_at:
            raise failure
        plain(folder, manifest, name, pieces, local)

    monkeypatch.setattr(loading, "read_pieces", fails)
    texts = launch(refused, 2, OLD, line, ranks="threads")
    assert texts[0] == texts[1]
    assert type(failure).__name__ in texts[0]


def test_a_file_of_another_dtype_than_its_manifest_says_is_refused_and_changes_nothing(old):
    """As a checkpoint from somebody else may be: its checksums fit its files."""
    part = find(old) / "part-00000.safetensors"
    length = int.from_bytes(part.read_bytes()[:8], "little")
    header, body = part.read_bytes()[8 : 8 + length], part.read_bytes()[8 + length :]
    header = header.replace(b'"F32"', b'"I32"')
    part.write_bytes(length.to_bytes(8, "little") + header + body)
    changed(old, lambda m: m["files"][part.name].update(sha256=checksum(part)), new=True)
    assert "is of torch.int32, and not of torch.float32" in one(refused, old)


# ---- files that are none


OUTSIDE = ["../../x", "/etc/passwd", "..", ".", "", "part-00000.safetensors/../x", "manifest.json", "a\x00b"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_part_named_outside_of_its_folder_is_refused_by_name_before_anything_is_opened(old, name, monkeypatch):
    def rename(manifest):
        manifest["files"][name] = manifest["files"].pop("part-00000.safetensors")
        for entry in manifest["tensors"].values():
            for piece in entry["pieces"]:
                piece[2] = name if piece[2] == "part-00000.safetensors" else piece[2]

    changed(old, rename, new=True)
    monkeypatch.setattr(loading, "check_files", None)
    monkeypatch.setattr(loading, "read_pieces", None)
    assert f"a file is named {name!r}" in one(refused, old)


@pytest.mark.parametrize("kind", ["a link", "a pipe", "a folder", "a link to a device"])
def test_a_part_that_is_no_regular_file_is_refused_before_anything_is_opened(old, kind, monkeypatch):
    part = find(old) / "part-00001.safetensors"
    part.rename(old / "moved")
    if kind == "a pipe":
        os.mkfifo(part)
    elif kind == "a folder":
        part.mkdir()
    else:
        part.symlink_to(old / "moved" if kind == "a link" else "/dev/zero")
    monkeypatch.setattr("shardwright.checkpoint.manifest.checksum", None)
    assert "part-00001.safetensors is no regular file" in one(refused, old)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a link to a device"])
def test_a_manifest_that_is_no_regular_file_is_never_read(old, kind):
    step = find(old)
    manifest = step / "manifest.json"
    manifest.rename(old / "moved")
    if kind == "a pipe":
        os.mkfifo(manifest)
    elif kind == "a folder":
        manifest.mkdir()
    else:
        manifest.symlink_to("/dev/zero")
    for path in (old, step):
        assert "manifest" in one(refused, path)


# ---- several steps, several writers


def bare(folder, step, *, keep=0, world=None):
    """Saves a small run under a number of steps."""
    if world is None:
        return one(lambda world: bare(folder, step, keep=keep, world=world))
    mine = Held(world, steps=0)
    mine.run.num_steps = step
    return save(folder, mine.run, keep=keep)


@pytest.mark.filterwarnings("ignore:a later checkpoint stays")  # it is what is tested
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_save_never_removes_what_it_has_just_written(tmp_path, keep):
    for step in (7, 8, 9):
        bare(tmp_path, step)
    path = bare(tmp_path, 5, keep=keep)
    assert path.name == "step-00000005"
    assert [step.name[-1] for step in steps_in(tmp_path)] == ["5", *"89"[3 - keep :]]


@pytest.mark.filterwarnings("ignore:a later checkpoint stays")  # it is what is tested
def test_steps_are_ordered_by_number(tmp_path):
    for step in (99_999_999, 100_000_000, 3):
        bare(tmp_path, step)
    assert [step.name for step in steps_in(tmp_path)] == ["step-00000003", "step-99999999", "step-100000000"]
    assert find(tmp_path).name == "step-100000000"


def test_a_checkpoint_put_aside_never_wins_over_the_one_that_took_its_name(tmp_path):
    """As a kill between the rename and the removal of the old one leaves them."""
    shutil.copytree(bare(tmp_path / "run", 5), tmp_path / "run" / "step-00000005.old")
    assert find(tmp_path / "run").name == "step-00000005"
    bare(tmp_path / "run", 6)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-00000005", "step-00000006"]


@pytest.mark.sampled(0)
def test_saves_of_several_processes_into_one_folder_wait_for_each_other(tmp_path):
    code = (
        "import os, sys; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path\n"
        "from checkpoint.test_trust import bare\n"
        "first = os.getpid()\n"
        "for _ in range(2):\n"
        "    if os.getpid() == first: os.fork()\n"  # after the imports, which take longest
        "for n in range(8): assert bare(Path(sys.argv[3]), n % 3, keep=3).is_dir() or n % 3 == 0\n"
        "if os.getpid() == first: sys.exit(any([os.wait()[1] for _ in range(2)]))\n"
    )
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", code, str(tests.parent / "src"), str(tests), str(tmp_path / "run")]
    writers = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert writers.returncode == 0, writers.stderr
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [f"step-0000000{n}" for n in range(3)]


def test_a_save_takes_no_lock_of_a_file_that_the_save_before_it_has_removed(tmp_path, monkeypatch):
    """The save before ends between the moment at which the next one opens the file and that at which it locks it."""
    path, plain, num_locks = tmp_path / locking.SAVING, locking.lock, []

    def lock_after_the_end(file):
        if not num_locks:
            path.unlink()
        num_locks.append(1)
        return plain(file)

    monkeypatch.setattr(locking, "lock", lock_after_the_end)
    with locking.one_save(tmp_path), path.open("a") as third:
        assert len(num_locks) == 2
        assert not plain(third), "a third save has to wait"
    assert not path.exists()


def test_a_lock_of_a_save_that_was_killed_holds_none_up(tmp_path):
    (tmp_path / ".saving").write_text("")
    assert bare(tmp_path, 1).is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_save_beside_one_that_never_ends_is_a_checkpoint_error(tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "MOST_WAIT_S", 0.1)
    with (tmp_path / ".saving").open("w") as file:
        assert locking.lock(file)
        with pytest.raises(CheckpointError, match="has not ended"):
            bare(tmp_path, 1)


# ---- options of an optimizer that are no numbers


def with_option(world, folder, option, line="dp2", loads=False):
    """Saves a run whose optimizer has an option of its own, or loads it; returns the option then."""
    mine = Held(world, line, steps=1)
    (group,) = mine.optimizer.param_groups
    group["own"] = option
    if loads:
        load(folder, mine.run, mine.optimizer)
    else:
        save(folder, mine.run, mine.optimizer)
    return group["own"]


@pytest.mark.parametrize(
    ("saved", "present", "loaded"),
    [
        ([1, 2.5, None], [0], [1, 2.5, None]),
        ([1, 2.5], (0,), (1, 2.5)),
        ([1, 2.5], "none", (1, 2.5)),
        ([(1, 2), "x"], [(0, 0), ""], [(1, 2), "x"]),
        ({"knots": [0.5, 1]}, {"knots": (0, 0)}, {"knots": (0.5, 1)}),
        ((torch.tensor(0.25), 1), (0.0, 0), (0.25, 1)),
        ({"c", "a"}, {"b"}, {"a", "c"}),
        ([frozenset({2, 1})], [frozenset()], [frozenset({1, 2})]),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (np.float32(0.25), 0.5, 0.25),
        (np.int64(3), 1, 3),
        (np.bool_(True), False, True),
        (np.array([0.25]), 0.5, 0.25),
        (len, abs, abs),  # of the constructor
        (torch.device("cpu"), torch.device("meta"), torch.device("meta")),
    ],
)
def test_lists_and_tables_of_an_optimizers_options_are_restored_as_what_they_are(tmp_path, saved, present, loaded):
    launch(with_option, 2, tmp_path, saved, ranks="threads")
    found = one(with_option, tmp_path, present, "single", True)
    assert found == loaded
    assert type(found) is type(loaded)


@pytest.mark.parametrize(
    "option",
    [[torch.ones(2)], torch.ones(2), [math.nan], {1: 2}, (object(),), object(), 1j, np.ones(2), {1, (object(),)}],
)
def test_an_option_that_could_not_be_loaded_is_refused_by_the_save_on_every_rank(tmp_path, option):
    with pytest.raises(CheckpointError, match="the option 'own' of a param group of the optimizer cannot be saved"):
        launch(with_option, 2, tmp_path, option, ranks="threads")
    assert steps_in(tmp_path) == []


class Odd(torch.optim.SGD):
    """Keeps an entry in each parameter's state that is no tensor of its shape."""

    entry = None

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["own"] = self.entry


@pytest.mark.parametrize("entry", [{1, "a"}, np.float32(0.5), torch.bfloat16, [1, (2.5, None)], math.inf, 2**70])
def test_state_that_is_no_tensor_is_saved_as_json_has_it(tmp_path, monkeypatch, entry):
    found = of_state(tmp_path, monkeypatch, entry)
    if isinstance(entry, set | torch.dtype | list):
        assert found in ([1, "a"], "torch.bfloat16", [1, [2.5, None]])
    else:
        assert found == entry


@pytest.mark.parametrize(
    "entry", [[torch.ones(1), torch.tensor(2.5)], {"rate": torch.ones(1, 1), "count": torch.tensor(7)}]
)
def test_numbers_that_are_tensors_inside_of_state_come_back_as_tensors(tmp_path, monkeypatch, entry):
    found = of_state(tmp_path, monkeypatch, entry)
    torch.testing.assert_close(found, entry, rtol=0, atol=0)


@pytest.mark.parametrize("entry", [object(), len, torch.tensor(1j), [torch.ones(2)], {1: 2}], ids=range(5))
def test_state_that_could_not_be_loaded_is_refused_by_the_save(tmp_path, monkeypatch, entry):
    with pytest.raises(CheckpointError, match=r"the state 'own' of 'up\.weight' of the optimizer cannot be saved"):
        of_state(tmp_path, monkeypatch, entry)
    assert steps_in(tmp_path) == []


def of_state(folder, monkeypatch, entry):
    """Returns an entry of a parameter's state after a save and a load into another run."""
    monkeypatch.setattr(Odd, "entry", entry)
    model = nn.Sequential(OrderedDict(up=nn.Linear(4, 3)))

    def work(world):
        run = parallelize(model, "dp2", world)
        optimizer = run.optimizer(Odd, lr=0.1)
        run.step(next(run.shard([(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))])))
        optimizer.step()
        save(folder, run, optimizer)
        other = parallelize(model, "dp2", world)
        loaded = other.optimizer(Odd, lr=0.1)
        load(folder, other, loaded)
        return loaded.state[other.parameters["up.weight"]]["own"]

    return launch(work, 2, ranks="threads")[0]
