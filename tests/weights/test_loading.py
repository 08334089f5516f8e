"""Weights of other programs are loaded to the bit under any layout, and each rank reads only its part of them."""

from __future__ import annotations

import pathlib
import pickle
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model
from torch import nn
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo

import shardwright as sw
from shardwright.errors import CheckpointError, PlanError
from shardwright.layout import Layout
from shardwright.parallelize import filling
from shardwright.sharding.box import Box
from shardwright.weights import stores, torch_records
from shardwright.weights.files import OpenFile
from shardwright.weights.safetensors_file import TensorFile
from shardwright.weights.torch_file import TorchFile
from shardwright.weights.torch_folder import TorchFolder
from shardwright.weights.torch_records import TorchRecords
from weights.plain_models import LAYOUTS, Normed, evaluated, made, same, tied_gpt, trained, with_values


def launch(work, line, *args):
    return sw.launch(work, Layout.parse(line), line, *args, ranks="threads")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The weights of a plain model, as other programs write them; and the names of each beside the model's."""
    folder, plain = tmp_path_factory.mktemp("weights"), tied_gpt(values=True)
    state = plain.state_dict()
    save_model(plain, str(folder / "one.safetensors"))
    torch.save({"model": state, "step": 3}, folder / "plain.pt")
    once = {name: tensor for name, tensor in state.items() if name != "head.weight"}
    (folder / "shards").mkdir()
    half, index = list(once)[: len(once) // 2], {}
    for number, names in ((1, half), (2, [name for name in once if name not in half])):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: once[name] for name in names}, str(folder / "shards" / file), metadata={"format": "pt"})
        index.update(dict.fromkeys(names, file))
    text = str({"metadata": {}, "weight_map": index}).replace("'", '"')
    (folder / "shards" / "model.safetensors.index.json").write_text(text)
    with pytest.warns(UserWarning, match="torch.distributed"):  # torch's own, of a save by one process
        dcp.save({"model": state, "step": 3}, checkpoint_id=str(folder / "dcp"))
    names = {"one.safetensors": None, "plain.pt": "model.", "shards": None, "dcp": "model."}
    return {folder / name: prefix for name, prefix in names.items()}


def _load_and_train(world, line, sources):
    given = sw.parallelize(tied_gpt(values=True), line, world, seed=5)
    expected = given.state_dict()
    run = sw.parallelize(tied_gpt(values=False), line, world, seed=5)
    for source, names in sources.items():
        with torch.no_grad():
            for parameter in run.parameters.values():
                parameter.zero_()
        run.changed()
        evaluated(run)  # copies for the forward are of the zeros now
        found = sw.load_weights(run, source, names=names)
        assert found == (tuple(found.loaded), (), ())
        assert set(found.loaded) == run.plan.state.keys()
        assert same(run.state_dict(), expected), source
    assert same(expected, tied_gpt(values=True).state_dict())
    one, other = trained(given), trained(run)
    assert one[0] == other[0]
    return same(one[1], other[1])


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", LAYOUTS)
def test_a_run_filled_from_files_is_and_trains_as_one_that_began_with_the_values(sources, line):
    assert all(launch(_load_and_train, line, sources))


def _buffers(world, line, source):
    run = sw.parallelize(made(Normed), line, world, loss=sw.MeanSquaredError())
    found = sw.load_weights(run, source)
    assert set(found.loaded) == {"first.weight", "first.bias", *(f"norm.{name}" for name in Normed().norm.state_dict())}
    return run.state_dict()


@pytest.mark.parametrize("line", ["dp2/zero3", "pp2 mb2/own-statistics bf16"])
def test_buffers_are_loaded_and_values_of_buffers_that_are_not_kept_are_passed_over(tmp_path, line):
    state = with_values(Normed()).state_dict()
    state["norm.num_batches_tracked"].fill_(12)
    torch.save({**state, "passing": torch.zeros(2)}, tmp_path / "plain.pt")
    for found in launch(_buffers, line, tmp_path / "plain.pt"):
        assert same(found, state)


# ---- what a rank reads


