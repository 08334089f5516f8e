"""Datasets, and the order in which a run reads their samples, which is the same under every layout.

``SampleOrder`` maps a step to the sample indices of its global batch, and each rank collates its own part of them. A
resumed run continues from the step number alone, because nothing else is stored.

T tokens, C channels, Y and X a picture's rows and columns
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shardwright.analysis.objects.marked_inputs import first_repeated
from shardwright.errors import PlanError
from shardwright.models import entry_of
from shardwright.models.convnet import ConvNetConfig
from shardwright.models.gpt import GPTConfig
from shardwright.models.settings import check_sizes
from shardwright.train.given_data import MapDataset, open_given

Split = Literal["train", "eval"]
Indices = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

EVAL_SHARE = 0.05
"""The share of a text, or of synthetic samples, that is the ``eval`` split; it is taken from the end."""

_STDLIB_BYTES = 8_000_000
_NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Dataset(Protocol):
    """The protocol of a dataset: a number of samples that are read by index, all of one shape."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def sample(self, index: int) -> tuple[Any, Any]:
        """Returns (inputs, targets) of the sample with this index, without a batch dim: tensors, or dicts of them.

        Raises: IndexError: the index is below 0, or not below the number of samples.
        """


def split_range(count: int, split: Split) -> range:
    """Returns the indices of a split of ``count`` samples: ``eval`` is the last 5 %, ``train`` the rest."""
    cut = count - round(count * EVAL_SHARE)
    return range(cut) if split == "train" else range(cut, count)


class TextTokens:
    """A dataset of the bytes of a text as tokens: windows of ``seq`` tokens, each with its next tokens as targets.

    Windows do not overlap. The source ``stdlib`` is 8 MB of the source code of Python's standard library; any other
    source is the path of a text file. ``split`` says which part of the text is read: "eval" is its last 5 %, "train"
    the rest.

    Raises: PlanError: the file cannot be read, ``seq`` is below 1, or the split is too short for one window.

    >>> text = TextTokens("stdlib", seq=8)
    >>> tokens, targets = text.sample(0)
    >>> tokens.shape, tokens.dtype, bool((tokens[1:] == targets[:-1]).all())
    (torch.Size([8]), torch.int64, True)
    """

    vocabulary = 256

    def __init__(self, source: str | Path, *, seq: int, split: Split = "train") -> None:
        self.seq = seq
        check_sizes(self, 1, "seq")
        text = _read_stdlib() if source == "stdlib" else _read_text(Path(source))
        part = split_range(len(text), split)
        self._bytes: Bytes = np.frombuffer(text[part.start : part.stop], dtype=np.uint8)
        if len(self) < 1:
            raise PlanError(
                f"the {split} split of '{source}' is shorter than one sample",
                given=f"{len(self._bytes)} bytes, seq={seq}",
                allowed=f"{seq + 1} bytes or more in each split; eval is the last {EVAL_SHARE:.0%}",
                fix="set a smaller seq, or use a longer text",
            )

    def __len__(self) -> int:
        return len(self._bytes) // (self.seq + 1)

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns (tokens, next tokens) of one window: both of shape (T,), int64."""
        check_index(index, len(self))
        start = index * (self.seq + 1)
        window = torch.from_numpy(self._bytes[start : start + self.seq + 1].astype(np.int64))
        return window[:-1], window[1:]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, which are bytes; a mark replaces those that are no UTF-8, or above 255."""
        return bytes(min(token, 255) for token in tokens).decode(errors="replace")


def _stdlib_files(folder: str) -> Iterator[str]:
    """Yields the Python files under ``folder`` in sorted order, without tests and installed packages."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NOT_READ)
        yield from (os.path.join(root, name) for name in sorted(files) if name.endswith(".py"))


@cache
def _read_stdlib() -> bytes:
    """Returns the first 8 MB of the standard library's source code, without reading more."""
    parts: list[bytes] = []
    left = _STDLIB_BYTES
    for path in _stdlib_files(sysconfig.get_path("stdlib")):
        with open(path, "rb") as file:
            parts.append(file.read(left))
        left -= len(parts[-1])
        if left <= 0:
            break
    return b"".join(parts)


