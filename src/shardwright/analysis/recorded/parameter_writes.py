"""Finds the parameters that a forward writes to itself, as code does that masks or normalizes a weight in place."""

from __future__ import annotations

from shardwright.analysis.recorded.recording import Recording


def written_parameters(recording: Recording) -> dict[str, str]:
    """Maps each parameter that a recorded forward writes to, by name, to the path of the module whose code does.

    Writes through views count too, and so do those through ``parameter.data``, and ``parameter.data = ...``. Writes in
    branches that the recorded forward did not take are not seen, nor those through NumPy.

    >>> import torch
    >>> from torch import nn
    >>> from shardwright.analysis.recorded.record_forward import record_forward
    >>> class Masked(nn.Linear):
    ...     def forward(self, x):
    ...         self.weight.data[:, 0].zero_()
    ...         return super().forward(x)
    >>> model = nn.Sequential(Masked(2, 2), nn.Linear(2, 2)).to("meta")
    >>> written_parameters(record_forward(model, torch.empty(1, 2, device="meta")))
    {'0.weight': '0'}
    """
    names = {use: name for name, use in recording.parameters.items()}
    writers = {name: module for name, module in recording.replaced.items() if name}
    for call in recording.calls:
        for use in call.written:
            if use in names:
                writers.setdefault(names[use], call.module)
        if not names.keys().isdisjoint(call.operands):
            viewed = next((names[use] for use in call.viewed if use in names), None)
            if viewed is not None:
                names |= {use: viewed for use in call.results if use not in names}
    return writers
