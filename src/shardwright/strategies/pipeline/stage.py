"""A pipeline stage at run time for models that can be traced: it runs this rank's chunks and exchanges activations.

Every chunk is run from the model's traced calls (:mod:`~shardwright.analysis.chunks.call_graph`), which are traced once
for each set of arguments and each train/eval mode. A chunk's inputs come from other stages over :class:`P2P`, or from
this stage's own chunks, without a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.analysis.chunks.arguments import arguments_given, bind
from shardwright.analysis.chunks.call_graph import ChunkedModel, Edge, PreparedNode, prepare, run
from shardwright.analysis.chunks.same_results import difference_from_forward
from shardwright.analysis.objects.own_attributes import own_attributes
from shardwright.errors import PlanError, UnknownCodeError
from shardwright.plan.schedule import Schedule
from shardwright.plan.stages import Stages
from shardwright.runtime.executor import Microbatch, OutputHandler
from shardwright.strategies.pipeline.messages import StageMessage
from shardwright.strategies.pipeline.p2p import ValueSpec, scattered, spec_of
from shardwright.strategies.pipeline.pipeline_stage import ChunkRoute, PipelineStage, ReceivedTensors, framed
from shardwright.strategies.pipeline.same_code import check_same_code, lines_of, not_followed
from shardwright.strategies.pipeline.scatter import WholeShapes, whole_shapes
from shardwright.strategies.pipeline.shared_buffers import SharedBuffers

PLAIN = (bool, int, float, str, tuple, type(None))
"""The types of module attributes that may change between steps: the model is then traced again."""


@dataclass
class StageCode:
    """The model's traced calls for one set of forward arguments and train/eval modes, cut into chunks.

    ``ready`` are the calls of this stage's chunks, with the functions that they run. ``attributes`` are the values that
    modules' attributes had when the code was traced. For attributes that are dicts, lists or objects, ``settings`` has
    the plain values in them. ``shared`` checks writes into buffers. ``routes`` caches the messages by schedule.
    ``has_run`` says that these calls have been run before; until then each chunk's run checks that it has not changed
    the attributes.
    """

    chunked: ChunkedModel
    ready: Mapping[int, tuple[PreparedNode, ...]]
    attributes: Mapping[tuple[str, str], Any]
    settings: Mapping[tuple[str, str], Mapping[str, Any]]
    shared: SharedBuffers
    routes: list[ChunkRoute] = field(default_factory=list)
    has_run: bool = False
    wholes: dict[object, WholeShapes] = field(default_factory=dict)
    """The shapes of values that chunks would send if no layer were cut, by a microbatch's shapes; for ``scatter``."""


