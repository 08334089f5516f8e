"""Linear layers of which each rank computes some output features and all ranks gather them at once.

Such a layer is column-parallel with no row-parallel one behind it: what follows needs all of its features, as where one
vector for each sample modulates the blocks of a diffusion transformer. Its traffic is an all-gather of the output, and
an all-reduce of the gradient of its input. So it must have far more weights than outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from math import prod

from torch import nn

from shardwright.analysis.dims.run_axes import RunAxes, leaves
from shardwright.analysis.recorded.recording import PRODUCTS, Recording
from shardwright.analysis.traced.structure import has_hooks


def gather_output_layers(
    model: nn.Module, recording: Recording, axes: RunAxes, size: int, taken: Collection[str],
    readers: Mapping[str, Collection[str]], most_sent: float,
) -> dict[str, nn.Linear]:  # fmt: skip
    """Returns the linear layers, by path, that may be cut by output features that ``size`` ranks gather at once.

    Such a layer has no parameter that is among ``taken`` or that other modules read (``readers``), and its output
    features are not features of the model's outputs. In the recorded run it sends at most ``most_sent`` elements for
    each element of its parameters. It sends its outputs, which count twice, as do the sums of other cuts.

    >>> import torch
    >>> from shardwright.analysis.model_graph import ModelGraph
    >>> class Modulated(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.scale, self.out = nn.Linear(4, 8), nn.Linear(8, 2)
    ...     def forward(self, x, condition):
    ...         return self.out(x * self.scale(condition)[:, None])
    >>> model = Modulated().to("meta")
    >>> run = ModelGraph(model, (torch.empty(1, 16, 8), torch.empty(1, 4))).run
    >>> readers = {name: {name.rpartition(".")[0]} for name, _ in model.named_parameters()}
    >>> [*gather_output_layers(model, run.recording, run.axes, 2, (), readers, most_sent=10)]
    ['scale']
    >>> [*gather_output_layers(model, run.recording, run.axes, 2, (), readers, most_sent=9)]
    []
    """
    in_output = {leaf for use in recording.outputs for axis in axes.of(use) for leaf in leaves(axis)}
    num_outputs = Counter[str]()
    for call in recording.calls:
        if call.name in PRODUCTS:
            num_outputs[call.module] += sum(prod(result.shape) for result in call.results)
    layers = {}
    for path, layer in model.named_modules():
        if type(layer) is not nn.Linear or has_hooks(layer) or layer.out_features < size or not num_outputs[path]:
            continue
        parameters = {f"{path}.{name}": p for name, p in layer.named_parameters()}
        if any(name in taken or set(readers.get(name, ())) != {path} for name in parameters):
            continue
        features = {leaf for name in parameters for leaf in leaves(axes.of(recording.parameters[name])[0])}
        sent, num_elements = 2 * num_outputs[path], sum(p.numel() for p in parameters.values())
        if sent <= most_sent * num_elements and features.isdisjoint(in_output):
            layers[path] = layer
    return layers
