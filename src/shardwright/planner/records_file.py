"""``RecordsFile``: keeps what rehearsals and plans of a model found in a file, so that a later plan finds it again.

A file belongs to one model, loss, shape of a sample and type of device, and to the code as it was when planning began.
Its name is a digest of all of these, so that after a change another file is read. The file also lists all code that was
loaded when it was written, with modules that the model's forward was the first to import. After a change of any of that
code the file counts as empty.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from inspect import getattr_static
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from shardwright.analysis.objects.reached import code_objects
from shardwright.errors import LayoutError, PlanError
from shardwright.planner.kept_values import StoredMisfit, from_nodes, to_text
from shardwright.planner.model_digest import described
from shardwright.strategies import STRATEGIES

MOST_FILES = 32
"""The most files that a folder keeps; the oldest ones are removed."""

_OURS = Path(__file__).parents[1]

_BEGAN_NS = time.time_ns()
"""When this module was loaded. If a code file was changed after that, Python may still run its former text."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype)

_FileState = tuple[str, int, int]

_T = TypeVar("_T")


def default_folder() -> Path:
    """Returns the folder in which the command ``plan`` keeps its files: ``shardwright/plans`` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright" / "plans"


@dataclass
class RecordsFile:
    """A cache, by key, of what rehearsals and plans found for one model; ``path`` is its file, None for no cache.

    The file counts as empty if it cannot be read, if another program wrote it, or if code that it lists has changed.
    """

    path: Path | None = None
    _found: dict[Hashable, Any] = field(default_factory=dict)
    _is_new: bool = False
    _code: frozenset[_FileState] = frozenset()
    """The states of the files of all code that was loaded when this cache was made, before anything was found."""

    @classmethod
    def of(cls, folder: Path | str | None, model: nn.Module, *given: Any) -> RecordsFile:
        """Returns the cache in ``folder`` for ``model`` and the other values that results depend on (``given``).

        Nothing is kept without a folder, or if ``model`` or the values in ``given`` cannot be told from others: if they
        hold functions without a name or large buffers with values, or their code is in no file or was changed since
        this process has begun to plan.
        """
        if folder is None:
            return cls()
        try:
            roots = [value for value in (model, *given) if isinstance(value, nn.Module)]
            name = sha256(described(model, given) + _code_of(roots)).hexdigest()
        except ValueError:
            return cls()
        path = Path(folder) / f"{name}.records"
        return cls(path, _read(path), False, frozenset(_states_of_loaded()))

    def find(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """Returns what was found under ``key`` before, or else the result of ``compute``, which is then kept.

        ``key`` has plain values alone.

        Raises: LayoutError, PlanError: ``compute`` raises it, or has raised it before.
        """
        if self.path is None:
            return compute()
        if key not in self._found:
            self._is_new = True
            try:
                self._found[key] = compute()
            except (LayoutError, PlanError) as error:
                self._found[key] = StoredMisfit.of(error)
                raise
        value = self._found[key]
        if isinstance(value, StoredMisfit):
            raise value.error()
        result: _T = value
        return result

    def forget(self) -> None:
        """Empties the cache and keeps nothing from now on, since results depend on more than is in the file's name."""
        self.path, self._found = None, {}

    def save(self) -> None:
        """Writes the file if it lacks anything that was found.

        Nothing is written, and nothing raised, if the folder cannot be written to or if code that was loaded before has
        changed in the meantime.
        """
        if self.path is None or not self._is_new:
            return
        before = {_state(path) for path, *_ in self._code}
        if before != self._code:
            return
        states = sorted(before | _states_of_loaded())  # with modules that the model's forward was the first to import
        with suppress(OSError, TypeError, RecursionError):  # the latter two: of values that JSON cannot hold
            content = f'{{"code":{json.dumps(states)},"found":{to_text(self._found)}}}'.encode()
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with NamedTemporaryFile(dir=self.path.parent, delete=False) as file:
                try:
                    file.write(_checksum(content) + content)
                    file.flush()
                    os.replace(file.name, self.path)
                except OSError:
                    os.unlink(file.name)
                    raise
            files = sorted(self.path.parent.glob("*.records"), key=lambda path: path.stat().st_mtime)
            for old in files[:-MOST_FILES]:
                old.unlink()


def _read(path: Path) -> dict[Hashable, Any]:
    """Returns the values by key in a file; {} if it is missing or damaged, or if code that it lists has changed."""
    with suppress(Exception):  # a damaged file may raise anything, and always counts as empty
        content = path.read_bytes()
        size = len(_checksum(b""))
        if content[:size] == _checksum(content[size:]):
            parts = json.loads(content[size:])
            code = [tuple(state) for state in parts["code"]]
            values_by_key = from_nodes(parts["found"])
            if isinstance(values_by_key, dict) and code == [_state(path) for path, *_ in code]:
                return values_by_key
    return {}


