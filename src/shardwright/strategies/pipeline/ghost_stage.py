"""A pipeline stage that runs the whole forward, with meta tensors (ghosts) in place of other stages' values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from shardwright.analysis.chunks.call_graph import Edge
from shardwright.analysis.chunks.events_chunked import EventsChunked
from shardwright.analysis.chunks.forward_events import ParameterIndex
from shardwright.analysis.chunks.forward_record import ValueName
from shardwright.analysis.on_meta.operator_results import tensors_of
from shardwright.errors import EXAMPLE, LayoutError
from shardwright.plan.event_stages import EventStages
from shardwright.plan.schedule import Schedule
from shardwright.rng import RngTracker
from shardwright.runtime.empty_batches import support_empty_batches
from shardwright.runtime.executor import Microbatch, OutputHandler
from shardwright.strategies.pipeline.ghost_mode import GhostMode
from shardwright.strategies.pipeline.ghost_parameters import GhostParameters
from shardwright.strategies.pipeline.messages import StageMessage
from shardwright.strategies.pipeline.p2p import PLAIN, ValueSpec, fill, scattered, spec_of
from shardwright.strategies.pipeline.pipeline_stage import ChunkRoute, PipelineStage, ReceivedTensors
from shardwright.strategies.pipeline.same_code import check_same_code, lines_of

KEPT_RECORDS = 64
"""The number of input shapes for which recorded forwards are cached; the least recently used are dropped."""

KEPT_PATHS = 8
"""The number of recorded forwards cached for one input shape: other values, as of a mask, may take other code paths."""


@dataclass
class GhostStage(PipelineStage[EventStages]):
    """This rank's pipeline chunks of a model whose forward was recorded; the executor runs the chunks.

    ``rng`` numbers the random draws of each microbatch. It is None in the rehearsal on the meta device that finds which
    values stages send each other.
    """

    rng: RngTracker | None = None
    _chunks: list[EventsChunked] = field(default_factory=list)
    _records: dict[object, list[EventsChunked]] = field(default_factory=dict)
    _routes: dict[object, list[ChunkRoute]] = field(default_factory=dict)
    _places: GhostParameters | None = None
    _units: Mapping[nn.Module, str] = field(default_factory=dict)
    _plain: Mapping[str, nn.Module] = field(default_factory=dict)
    _names: ParameterIndex | None = None
    _edges: tuple[Edge, ...] = ()
    _takes_no_samples: bool = False

    def expect(
        self, microbatches: Sequence[Microbatch], values: Sequence[Mapping[str, Any]], *, announced: bool = False
    ) -> None:  # fmt: skip
        """Sets the shapes and dtypes of all p2p messages, which a stage otherwise learns from the messages themselves.

        It is for steps on the meta device, where no message arrives. ``values[m]`` are the values of microbatch m that
        cross between chunks, by name. ``announced`` says that the others know the shapes and dtypes of what this stage
        sends, as after a first step.
        """
        self._prepare()
        for number, (microbatch, crossing) in enumerate(zip(microbatches, values, strict=True)):
            key = self._key(number, microbatch, len(microbatches)), self._chunks_for(microbatch).crossing
            for edge in self.stages.chunked.edges:
                spec, _ = spec_of([crossing[name] for name in edge.values], f"chunk {edge.source}")
                self.p2p.set_spec(key, (edge.source, edge.target), self._sent(spec), announced=announced)

    def begin(self, schedule: Schedule, microbatches: Sequence[Microbatch], last: OutputHandler) -> None:
        """Prepares for one run of a schedule over ``microbatches``; ``last`` gets the model's output on each of them.

        The forward is recorded again for a microbatch whose input shapes, or whose path through the code, are new.
        Every rank of ``pp`` calls it.

        Traffic: one all-reduce over ``pp`` for the first batch of each kind (arguments, training or evaluation), to
            compare the records.
        Raises: PlanError: ranks have recorded different forwards.
        """
        self._prepare()
        self._chunks = [self._chunks_for(microbatch) for microbatch in microbatches]
        keys = [
            (self._key(number, microbatch, len(microbatches)), chunked.crossing)
            for number, (microbatch, chunked) in enumerate(zip(microbatches, self._chunks, strict=True))
        ]
        # where one microbatch sends nothing between two chunks and another does, the first sends an empty message
        edges = {(edge.source, edge.target): edge for chunked in reversed(self._chunks) for edge in chunked.edges}
        self._edges = tuple(edges[pair] for pair in sorted(edges))
        self._route = self._new_route(schedule, self._routes.setdefault(self._edges, []), self._edges)
        self._microbatches, self._last = microbatches, last
        self._saved, self._arrived, self._reached = {}, {}, {}
        self.p2p.begin(self._route.arrivals, keys)

    def crossing(self, planned: Sequence[Edge]) -> dict[str, Tensor]:
        """Returns meta tensors like the values that chunks sent each other for the first microbatch, by name.

        For each pair of chunks the names come from ``planned`` if it lists as many values as were sent, else from the
        record of the forward that ran.
        """
        by_name: dict[str, Tensor] = {}
        names = {edge[:2]: edge.values for edge in planned}
        for edge in self._chunks[0].edges:
            spec = self.p2p.spec(StageMessage("F", 0, edge.source, edge.target))
            tensors = [
                torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.needs_gradient)
                for leaf in spec.tensors
            ]
            known = names.get(edge[:2], ())
            by_name.update(
                zip(known if len(known) == len(edge.values) else edge.values, fill(spec, tensors), strict=True)
            )
        return by_name

    def _prepare(self) -> None:
        if self._places is None:
            self._places = GhostParameters(self.model, self.stages)
            self._units = {self.model.get_submodule(path): path for path in self.stages.units}
            self._plain = {path: self.stages.model.get_submodule(path) for path in self.stages.units}
            with self._places.standing_in({}):
                self._names = ParameterIndex(self.model)

    def _chunks_for(self, microbatch: Microbatch) -> EventsChunked:
        """Returns the chunks of the recorded forward that a microbatch will follow, recorded now if it is new."""
        inputs = microbatch.inputs
        leaves, tree = tree_flatten(inputs)
        shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
        training = tuple(module.training for module in self.model.modules())
        key = (str(tree), shapes, training, torch.is_grad_enabled())
        known = self._records.pop(key, [])
        chunked = next(
            (cached for cached in known if cached.record.is_one_path or self._follows(cached, microbatch)), None
        )
        if chunked is None:
            for path, module in self.model.named_modules():
                self.stages.model.get_submodule(path).training = module.training
            if self.rng is not None:
                self.rng.samples = microbatch.samples
            if not len(microbatch.samples) and not self._takes_no_samples:
                self._takes_no_samples = True
                support_empty_batches(self.stages.model)
            chunked = self.stages.with_inputs(inputs, None if self.rng is None else self.rng.draw)
            self._check_homes(chunked)
            kind = (str(tree), self.model.training)
            if kind not in self._compared:  # all stages begin the same kinds of runs, so all of them compare here
                self._compared.add(kind)
                check_same_code(self.p2p.axis.for_strategy("core"), lines_of(chunked))
        self._records[key] = [chunked, *(cached for cached in known if cached is not chunked)][:KEPT_PATHS]
        for old in list(self._records)[:-KEPT_RECORDS]:
            del self._records[old]
        return chunked

    def _check_homes(self, chunked: EventsChunked) -> None:
        """Raises LayoutError if a stage would use parameters in this forward that only another stage stores."""
        planned = self.stages.chunked
        buffers = {name for path in self.stages.uncalled for name in planned.names[path]}
        stored = buffers.union(name for name, _ in self.stages.model.named_parameters())
        for chunk in range(chunked.num_chunks):
            for name in stored.intersection(chunked.weights_of(chunk)):
                if self.stage_of[chunk] not in {self.stage_of[home] for home in planned.homes[name]}:
                    raise LayoutError(
                        "this forward calls modules on another stage than the example did",
                        given=f"'{name}' is used on stage {self.stage_of[chunk]}, and stored on stage "
                        f"{self.stage_of[planned.homes[name][0]]}",
                        allowed="forwards whose calls of a module lie on the stage that stores its parameters",
                        fix=f"{EXAMPLE}, with these arguments; or name other modules: cut:first,second",
                    )

    def _follows(self, chunked: EventsChunked, microbatch: Microbatch) -> bool:
        """Returns whether a microbatch's forward, run on ghosts (meta tensors) only, makes the calls of this record."""
        assert self._places is not None
        assert self._names is not None
        if self.rng is None:
            return True
        self.rng.samples = microbatch.samples  # each forward counts its draws anew
        mode = GhostMode(chunked, None, self._plain, self._names, {}, self.p2p.axis.device, lambda _: None)
        try:
            with self._places.standing_in({}):
                mode.run(self.model, self._units, self._places.opened, microbatch.inputs)
        except Exception:  # also of the user's own code, which has got ghosts of the other path
            return False
        return True

    def _run(self, chunk: int, number: int, inputs: Any) -> Sequence[Tensor]:
        places, names = self._places, self._names
        assert places is not None
        assert names is not None
        chunked = self._chunks[number]
        incoming: list[ReceivedTensors] = []
        received: dict[ValueName, Tensor] = {}
        for source, target, _ in self._edges:
            if target == chunk:
                values = chunked.values.get((source, target), ())
                came = self._received_values(StageMessage("F", number, source, chunk), incoming)
                received.update(zip(values, came, strict=True))

        def before(event: int) -> None:
            for path, times in chunked.repeats.get(event, ()):
                self.repeat(path, times, len(chunked.record.calls[path]))
            called = chunked.record.events[event]
            places.fetch(chunked.given_to(called))

        mode = GhostMode(chunked, chunk, self._plain, names, received, self.p2p.axis.device, before)
        learning = chunked.record.learning
        places.fetch(chunked.record.returned if chunk == chunked.num_chunks - 1 else ())
        with self._calls(chunked, chunk) as fetched, places.standing_in(fetched), names.also(fetched):
            output = mode.run(self.model, self._units, places.opened, inputs)
            made = {name: tensor if name in learning else tensor.detach() for name, tensor in mode.made.items()}
        # In inference the output is sent to other stages, without cache objects in it: of a cache each stage holds only
        # the part of its own layers.
        if not torch.is_grad_enabled() and tensors_of(output):
            output = tree_map(lambda leaf: leaf if isinstance(leaf, (Tensor, *PLAIN)) else None, output)
        sent = {
            target: [made[name] for name in chunked.values.get((source, target), ())]
            for source, target, _ in self._edges
            if source == chunk
        }
        return self._finish(chunk, number, incoming, sent, output, chunk == chunked.num_chunks - 1)

    def _scattered(self, spec: ValueSpec, message: StageMessage) -> ValueSpec:
        return self._sent(spec)

    def _sent(self, spec: ValueSpec) -> ValueSpec:
        return scattered(spec, [leaf.shard is None for leaf in spec.tensors], self.p2p.scatter)

    def _calls(self, chunked: EventsChunked, chunk: int) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Returns the context that strategies put around a chunk's calls; it yields weights they gather, by name."""
        if self.frame is None:
            return nullcontext({})
        return self.frame.calls(chunked.weights_of(chunk), chunked.read_between(chunk))
