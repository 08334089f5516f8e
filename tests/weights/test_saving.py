"""What is written is read by torch, safetensors and torch.distributed.checkpoint, whole, whatever the layout."""

from __future__ import annotations

import errno
import json
import os
import resource
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardwright as sw
from shardwright.errors import CheckpointError, PlanError
from shardwright.layout import Layout
from shardwright.weights import targets
from weights.plain_models import LAYOUTS, Normed, made, same, tied_gpt, with_values


def read_back(path):
    """The tensors of a file or folder, by the reader of the library that the format belongs to."""
    if (path / ".metadata").exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of a load by one process
            dcp_to_torch_save(path, path.parent / "joined.pt")
            joined = torch.load(path.parent / "joined.pt", weights_only=True)
            found = {name: torch.empty_like(tensor) for name, tensor in joined.items()}
            dcp.load(found, checkpoint_id=str(path), no_dist=True)
        assert same(found, joined)
        return found
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


TO = {"a.safetensors": None, "a.pt": None, "folder": None, "dcp": "dcp"}


def _write(world, line, folder):
    run = sw.parallelize(tied_gpt(values=True), line, world)
    return [sw.save_weights(run, folder / to, format=kind, max_file_bytes=1500) for to, kind in TO.items()]


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", LAYOUTS)
def test_every_format_has_the_plain_model_to_the_bit_and_a_plain_model_loads_it(tmp_path, line):
    outcomes = sw.launch(_write, Layout.parse(line), line, tmp_path, ranks="threads")
    assert all(each == outcomes[0] for each in outcomes)
    plain = tied_gpt(values=True).state_dict()
    once = {name: tensor for name, tensor in plain.items() if name != "head.weight"}
    for to, saved in zip(TO, outcomes[0], strict=True):
        expected = plain if to in ("a.pt", "dcp") else once
        assert same(read_back(tmp_path / to), expected), to
        assert sorted(saved.names) == sorted(expected)
        assert {file.name for file in saved.files} == (
            {path.name for path in (tmp_path / to).iterdir()} if (tmp_path / to).is_dir() else {to}
        )
        assert saved.num_bytes == sum(tensor.nbytes for tensor in once.values())
    model = tied_gpt(values=False).to_empty(device="cpu")
    model.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True))
    assert same(model.state_dict(), plain)
    assert load_model(tied_gpt(values=True), tmp_path / "a.safetensors") == (set(), [])
    tied = torch.load(tmp_path / "a.pt", weights_only=True)
    assert tied["head.weight"].data_ptr() == tied["token.weight"].data_ptr()
    index = json.loads((tmp_path / "folder" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == saved.num_bytes
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "folder" / file, "pt") as content:
            assert name in content.keys()  # noqa: SIM118  # it is no dict
            assert len(content.keys()) == 1 or sum(load_file(tmp_path / "folder" / file)[n].nbytes for n in content.keys()) <= 1500  # fmt: skip  # noqa: E501, SIM118


def test_a_tied_tensor_of_a_dcp_folder_is_stored_once(tmp_path):
    sw.launch(_write, 1, "single", tmp_path, ranks="threads")
    size = sum(path.stat().st_size for path in (tmp_path / "dcp").glob("*.distcp"))
    sw.save_weights(tmp_path / "dcp", tmp_path / "untied", format="dcp")
    assert sum(path.stat().st_size for path in (tmp_path / "untied").glob("*.distcp")) > size + 19 * 12 * 4


def test_a_folder_that_fits_in_one_file_has_no_index(tmp_path):
    def write(world):
        return sw.save_weights(sw.parallelize(made(Normed), "dp2", world, loss=sw.MeanSquaredError()), tmp_path / "one")

    for saved in sw.launch(write, 2, ranks="threads"):
        assert [file.name for file in saved.files] == ["model.safetensors"]
        assert "last.weight" not in saved.names
        assert "norm.running_mean" in saved.names
        assert "passing" not in saved.names


def test_names_and_dtype_of_what_is_written_can_be_chosen(tmp_path):
    torch.save(with_values(Normed()).state_dict(), tmp_path / "a.pt")
    renamed = {"first.weight": "w", "norm.num_batches_tracked": None}
    saved = sw.save_weights(tmp_path / "a.pt", tmp_path / "b.pt", names=renamed, dtype=torch.bfloat16, model=Normed())
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert found.keys() == set(saved.names)
    assert {"w", "last.weight", "first.bias"} <= found.keys()
    assert "norm.num_batches_tracked" not in found
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert found["w"].data_ptr() == found["last.weight"].data_ptr(), "the model says that they are tied"


@pytest.mark.parametrize("to", ["b.safetensors", "b.pt", "folder", "dcp"])
def test_files_of_one_kind_become_files_of_another(tmp_path, to):
    state = with_values(Normed()).state_dict()
    torch.save(state, tmp_path / "a.pt")
    sw.save_weights(tmp_path / "a.pt", tmp_path / to, format=TO.get(to))
    assert same(read_back(tmp_path / to), state)


# ---- what cannot be written


def _refused(world, to, text, options):
    run = sw.parallelize(made(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), "dp2/zero3", world)
    with pytest.raises((CheckpointError, PlanError), match=text):
        sw.save_weights(run, to, **options)


def _refused_early_and_late(world, to, text, options):
    _refused(world, to, text, options | {"check_only": True})
    _refused(world, to, text, options)


REFUSED = {
    "a device": ("/dev/null", "cannot write '/dev/null'", {"format": "pt"}),
    "a folder for a file": (".", "a folder", {"format": "pt"}),
    "a folder with files": (".", "a folder with files of another kind, such as 'file'", {}),
    "a file for a folder": ("file", "a file", {}),
    "a link": ("link", "a link", {}),
    "a place under a file": ("file/x/y", "cannot write", {}),
    "no config": ("new", "needs a config", {"format": "transformers"}),
    "a config of nothing": ("new", "without a 'model_type'", {"format": "transformers", "config": {"a": 1}}),
    "no such format": ("new", "no such format", {"format": "gguf"}),
    "a format with a typing error": (
        "new",
        "allowed: safetensors, transformers, pt, dcp\n.*=safetensors",
        {"format": "safetensor"},
    ),
    "no dtype": ("new", "no floating-point dtype", {"dtype": torch.int8}),
    "no room": ("new", "too small", {"max_file_bytes": 0}),
    "one name for two": ("new", "two tensors would have one name", {"names": lambda name: "x"}),
    "names that fail": ("new", "ZeroDivisionError", {"names": lambda name: str(1 / 0)}),
    "a dtype that safetensors lacks": ("new", "safetensors cannot hold", {"dtype": torch.float8_e4m3fnuz}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_written_is_one_error_on_every_rank_and_leaves_nothing(tmp_path, what):
    to, text, options = REFUSED[what]
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("file")
    sw.launch(_refused_early_and_late, 2, tmp_path / to, text, options, ranks="threads")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("line", ["dp2/zero3", "pp2 mb2"])
@pytest.mark.parametrize("to", TO)
def test_a_check_before_the_first_step_writes_nothing_and_says_what_will_be_written(tmp_path, to, line):
    def work(world):
        run = sw.parallelize(tied_gpt(values=True), line, world)
        checked = sw.save_weights(run, tmp_path / "out" / to, format=TO[to], check_only=True)
        left = list((tmp_path / "out").iterdir()) if world.rank == 0 else []
        return checked, sw.save_weights(run, tmp_path / "out" / to, format=TO[to]), left

    for checked, saved, left in sw.launch(work, 2, ranks="threads"):
        assert (checked.files, *checked[1:]) == ((), *saved[1:])
        assert left == []


def test_a_disk_without_room_is_told_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(targets.shutil, "disk_usage", lambda _: targets.shutil._ntuple_diskusage(1, 1, 0))
    sw.launch(_refused, 2, tmp_path / "new", "No space left", {"check_only": True}, ranks="threads")
    sw.launch(_refused, 2, tmp_path / "a.pt", "No space left", {"check_only": True}, ranks="threads")


@pytest.mark.parametrize("to", TO)
def test_a_full_disk_is_one_error_on_every_rank_and_leaves_no_half_file(tmp_path, to):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, before[1]))  # a file that is longer cannot be written
    try:
        sw.launch(_refused, 2, tmp_path / to, "cannot write|could not be written", {"format": TO[to]}, ranks="threads")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_after_the_first_file_leaves_no_folder(tmp_path, monkeypatch):
    written = []
    write = targets._write_file

    def fills_up(path, *rest):
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path)
        write(path, *rest)

    monkeypatch.setattr(targets, "_write_file", fills_up)
    sw.launch(_refused, 2, tmp_path / "new", "No space left", {"max_file_bytes": 8}, ranks="threads")
    assert written
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_file_stays_if_a_later_one_cannot_be_written(tmp_path, monkeypatch):
    def write(world):
        sw.save_weights(sw.parallelize(made(lambda: nn.Linear(4, 4)), "dp2", world), tmp_path / "a.safetensors")

    sw.launch(write, 2, ranks="threads")
    before = (tmp_path / "a.safetensors").read_bytes()
    monkeypatch.setattr(targets, "write_values", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    sw.launch(_refused, 2, tmp_path / "a.safetensors", "cannot write", {}, ranks="threads")
    assert (tmp_path / "a.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_an_earlier_folder_of_weights_is_replaced_whole_and_one_with_other_files_is_left(tmp_path):
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "a.pt")
    for most in (8, 10**9, 8):  # several files, one, and several again: none of the earlier ones may stay
        saved = sw.save_weights(tmp_path / "a.pt", tmp_path / "to", max_file_bytes=most)
        assert sorted(saved.files) == sorted((tmp_path / "to").iterdir())
    sw.save_weights(tmp_path / "a.pt", tmp_path / "to", format="dcp")
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == [".metadata", "__0_0.distcp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "to"]
    (tmp_path / "to" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"such as 'notes.txt'"):
        sw.save_weights(tmp_path / "a.pt", tmp_path / "to")
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == [".metadata", "__0_0.distcp", "notes.txt"]


def test_a_source_that_changes_while_it_is_written_elsewhere_leaves_no_file(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "a.pt")
    write = targets.write_values

    def touched(*given):
        os.utime(tmp_path / "a.pt", ns=(0, 1))
        write(*given)

    monkeypatch.setattr(targets, "write_values", touched)
    with pytest.raises(CheckpointError, match="it was written to"):
        sw.save_weights(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_config_and_a_tokenizer_are_replaced_only_by_others(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    folder = tmp_path / "llama"
    for _ in range(2):  # the second time over its own kind
        sw.save_weights(tmp_path / "a.pt", folder, format="transformers", config=config)
    for format in ("safetensors", "dcp"):
        with pytest.raises(CheckpointError, match=r"such as 'config\.json'"):
            sw.save_weights(tmp_path / "a.pt", folder, format=format)
    (folder / "tokenizer.json").write_text("mine")
    with pytest.raises(CheckpointError, match=r"such as 'tokenizer\.json'"):
        sw.save_weights(tmp_path / "a.pt", folder, format="transformers", config=config)
    assert (folder / "tokenizer.json").read_text() == "mine"
    with pytest.raises(CheckpointError, match="what was read from there"):
        sw.save_weights(tmp_path / "a.pt", folder, format="transformers", config=folder)
    sw.save_weights(tmp_path / "a.pt", folder, format="transformers", config=folder, force=True)
    assert (folder / "tokenizer.json").read_text() == "mine"


@pytest.mark.parametrize("kind", ["transformers", "safetensors", "dcp"])
def test_weights_of_another_program_are_not_replaced_but_by_force(tmp_path, kind):
    torch.save({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, tmp_path / "a.pt")
    folder, config = tmp_path / "pretrained", {"model_type": "llama"}
    if kind == "dcp":
        with warnings.catch_warnings(action="ignore"):  # of torch, that there is one process
            dcp.save({"weight": torch.zeros(2)}, checkpoint_id=folder, no_dist=True)
    else:
        folder.mkdir()
        save_file({"weight": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    options = {"format": kind, "config": config}
    with pytest.raises(CheckpointError, match=r"would be replaced[\s\S]*force=True"):
        sw.save_weights(tmp_path / "a.pt", folder, **options)
    sw.launch(_refused, 2, folder, "which shardwright has not written", options, ranks="threads")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    sw.save_weights(tmp_path / "a.pt", folder, **options, force=True)
    sw.save_weights(tmp_path / "a.pt", folder, **options)  # now it is this library's own


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.bin"])
def test_a_single_file_of_another_program_is_not_replaced_but_by_force(tmp_path, name):
    torch.save({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, tmp_path / "a.pt")
    file, theirs = tmp_path / name, {"weight": torch.zeros(2)}
    if file.suffix == ".safetensors":
        save_file(theirs, file, {"format": "pt"})
    else:
        torch.save(theirs, file)
    before = file.read_bytes()
    with pytest.raises(CheckpointError, match=r"would be replaced[\s\S]*which shardwright has not written"):
        sw.save_weights(tmp_path / "a.pt", file)
    sw.launch(_refused, 2, file, "which shardwright has not written", {}, ranks="threads")
    assert file.read_bytes() == before
    sw.save_weights(tmp_path / "a.pt", file, force=True)
    sw.save_weights(tmp_path / "a.pt", file)  # now it is this library's own
    if file.suffix != ".safetensors":
        for options in ({}, {"mmap": True}):
            found = torch.load(file, weights_only=True, **options)
            assert [*found] == ["weight", "bias"]
            assert torch.equal(found["weight"], torch.ones(4, 4))
    file.write_bytes(b"")
    sw.save_weights(tmp_path / "a.pt", file)  # an empty file has nothing to lose


def test_what_a_run_was_filled_from_is_not_replaced_but_by_force(tmp_path):
    torch.save({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, tmp_path / "a.pt")
    for first in ("first", "first.pt"):
        sw.save_weights(tmp_path / "a.pt", tmp_path / first)
    plain = nn.Linear(4, 4)

    def work(world):
        run = sw.parallelize(plain, "dp2", world)
        for source in (tmp_path / "first", tmp_path / "first.pt"):
            sw.load_weights(run, source)
            with pytest.raises(CheckpointError, match="what was read from there"):
                sw.save_weights(run, source)
        for _ in range(2):
            sw.save_weights(run, tmp_path / "second")
        sw.save_weights(run, tmp_path / "first", force=True)

    sw.launch(work, 2, ranks="threads")
