"""``RecordsFile``: keeps what rehearsals and plans of a model found in a file, so that a later plan finds it again.

A file holds what was found for one model, loss, shape of a sample and type of device, under one state of the code. All
of these are in its name, as a digest. So nothing in a file is ever out of date: after a change another file is read.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shardwright.errors import ExplainedError, LayoutError, PlanError
from shardwright.strategies import STRATEGIES

MOST_FILES = 32
"""The most files that a folder keeps: of more, those that were written first are removed."""

MOST_VALUES = 1 << 20
"""The most elements of a buffer whose values are part of a model's digest. A model with larger ones is not kept."""

_OURS = Path(__file__).parents[1]

_T = TypeVar("_T")


def default_folder() -> Path:
    """Returns the folder in which the command keeps such files: ``shardwright/plans`` among the user's caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright" / "plans"


class _StoredMisfit(NamedTuple):
    """An error in place of a result, by its class and parts."""

    kind: type[ExplainedError]
    parts: tuple[str, str, str, str]


@dataclass
class RecordsFile:
    """What was found for one model, by key; ``path`` is the file, or None if nothing is kept.

    A file that cannot be read, or that anything else has written, counts as empty.
    """

    path: Path | None = None
    _found: dict[Hashable, Any] = field(default_factory=dict)
    _is_new: bool = False

    @classmethod
    def of(cls, folder: Path | str | None, model: nn.Module, *given: Any) -> RecordsFile:
        """Returns the file in ``folder`` of a model and all else that what is found depends on.

        Nothing is kept without a folder, or if ``model`` or the values in ``given`` cannot be told from others: if they
        hold functions without a name or large buffers with values, or their code is in no file.
        """
        if folder is None:
            return cls()
        try:
            name = sha256(_described(model, given) + _code_of(model)).hexdigest()
        except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError):
            return cls()
        path = Path(folder) / f"{name}.pickle"
        found: dict[Hashable, Any] = {}
        with suppress(OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError):
            found = _RecordsUnpickler(io.BytesIO(path.read_bytes())).load()
        return cls(path, found if isinstance(found, dict) else {})

    def find(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """Returns what was found under ``key`` before, or else the result of ``compute``, to be kept.

        ``key`` has plain values alone. Raises: LayoutError, PlanError: ``compute`` does, or did before.
        """
        if self.path is None:
            return compute()
        if key not in self._found:
            self._is_new = True
            try:
                self._found[key] = compute()
            except (LayoutError, PlanError) as error:
                parts = error.what, str(error.given), str(error.allowed), str(error.fix)
                self._found[key] = _StoredMisfit(type(error), parts)
                raise
        found = self._found[key]
        if isinstance(found, _StoredMisfit):
            what, given, allowed, fix = found.parts
            raise found.kind(what, given=given, allowed=allowed, fix=fix)
        kept: _T = found
        return kept

    def forget(self) -> None:
        """Keeps nothing, now and from now on: what is found depends on more than is in the file's name."""
        self.path, self._found = None, {}

    def save(self) -> None:
        """Writes the file if anything was found that it has not; a folder that cannot be written to is left alone."""
        if self.path is None or not self._is_new:
            return
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with NamedTemporaryFile(dir=self.path.parent, delete=False) as file:
                file.write(pickle.dumps(self._found, protocol=5))
            os.replace(file.name, self.path)
            files = sorted(self.path.parent.glob("*.pickle"), key=lambda each: each.stat().st_mtime)
            for old in files[:-MOST_FILES]:
                old.unlink()


class _RecordsUnpickler(pickle.Unpickler):
    """Unpickles what this library has found: plain containers, and values of its own classes of plain data.

    A name that is anything else, such as a function, or a class that one of its modules imports, is refused: a file
    that somebody else has written runs no code.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "Counter"):
            return Counter
        if module.partition(".")[0] == "shardwright":
            found = super().find_class(module, name)
            is_data = isinstance(found, type) and (
                issubclass(found, tuple | Enum | ExplainedError) or is_dataclass(found)
            )
            if is_data and found.__module__.partition(".")[0] == "shardwright":
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no class of what is kept")


class _ModelSnapshot(pickle.Pickler):
    """Pickles modules with shapes in place of tensors; a tensor that occurs again is named by its number."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        number = self._numbers.setdefault(id(value), len(self._numbers))
        values = b"" if value.is_meta or isinstance(value, nn.Parameter) else _values_of(value)
        kind = type(value).__qualname__
        return number, kind, tuple(value.shape), value.stride(), str(value.dtype), value.requires_grad, values


def _values_of(tensor: Tensor) -> bytes:
    if tensor.numel() > MOST_VALUES:
        raise pickle.PicklingError("a tensor with too many values")
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _described(*values: Any) -> bytes:
    file = io.BytesIO()
    _ModelSnapshot(file).dump(values)
    return file.getvalue()


def _code_of(model: nn.Module) -> bytes:
    """Returns the versions of the code that a plan of the model runs: of this library, of torch and of the model.

    The model's are all files that Python has loaded of the packages of its classes, and all that are in no package
    directory at all, such as the user's own.
    """
    packages = set[str]()
    for kind in {each for module in model.modules() for each in type(module).__mro__[:-1]}:
        if not getattr(sys.modules[kind.__module__], "__file__", None):
            raise ValueError(f"the code of {kind} is in no file")
        packages.add(kind.__module__.partition(".")[0])
    installed = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")})
    files = {str(path) for path in _OURS.rglob("*.*") if path.suffix in (".py", ".toml")}
    for name, module in [*sys.modules.items()]:
        path, top = getattr(module, "__file__", None), name.partition(".")[0]
        if path and top not in ("torch", "shardwright") and (top in packages or not path.startswith(installed)):
            files.add(path)
    facts = sys.version, torch.__version__, torch.get_default_dtype(), sorted(STRATEGIES)
    return repr((facts, sorted(_states(files)))).encode()


def _states(files: set[str]) -> Iterator[tuple[str, int, int]]:
    for path in files:
        with suppress(OSError):
            found = os.stat(path)
            yield path, found.st_mtime_ns, found.st_size
