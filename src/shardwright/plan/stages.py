"""``Stages``: a model cut into pipeline chunks, as the pipeline's ``place`` puts it into the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardwright.analysis.call_graph import Chunked, read_graph, sites
from shardwright.analysis.costs import Cost
from shardwright.errors import LayoutError

DROPOUTS = nn.modules.dropout._DropoutNd
"""The base class of torch's layers that draw random masks."""


@dataclass(frozen=True)
class Stages:
    """The plain model on the meta device, its module calls cut into pipeline chunks, and each chunk's forward cost.

    ``opened`` are the modules whose calls are cut one by one, ``unread`` those whose code cannot be followed.
    """

    model: nn.Module
    chunked: Chunked
    costs: tuple[Cost, ...]
    opened: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def num_chunks(self) -> int:
        """The number of pipeline chunks that the model is cut into."""
        return self.chunked.num_chunks

    @property
    def gives_dict(self) -> bool:
        """Whether the model's output is a dict: its code tells no class, and a caller may read it by attributes."""
        (output,) = (node for node in self.chunked.graph.nodes if node.op == "output")
        return isinstance(output.args[0], dict)

    def with_arguments(self, given: Sequence[str]) -> Chunked:
        """Returns the graph of the code that runs with the model's arguments ``given``, cut into the same chunks.

        Raises: LayoutError: that code calls a module with weights that the cut did not see.
        """
        graph = read_graph(self.model, self.opened, given)
        chunk_of, last_chunk = dict(self.chunked.chunk_of), dict[str, int]()
        for before, chunk in self.chunked.chunk_of.items():
            last_chunk[before.module] = max(chunk, last_chunk.get(before.module, 0))
        for _, site in sites(graph):
            if site is None or site in chunk_of:
                continue
            if site.module in last_chunk:
                chunk_of[site] = last_chunk[site.module]
            elif not is_stateless(self.model.get_submodule(site.module)):
                raise LayoutError(
                    f"the code now calls '{site.module}', which it did not when the model was cut into stages",
                    given=f"the arguments {', '.join(given)}, in training or evaluation",
                    allowed="calls of modules that are called in training, on inputs of the form of the example",
                    fix="give parallelize an example with these arguments",
                )
        return Chunked(graph, chunk_of, self.num_chunks, self.chunked.names)


def is_stateless(module: nn.Module) -> bool:
    """Returns whether a module may be called any number of times: no weights, no statistics, no random numbers."""
    state = [*module.parameters(), *module.buffers()]
    return not state and not any(isinstance(each, DROPOUTS) for each in module.modules())
