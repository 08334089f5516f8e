"""One checkpoint: saved under any layout, loaded under any other, to the last bit; what is broken is refused."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import pickle
import shutil
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import shardwright.checkpoint
from checkpoint.runs import go, gpt, held, loaded, saved, start, whole
from shardwright.checkpoint import manifest as manifests
from shardwright.checkpoint.loading import load, read_whole
from shardwright.checkpoint.manifest import FORMAT, MANIFEST, VERSION, find, read, signed, steps_in
from shardwright.checkpoint.saving import save
from shardwright.comm.launch import launch
from shardwright.errors import CheckpointError
from shardwright.layout import Layout
from shardwright.parallelize import parallelize

PLAIN = ("single", "dp2", "tp2", "tp3", "dp2 tp2")
CUT = ("dp2/zero3", "pp2 mb2", "pp2 dp2/zero3 tp2 mb2")
LINES = (*PLAIN, *CUT)
PAIRS = [
    *((source, target) for source in PLAIN for target in PLAIN),
    *((source, target) for source in CUT for target in CUT),
    *((source, target) for line in CUT for source, target in (("tp3", line), (line, "tp3"), (line, "single"))),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One run for each layout: where it was saved after three steps, what its ranks held then, three more losses."""

    @cache
    def of(line):
        folder = tmp_path_factory.mktemp("run")
        return folder, saved(line, folder, steps=3, more=3)

    return of


@pytest.fixture
def run_folder(checkpoints, tmp_path):
    """A folder of one's own with the checkpoint of a run under tp2."""
    shutil.copytree(checkpoints("tp2")[0], tmp_path / "run")
    return tmp_path / "run"


# ---- any layout to any other


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.sampled(100)
def test_what_one_layout_saved_another_loads_to_the_last_bit(checkpoints, source, target):
    folder, before = checkpoints(source)
    after = loaded(target, folder)
    expected, found = whole(source, before), whole(target, after)
    assert found.keys() == expected.keys()
    assert {name.rpartition("/")[2] for name in found if name.startswith("optimizer/")} == {"exp_avg", "exp_avg_sq"}
    for name, tensor in expected.items():
        assert not tensor.isnan().any(), f"{source} holds only some of {name}"
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    for each in after:
        assert (each.num_steps, each.seed) == (3, 3)
        known = {name: state for rank in before for name, state in rank.scalars.items()}
        assert each.scalars == {name: known[name] for name in each.scalars}
        assert all(state["step"] == (3.0, torch.float32) for state in each.scalars.values())
    assert {name for each in after for name in each.scalars} == set(dict(gpt().named_parameters()))


@pytest.mark.parametrize("line", LINES)
@pytest.mark.sampled(100)
def test_the_losses_go_on_exactly_under_the_same_layout(checkpoints, line):
    folder, before = checkpoints(line)
    assert [each.losses for each in loaded(line, folder, more=3)] == [each.losses[3:] for each in before]


@pytest.mark.parametrize("target", LINES)
@pytest.mark.parametrize("source", ["tp3"])
@pytest.mark.sampled(100)
def test_the_losses_go_on_under_another_layout_within_rounding(checkpoints, source, target):
    folder, before = checkpoints(source)
    for each in loaded(target, folder, more=3):
        assert each.losses == pytest.approx(before[0].losses[3:], rel=1e-12)


def test_a_rate_and_its_betas_come_from_the_checkpoint(checkpoints):
    def work(world):
        run, optimizer = start(world, "dp2", lr=77.0)
        load(checkpoints("tp2")[0], run, optimizer)
        return optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]

    assert launch(work, 2, ranks="threads") == [(1e-2, (0.9, 0.999))] * 2


def test_a_model_alone_is_loaded_without_its_optimizer(checkpoints):
    folder, before = checkpoints("dp2")

    def work(world):
        run, optimizer = start(world, "tp2")
        load(folder, run)
        return held(run, optimizer, [])

    found, expected = whole("tp2", launch(work, 2, ranks="threads")), whole("dp2", before)
    assert set(found) == set(dict(gpt().named_parameters()))
    assert all(torch.equal(found[name], expected[name]) for name in found)