def _read_text(path: Path) -> bytes:
    """Returns the bytes of a text file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise PlanError(
            f"cannot read the text '{path}'",
            given=error.strerror or str(error),
            allowed="'stdlib', or a file that can be read",
            fix="check the path",
        ) from error


class Cifar10:
    """A dataset of CIFAR-10 pictures, scaled to -1..1, and their classes, from a folder in the official binary format.

    A record is one label byte, then 3 x 32 x 32 pixel bytes. ``data_batch_*.bin`` are the ``train`` split,
    ``test_batch.bin`` is ``eval``. The files are memory-mapped; nothing is ever downloaded.

    Raises: PlanError: a missing folder or file, a file that is empty or has a part of a record, a label above 9.
    Source: https://www.cs.toronto.edu/~kriz/cifar.html
    """

    record_bytes = 1 + 3 * 32 * 32

    def __init__(self, folder: str | Path, *, split: Split = "train") -> None:
        train, test = _cifar_files(Path(folder))
        files = train if split == "train" else [test]
        self._records = [self._map(path) for path in files]
        self._starts = np.cumsum([0, *map(len, self._records)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns (picture, class) of one record: (3, 32, 32) float32 and 0-d int64."""
        check_index(index, len(self))
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        record = self._records[file][index - self._starts[file]]
        picture_CYX = torch.from_numpy(record[1:].astype(np.float32)).reshape(3, 32, 32)
        return picture_CYX / 127.5 - 1, torch.tensor(int(record[0]))

    def _map(self, path: Path) -> Bytes:
        """Returns the records of one file, (records, 3073)."""
        size = path.stat().st_size
        if size == 0 or size % self.record_bytes:
            raise PlanError(
                f"'{path.name}' is not a CIFAR-10 file, or was truncated",
                given=f"{size} bytes",
                allowed=f"a multiple of {self.record_bytes} bytes, at least one",
                fix="fetch the binary version of CIFAR-10 again",
            )
        records = np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, self.record_bytes)
        if records[:, 0].max() > 9:
            raise PlanError(
                f"'{path.name}' is not a CIFAR-10 file",
                given=f"a label of {records[:, 0].max()}",
                allowed="labels from 0 to 9",
                fix="fetch the binary version of CIFAR-10; CIFAR-100 and the Python version differ",
            )
        return records


def _cifar_files(folder: Path) -> tuple[list[Path], Path]:
    """Returns the training files, numbered from 1 without a gap, and the test file."""
    numbers = sorted(
        int(number)
        for path in folder.glob("data_batch_*.bin")
        if (number := path.stem.removeprefix("data_batch_")).isdecimal()
    )
    train = [folder / f"data_batch_{number}.bin" for number in range(1, max(numbers, default=1) + 1)]
    test = folder / "test_batch.bin"
    missing = [path.name for path in (*train, test) if not path.is_file()]
    if missing:
        exists = folder.is_dir()
        raise PlanError(
            f"'{folder}' is not a CIFAR-10 folder",
            given=f"missing: {', '.join(missing)}" if exists else "no such folder",
            allowed="a folder with data_batch_1.bin, data_batch_2.bin, ... and test_batch.bin",
            fix="unpack cifar-10-binary.tar.gz and give its folder cifar-10-batches-bin",
        )
    return train, test


