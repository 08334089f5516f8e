"""The checkpoint format: the files of a checkpoint folder, the manifest that lists them, and the checks of both.

::

    run/ckpt/
        step-00000100/
            manifest.json              every tensor's shape, and which part of it is stored in which file
            part-00000.safetensors     the parts of tensors that rank 0 wrote
            part-00001.safetensors
        .tmp-.../                      being written, or left by a killed run: never read

A checkpoint is complete exactly when its folder has its final name, which one rename gives it last. It contains no
pickle, so opening a checkpoint runs no code; ``schema.py`` says what a manifest may contain.

Versions of the format, which every later version can read:

1. The first. It has no checksum of the manifest.
2. The last entry of the manifest is the SHA-256 of all text before that entry. Every later version keeps this entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from shardwright.checkpoint.schema import check_schema
from shardwright.comm.agreement import first_problem, gather_json
from shardwright.comm.axis import Axis
from shardwright.errors import CheckpointError
from shardwright.sharding.box import Box
from shardwright.text_files import read_text

FORMAT = "shardwright-checkpoint"
VERSION = 2
MANIFEST = "manifest.json"

MOST_BYTES = 2**30
"""The size in bytes up to which a manifest is read; a larger one is refused."""

_SIGN = ',\n "sha256": "'
"""The text between a manifest's text and the checksum of that text."""

_STEP = re.compile(r"step-([0-9]+)(\.old)?")

T = TypeVar("T")


