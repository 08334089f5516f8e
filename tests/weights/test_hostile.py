"""Sources that are damaged, made to do harm, or of another model: one error on every rank, and nothing is changed."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo

import shardwright as sw
from shardwright.errors import CheckpointError
from shardwright.weights.safetensors_file import TensorFile
from weights.plain_models import made


def good() -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3, 2), 7.0), "bias": torch.full((3,), 7.0)}


def _load(world, source):
    run = sw.parallelize(made(lambda: nn.Linear(2, 3)), "dp2/zero1", world)
    before = run.state_dict()
    try:
        sw.load_weights(run, source)
    except CheckpointError as failure:
        after = run.state_dict()
        return str(failure), all(torch.equal(after[name], before[name]) for name in before)
    return "", all(bool((tensor == 7).all()) for tensor in run.state_dict().values())


def outcome(source) -> str:
    """The text of the error, "" for none: the same on both ranks, with all values as they were or as given."""
    texts = sw.launch(_load, 2, source, ranks="threads")
    assert texts[0] == texts[1]
    assert texts[0][1]
    return texts[0][0]


class Harm:
    """A value whose unpickling makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def index(folder: Path, places, **more):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places, **more}))
    return folder


def dcp(folder: Path, *, chunk=None, state=None, file="a", offset=0, length=None, content=None, **more):
    """A folder of DCP of one tensor, ``weight``, and ``bias``, of which parts can be made wrong."""
    tensors = good() if content is None else content
    for name, tensor in tensors.items():
        torch.save(tensor, folder / f"{name}")
    entries, places = {}, {}
    for name, tensor in good().items():
        zeros = torch.Size([0] * tensor.dim())
        chunks = [m.ChunkStorageMetadata(zeros, tensor.size())] if chunk is None or name == "bias" else chunk
        entries[name] = m.TensorStorageMetadata(m.TensorProperties(tensor.dtype), tensor.size(), chunks)
        size = (folder / name).stat().st_size if length is None else length
        places[m.MetadataIndex(name, zeros)] = _StorageInfo(name if file == "a" else file, offset, size, **more)
    (folder / ".metadata").write_bytes(pickle.dumps(m.Metadata(entries, state, places)))
    return folder


def _split(folder: Path, *, swap=False):
    one, two = good(), {}
    two["bias"] = one.pop("bias")
    save_file(one, str(folder / "1.safetensors"))
    save_file(two, str(folder / "2.safetensors"))
    return index(folder, {"weight": "2.safetensors" if swap else "1.safetensors", "bias": "2.safetensors"})


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _saved(path: Path, value) -> Path:
    torch.save(value, path)
    return path


def _zip(path: Path, harm: Path) -> Path:
    """A file of torch.save whose pickle makes a folder."""
    torch.save(good(), path)
    with zipfile.ZipFile(path) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in entries.items():
            file.writestr(name, pickle.dumps(Harm(harm), 2) if name.endswith("data.pkl") else content)
    return path


def _compressed(path: Path) -> Path:
    """A file of torch.save whose entries were compressed by another program, so that values are not at their places."""
    torch.save(good(), path)
    with zipfile.ZipFile(path) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return path


def _big_endian(path: Path) -> Path:
    """A file of torch.save from a processor of the other byte order."""
    torch.save(good(), path)
    path.write_bytes(path.read_bytes().replace(b"little", b"big" + b"   "))
    return path


def _tensors(path: Path, tensors) -> Path:
    save_file(tensors, str(path))
    return path


def _linked(folder: Path, to) -> Path:
    (folder / "1.safetensors").symlink_to(to)
    return index(folder, {"weight": "1.safetensors"})


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "1.safetensors")
    return index(folder, {"weight": "1.safetensors"})


def _collision(folder: Path) -> Path:
    save_file(good(), str(folder / "1.safetensors"))
    save_file({"bias": torch.zeros(3)}, str(folder / "2.safetensors"))
    return folder


def _deep():
    found = good()
    for _ in range(40):
        found = {"a": found}
    return found


