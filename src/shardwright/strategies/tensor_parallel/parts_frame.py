"""What surrounds a chunk's calls in a pipeline stage whose model runs on parts of tensors.

The code between modules runs on every stage, so it may gather only what this chunk's own functions read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.sharding.tensor_part import TensorPart, tag
from shardwright.strategies.tensor_parallel.parts_mode import PartsMode


class HeldPart(NamedTuple):
    """A parameter or buffer of a module, the part that it is, and how it is gathered if it is stored in parts.

    ``whole`` is a parameter's name in the model.
    """

    module: nn.Module
    kind: Literal["_parameters", "_buffers"]
    name: str
    part: TensorPart | None
    fetch: Callable[[Tensor], Tensor] | None = None
    whole: str = ""

    @property
    def store(self) -> dict[str, Any]:
        """The module's parameters or buffers; another strategy may have put another dict there since."""
        store: dict[str, Any] = getattr(self.module, self.kind)
        return store


def tag_all(parts: Sequence[HeldPart]) -> None:
    """Marks parameters and buffers as the parts that they are."""
    for each in parts:
        tensor = dict.get(each.store, each.name)  # to read it as an attribute would unshard its group under ZeRO-3
        if tensor is not None:
            tag(tensor, each.part)


@dataclass(frozen=True, eq=False)
class PartsFrame:
    """The frame of a model on parts that pipeline stages run: the mode, and weights as code between modules reads them.

    ``tags`` are what is marked as a part, ``stored`` the weights that are gathered, by name.
    """

    mode: PartsMode | None
    tags: Sequence[HeldPart]
    stored: Mapping[str, Sequence[HeldPart]]
    everywhere: frozenset[str]

    def within(self, inputs: Any) -> AbstractContextManager[Any]:
        """Leaves the inputs as they are."""
        return nullcontext(inputs)

    @contextmanager
    def calls(self, used: Collection[str], read: Collection[str]) -> Iterator[Mapping[str, Tensor]]:
        """Runs a chunk's calls on parts; gathers the weights stored in parts that its functions between modules read.

        Traffic: one all-gather for each of these, and a reduce-scatter of its gradient.
        """
        tag_all(self.tags)
        fetched, before = {}, []
        for name in sorted(self.stored.keys() & {*read, *(self.everywhere.intersection(used))}):
            first = self.stored[name][0]
            assert first.fetch is not None, "it is stored in parts"
            fetched[name] = first.fetch(first.store[first.name])
            tag(fetched[name], first.part)
            before += [(each.store, each.name, dict.get(each.store, each.name)) for each in self.stored[name]]
            for each in self.stored[name]:
                dict.__setitem__(each.store, each.name, fetched[name])
        try:
            with nullcontext() if self.mode is None else self.mode:
                yield fetched
        finally:
            for store, own, tensor in before:
                dict.__setitem__(store, own, tensor)

    def give(self, output: Any) -> Any:
        """Returns the model's output, gathered. Traffic: one all-gather for each dim that is cut."""
        return output if self.mode is None else tree_map_only(Tensor, self.mode.whole, output)

    def repeat(self, path: str, times: int, total: int) -> None:
        """Does nothing: calls are not counted."""

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that does nothing: no state is kept between calls."""
        return lambda: None