def _checksum(content: bytes) -> bytes:
    return sha256(content).hexdigest().encode() + b"\n"


def _code_of(roots: list[nn.Module]) -> bytes:
    """Returns, as bytes, the state of the code that a plan runs: of this library, torch, the model and its loss.

    The code of the model and its loss is every loaded file of the packages of their classes, and every loaded file
    that is in no package directory, such as the user's own, with the settings that it reads. Other modules, and those
    that are imported later, are listed in the file itself; ``sys.path`` is included, since it decides which those are.

    Raises: ValueError: code is in no file, or was changed since this process began to plan.
    """
    packages, kinds = set[str](), set[type]()
    for kind in {base for root in roots for module in root.modules() for base in type(module).__mro__[:-1]}:
        if not os.path.isfile(getattr(sys.modules.get(kind.__module__), "__file__", None) or ""):
            raise ValueError(f"the code of {kind} is in no file")
        packages.add(kind.__module__.partition(".")[0])
        kinds.add(kind)
    packaged = *_installed(), *_pythons_own()
    files = {str(path) for path in _OURS.rglob("*.*") if path.suffix in (".py", ".toml")}
    for path, top in _loaded():
        if top in packages or not path.startswith(packaged):
            files.add(path)
            if top in packages and _state(path)[1] > _BEGAN_NS:
                raise ValueError(f"what was loaded of {path} may be older than the file")
    folders = [os.path.abspath(folder) for folder in sys.path]
    facts = sys.version, torch.__version__, torch.get_default_dtype(), sorted(STRATEGIES), folders
    return repr((facts, sorted(map(_state, files)), _settings_of(kinds))).encode()


_DEEPEST = 3
"""How many attributes of attributes code is taken to read of a global variable: ``config.model.depth`` has two."""


def _settings_of(kinds: set[type]) -> list[str]:
    """Returns the plain values of class attributes, and of global variables that the classes' code reads, as text.

    A function that builds a model may set such a value, which no file shows. Code reads it by its own name, as an
    attribute of an object, a class or an imported module (``config.depth``), or in a function that it calls. What is
    in torch and in this library is left out.
    """
    settings, seen = set[str](), set[int]()
    waiting: list[FunctionType] = []
    for kind in kinds:
        if _is_ours(kind.__module__):
            continue
        own = {f"{kind.__qualname__}.{name}": value for name, value in vars(kind).items() if not name.startswith("__")}
        settings |= {f"{kind.__module__}.{name}={value!r}" for name, value in own.items() if _is_plain(value)}
        functions = (getattr(attr, "__func__", attr) for attr in vars(kind).values())  # of static and class methods too
        waiting += [candidate for candidate in functions if isinstance(candidate, FunctionType)]
    while waiting:
        function = waiting.pop()
        if id(function) in seen or _is_ours(function.__module__ or ""):
            continue
        seen.add(id(function))
        names = {name for code in code_objects(function) for name in code.co_names}
        read = [(name, function.__globals__[name]) for name in names & function.__globals__.keys()]
        while read:
            path, value = read.pop()
            if _is_plain(value):
                settings.add(f"{function.__module__}.{path}={value!r}")
            elif isinstance(value, FunctionType):
                waiting.append(value)
            elif path.count(".") < _DEEPEST and not _is_ours(getattr(value, "__name__", type(value).__module__)):
                inside = ((f"{path}.{name}", getattr_static(value, name, None)) for name in names)
                read += [pair for pair in inside if pair[1] is not None]
    return sorted(settings)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "shardwright")


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return type(value) in _PLAIN


def _loaded() -> set[tuple[str, str]]:
    """Returns the files of all modules that Python has loaded, with the first part of a module's name.

    This library, torch and Python's own modules are left out: the name of a cache's file has their files or version.
    """
    others, own = _installed(), _pythons_own()
    return {
        (path, top)
        for path, top in (
            (getattr(module, "__file__", None), n.partition(".")[0]) for n, module in [*sys.modules.items()]
        )
        if isinstance(path, str) and top not in ("torch", "shardwright")
        if path.startswith(others) or not path.startswith(own)
    }


def _installed() -> tuple[str, ...]:
    return sysconfig.get_path("purelib"), sysconfig.get_path("platlib")


def _pythons_own() -> tuple[str, ...]:
    return sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")


def _states_of_loaded() -> set[_FileState]:
    return {_state(path) for path, _ in _loaded()}


def _state(path: str) -> _FileState:
    """Returns a file's path, time and size; of one that is not there, as in an archive, zeros."""
    try:
        status = os.stat(path)
    except OSError:
        return path, 0, 0
    return path, status.st_mtime_ns, status.st_size