SOURCES = {
    "no such file": (lambda d: d / "nowhere.safetensors", "No such file"),
    "a device": (lambda d: Path("/dev/zero"), "a device or a pipe"),
    "an empty folder": (lambda d: d, "no file of weights"),
    "an empty file": (lambda d: _write(d / "a.safetensors", b""), "no safetensors file"),
    "an empty .pt": (lambda d: _write(d / "a.pt", b""), "no zip archive"),
    "a text": (lambda d: _write(d / "a.txt", b"weight = 7 and more"), "a file of another kind"),
    "a name with a zero": (lambda d: d / "a\0b", "null"),
    "an index that is no JSON": (lambda d: _write(d / "model.safetensors.index.json", b"{").parent, "not JSON"),
    "an index without a map": (lambda d: index(d, []), "no 'weight_map'"),
    "an index with numbers for files": (lambda d: index(d, {"weight": 3}), "names the file 3"),
    "an index of a missing file": (lambda d: index(d, {"weight": "1.safetensors"}), "No such file"),
    "an index of a file above": (lambda d: index(d, {"weight": "../x"}), "'../x', which is not in it"),
    "an index of a file elsewhere": (lambda d: index(d, {"weight": "/etc/passwd"}), "which is not in it"),
    "an index of a device": (lambda d: _linked(d, "/dev/zero"), "a device or a pipe"),
    "an index of a pipe": (_pipe, "a device or a pipe"),
    "an index of a link to nothing": (lambda d: _linked(d, d / "nothing"), "No such file"),
    "an index of a link to itself": (lambda d: _linked(d, d / "1.safetensors"), "symbolic links"),
    "an index of a link to a text": (lambda d: _linked(d, "/etc/hostname"), "no safetensors file"),
    "an index that is wrong": (lambda d: _split(d, swap=True), "says that 2.safetensors has 'weight'"),
    "files with one name twice": (_collision, "two files have a tensor 'bias'"),
    "a pickle": (lambda d: _write(d / "a.pt", pickle.dumps(Harm(d / "harm"))), "a plain pickle could run code"),
    "a pickle in a .pt": (lambda d: _zip(d / "a.pt", d / "harm"), "could run code"),
    "a .pt that was compressed": (lambda d: _compressed(d / "a.pt"), "has no values"),
    "a .pt of another processor": (lambda d: _big_endian(d / "a.pt"), "no weights to read"),
    "a model in a .pt": (lambda d: _saved(d / "a.pt", nn.Linear(2, 3)), "could run code"),
    "a list in a .pt": (lambda d: _saved(d / "a.pt", [torch.ones(2)]), "a list without tensors by name"),
    "two tensors of one name": (lambda d: _saved(d / "a.pt", {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}), "two"),
    "dicts in dicts": (lambda d: _saved(d / "a.pt", _deep()), "more than 16 dicts"),
    "a truncated .pt": (
        lambda d: _write(d / "b.pt", _saved(d / "a.pt", good()).read_bytes()[:-300]),
        "no weights to read",
    ),
    "metadata of DCP that run code": (
        lambda d: _write(d / ".metadata", pickle.dumps(Harm(d / "harm"))).parent,
        "names code that could run",
    ),
    "metadata of DCP with code inside": (lambda d: dcp(d, state=[Harm(d / "harm")]), "names code that could run"),
    "metadata of DCP that are none": (lambda d: _write(d / ".metadata", pickle.dumps([3])).parent, ".metadata:"),
    "metadata of DCP cut off": (
        lambda d: _write(d / ".metadata", (dcp(d) / ".metadata").read_bytes()[:90]).parent,
        ".metadata:",
    ),
    "a file of DCP elsewhere": (lambda d: dcp(d, file="../x"), "which is not in it"),
    "a missing file of DCP": (lambda d: dcp(d, file="gone"), "No such file"),
    "a place outside of a file of DCP": (lambda d: dcp(d, offset=2**40), "not inside of weight"),
    "a place before a file of DCP": (lambda d: dcp(d, offset=-8), "not inside of weight"),
    "a compressed file of DCP": (lambda d: dcp(d, transform_descriptors=["zstd"]), "is compressed"),
    "a chunk outside of its tensor": (
        lambda d: dcp(d, chunk=[m.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 2]))]),
        "outside of its shape",
    ),
    "names of another model": (
        lambda d: _tensors(d / "a.safetensors", {"other": torch.ones(1)}),
        "'weight' is missing",
    ),
    "a name too many": (
        lambda d: _tensors(d / "a.safetensors", {**good(), "more": torch.ones(1)}),
        "'more' is unknown to the model",
    ),
    "swapped sizes": (
        lambda d: _tensors(d / "a.safetensors", {**good(), "weight": torch.ones(2, 3)}),
        "'weight' has shape [2, 3], and the model's [3, 2]",
    ),
    "whole numbers": (
        lambda d: _tensors(d / "a.safetensors", {**good(), "bias": torch.ones(3, dtype=torch.int64)}),
        "'bias' is torch.int64, and the model's torch.float32",
    ),
}


@pytest.mark.parametrize("what", SOURCES)
def test_a_source_that_cannot_be_used_is_one_error_on_every_rank_and_changes_nothing(tmp_path, what):
    make, text = SOURCES[what]
    assert text in outcome(make(tmp_path))
    assert not (tmp_path / "harm").exists(), "code of the file ran"


GOOD = {
    "a folder of two files": _split,
    "a folder of DCP": dcp,
    "a .pt with other values": lambda d: _saved(d / "a.pt", {"x": {**good(), "step": 3, "none": None}}),
    "links, as a cache of downloads has them": lambda d: _links(d),
    "a .bin": lambda d: _saved(d / "pytorch_model.bin", good()).parent,
}