class Synthetic:
    """A dataset of random samples for the built-in model that ``config`` builds, the same in every run.

    ``num_samples`` counts those of both splits.

    Raises: PlanError: ``config`` is not that of a built-in model, or ``seq`` is below 1.
    """

    def __init__(self, config: object, *, seq: int, split: Split = "train", num_samples: int = 1024) -> None:
        entry = entry_of(config)
        if entry is None:
            raise PlanError(
                "there are no synthetic samples for this model",
                given=f"a config of type {type(config).__name__}",
                allowed="the config of a named model",
                fix="name a text file or a CIFAR-10 folder",
            )
        self.config, self.entry, self.seq = config, entry, seq
        check_sizes(self, 1, "seq")
        self.indices = split_range(num_samples, split)

    def __len__(self) -> int:
        return len(self.indices)

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns (inputs, targets) of one random sample from the model's ``example_batch``.

        It is seeded by the sample's index in the whole dataset, so that training and evaluation share no sample.
        """
        check_index(index, len(self))
        generator = torch.Generator().manual_seed(self.indices[index])
        inputs, targets = self.entry.example_batch(self.config, 1, self.seq, generator)
        return inputs[0], targets[0]


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The sample indices of each step's global batch: every sample once per epoch, reshuffled every epoch.

    The last batch of an epoch holds the remaining samples. The order depends only on the fields (number of samples,
    batch size, seed) and the step.

    Raises: PlanError: ``num_samples`` or ``batch_size`` is below 1.

    >>> order = SampleOrder(num_samples=5, batch_size=2, seed=0)
    >>> order.num_steps_per_epoch, [len(order.batch(step)) for step in range(4)]
    (3, [2, 2, 1, 2])
    >>> sorted(int(index) for step in range(3) for index in order.batch(step))
    [0, 1, 2, 3, 4]
    """

    num_samples: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        check_sizes(self, 1, "num_samples", "batch_size")

    @property
    def num_steps_per_epoch(self) -> int:
        """The number of batches (steps) in an epoch; the last one may be smaller."""
        return -(-self.num_samples // self.batch_size)

    def batch(self, step: int) -> Indices:
        """Returns the sample indices of the global batch of ``step``, which is counted from 0 across epochs."""
        assert step >= 0, step
        epoch, place = divmod(step, self.num_steps_per_epoch)
        start = place * self.batch_size
        return epoch_order(self.num_samples, self.seed, epoch)[start : start + self.batch_size].copy()


@lru_cache(maxsize=8)  # every step of an epoch needs the same permutation, and ranks that are threads share the cache
def epoch_order(num_samples: int, seed: int, epoch: int) -> Indices:
    """Returns a random permutation of the samples (read-only) that depends only on seed and epoch.

    It sorts raw words of a counter-based generator, because numpy keeps those the same in every version but does not
    promise the same of ``permutation``.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)  # a list of both would pass through floats
    words = np.random.Philox(key=key).random_raw(num_samples)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def global_batch(dataset: Dataset, indices: Sequence[int] | Indices) -> tuple[Any, Any]:
    """Returns (inputs, targets) of the samples with these indices, stacked in dim 0; without indices, dim 0 has size 0.

    A dataset with a ``collate`` of its own makes the batch by it.

    Raises: IndexError: an index that the dataset does not have. PlanError: samples have different shapes or parts.
    """
    if collates(dataset) and len(indices):
        return dataset.batch([int(index) for index in indices])
    samples = [dataset.sample(int(index)) for index in indices] or [dataset.sample(0)]
    if len(indices) == 0:
        empty: tuple[Any, Any] = tree_map(lambda leaf: leaf.new_empty((0, *leaf.shape)), samples[0])
        return empty
    try:
        stacked: tuple[Any, Any] = tree_map(lambda *leaves: torch.stack(leaves), *samples)
    except (RuntimeError, ValueError, TypeError) as failure:  # from torch, and from pytree if dicts have other keys
        shapes = list(dict.fromkeys(str(tree_map(lambda leaf: list(leaf.shape), sample)) for sample in samples))
        raise PlanError(
            "the samples of a batch have different shapes",
            given=" and ".join(shapes[:2]) if len(shapes) > 1 else str(failure).splitlines()[0],
            allowed="samples of one shape, with the same parts",
            fix="pad or cut them in the dataset: tokenizer(text, padding='max_length', truncation=True); or give it a "
            "method collate(samples) that pads a batch",
        ) from failure
    return stacked


def collates(dataset: Dataset) -> TypeGuard[MapDataset]:
    """Returns whether a dataset makes batches by a ``collate`` of its own, which is given all samples of a batch.

    Padding to the longest sample, for instance, then does not depend on how ranks share a batch.
    """
    return isinstance(dataset, MapDataset) and dataset.collate is not None


def first_sample_repeated(dataset: Dataset, number: int) -> tuple[Any, Any]:
    """Returns a batch (inputs, targets) of ``number`` samples, each the first of a dataset: for planning alone.

    >>> first_sample_repeated(MapDataset([(torch.ones(3), 1)], range(1), "mine:data"), 4)[0].shape
    torch.Size([4, 3])
    """
    return first_repeated(global_batch(dataset, range(1)), number)


def check_index(index: int, num_samples: int) -> None:
    """Raises IndexError unless ``index`` is from 0 to ``num_samples`` - 1."""
    if not 0 <= index < num_samples:
        raise IndexError(f"sample {index} of {num_samples}: they count from 0")


def is_factory(name: str) -> bool:
    """Returns whether ``--data`` names a factory, ``package.module:factory``, and no file or folder.

    >>> is_factory("mine.data:dataset"), is_factory("wiki.txt")
    (True, False)
    """
    return ":" in name and not Path(name).exists()


def open_data(name: str, *, seq: int, model: object, split: Split = "train") -> Dataset:
    """Returns the dataset that ``--data`` names, for the model that the config ``model`` builds.

    ``name`` is ``stdlib``, ``synthetic``, a text file, a CIFAR-10 folder, or a factory of a map-style dataset,
    ``package.module:factory`` (:func:`~shardwright.train.given_data.open_given`). ``stdlib`` is the default, so for a
    built-in model that does not read text it gives synthetic samples. For a model without a known config, text and
    pictures are not checked to fit, and there are no synthetic samples.

    Raises: PlanError: no such data, data that the model cannot read or that are damaged, too little text for a sample,
        or a ``seq`` that is below 1 or more than the model's learned positions.

    >>> len(open_data("synthetic", seq=8, model=GPTConfig()).sample(0)[0])
    8
    >>> open_data("wiki.txt", seq=8, model=GPTConfig())
    Traceback (most recent call last):
    shardwright.errors.PlanError: there is no data 'wiki.txt'
      given:   neither a file nor a folder
      allowed: stdlib, synthetic, a text file, a CIFAR-10 folder, package.module:factory
      fix:     check the path, or leave it out to use stdlib
    """
    path = Path(name)
    if is_factory(name):
        return open_given(name, split)
    reads_text = isinstance(model, GPTConfig)
    known = entry_of(model) is not None
    if isinstance(model, GPTConfig) and model.style == "gpt2" and seq > model.max_tokens:
        raise PlanError(
            "the samples are longer than the model's learned positions",
            given=f"seq={seq}, max_tokens={model.max_tokens}",
            allowed=f"seq from 1 to {model.max_tokens}",
            fix=f"set seq={model.max_tokens}, or max_tokens={seq}",
        )
    if name == "synthetic" or (name == "stdlib" and known and not reads_text):
        return Synthetic(model, seq=seq, split=split)
    if name == "stdlib" or path.is_file():
        fits = isinstance(model, GPTConfig) and model.vocabulary >= TextTokens.vocabulary
        _check_fits(name, "bytes of text", model, fits=fits or not known)
        return TextTokens(name, seq=seq, split=split)
    if path.is_dir():
        fits = isinstance(model, ConvNetConfig) and model.reads_cifar10
        _check_fits(name, "3 x 32 x 32 pictures of 10 classes", model, fits=fits or not known)
        return Cifar10(path, split=split)
    raise PlanError(
        f"there is no data '{name}'",
        given="neither a file nor a folder",
        allowed="stdlib, synthetic, a text file, a CIFAR-10 folder, package.module:factory",
        fix="check the path, or leave it out to use stdlib",
    )


ENDS_BYTES = 2**20
"""The bytes at the beginning and at the end of each file that :func:`fingerprint` reads."""


def fingerprint(name: str) -> dict[str, list[Any]]:
    """Returns a fingerprint of the data, to detect changes: by file name, [size in bytes, SHA-256 of its two ends].

    The ends are the first and the last MiB of a file. ``name`` is that of :func:`open_data`. The source ``stdlib``
    counts as one file, and synthetic samples and a user's own dataset have no files.

    Raises: PlanError: a folder is not a CIFAR-10 folder. OSError: a file cannot be read.

    >>> fingerprint("synthetic")
    {}
    """
    path = Path(name)
    if path.is_dir():
        train, test = _cifar_files(path)
        return {file.name: _ends(file) for file in (*train, test)}
    if name == "stdlib":
        text = _read_stdlib()
        return {name: [len(text), hashlib.sha256(text[:ENDS_BYTES] + text[-ENDS_BYTES:]).hexdigest()]}
    return {} if name == "synthetic" or is_factory(name) else {name: _ends(path)}


def _ends(path: Path) -> list[Any]:
    with path.open("rb") as file:
        size, first = path.stat().st_size, file.read(ENDS_BYTES)
        file.seek(max(size - ENDS_BYTES, 0))
        return [size, hashlib.sha256(first + file.read(ENDS_BYTES)).hexdigest()]


def _check_fits(name: str, kind: str, model: object, *, fits: bool) -> None:
    """Raises PlanError with the kind of the data and the model, unless ``fits``."""

    if not fits:
        raise PlanError(
            f"this model cannot read '{name}'",
            given=f"{kind}, for {model}",
            allowed=f"text: gpt with vocabulary={TextTokens.vocabulary} or more; CIFAR-10: convnet",
            fix="use synthetic data, or a model that fits",
        )
