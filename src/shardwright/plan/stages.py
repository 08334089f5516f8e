"""A model cut into pipeline chunks: which calls belong to which chunk, and what each chunk costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardwright.analysis.call_graph import Chunked, read_graph, sites
from shardwright.analysis.costs import Cost
from shardwright.errors import LayoutError

DROPOUTS = nn.modules.dropout._DropoutNd
"""What draws random numbers for its masks."""


@dataclass(frozen=True)
class Stages:
    """A model, on the meta device, in chunks; and what each chunk costs forward."""

    model: nn.Module
    chunked: Chunked
    costs: tuple[Cost, ...]
    opened: tuple[str, ...] = ()

    @property
    def num_chunks(self) -> int:
        """How many pieces there are."""
        return self.chunked.num_chunks

    def with_arguments(self, given: Sequence[str]) -> Chunked:
        """The same cut of the code that runs when these arguments are given."""
        graph = read_graph(self.model, self.opened, given)
        chunk_of, known = dict(self.chunked.chunk_of), dict[str, int]()
        for before, chunk in self.chunked.chunk_of.items():
            known[before.module] = max(chunk, known.get(before.module, 0))
        for _, site in sites(graph):
            if site is None or site in chunk_of:
                continue
            if site.module in known:
                chunk_of[site] = known[site.module]
            elif not is_stateless(self.model.get_submodule(site.module)):
                raise _unknown_call(site.module, given)
        return Chunked(graph, chunk_of, self.num_chunks, self.chunked.names)


def _unknown_call(path: str, given: Sequence[str]) -> LayoutError:
    return LayoutError(
        f"the code now calls '{path}', which it did not when the model was cut into stages",
        given=f"the arguments {', '.join(given)}, in training or evaluation",
        allowed="calls of modules that are called in training, on inputs of the form of the example",
        fix="give parallelize an example with these arguments",
    )


def is_stateless(module: nn.Module) -> bool:
    """Whether it does not matter how often a module is called: no weights, no statistics, no random numbers."""
    state = [*module.parameters(), *module.buffers()]
    return not state and not any(isinstance(each, DROPOUTS) for each in module.modules())