def _links(folder: Path) -> Path:
    (folder / "blobs").mkdir()
    save_file(good(), str(folder / "blobs" / "0f"))
    (folder / "snapshot").mkdir()
    (folder / "snapshot" / "model.safetensors").symlink_to("../blobs/0f")
    return folder / "snapshot"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", GOOD)
def test_the_same_source_undamaged_is_loaded(tmp_path, what):
    source = GOOD[what](tmp_path)
    if "other values" in what:
        assert "do not fit the model" in outcome(source)
        one = sw.launch(_named, 1, source, ranks="threads")[0]
        assert one == (("weight", "bias"), (), ())
        return
    assert outcome(source) == ""


def _named(world, source):
    return sw.load_weights(sw.parallelize(nn.Linear(2, 3), "single", world), source, names="x.")


def test_values_that_are_not_finite_are_values(tmp_path):
    save_file({**good(), "bias": torch.full((3,), float("nan"))}, str(tmp_path / "a.safetensors"))

    def load(world):
        run = sw.parallelize(made(lambda: nn.Linear(2, 3)), "dp2/zero3", world)
        sw.load_weights(run, tmp_path / "a.safetensors")
        return bool(run.state_dict()["bias"].isnan().all())

    assert sw.launch(load, 2, ranks="threads") == [True, True]


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(2, 2, bias=False)
        self.two = nn.Linear(2, 2, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(x))


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3"])
def test_two_values_for_a_tied_tensor_are_refused_and_two_equal_ones_are_not(tmp_path, line):
    weight = torch.tensor([[1.0, 2.0], [float("nan"), 4.0]])
    save_file({"one.weight": weight, "two.weight": weight.clone()}, str(tmp_path / "same.safetensors"))
    save_file({"one.weight": weight, "two.weight": weight + 1}, str(tmp_path / "other.safetensors"))

    def load(world):
        run = sw.parallelize(made(Tied), line, world)
        assert sw.load_weights(run, tmp_path / "same.safetensors").loaded == ("one.weight",)
        with pytest.raises(CheckpointError, match="two values for one tensor"):
            sw.load_weights(run, tmp_path / "other.safetensors")
        sw.load_weights(run, tmp_path / "other.safetensors", names={"one.weight": None}, strict=False)
        return run.state_dict()["one.weight"][0].tolist()

    assert sw.launch(load, 2, ranks="threads") == [[2.0, 3.0]] * 2


def test_names_that_are_wrong_are_refused_on_every_rank(tmp_path):
    save_file(good(), str(tmp_path / "a.safetensors"))

    def refused(world, names, text):
        run = sw.parallelize(made(lambda: nn.Linear(2, 3)), "dp2", world)
        with pytest.raises(CheckpointError, match=text):
            sw.load_weights(run, tmp_path / "a.safetensors", names=names, strict=False)

    def fails(name):
        raise KeyError(name)

    for names, text in [
        ({"wieght": "weight"}, "names that the model does not have"),
        (lambda name: 3, "gives no name for 'weight'"),
        (fails, "KeyError: 'weight'"),
        ("model.", "none of 2 names, such as 'bias'"),
    ]:
        sw.launch(refused, 2, names, text, ranks="threads")


def test_ranks_with_different_sources_all_raise(tmp_path):
    save_file(good(), str(tmp_path / "0.safetensors"))
    save_file({**good(), "more": torch.ones(1)}, str(tmp_path / "1.safetensors"))

    def load(world):
        run = sw.parallelize(made(lambda: nn.Linear(2, 3)), "dp2", world)
        with pytest.raises(CheckpointError, match="ranks were given different weights"):
            sw.load_weights(run, tmp_path / f"{world.rank}.safetensors", strict=False)
        with pytest.raises(CheckpointError, match="No such file"):
            sw.load_weights(run, tmp_path / f"{2 * world.rank}.safetensors")

    sw.launch(load, 2, ranks="threads")


@pytest.mark.parametrize("line", ["dp2/zero3", "pp2 mb2"])
def test_a_file_that_fails_on_one_rank_in_the_middle_raises_on_all_and_says_that_values_are_overwritten(
    tmp_path, monkeypatch, line
):
    save_file({f"{n}.{k}": v for n in "01" for k, v in good().items() if k == "bias"}, str(tmp_path / "a.safetensors"))
    read = TensorFile.read

    def fails(store, name, box):
        if name == "1.bias" and box.stop == (3,):
            raise OSError(5, "Input/output error")
        return read(store, name, box)

    monkeypatch.setattr(TensorFile, "read", fails)

    def load(world):
        model = made(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        run = sw.parallelize(model, line, world)
        with pytest.raises(CheckpointError, match="partly overwritten"):
            sw.load_weights(run, tmp_path / "a.safetensors", strict=False)

    sw.launch(load, 2, ranks="threads")