class _Counted:
    """The bytes of each box that one rank's stores read, and whether any two were alive at a time."""

    def __init__(self, monkeypatch, kind):
        self.of_rank, self.most_alive = {}, 0
        alive = set()
        read = kind.read

        def counted(store, name, box):
            values = read(store, name, box)
            sizes = self.of_rank.setdefault(id(store), [])
            sizes.append(values.nbytes)
            key = (id(store), len(sizes))
            alive.add(key)
            weakref.finalize(values, alive.discard, key)
            self.most_alive = max(self.most_alive, sum(1 for each in alive if each[0] == id(store)))
            self.stores[id(store)] = store
            return values

        self.stores = {}
        monkeypatch.setattr(kind, "read", counted)


def _read_bytes(world, line, source, names):
    run = sw.parallelize(tied_gpt(values=False), line, world)
    sw.load_weights(run, source, names=names, strict=not callable(names))
    assert same(run.state_dict(), tied_gpt(values=True).state_dict())
    return sum(p.nbytes for p in run.parameters.values())


def _once(name):
    """The names of a file that has the tied tensor twice: read under both, its values would be compared."""
    return None if name == "head.weight" else f"model.{name}"


@pytest.mark.sampled(0)
@pytest.mark.parametrize("line", ["dp4/zero3", "tp2", "pp2 mb2 dp2/zero1", "tp2x2x2/3d", "dp2/zero1 bf16"])
def test_a_rank_reads_its_own_bytes_and_holds_one_slab_at_a_time(sources, line, monkeypatch):
    monkeypatch.setattr(torch_records, "LEAST_RUN_BYTES", 0)
    monkeypatch.setattr(filling, "MOST_SLAB_BYTES", 100)
    for source, kind in zip(sources, (TensorFile, TorchFile, None, TorchFolder), strict=True):
        if kind is None:
            continue
        with monkeypatch.context() as patch:
            counted = _Counted(patch, kind)
            found = launch(_read_bytes, line, source, None if kind is TensorFile else _once)
        assert sorted(map(sum, counted.of_rank.values())) == sorted(found)
        assert max(map(max, counted.of_rank.values())) <= 100, "a row is shorter, and slabs are whole rows"
        assert counted.most_alive == 1
        if kind is TensorFile:
            of_file = [store.file.num_read_bytes - store._start for store in counted.stores.values()]
            assert sorted(of_file) == sorted(found), "beside the header, not one byte more"


def test_a_stage_reads_nothing_of_the_tensors_of_other_stages(sources, monkeypatch):
    names = {}
    read = TensorFile.read

    def noted(store, name, box):
        names.setdefault(id(store), (store, set()))[1].add(name)
        return read(store, name, box)

    monkeypatch.setattr(TensorFile, "read", noted)
    launch(_read_bytes, "pp2 mb2", next(iter(sources)), None)
    first, second = (found for _, found in names.values())
    assert first & second == {"head.weight"}, "the tied table, which both stages hold"
    assert first - second
    assert second - first


def test_only_the_chunks_of_a_dcp_folder_that_a_rank_needs_are_read(tmp_path, monkeypatch):
    weight = torch.arange(24.0).view(8, 3)
    for name, rows in _ROWS.items():
        torch.save(weight[rows].clone(), tmp_path / name)
    _write_metadata(tmp_path, weight)
    store = TorchFolder(tmp_path)
    assert torch.equal(store.read("weight", Box((3, 1), (4, 3))), weight[3:4, 1:3])
    assert store.files["a"].num_read_bytes
    assert not store.files["b"].num_read_bytes
    assert torch.equal(store.read("weight", Box((0, 0), (8, 3))), weight)
    assert torch.equal(store.read("weight", Box((2, 1), (7, 2))), weight[2:7, 1:2])


_ROWS = {"a": slice(0, 4), "b": slice(4, 8)}


def _write_metadata(folder: Path, weight):
    chunks = [m.ChunkStorageMetadata(torch.Size([rows.start, 0]), torch.Size([4, 3])) for rows in _ROWS.values()]
    state = {"weight": m.TensorStorageMetadata(m.TensorProperties(weight.dtype), weight.size(), chunks)}
    places = {
        m.MetadataIndex("weight", (rows.start, 0)): _StorageInfo(name, 0, (folder / name).stat().st_size)
        for name, rows in _ROWS.items()
    }
    (folder / ".metadata").write_bytes(pickle.dumps(m.Metadata(state, None, places)))