@dataclass
class Stage(PipelineStage[Stages]):
    """This rank's pipeline chunks of a traced model; the executor runs the chunks.

    It implements :class:`~shardwright.runtime.executor.ModelPart`.
    """

    _codes: dict[object, StageCode] = field(default_factory=dict)
    _code: StageCode | None = None
    _by_value: set[tuple[str, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._planned = {
            (path, name): (value, _settings_in(value))
            for path, module in self.model.named_modules()
            for name, value in own_attributes(module).items()
        }
        """The attributes that the model had when it was planned, with the plain values in each: code that no batch has
        run yet is traced with these, unless they have been set since."""

    def expect(
        self, microbatches: Sequence[Microbatch], values: Sequence[Mapping[str, Any]], *, announced: bool = False
    ) -> None:  # fmt: skip
        """Sets the shapes and dtypes of all p2p messages, which a stage otherwise learns from the messages themselves.

        It is for steps on the meta device, where no message arrives. ``values[m]`` are the values of microbatch m that
        cross between chunks, by their names in the model's code. ``announced`` says that the others know the shapes and
        dtypes of what this stage sends, as after a first step.
        """
        code = self._code_of(microbatches[0].inputs)
        chunked = code.chunked
        for number, (microbatch, crossing) in enumerate(zip(microbatches, values, strict=True)):
            wholes = self._whole_shapes(chunked, microbatch, code.wholes)
            for edge in chunked.edges:
                sent = [_crossing_value(chunked, name, crossing[name]) for name in edge.values]
                spec, _ = spec_of(sent, f"chunk {edge.source}")
                key = self._key(number, microbatch, len(microbatches))
                between = edge.source, edge.target
                self.p2p.set_spec(key, between, self._sent(spec, edge, wholes), announced=announced)

    # ---- ModelPart: called by the executor

    def begin(self, schedule: Schedule, microbatches: Sequence[Microbatch], last: OutputHandler) -> None:
        """Prepares for one run of a schedule over ``microbatches``; ``last`` gets the model's output on each of them.

        The model's code is traced again if its arguments, a module's train/eval mode or an attribute that it reads have
        changed. Every rank of ``pp`` calls it.

        Traffic: one all-reduce over ``pp`` for the first batch of each kind (arguments, training or evaluation), to
            compare the traced code.
        Raises: PlanError: ranks have traced different code, an attribute that the code reads has changed to a value
            that is no number, string, tuple or None, or values are to be sent in parts and the model does not run on
            the meta device, which tells the whole ones.
        """
        count = len(microbatches)
        keys = [self._key(number, microbatch, count) for number, microbatch in enumerate(microbatches)]
        for key, microbatch in zip(keys, microbatches, strict=True):
            if not self.p2p.has_key(key):
                # Bad inputs raise here, on every stage, before any stage waits for another.
                with framed(self.frame, microbatch.inputs):
                    pass
        self._code = self._code_of(microbatches[0].inputs)
        for microbatch in microbatches:  # a model that cannot be run without values raises here, on every stage
            self._whole_shapes(self._code.chunked, microbatch, self._code.wholes)
        self._route, self._microbatches, self._last = self._route_for(schedule, self._code), microbatches, last
        self._saved, self._arrived, self._reached = {}, {}, {}
        self.p2p.begin(self._route.arrivals, keys)

    def _run(self, chunk: int, number: int, inputs: Any) -> Sequence[Tensor]:
        assert self._code is not None
        chunked = self._code.chunked
        values = bind(chunked, inputs)
        incoming: list[ReceivedTensors] = []
        for edge in chunked.edges:
            if edge.target == chunk:
                message = StageMessage("F", number, edge.source, chunk)
                values.update(zip(edge.values, self._received_values(message, incoming), strict=True))
        with self._code.shared.watching(self.model) if self._code.shared.users else nullcontext():
            output = run(self._code.ready[chunk], values, chunked.before(self.repeat))
        if not self._code.has_run:
            for path, name in self._changed_attributes(self._code):
                raise _attribute_changed(path, name)
        sent = {
            edge.target: [_crossing_value(chunked, name, values[name]) for name in edge.values]
            for edge in chunked.edges
            if edge.source == chunk
        }
        return self._finish(chunk, number, incoming, sent, output, chunk == chunked.num_chunks - 1)

    # ---- values that are sent in parts

    def _scattered(self, spec: ValueSpec, message: StageMessage) -> ValueSpec:
        if self.p2p.scatter is None:
            return spec
        assert self._code is not None
        chunked, ends = self._code.chunked, (message.source, message.target)
        edge = next(edge for edge in chunked.edges if edge[:2] == ends)
        return self._sent(
            spec, edge, self._whole_shapes(chunked, self._microbatches[message.microbatch], self._code.wholes)
        )

    def _sent(self, spec: ValueSpec, edge: Edge, wholes: WholeShapes) -> ValueSpec:
        """Returns the spec of an edge's values with a mark on each whole tensor, of which ranks send parts."""
        if self.p2p.scatter is None:
            return spec
        shapes = [shape for name in edge.values for shape in wholes[name]]
        is_whole = [leaf.shape == shape for leaf, shape in zip(spec.tensors, shapes, strict=True)]
        return scattered(spec, is_whole, self.p2p.scatter)

    def _whole_shapes(
        self, chunked: ChunkedModel, microbatch: Microbatch, known: dict[object, WholeShapes]
    ) -> WholeShapes:
        """Returns :func:`whole_shapes` of a microbatch, from ``known`` or added there; {} if nothing is scattered."""
        if self.p2p.scatter is None:
            return {}
        with framed(self.frame, microbatch.inputs) as inputs:
            key = tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
            if key not in known:
                known[key] = whole_shapes(self.stages.model, chunked, inputs)
        return known[key]

    # ---- the model's code

    def _code_of(self, inputs: Any) -> StageCode:
        """Returns the traced calls for a batch's inputs.

        Code that branches on the value of an argument, such as a flag, is traced for each value by itself.
        """
        arguments = arguments_given(self.stages.model, inputs)
        if arguments not in self._by_value:
            try:
                return self._code_for(arguments, inputs)
            except UnknownCodeError:
                self._by_value.add(arguments)
        return self._code_for(arguments_given(self.stages.model, inputs, by_value=True), inputs)

    def _code_for(self, arguments: tuple[str, ...], inputs: Any) -> StageCode:
        """Returns the cached traced calls for these arguments, traced again if a module's mode or setting has changed.

        Raises PlanError for a setting that is now neither a number, a string, a tuple nor None.
        """
        key = (arguments, tuple(module.training for module in self.model.modules()))
        code = self._codes.get(key)
        if code is not None and (changed := self._changed_attributes(code)):
            self._take_over({key: code.attributes[key] for key in changed})
            self._codes.clear()
            code = None
        if code is not None:
            code.has_run = True
            return code
        for path, module in self.model.named_modules():
            self.stages.model.get_submodule(path).training = module.training
        code = self._codes[key] = self._read_code(arguments, inputs)
        kind = (arguments, self.model.training)
        if kind not in self._compared:  # all stages begin the same kinds of runs, so all of them compare here
            self._compared.add(kind)
            check_same_code(self.p2p.axis.for_strategy("core"), lines_of(code.chunked))
        return code

    def _changed_attributes(self, code: StageCode) -> list[tuple[str, str]]:
        """Returns (module path, attribute name) of each attribute whose value has changed since the code was traced."""
        return [
            key for key, before in code.attributes.items() if self._differs(key, before, code.settings.get(key, {}))
        ]

    def _differs(self, key: tuple[str, str], before: Any, settings: Mapping[str, Any]) -> bool:
        """Returns whether an attribute of a module is no longer what it was, or no longer has these plain values."""
        now = getattr(self.model.get_submodule(key[0]), key[1], None)
        is_equal = now is before or (isinstance(now, PLAIN) and type(now) is type(before) and now == before)
        return not is_equal or bool(settings and settings != _settings_in(now))

    def _take_over(self, before: Mapping[tuple[str, str], Any]) -> None:
        """Gives the model whose code is traced the new values of attributes that had the values ``before``.

        Raises: PlanError: a new value is neither a number, a string, a tuple nor None.
        """
        for (path, name), old in before.items():
            value = getattr(self.model.get_submodule(path), name)
            if not isinstance(value, PLAIN) and value is not old:
                raise _attribute_changed(path, name)
            setattr(self.stages.model.get_submodule(path), name, value)
            self._planned[path, name] = value, _settings_in(value)

    def _read_code(self, arguments: tuple[str, ...], inputs: Any) -> StageCode:
        chunked, is_planned = self.stages.with_arguments(arguments), True
        while changed := [
            key for key in chunked.attributes if key in self._planned and self._differs(key, *self._planned[key])
        ]:  # set since the model was planned, and before this code is first run
            self._take_over({key: self._planned[key][0] for key in changed})
            chunked, is_planned = self.stages.with_arguments(arguments), False
        modes = tuple(module.training for module in self.stages.model.modules())
        # Planning has checked the first code against the forward. Code that is read later may differ, so it is checked.
        is_known = is_planned and not self._compared and (arguments, modes) == self.stages.compared
        if not is_known and (why := difference_from_forward(self.stages.model, chunked, inputs)):
            raise not_followed(self.stages.model, why, has_example=self.stages.compared is not None)
        attributes = {
            (path, name): getattr(self.model.get_submodule(path), name, None) for path, name in chunked.attributes
        }
        mine = (chunk for chunk, at in enumerate(self.stage_of) if at == self.stage)
        ready = {chunk: prepare(self.model, chunked, chunk) for chunk in mine}
        settings = {key: entries for key, value in attributes.items() if (entries := _settings_in(value))}
        return StageCode(chunked, ready, attributes, settings, SharedBuffers(chunked, self.stage_of, self.stage))

    def _route_for(self, schedule: Schedule, code: StageCode) -> ChunkRoute:
        return self._new_route(schedule, code.routes, code.chunked.edges)


def _settings_in(value: Any) -> dict[str, Any]:
    """Returns the plain values in a dict, a list or an object of settings that a module has, by name."""
    if isinstance(value, (*PLAIN, Tensor, type)) or callable(value):  # modules are callable
        return {}
    entries = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    entries = dict(enumerate(value)) if isinstance(value, list) else entries
    return {str(name): entry for name, entry in entries.items() if isinstance(entry, PLAIN)}


def _attribute_changed(path: str, name: str) -> PlanError:
    return PlanError(
        f"'{f'{path}.{name}'.lstrip('.')}' is set while the model runs, and read by code outside of the module",
        given="an attribute that is no longer what it was when the code was read",
        allowed="values that modules take and return: these are sent between stages; settings that do not change "
        "within a step",
        fix="return the value from the module's forward",
    )


def _crossing_value(chunked: ChunkedModel, name: str, value: Any) -> Any:
    """Returns a value in the form to be sent: detached unless a gradient can come back for it."""
    return value if name in chunked.learning else tree_map_only(Tensor, Tensor.detach, value)