@dataclass(frozen=True)
class StoredBox:
    """The place of one box (a range of every dim) of a tensor in a checkpoint: a file, and a key in it."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``: the tensors of a checkpoint by global name, whatever layout wrote them.

    ``step`` is the number of steps taken, ``layout`` the line of the layout that wrote the checkpoint ("" for global
    tensors), and ``seed`` the run's seed of random numbers. ``tensors`` maps a name to (dtype, shape, places of the
    tensor's parts in files); model tensors are named as in the plain model, optimizer state is named
    ``optimizer/<parameter>/<key>``. ``files`` maps a name to (bytes, SHA-256). ``scalars`` holds the optimizer state
    that does not have its parameter's shape, such as step counts, by parameter and key, as pairs (dtype or "", value);
    the fp16 loss scale is there too. ``groups`` are the optimizer's param groups, and ``optimizer`` is its class's
    name, "" without one. ``extra`` is the user's data. ``frozen`` names the parameters that were not trained.
    """

    step: int
    layout: str
    seed: int
    tensors: Mapping[str, tuple[str, tuple[int, ...], tuple[StoredBox, ...]]]
    files: Mapping[str, tuple[int, str]]
    optimizer: str
    scalars: Mapping[str, Mapping[str, Any]]
    groups: tuple[Mapping[str, Any], ...]
    extra: Mapping[str, Any]
    frozen: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Returns the manifest as the text of ``manifest.json``."""
        tensors = {
            name: {
                "dtype": dtype,
                "shape": shape,
                "pieces": [[list(s.box.start), list(s.box.stop), s.file, s.key] for s in stored],
            }
            for name, (dtype, shape, stored) in self.tensors.items()
        }
        files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        head = {"format": FORMAT, "version": VERSION, "step": self.step, "layout": self.layout, "seed": self.seed}
        state = {"optimizer": self.optimizer, "scalars": self.scalars, "groups": self.groups, "extra": self.extra}
        state |= {"frozen": list(self.frozen)} if self.frozen else {}
        return signed(json.dumps({**head, **state, "files": files, "tensors": tensors}, indent=1))

    @staticmethod
    def from_json(text: str, path: Path) -> Manifest:
        """Returns the manifest in ``text``, the text of ``manifest.json``; ``path`` is the checkpoint, for errors.

        Raises: CheckpointError: the text is of another format, of a newer version, or broken.
        """
        try:
            content = json.loads(_checked(text))
            if isinstance(content, dict) and content.get("format") != FORMAT:
                raise _foreign(path, f"a manifest of format {content.get('format')!r:.80}")
            version = content.get("version") if isinstance(content, dict) else None
            if isinstance(version, int) and version > VERSION:
                raise CheckpointError(
                    f"'{path}' was written by a newer shardwright",
                    given=f"version {version}",
                    allowed=f"versions up to {VERSION}",
                    fix="upgrade shardwright",
                )
            if _SIGN not in text and (version != 1 or version is True):
                raise ValueError("no checksum at its end")
            check_schema(content)
        except CheckpointError:
            raise
        except (ValueError, TypeError, RecursionError) as failure:
            raise _broken(path, f"{MANIFEST}: {failure}") from failure
        tensors = {
            name: (
                entry["dtype"],
                tuple(entry["shape"]),
                tuple(StoredBox(Box(tuple(a), tuple(b)), file, key) for a, b, file, key in entry["pieces"]),
            )
            for name, entry in content["tensors"].items()
        }
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()}
        return Manifest(
            content["step"], content["layout"], content["seed"], tensors, files,
            content["optimizer"], content["scalars"], tuple(content["groups"]), content["extra"],
            tuple(content.get("frozen", ())),
        )  # fmt: skip


def signed(text: str) -> str:
    """Returns the JSON ``text`` of a manifest with the text's checksum added as the last entry.

    >>> print(signed('{"step": 3\\n}')[:30])
    {"step": 3,
     "sha256": "b3d60a
    """
    body = text.removesuffix("\n}")
    return f'{body}{_SIGN}{hashlib.sha256(body.encode()).hexdigest()}"\n}}'


def _checked(text: str) -> str:
    """Returns a manifest's text without its checksum, if it has one. Raises ValueError if the two do not match."""
    body, sign, _ = text.rpartition(_SIGN)
    if sign and signed(f"{body}\n}}") != text:
        raise ValueError("it does not match its checksum")
    return f"{body}\n}}" if sign else text


def steps_in(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, sorted by step.

    ``step-N.old``, the earlier checkpoint of a step that is saved again, is returned only while ``step-N`` is missing.
    """
    paths = {path.parent.name: path.parent for path in folder.glob(f"step-*/{MANIFEST}") if path.is_file()}
    steps = {path: _STEP.fullmatch(name) for name, path in paths.items()}
    newest = [(int(n[1]), path) for path, n in steps.items() if n and not (n[2] and path.stem in paths)]
    return [path for _, path in sorted(newest)]


def find(path: Path) -> Path:
    """Returns ``path`` if it is a checkpoint, else the newest complete checkpoint in that folder.

    Raises: CheckpointError: there is no complete checkpoint.
    """
    if (path / MANIFEST).is_file():
        return path
    if checkpoints := steps_in(path):
        return checkpoints[-1]
    if not path.exists():
        raise CheckpointError(
            f"there is no checkpoint at '{path}'",
            given="a path that does not exist",
            allowed="a checkpoint, or the folder of a run that saved one",
            fix="look for folders named step-*; in Python give sw.load the folder that sw.save was given, or leave it "
            "out in a new run; start the command without --resume",
        )
    raise _foreign(path, "no manifest in it")


def find_on_all(everyone: Axis, path: Path) -> Path:
    """Returns the checkpoint that rank 0 finds with :func:`find`, on every rank, so that all load the same step.

    Every rank calls this function. If each rank searched for itself, a save that renames its folder at that moment
    could make two ranks find different steps.

    Traffic: all-gathers of short texts.
    Raises: CheckpointError, on every rank: there is no complete checkpoint.
    """
    name = on_all(everyone, path, lambda: str(find(path).relative_to(path)) if everyone.index == 0 else "")
    return Path(path, gather_json(everyone, name)[0])


def read(path: Path) -> Manifest:
    """Returns the manifest of the checkpoint folder ``path``.

    Raises: CheckpointError: the manifest is missing or broken, or is not one of this library's.
    """
    try:
        return Manifest.from_json(read_text(path / MANIFEST, MOST_BYTES, pipes=False), path)
    except (OSError, UnicodeDecodeError) as failure:
        raise _foreign(path, str(failure)) from failure


def check_files(path: Path, manifest: Manifest, names: set[str]) -> None:
    """Raises CheckpointError unless the checkpoint files ``names`` have the size and checksum that the manifest lists.

    Symbolic links, devices and whatever else is no regular file are refused before any file is opened.
    """
    sizes = {}
    for name in sorted(names):
        with contextlib.suppress(FileNotFoundError):
            status = (path / name).lstat()
            if not stat.S_ISREG(status.st_mode):
                raise _broken(path, f"{name} is no regular file")
            sizes[name] = status.st_size
    for name in sorted(names):
        size, digest = manifest.files[name]
        if sizes.get(name) != size:
            what = f"has {sizes[name]} bytes" if name in sizes else "is missing"
            raise _broken(path, f"{name} {what}, {size} were written")
        if checksum(path / name) != digest:
            raise _broken(path, f"{name} does not match its checksum")


def on_all(everyone: Axis, path: Path, do: Callable[[], T]) -> T:
    """Runs ``do`` on every rank and returns its result; if it fails on one rank, all ranks raise.

    ``do`` reads the checkpoint at ``path``, and calls no collective. Every rank of ``everyone`` calls this function.

    Traffic: two all-gathers, of the lengths of error texts and of the texts.
    Raises: CheckpointError, on every rank, if ``do`` raised on any.
    """
    result, problem = None, ""
    try:
        with reading(path):
            result = do()
    except CheckpointError as failure:
        problem = str(failure)
    if rank_problem := first_problem(everyone, problem):
        raise CheckpointError(rank_problem[1])
    return cast("T", result)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Returns a context that turns exceptions of its block into a CheckpointError about the checkpoint at ``path``."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as failure:  # a file that is not what its manifest says can fail anywhere
        raise CheckpointError(
            f"the checkpoint at '{path}' could not be read; all is as it was",
            given=f"{type(failure).__name__}: {failure}".splitlines()[0],
            allowed="files that can be read as they were written, and room for their content",
            fix="mend what is given, or take the checkpoint of another step",
        ) from failure


def checksum(file: Path) -> str:
    """Returns the SHA-256 of a file as hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint '{path}' is broken",
        given=what,
        allowed="the files as they were written",
        fix="remove it to go on from the step before it, or copy it again",
    )


def _foreign(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"'{path}' is not a checkpoint of shardwright",
        given=what,
        allowed=f"a folder with {MANIFEST}, or with folders step-* that have one",
        fix="give the folder that sw.save was given (the --out folder of a run of the command), or one of its steps",
    )