class WithBuffers(nn.Module):
    """A batch norm's counts and means, a number of its own, and a frozen weight."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(0.1))
        self.down = nn.Linear(6, 19)
        self.down.bias.requires_grad_(False)

    def forward(self, x):
        return self.down(self.norm(self.up(x)) * self.scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_buffers_and_parameters_without_a_dim_are_kept_to_the_last_bit(tmp_path, dtype):
    torch.manual_seed(0)
    model = WithBuffers().to(dtype)
    data = (torch.randn(5, 4, dtype=dtype), torch.arange(5))

    def work(world, resumes):
        run, optimizer = start(world, "single", copy.deepcopy(model))
        if resumes:
            load(tmp_path, run, optimizer)
        losses = []
        while run.num_steps < (4 if resumes else 2):
            losses.append(run.step(next(run.shard([data]))).item())
            optimizer.step()
        if not resumes:
            save(tmp_path, run, optimizer)
            losses += [run.step(next(run.shard([data]))).item() for _ in range(2) if optimizer.step() is None or True]
        return losses, {name: (tensor.clone(), tensor.dtype) for name, tensor in run.model.state_dict().items()}

    def straight(world):
        run, optimizer = start(world, "single", copy.deepcopy(model))
        losses = []
        while run.num_steps < 4:
            losses.append(run.step(next(run.shard([data]))).item())
            optimizer.step()
        return losses, {name: (tensor.clone(), tensor.dtype) for name, tensor in run.model.state_dict().items()}

    ((losses, expected),) = launch(straight, 1, ranks="threads")
    launch(work, 1, False, ranks="threads")
    ((again, found),) = launch(work, 1, True, ranks="threads")
    assert again == losses[2:]
    for name, (tensor, its_dtype) in expected.items():
        assert found[name][1] == its_dtype
        assert torch.equal(found[name][0], tensor), name


class WithTables(nn.Module):
    """Two tables that are not persistent, one of them under a second name that is, and a count that is."""

    def __init__(self, value):
        super().__init__()
        self.layer = nn.Linear(4, 19)
        self.register_buffer("table", torch.full((4,), value), persistent=False)
        self.register_buffer("shared", torch.full((2,), value), persistent=False)
        self.layer.register_buffer("known", self.shared)
        self.layer.register_buffer("count", torch.tensor(value))

    def forward(self, x):
        return self.layer(x * self.table)


def test_state_of_a_parameter_without_dims_loads_into_slices_and_one_without_elements_is_no_matter(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(6, 5), nn.Parameter(torch.tensor(2.5))
            self.nothing = nn.Parameter(torch.zeros(0, 5))

        def forward(self, x):
            return self.layer(x) * self.scale + self.nothing.sum()

    model, batch = Scaled(), (torch.randn(8, 6), torch.arange(8) % 5)

    def work(world, line, source, target):
        run = parallelize(model, line, world)
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
        if source is not None:
            load(source, run, optimizer)
        losses = []
        for each in run.shard([batch] * 2):
            losses.append(run.step(each).item())
            optimizer.step()
        if target is not None:
            save(target, run, optimizer)
        return losses

    launch(work, 2, "dp2", None, tmp_path, ranks="threads")
    expected = launch(work, 2, "dp2", tmp_path, None, ranks="threads")[0]
    for line in ("dp2/zero1", "dp2/zero3/bucket:0/offload:disk"):
        assert launch(work, 2, line, tmp_path, None, ranks="threads")[0] == pytest.approx(expected, rel=1e-5)


def test_buffers_that_are_not_persistent_are_neither_saved_nor_loaded(tmp_path):
    models = {value: WithTables(value) for value in (1.0, 5.0)}

    def work(world, value):
        run, _ = start(world, "dp2", models[value])
        if value == 1.0:
            save(tmp_path, run)
        else:
            load(tmp_path, run)
        return {name: buffer.unique().tolist() for name, buffer in run.model.named_buffers()}

    launch(work, 2, 1.0, ranks="threads")
    kept = {"layer.weight", "layer.bias", "layer.known", "layer.count"}
    assert set(read(find(tmp_path)).tensors) == kept == set(WithTables(0.0).state_dict())
    for found in launch(work, 2, 5.0, ranks="threads"):
        assert found["table"] == [5.0]
        assert found["layer.count"] == [1.0]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adam])
@pytest.mark.sampled(100)
def test_other_optimizers_keep_their_state_too(tmp_path, kind):
    def work(world, resumes):
        run, optimizer = start(world, "tp3" if resumes else "dp2", kind=kind)
        if resumes:
            load(tmp_path, run, optimizer)
            return go(run, optimizer, 4)
        before = go(run, optimizer, 2)
        save(tmp_path, run, optimizer)
        return before + go(run, optimizer, 4)

    straight = launch(work, 2, False, ranks="threads")[0]
    assert launch(work, 3, True, ranks="threads")[0] == pytest.approx(straight[2:], rel=1e-9)


def test_a_run_that_has_made_no_step_is_saved_and_loaded(tmp_path):
    folder = tmp_path / "run"
    saved("dp2", folder, steps=0)
    assert [path.name for path in steps_in(folder)] == ["step-00000000"]
    assert loaded("tp2", folder, more=2)[0].losses == pytest.approx(saved("tp2", tmp_path / "b", steps=2)[0].losses)


# ---- the folder


@pytest.mark.parametrize("line", ["pp2/cut:0,2 mb2", "pp3/cut:0,2,3 mb2"])
def test_a_stage_that_trains_nothing_is_saved_and_loaded(tmp_path, line):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    model[0].requires_grad_(False)

    def work(world, step):
        run = parallelize(model, line, world)
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1 * step)
        if step > 1:
            load(tmp_path, run, optimizer)
        run.step(next(run.shard([(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))])))
        optimizer.step()
        save(tmp_path, run, optimizer)
        return optimizer.param_groups[0]["lr"], run.num_steps

    num_ranks = Layout.parse(line).num_ranks
    assert launch(work, num_ranks, 1, ranks="threads") == [(0.1, 1)] * num_ranks
    assert launch(work, num_ranks, 2, ranks="threads") == [(0.1, 2)] * num_ranks


@pytest.mark.parametrize("keeps_empty", [True, False])
def test_groups_by_stage_keep_their_options_however_often_they_are_saved(tmp_path, keeps_empty):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def work(world, line, loads):
        run = parallelize(model, line, world)
        rates = {"0.": 0.01, "1.": 0.1}
        groups = [
            {"params": [p for name, p in run.parameters.items() if name.startswith(first)], "lr": 9.0 if loads else lr}
            for first, lr in rates.items()
        ]
        groups = [group for group in groups if keeps_empty or group["params"]]
        optimizer = run.optimizer(torch.optim.SGD, groups)
        if loads:
            load(tmp_path, run, optimizer)
        save(tmp_path, run, optimizer)
        return [group["lr"] for group in optimizer.param_groups]

    each = [[0.01, 0.1], [0.01, 0.1]] if keeps_empty else [[0.01], [0.1]]
    for loads in (False, True, True):
        assert launch(work, 2, "pp2 mb2", loads, ranks="threads") == each
    assert launch(work, 1, "single", True, ranks="threads") == [[0.01, 0.1]]


DECAYS = {"decayed": {"weight_decay": 0.1}, "others": {"weight_decay": 0.0}}


def by_dims(name, shape):
    return DECAYS["decayed" if len(shape) > 1 else "others"]


GROUPINGS = {
    "one group": None,
    "groups by stage": lambda name, shape: {"lr": 0.1 if name.startswith("0.") else 0.2},
    "a parameter in the other group": lambda name, shape: DECAYS["decayed" if name == "1.bias" else "others"],
    "a parameter left out": lambda name, shape: None if name == "1.bias" else by_dims(name, shape),
}


@pytest.mark.parametrize("saves", ["dp2/zero3", "pp2 mb2"])
def test_an_optimizer_of_other_groups_is_refused_with_the_groups_that_were_saved(tmp_path, saves):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def work(world, line, grouping, loads):
        run = parallelize(model, line, world)
        optimizer = run.optimizer(torch.optim.AdamW, parameters=grouping)
        if not loads:
            run.step(next(run.shard([(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))])))
            optimizer.step()
            save(tmp_path, run, optimizer)
            return None
        before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        with pytest.raises(CheckpointError, match="into other groups") as found:
            load(tmp_path, run, optimizer)
        assert before == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        assert not optimizer.state
        return str(found.value)

    launch(work, saves, saves, by_dims, False, ranks="threads")
    for grouping in GROUPINGS.values():
        for line in ("dp2/zero1", "pp2 mb2"):
            for text in launch(work, line, line, grouping, True, ranks="threads"):
                assert "2 groups (2 parameters with weight_decay 0.1" in text or "lr 0.001, weight_decay 0.1" in text
                assert "{'weight_decay': 0.1} if len(shape) > 1 else {'weight_decay': 0.0}" in text

    def resumed(world, line):
        run = parallelize(model, line, world)
        optimizer = run.optimizer(torch.optim.AdamW, parameters=by_dims)
        load(tmp_path, run, optimizer)
        return [group["weight_decay"] for group in optimizer.param_groups]

    for line in ("single", "dp2/zero3", "pp2 mb2", "tp2"):
        assert launch(resumed, line, line, ranks="threads") == [[0.1, 0.0]] * Layout.parse(line).num_ranks


def test_every_element_is_written_once(checkpoints):
    for line in LINES:
        manifest = read(find(checkpoints(line)[0]))
        for name, (_, shape, stored) in manifest.tensors.items():
            assert sum(each.box.size for each in stored) == torch.Size(shape).numel(), f"{name} under {line}"


def test_the_manifest_is_json_and_tells_every_file_its_size_and_checksum(checkpoints):
    for line in LINES:
        step = find(checkpoints(line)[0])
        found = json.loads((step / MANIFEST).read_text())
        assert set(found) == {
            *("format", "version", "step", "layout", "seed"),
            *("optimizer", "scalars", "groups", "extra", "files", "tensors", "sha256"),
        }
        assert (found["format"], found["version"]) == (FORMAT, VERSION) == ("shardwright-checkpoint", 2)
        assert (found["step"], found["layout"], found["optimizer"]) == (3, str(Layout.parse(line)), "AdamW")
        assert sorted([*found["files"], MANIFEST]) == sorted(path.name for path in step.iterdir())
        for name, said in found["files"].items():
            content = (step / name).read_bytes()
            assert said == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for entry in found["tensors"].values():
            assert set(entry) == {"dtype", "shape", "pieces"}


def test_there_is_no_pickle_in_a_checkpoint_nor_in_the_code(checkpoints):
    for path in find(checkpoints("dp2 tp2")[0]).iterdir():
        with pytest.raises(Exception):  # noqa: B017  # whatever it finds there instead
            pickle.loads(path.read_bytes())
        if path.suffix == ".safetensors":
            with safe_open(str(path), framework="pt") as file:
                assert list(file.keys())
    for source in Path(shardwright.checkpoint.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names.append(getattr(node, "module", None) or "")
            assert not {"pickle", "dill", "marshal", "shelve", "joblib"} & {
                part for n in names for part in n.split(".")
            }
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr not in ("save", "load")


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_the_newest_steps_are_kept(tmp_path, keep):
    def work(world):
        run, optimizer = start(world, "dp2")
        for step in range(1, 5):
            go(run, optimizer, step)
            save(tmp_path, run, optimizer, keep=keep)

    launch(work, 2, ranks="threads")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{n:08d}" for n in range(1, 5)][-keep:]
    assert find(tmp_path).name == "step-00000004"


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_a_save_beside_a_later_step_warns_that_a_load_of_the_folder_takes_that_one(tmp_path, keep):
    def saved_at(step):
        def work(world):
            run, optimizer = start(world, "dp2")
            go(run, optimizer, step)
            save(tmp_path, run, optimizer, keep=keep)

        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            launch(work, 2, ranks="threads")
        return [str(each.message) for each in found]

    assert saved_at(2) == []
    found = saved_at(1)
    names = sorted(path.name for path in tmp_path.iterdir())
    if keep == 1:  # the later one is removed
        assert (found, names) == ([], ["step-00000001"])
        return
    (text,) = found
    assert "given:   step-00000001 saved beside step-00000002" in text
    assert str(tmp_path / "step-00000001") in text
    assert names == ["step-00000001", "step-00000002"]


def test_a_step_that_is_saved_again_takes_the_place_of_the_first(tmp_path):
    def work(world):
        run, optimizer = start(world, "tp2")
        go(run, optimizer, 2)
        path = save(tmp_path, run, optimizer)
        with torch.no_grad():
            run.parameters["norm.weight"].fill_(7.0)
        assert save(tmp_path, run, optimizer) == path
        return path

    path = launch(work, 2, ranks="threads")[0]
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000002"]
    assert torch.equal(read_whole(path, read(path), "norm.weight"), torch.full((12,), 7.0, dtype=torch.float64))


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path):
    left = tmp_path / ".tmp-step-00000001-abc"
    left.mkdir()
    (left / "part-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-file").write_bytes(b"")
    saved("dp2", tmp_path, steps=1)
    assert not left.exists()
    assert find(tmp_path).name == "step-00000001"


def test_a_folder_that_was_put_aside_still_counts_until_the_new_one_is_there(tmp_path):
    saved("single", tmp_path, steps=2)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000002.old")
    assert loaded("dp2", tmp_path)[0].num_steps == 2
    saved("single", tmp_path, steps=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


# ---- what cannot be written


def refused(num_ranks, work, *args):
    """The message, the same on every rank: a rank that is refused alone would leave the others waiting."""

    def told(world):
        try:
            work(world, *args)
        except CheckpointError as refusal:
            return str(refusal)
        return "not refused"

    (text,) = set(launch(told, num_ranks, ranks="threads"))
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:4]] == ["given", "allowed", "fix"], text
    return text


def everything_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def keep_going(world, folder):
    """Loads, makes a step, and cannot save it; every rank goes on."""
    run, optimizer = start(world, "tp2")
    load(folder, run, optimizer)
    go(run, optimizer, 4)
    try:
        save(folder, run, optimizer)
    except CheckpointError:
        go(run, optimizer, 5)
        raise


def test_a_disk_without_room_is_an_error_on_every_rank_and_leaves_the_last_one_untouched(run_folder, monkeypatch):
    before = everything_in(run_folder)
    usage = shutil.disk_usage(run_folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    text = refused(2, keep_going, run_folder)
    assert "the last complete one is untouched" in text
    assert "rank 0: [Errno 28] 10 B free" in text
    assert str(run_folder) in text
    assert everything_in(run_folder) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_write_that_fails_on_one_rank_fails_on_all_and_leaves_nothing_behind(run_folder, monkeypatch, rank):
    from shardwright.checkpoint import saving

    before, plain = everything_in(run_folder), saving.save_file

    def fails(tensors, path):
        plain(tensors, path)
        if f"part-0000{rank}" in path:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(saving, "save_file", fails)
    assert f"rank {rank}: [Errno 5] Input/output error" in refused(2, keep_going, run_folder)
    assert everything_in(run_folder) == before


@pytest.mark.parametrize("name", ["fsync", "rename", "mkdir"])
def test_a_call_to_the_system_that_fails_is_an_error_on_every_rank(run_folder, monkeypatch, name):
    import os

    def fails(*_, **__):
        raise OSError(30, "Read-only file system")

    before = everything_in(run_folder)
    monkeypatch.setattr(os, name, fails)
    text = refused(2, keep_going, run_folder)
    monkeypatch.undo()
    assert "Read-only file system" in text
    assert everything_in(run_folder) == before


def test_a_folder_that_is_a_file_is_refused_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")

    def work(world):
        run, optimizer = start(world, "dp2")
        save(tmp_path / "file", run, optimizer)

    assert "rank 0" in refused(2, work)


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    "value", [torch.ones(2), Path("x"), {(1, 2): 3}, CIRCLE, {1, 2}], ids=lambda v: type(v).__name__
)
def test_what_is_not_json_is_refused_on_every_rank_before_anything_is_sent(tmp_path, value):
    def work(world):
        run, optimizer = start(world, "dp2")
        with world.recorder.recording() as records:
            try:
                save(tmp_path, run, optimizer, extra={"best": value})
            finally:
                assert records == []

    text = refused(2, work)
    assert text.startswith("'extra' cannot be kept as JSON")
    assert list(tmp_path.iterdir()) == []


# ---- what cannot be loaded


def load_under(world, line, path, kind=torch.optim.AdamW, **changes):
    """Loads, and when it is refused the run is as it was."""
    run, optimizer = start(world, line, gpt(**changes), kind)
    before = held(run, optimizer, [])
    try:
        load(path, run, optimizer)
    except CheckpointError:
        after = held(run, optimizer, [])
        assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)
        assert after.tensors.keys() == before.tensors.keys(), "the optimizer has got a state"
        assert (after.num_steps, run.rng.seed) == (0, 3)
        go(run, optimizer, 1)  # and it can go on
        raise


def part(folder, number):
    return find(folder) / f"part-0000{number}.safetensors"


def change(path, **entries):
    manifest = find(path) / MANIFEST
    found = json.loads(manifest.read_text())
    del found["sha256"]
    found.update(entries)
    manifest.write_text(signed(json.dumps(found, indent=1)))


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


BROKEN = {
    "a byte at the end": (lambda f: flip(part(f, 1), -1), "part-00001.safetensors does not match its checksum"),
    "a byte of the header": (lambda f: flip(part(f, 0), 20), "part-00000.safetensors does not match its checksum"),
    "a short file": (lambda f: part(f, 1).write_bytes(part(f, 1).read_bytes()[:-9]), "bytes, "),
    "an empty file": (lambda f: part(f, 0).write_bytes(b""), "part-00000.safetensors has 0 bytes"),
    "a missing file": (lambda f: part(f, 1).unlink(), "part-00001.safetensors is missing"),
    "half a manifest": (lambda f: (find(f) / MANIFEST).write_text((find(f) / MANIFEST).read_text()[:500]), "broken"),
    "an empty manifest": (lambda f: (find(f) / MANIFEST).write_text(""), "manifest.json: "),
    "a manifest of bytes": (lambda f: (find(f) / MANIFEST).write_bytes(b"\xff\xfe\x00"), "is not a checkpoint"),
    "a list for a manifest": (lambda f: (find(f) / MANIFEST).write_text("[1, 2]"), "manifest.json: "),
    "a manifest of somebody else": (lambda f: (find(f) / MANIFEST).write_text('{"format": "x"}'), "of format 'x'"),
    "a manifest without tensors": (lambda f: change(f, tensors=None), "manifest.json: "),
    "a manifest without files": (lambda f: change(f, files={}), "manifest.json: "),
    "a dtype that is none": (
        lambda f: change(f, tensors={"a": {"dtype": "float65", "shape": [], "pieces": []}}),
        "manifest.json: ",
    ),
    "a newer version": (lambda f: change(f, version=3), "written by a newer shardwright"),
    "a version that is none": (lambda f: change(f, version="2"), "'version' is '2'"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("line", ["tp2", "dp2"])
@pytest.mark.sampled(100)
def test_what_is_broken_is_refused_on_every_rank_and_changes_nothing(run_folder, name, line):
    how, words = BROKEN[name]
    how(run_folder)
    assert words in refused(2, load_under, line, run_folder)


def test_what_is_broken_may_be_removed_to_go_on_from_the_step_before(run_folder):
    shutil.copytree(find(run_folder), run_folder / "step-00000009")
    flip(part(run_folder, 0), -1)
    text = refused(2, load_under, "tp2", run_folder)
    assert "step-00000009' is broken" in text
    assert "fix:     remove it to go on from the step before it" in text
    shutil.rmtree(run_folder / "step-00000009")
    assert loaded("tp2", run_folder)[0].num_steps == 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p / "nowhere", "there is no checkpoint at"),
        (lambda p: (p / "empty").mkdir() or p / "empty", "no manifest in it"),
        (lambda p: (p / "file").write_text("x") and p / "file", "no manifest in it"),
        (lambda p: (p / ".tmp-step-00000001-a").mkdir() or p, "no manifest in it"),
    ],
)
def test_a_path_without_a_checkpoint_is_refused_on_every_rank(tmp_path, make, words):
    assert words in refused(2, load_under, "dp2", make(tmp_path))


def test_the_checkpoint_of_another_model_is_refused_on_every_rank(run_folder):
    text = refused(2, lambda world: load_under(world, "tp2", run_folder, num_layers=3))
    assert "is a checkpoint of another model" in text
    assert "blocks.2." in text
    text = refused(2, lambda world: load_under(world, "dp2", run_folder, vocabulary=20))
    assert "token.weight [19, 12] instead of [20, 12]" in text
    assert "tensors differ" in refused(2, lambda world: load_under(world, "pp2 mb2", run_folder, num_layers=1))


def test_the_checkpoint_of_another_optimizer_is_refused_on_every_rank(run_folder, tmp_path):
    text = refused(2, load_under, "tp2", run_folder, torch.optim.SGD)
    assert "given:   AdamW, to be loaded into SGD" in text

    def without(world):
        run, _ = start(world, "dp2")
        save(tmp_path / "bare", run)

    launch(without, 2, ranks="threads")
    text = refused(2, load_under, "tp2", tmp_path / "bare")
    assert "given:   none, to be loaded into AdamW" in text


def test_an_element_that_no_file_holds_is_never_made_up(run_folder):
    tensors = json.loads((find(run_folder) / MANIFEST).read_text())["tensors"]
    tensors["norm.weight"]["pieces"] = []
    change(run_folder, tensors=tensors)
    assert "'norm.weight' has 0 elements in its pieces" in refused(2, load_under, "dp2", run_folder)


def test_the_code_that_reads_a_manifest_knows_no_version_above_its_own():
    assert manifests.VERSION == VERSION == 2


def test_state_is_written_in_files_that_are_copied_one_at_a_time(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(shardwright.checkpoint.saving, "MOST_BYTES", 1500)
    sizes = []
    plain = shardwright.checkpoint.saving.save_file

    def noted(tensors, path):
        sizes.append([tensor.nbytes for tensor in tensors.values()])
        plain(tensors, path)

    monkeypatch.setattr(shardwright.checkpoint.saving, "save_file", noted)
    before = saved("dp2/zero3/offload:disk", tmp_path)
    assert all(sum(each) <= 1500 or len(each) == 1 for each in sizes)
    assert len(list(tmp_path.glob("step-*/part-00000*.safetensors"))) > 5
    expected, found = whole("dp2/zero3", before), whole("tp2", loaded("tp2", tmp_path))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("line", ["single", "dp2"])
def test_state_of_another_shape_than_its_parameter_loads_as_it_was(tmp_path, line):
    """Adafactor keeps sums of the rows and columns of a matrix."""
    model, batch = nn.Linear(3, 2), (torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))

    def started(world):
        run = parallelize(model, line, world)
        return run, run.optimizer(torch.optim.Adafactor, lr=0.1)

    def saved(world):
        run, optimizer = started(world)
        run.step(next(run.shard([batch])))
        optimizer.step()
        save(tmp_path, run, optimizer)
        return optimizer.state[run.parameters["weight"]]["row_var"]

    def again(world):
        run, optimizer = started(world)
        load(tmp_path, run, optimizer)
        found = optimizer.state[run.parameters["weight"]]["row_var"].clone()
        run.step(next(run.shard([batch])))
        optimizer.step()
        return found

    layout = Layout.parse(line)
    before, after = launch(saved, layout, ranks="threads"), launch(again, layout, ranks="threads")
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
