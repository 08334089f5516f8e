"""The reader and the writer of safetensors files beside safetensors' own."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardwright.errors import CheckpointError
from shardwright.sharding.box import Box
from shardwright.weights import targets, torch_records
from shardwright.weights.safetensors_file import DTYPES, TensorFile
from shardwright.weights.targets import WeightEntry, write_safetensors


def filled(shape, dtype):
    return torch.randint(0, 2, tuple(shape), generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@given(data=st.data(), least=st.sampled_from([0, 2**10]))
def test_any_box_of_any_tensor_has_the_values_of_the_whole_tensor(tmp_path_factory, data, least):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    stop = tuple(data.draw(st.integers(a + 1, size)) for a, size in zip(start, shape, strict=True))
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    path = tmp_path_factory.mktemp("box") / "one.safetensors"
    save_file({"before": torch.ones(3), "x": tensor}, str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_records, "LEAST_RUN_BYTES", least)
        store = TensorFile(path)
        assert torch.equal(store.read("x", Box(start, stop)), tensor[Box(start, stop).slices])
    if not least:
        assert store.file.num_read_bytes - store._start == 4 * Box(start, stop).size


def test_every_dtype_is_written_and_read_as_safetensors_does(tmp_path):
    tensors = {name: filled((3, 2), dtype) for name, dtype in DTYPES.items()}
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(2.5, dtype=torch.bfloat16)}
    table = [WeightEntry((name, f"{name} too"), t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    write_safetensors(tmp_path / "ours.safetensors", table, zip(table, tensors.values(), strict=True))
    save_file(tensors, str(tmp_path / "theirs.safetensors"))
    found = load_file(tmp_path / "ours.safetensors")
    store = TensorFile(tmp_path / "theirs.safetensors")
    for name, tensor in tensors.items():
        for each in (found[name], store.read(name, Box.of(tensor.shape))):
            assert (each.dtype, each.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(each.contiguous().view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": targets._OURS, **{f"{name} too": name for name in tensors}}


def header(text: str, rest: bytes = b"\0" * 8) -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode() + rest


ENTRY = '"{}":{{"dtype":"{}","shape":{},"data_offsets":{}}}'
F32 = ENTRY.format("x", "F32", [2], [0, 8])
BROKEN = {
    "an empty file": b"",
    "seven bytes": b"\0" * 7,
    "a header longer than the file": (2**40).to_bytes(8, "little") + b"{}",
    "no JSON": header("{nothing", b""),
    "JSON of another kind": header("[1]", b""),
    "a number with thousands of digits": header('{"x":' + "1" * 9999 + "}"),
    "JSON in JSON": header("[" * 5000),
    "a name twice": header("{" + F32 + "," + F32 + "}"),
    "a dtype that torch does not have": header("{" + ENTRY.format("x", "F4", [2], [0, 8]) + "}"),
    "a shape with a negative size": header("{" + ENTRY.format("x", "F32", [-2], [0, 8]) + "}"),
    "a shape with a fraction": header("{" + ENTRY.format("x", "F32", [2.0], [0, 8]) + "}"),
    "a shape of other bytes": header("{" + ENTRY.format("x", "F32", [3], [0, 8]) + "}"),
    "a shape beyond all memory": header("{" + ENTRY.format("x", "F32", [2**62, 4], [0, 8]) + "}"),
    "an offset before the start": header("{" + ENTRY.format("x", "F32", [2], [-8, 0]) + "}"),
    "two tensors in one place": header("{" + F32 + "," + ENTRY.format("y", "F32", [2], [0, 8]) + "}"),
    "two tensors in one place of a file with room for both": header(
        "{" + F32 + "," + ENTRY.format("y", "F32", [2], [0, 8]) + "}", b"\0" * 16
    ),
    "a gap": header("{" + F32 + "," + ENTRY.format("y", "F32", [2], [9, 17]) + "}", b"\0" * 17),
    "bytes too many": header("{" + F32 + "}", b"\0" * 9),
    "a truncated tensor": header("{" + F32 + "}", b"\0" * 7),
    "an entry without a dtype": header('{"x":{"shape":[2],"data_offsets":[0,8]}}'),
    "an entry that is a text": header('{"x":"y"}'),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_not_what_its_header_says_is_refused(tmp_path, what):
    (tmp_path / "broken.safetensors").write_bytes(BROKEN[what])
    with pytest.raises(CheckpointError, match="there are no weights to read"):
        TensorFile(tmp_path / "broken.safetensors")


def test_a_complete_file_of_the_same_kind_is_read(tmp_path):
    (tmp_path / "whole.safetensors").write_bytes(header('{"__metadata__":{"a":"b"},' + F32 + "}"))
    store = TensorFile(tmp_path / "whole.safetensors")
    assert store.read("x", Box((0,), (2,))).tolist() == [0.0, 0.0]
    store.end()


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error_and_does_not_end_the_process(tmp_path):
    path = tmp_path / "short.safetensors"
    save_file({"x": torch.ones(2**16)}, str(path))
    store = TensorFile(path)
    with path.open("r+b") as file:
        file.truncate(2**17)
    with pytest.raises(CheckpointError, match=r"it ends 131\d\d\d bytes too early"):
        store.read("x", Box((0,), (2**16,)))


def test_a_file_that_is_written_to_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "same.safetensors"
    save_file({"x": torch.ones(4)}, str(path))
    store = TensorFile(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(0, 1))  # the clock of files may stand still for some milliseconds
    with pytest.raises(CheckpointError, match="it was written to"):
        store.end()
