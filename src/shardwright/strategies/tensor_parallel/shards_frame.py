"""Runs a pipeline stage's chunks on tensor shards: marks the shards, and all-gathers weights that functions read.

The code between modules runs on every stage, so only the weights that this chunk's own functions read are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from shardwright.sharding.tensor_shard import TensorShard, tag, tagged
from shardwright.strategies.tensor_parallel.output_shards import OutputShards
from shardwright.strategies.tensor_parallel.shards_mode import ShardsMode


class HeldShard(NamedTuple):
    """A module's parameter or buffer, and the shard of the whole tensor that this rank computes with.

    ``name`` is its name in the module, and ``shard`` is None for a whole tensor. ``fetch`` all-gathers a parameter that
    is sharded at rest. ``whole`` is the parameter's name in the model, empty for a buffer. With ``again`` the parameter
    is fetched only if it is not at hand yet: in a recomputation, since no forward of the model is then around it.
    """

    module: nn.Module
    kind: Literal["_parameters", "_buffers"]
    name: str
    shard: TensorShard | None
    fetch: Callable[[Tensor], Tensor] | None = None
    whole: str = ""
    again: bool = False

    @property
    def is_at_hand(self) -> bool:
        """Whether the parameter has been fetched already, around the module that runs now."""
        return _FETCHED in vars(self.store[self.name])

    @property
    def store(self) -> dict[str, Any]:
        """``module._parameters`` or ``module._buffers``, looked up at each access because ZeRO replaces the former."""
        store: dict[str, Any] = getattr(self.module, self.kind)
        return store


_FETCHED = "_is_fetched"


def mark_fetched(tensor: Tensor) -> Tensor:
    """Marks a tensor as one that :attr:`HeldShard.fetch` has returned, and returns it."""
    vars(tensor)[_FETCHED] = True
    return tensor


def tag_all(shards: Sequence[HeldShard]) -> None:
    """Marks each parameter and buffer as the shard that it is, so that ``ShardsMode`` treats it as one."""
    for shard in shards:
        tensor = dict.get(shard.store, shard.name)  # to read it as an attribute would unshard its group under ZeRO-3
        if tensor is not None:
            tag(tensor, shard.shard)


@contextmanager
def run_on_shards(mode: ShardsMode, buffers: Sequence[HeldShard]) -> Iterator[None]:
    """Returns the context of ``mode``; when it ends, buffers that code has replaced are cut as planned, or made whole.

    If tensor parallelism cuts ``state``, the code ``self.memory = state.detach()`` makes the buffer a shard, which a
    checkpoint would mistake for the whole buffer.

    Traffic: for each such buffer, one all-gather for each dim that is cut otherwise than planned.
    """
    before = [buffer.store.get(buffer.name) for buffer in buffers]
    with mode:
        yield
    for buffer, tensor in zip(buffers, before, strict=True):
        now = buffer.store.get(buffer.name)
        if now is not None and now is not tensor:
            buffer.store[buffer.name] = mode.as_shard(now, buffer.shard)


@dataclass(eq=False)
class CheckpointedCode:
    """Runs the code of a checkpoint on tensor shards again, in a backward: no forward of the model is around it then.

    ``fetched`` are the weights that are all-gathered around the code that runs now, each with the function that gathers
    it. ``mode`` is None if only samples are cut; ``buffers`` are the buffers that code may replace.
    """

    mode: ShardsMode | None
    buffers: Sequence[HeldShard]
    fetched: list[tuple[HeldShard, Callable[[Tensor], Tensor]]] = field(default_factory=list)

    def prepared(self, inputs: Sequence[Any]) -> Callable[[Sequence[Any]], AbstractContextManager[None]]:
        """Returns what ``prepare_checkpoint`` asks for: a function that returns the context of a second run.

        In this context the inputs of the second run are tagged with the shards of ``inputs``. The two are matched from
        the last input backwards.
        """
        shards = [tagged(value) if isinstance(value, Tensor) else None for value in inputs]
        return partial(self._again, shards, tuple(self.fetched))

    @contextmanager
    def _again(
        self, shards: Sequence[TensorShard | None], fetched: Sequence[tuple[HeldShard, Callable[[Tensor], Tensor]]],
        inputs: Sequence[Any],
    ) -> Iterator[None]:  # fmt: skip
        for value, shard in zip(inputs[len(inputs) - len(shards) :], shards, strict=True):
            if shard is not None:
                tag(value, shard)
        mode = self.mode
        with (
            self.around([(weight, fetch) for weight, fetch in fetched if not weight.is_at_hand]),
            run_on_shards(mode, self.buffers) if mode is not None and not mode.depth else nullcontext(),
        ):
            yield

    @contextmanager
    def around(self, fetched: Sequence[tuple[HeldShard, Callable[[Tensor], Tensor]]]) -> Iterator[None]:
        """Returns a context in which the weights are all-gathered."""
        before = [(weight, weight.store[weight.name]) for weight, _ in fetched]
        self.fetched += fetched
        try:
            for (weight, tensor), (_, fetch) in zip(before, fetched, strict=True):
                weight.store[weight.name] = whole = fetch(tensor)
                whole._is_param = True  # isinstance(x, nn.Parameter) is then True
                tag(whole, weight.shard)
            yield
        finally:
            del self.fetched[len(self.fetched) - len(fetched) :]
            for weight, tensor in before:
                weight.store[weight.name] = tensor


@dataclass(frozen=True, eq=False)
class ShardsFrame:
    """The context in which a pipeline stage runs chunks of a model on tensor shards (a ``ForwardFrame``).

    ``mode`` and ``output`` are None if only samples are cut. ``tags`` are the tensors to mark as shards, ``stored`` are
    the weights that are sharded at rest, by name, and ``buffers`` are the buffers that code may replace. The weights in
    ``everywhere`` are stored ones that modules other than their own read.
    """

    mode: ShardsMode | None
    output: OutputShards | None
    tags: Sequence[HeldShard]
    stored: Mapping[str, Sequence[HeldShard]]
    everywhere: frozenset[str]
    buffers: Sequence[HeldShard]

    def within(self, inputs: Any) -> AbstractContextManager[Any]:
        """Returns a context that yields the model's inputs unchanged: they are whole."""
        return nullcontext(inputs)

    @contextmanager
    def calls(self, used: Collection[str], read: Collection[str]) -> Iterator[Mapping[str, Tensor]]:
        """Returns a context in which a chunk's calls run on tensor shards; it yields all-gathered weights, by name.

        Of the weights that are sharded between steps, it all-gathers two kinds: those that functions between modules
        read (``read``), and those ``used`` in the chunk that modules other than their own read.

        Traffic: for each of these weights and each axis that shards it, one all-gather, and in the backward one
            reduce-scatter of its gradient.
        """
        tag_all(self.tags)
        fetched, before = {}, []
        for name in sorted(self.stored.keys() & {*read, *(self.everywhere.intersection(used))}):
            first = self.stored[name][0]
            assert first.fetch is not None, "it is stored in shards"
            fetched[name] = first.fetch(first.store[first.name])
            tag(fetched[name], first.shard)
            before += [(shard.store, shard.name, dict.get(shard.store, shard.name)) for shard in self.stored[name]]
            for shard in self.stored[name]:
                dict.__setitem__(shard.store, shard.name, fetched[name])
        try:
            with nullcontext() if self.mode is None else run_on_shards(self.mode, self.buffers):
                yield fetched
        finally:
            for store, key, tensor in before:
                dict.__setitem__(store, key, tensor)

    def give(self, output: Any) -> Any:
        """Returns the model's output as the loss takes it (:meth:`OutputShards.give`), with the traffic of that."""
        return output if self.output is None else self.output.give(output)

    def repeat(self, path: str, times: int, total: int) -> None:
        """Does nothing: running on tensor shards does not depend on how often a module was called."""

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that does nothing: no state is kept between calls."""
        return lambda: None