def test_of_a_large_tensor_in_a_file_of_torch_only_the_rows_of_a_box_are_read(tmp_path):
    weight = torch.arange(float(2**18)).view(512, 512)
    kinds = {"rows": weight, "transposed": weight.t(), "a view": weight[3:], "every other": weight[::2]}
    torch.save({**kinds, "narrow": weight.bfloat16(), "flags": weight % 2 == 0, "one": weight[1, 1]}, tmp_path / "a.pt")
    file = OpenFile(tmp_path / "a.pt")
    records = TorchRecords(file, 0, file.num_bytes, "", AssertionError)
    before = file.num_read_bytes
    assert before < 20_000
    box = Box((5, 100), (9, 500))
    assert torch.equal(records.read(records.content["rows"], box), weight[box.slices])
    assert file.num_read_bytes == before + 4 * box.size
    for name, tensor in {**kinds, "narrow": weight.bfloat16(), "flags": weight % 2 == 0}.items():
        assert torch.equal(records.read(records.content[name], box), tensor[box.slices]), name
    assert records.read(records.content["one"], Box((), ())) == weight[1, 1]


def test_tied_tensors_that_a_file_stores_once_are_read_once(sources, monkeypatch):
    file = next(each for each in sources if each.suffix == ".pt")
    counted = _Counted(monkeypatch, TorchFile)
    found = launch(_read_bytes, "dp2/zero3", file, "model.")
    assert sorted(map(sum, counted.of_rank.values())) == sorted(found)


# ---- names


def _named(world, line, source, names, strict):
    run = sw.parallelize(made(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), line, world)
    before = run.state_dict()
    found = sw.load_weights(run, source, names=names, strict=strict)
    return found, before, run.state_dict()


def test_names_are_turned_by_a_mapping_or_a_function_and_none_leaves_a_tensor_as_it_is(tmp_path):
    file = tmp_path / "named.safetensors"
    save_file({"in.w": torch.full((2, 2), 3.0), "in.b": torch.full((2,), 4.0), "1.bias": torch.ones(2)}, str(file))
    mapping = {"0.weight": "in.w", "0.bias": "in.b", "1.weight": None}
    for names in (mapping, lambda name: mapping.get(name, name)):
        for found, before, after in launch(_named, "dp2/zero3", file, names, True):
            assert found == (("0.weight", "0.bias", "1.bias"), (), ())
            assert torch.equal(after["1.weight"], before["1.weight"])
            assert [after[n].flatten()[0].item() for n in ("0.weight", "0.bias", "1.bias")] == [3.0, 4.0, 1.0]


def test_without_strict_what_fits_by_name_is_loaded_and_the_rest_is_named(tmp_path):
    save_file({"0.weight": torch.ones(2, 2), "other": torch.ones(1)}, str(tmp_path / "some.safetensors"))
    for found, before, after in launch(_named, "pp2 mb2", tmp_path / "some.safetensors", None, False):
        assert found == (("0.weight",), ("0.bias", "1.weight", "1.bias"), ("other",))
        assert torch.equal(after["0.weight"], torch.ones(2, 2))
        assert torch.equal(after["1.weight"], before["1.weight"])


def test_one_tensor_of_a_file_may_fill_two_of_a_model_that_does_not_tie_them(tmp_path):
    save_file(
        {"w": torch.ones(2, 2), "0.bias": torch.ones(2), "1.bias": torch.ones(2)}, str(tmp_path / "a.safetensors")
    )
    for _, _, after in launch(_named, "tp2", tmp_path / "a.safetensors", {"0.weight": "w", "1.weight": "w"}, True):
        assert torch.equal(after["1.weight"], after["0.weight"])


# ---- dtypes


