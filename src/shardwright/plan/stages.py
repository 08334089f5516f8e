"""``Stages``: a model cut into pipeline chunks along its traced graph of module calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardwright.analysis.chunks.call_graph import ChunkedModel, read_graph, sites
from shardwright.analysis.chunks.chunks_by_parameter import chunks_by_parameter
from shardwright.analysis.chunks.costs import Cost
from shardwright.errors import EXAMPLE, LayoutError

DROPOUTS = nn.modules.dropout._DropoutNd
"""The base class of torch's dropout layers."""


@dataclass(frozen=True)
class Stages:
    """A model whose traced module calls are cut into pipeline chunks, with the forward cost of each chunk.

    ``model`` is the plain model on the meta device. ``opened`` names the modules whose inner calls are cut one by one,
    ``whole`` the containers that stages call as one module, and ``unread`` the modules whose code cannot be traced.
    """

    model: nn.Module
    chunked: ChunkedModel
    costs: tuple[Cost, ...]
    opened: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    compared: tuple[tuple[str, ...], tuple[bool, ...]] | None = None
    """The arguments (``given`` of :func:`trace`) and the modes of all modules for which planning has compared the
    traced calls with the forward, on an example; None without an example."""

    def called(self) -> frozenset[str]:
        """Returns the names of all modules that the stages call."""
        return frozenset(name for chunk in range(self.num_chunks) for name in self.chunked.calls_of(chunk))

    @property
    def num_chunks(self) -> int:
        """The number of pipeline chunks that the model is cut into."""
        return self.chunked.num_chunks

    @property
    def gives_dict(self) -> bool:
        """Whether the model's output is a dict in the traced code.

        The class of the output is then not known, and a caller may read the output by attributes.
        """
        (output,) = (node for node in self.chunked.graph.nodes if node.op == "output")
        return isinstance(output.args[0], dict)

    def with_arguments(self, given: Sequence[str]) -> ChunkedModel:
        """Traces the model again with other arguments of its forward, and returns the graph cut into the same chunks.

        ``given`` names the arguments of the forward that are passed, as in :func:`trace`. A module that was not called
        before runs in the chunk of its parameters.

        Raises: LayoutError: the code calls a module that it did not call when the model was cut, and which has buffers
            or dropout, or is called behind a later chunk than that of its parameters; or it cannot be traced with these
            arguments.
        """
        graph = read_graph(self.model, self.opened, given, self.whole)
        chunk_of, last_chunk = dict(self.chunked.chunk_of), dict[str, int]()
        for before, chunk in self.chunked.chunk_of.items():
            last_chunk[before.module] = max(chunk, last_chunk.get(before.module, 0))
        known, new = {site for _, site in sites(self.chunked.graph)}, set[str]()
        trained, homes = {name for name, _ in self.model.named_parameters()}, chunks_by_parameter(self.chunked)
        for _, site in sites(graph):
            if site is None or site in chunk_of:
                continue
            if site in known:
                continue  # uses inputs alone: each stage that needs it makes the call
            if site.module in last_chunk:
                chunk_of[site] = last_chunk[site.module]
                continue
            module = self.model.get_submodule(site.module)
            weights = self.chunked.names.get(site.module, ())
            chunks = {homes[name][0] if name in trained else -1 for name in weights}  # buffers are on all stages
            drops = any(isinstance(submodule, DROPOUTS) for submodule in module.modules())
            if len(chunks) == 1 and -1 not in chunks and not drops:
                chunk_of[site] = min(chunks)
                new.add(site.module)
            elif not is_stateless(module):
                raise _is_called_now(site.module, given)
        chunked_model = ChunkedModel(graph, chunk_of, self.num_chunks, self.chunked.names)
        for node, site in sites(graph) if new else ():
            if site is not None and chunked_model.nodes[node] != chunk_of.get(site, chunked_model.nodes[node]):
                raise _is_called_now(min(new), given)  # its result is used in an earlier chunk
        return chunked_model


def _is_called_now(module: str, arguments: Sequence[str]) -> LayoutError:
    return LayoutError(
        f"the code now calls '{module}', which it did not when the model was cut into stages",
        given=f"the arguments {', '.join(arguments)}, in training or evaluation",
        allowed="calls of modules that are called in training, on inputs of the form of the example",
        fix=f"give these arguments in the example, so that stages are cut with them too: {EXAMPLE}",
    )


def is_stateless(module: nn.Module) -> bool:
    """Returns whether a module has no weights, no buffers and no dropout, so that every stage may call it."""
    state = [*module.parameters(), *module.buffers()]
    return not state and not any(isinstance(submodule, DROPOUTS) for submodule in module.modules())