def _typed(world, line, source):
    run = sw.parallelize(nn.Linear(2, 2, bias=False), line, world)
    sw.load_weights(run, source)
    return run.parameters["weight"].dtype, run.state_dict()["weight"], run.model.weight.dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_floating_point_values_are_rounded_to_the_dtype_that_the_run_stores(tmp_path, dtype):
    values = torch.tensor([[1.2, 3.0], [float("nan"), -0.3]], dtype=torch.float64).to(dtype)
    save_file({"weight": values}, str(tmp_path / "w.safetensors"))
    ((stored, state, computes),) = launch(_typed, "bf16", tmp_path / "w.safetensors")
    assert (stored, computes) == (torch.float32, torch.bfloat16), "master weights keep the full precision"
    assert torch.equal(state.nan_to_num(7), values.float().nan_to_num(7))


# ---- state dicts


def _state_dicts(world, line, how):
    run = sw.parallelize(tied_gpt(values=False), line, world, seed=5)
    given = sw.parallelize(tied_gpt(values=True), line, world, seed=5)
    state = given.state_dict()
    evaluated(run)
    if how == "of one rank":
        run.load_state_dict(state if world.rank == world.size - 1 else {}, from_rank=world.size - 1)
    elif how == "parts":
        run.load_state_dict(given.state_dict(full=False), full=False)
    else:
        run.load_state_dict(state)
    assert same(run.state_dict(), state)
    one, other = trained(given), trained(run)
    return one[0] == other[0] and same(one[1], other[1])


@pytest.mark.sampled(100)
@pytest.mark.parametrize("how", ["whole", "of one rank", "parts"])
@pytest.mark.parametrize("line", ["dp2/zero3", "pp2 mb2 dp2/zero1 tp2", "dp2/zero1 bf16"])
def test_a_state_dict_reaches_master_weights_and_shards(line, how):
    assert all(launch(_state_dicts, line, how))


def _parts_of_another_layout(world, line):
    run = sw.parallelize(made(lambda: nn.Linear(4, 4)), line, world)
    before = run.state_dict(full=False)["weight"].clone()
    with pytest.raises(CheckpointError, match="not those of rank"):
        run.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, full=False)
    with pytest.raises(CheckpointError, match="no such rank"):
        run.load_state_dict({}, from_rank=2)
    with pytest.raises(PlanError, match="leave out from_rank"):
        run.load_state_dict(run.state_dict(full=False), full=False, from_rank=0)
    with pytest.raises(CheckpointError, match="no plain values"):
        run.load_state_dict({"weight": torch.ones(4, 4, device="meta"), "bias": torch.ones(4)})
    with pytest.raises(CheckpointError, match="different weights"):
        run.load_state_dict(
            {"weight": torch.ones(4, 4)} | ({"bias": torch.ones(4)} if world.rank else {}), strict=False
        )
    return torch.equal(run.state_dict(full=False)["weight"], before)


def test_state_dicts_that_do_not_fit_change_nothing_on_any_rank():
    assert launch(_parts_of_another_layout, "dp2/zero3") == [True, True]


def test_a_checkpoint_of_this_library_gives_its_weights_alone(tmp_path):
    def save(world, line):
        run = sw.parallelize(tied_gpt(values=True), line, world)
        _, state = trained(run)
        sw.save(tmp_path / "run", run)
        return state

    def load(world, line):
        run = sw.parallelize(tied_gpt(values=False), line, world)
        sw.load_weights(run, tmp_path / "run")
        return run.state_dict(), run.num_steps

    state = launch(save, "dp2/zero3 tp2")[0]
    for found, num_steps in launch(load, "tp2"):
        assert same(found, state)
        assert num_steps == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_that_python_3_13_has_written_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)  # where the classes of paths are there
    monkeypatch.setattr(type(tmp_path), "__module__", "pathlib._local")
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "saved")
    assert b"pathlib._local" in (tmp_path / "saved" / ".metadata").read_bytes()
    assert stores.open_store(tmp_path / "saved").tensors.keys() == {"weight"}


def test_a_store_of_every_kind_is_found_by_what_is_at_the_path(sources):
    kinds = [type(stores.open_store(path)).__name__ for path in sources]
    assert kinds == ["TensorFile", "TorchFile", "JoinedStore", "TorchFolder"]
