"""Spatial parallel: each rank computes its rows of a picture and of every feature map; halos are exchanged.

::

      picture     conv 3x3        conv 3x3                flatten, linear
    +--------+   +--------+      +--------+   gathered   +------+
    | rank 0 |   | rank 0 |      | rank 0 |  ----------> |      |    every rank: the same
    +--------+ <> +--------+ <>  +--------+              |      |
    | rank 1 |   | rank 1 |      | rank 1 |  ----------> |      |
    +--------+   +--------+      +--------+              +------+

    <> the rows that the other's windows reach into

Shapes: pictures (B, C, H, W), or with one or three dims of pixels; a map is (B, C, H / tp, W) on a rank, rows balanced,
    and whole from the first layer on that needs whole maps, or that would leave fewer rows than ranks. Weights are
    whole on every rank.
Traffic: forward, for each layer whose windows reach over a cut, its halo: (kernel - stride) rows for each cut; backward
    the same rows' gradients. One all-gather where maps become whole, or one all-reduce of a mean over rows. The
    gradients of weights used on cut maps: one all-reduce of each param group. Statistics of norms as under dp.
Source: Dryden et al. 2019, arXiv:1903.06681.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor, nn

from shardwright.analysis.on_meta.module_calls import given_to
from shardwright.analysis.traced.convolution_chains import CONVOLUTIONS
from shardwright.analysis.traced.structure import owners
from shardwright.comm.axis import Axis
from shardwright.errors import LayoutError
from shardwright.forward_stack import Rung
from shardwright.mesh import Coord
from shardwright.operators.picture_rows import Resize, SlidingWindow, balanced_rows, reading_of
from shardwright.plan.layer_overrides import overrides_of
from shardwright.plan.option import StrategyOption
from shardwright.plan.plan import Job, Plan, Shard
from shardwright.plan.traffic import StepCalls, Traffic
from shardwright.runtime.applied import AppliedStrategy
from shardwright.strategies.spatial.feature_maps import MODEL, apply_maps, check_rows, maps_of, price_maps
from shardwright.strategies.spatial.maps import CutMaps, FeatureMaps, follow

ROWS = 2
"""The dim of pictures and maps that is sharded: 2, of (samples, channels, rows, ...)."""


@dataclass(frozen=True)
class Spatial:
    """Cuts pictures and feature maps in rows; every rank holds a copy of the weights.

    It is for pictures whose feature maps are too large for one device. Where the window of a convolution or a pool
    reads rows of other ranks (a halo), these ranks send them.
    """

    name: ClassVar[str] = "spatial"
    axis: ClassVar[str] = "tp"
    phase: ClassVar[Literal["operators", "stages", "state"]] = "operators"
    default: ClassVar[bool] = False
    options: ClassVar[Mapping[str, StrategyOption]] = {
        "spatial": StrategyOption("pictures cut in rows, for maps too large for one device")
    }
    source: ClassVar[str] = "Dryden et al. 2019, arXiv:1903.06681"

    def place(self, job: Job, plan: Plan) -> Plan:
        """Returns the plan with the feature maps that are sharded by rows, found by tracing the model's code.

        On one rank nothing is sharded.

        Raises: LayoutError: the model's code cannot be traced, no convolution can work on row-sharded maps, the job's
            example pictures have fewer rows than there are ranks, or a role that the user gave to a layer does not fit.
        """
        parts = plan.mesh["tp"]
        overrides = overrides_of(job)
        if parts > 1:
            maps = follow(job.model, parts, overrides.copied)
            steps = [] if maps is None else [step for n, step in enumerate(maps.steps) if n in maps.settled().work]
            called = [job.model.get_submodule(step.path) for step in steps if step.path and step.call is not None]
            if maps is None or not any(isinstance(module, CONVOLUTIONS) for module in called):
                raise _refused(job.model, maps, parts)
            plan = replace(plan, inputs={**plan.inputs, "tp": ROWS})
            plan = plan.note(MODEL, maps, by=self.name, rung=Rung.FRAME)
            plan = self._placed(job, plan, maps)
        for path, module, _, _ in owners(job.model):
            if path not in plan.roles:
                plan = plan.role(path, self.name, "copied", f"{type(module).__name__}: every rank computes it whole")
        return overrides.explained(plan, self.name)

    def _placed(self, job: Job, plan: Plan, maps: FeatureMaps) -> Plan:
        settled, shown, cut = maps.settled(), maps.settled(_height(job, maps)), {"tp": Shard(ROWS)}
        for path, numbers in maps.calls.items():
            if any(number in settled.work for number in numbers):
                plan = plan.use(path, x=cut, dy=cut)
            touched = [number for number in numbers if settled.touches(number)]
            if touched:
                plan = plan.wraps(path, Rung.OPERATOR, self.name)
            names = {_name(cut_maps, number) for number in touched for cut_maps in (settled, shown)}
            owns = next(job.model.get_submodule(path).parameters(recurse=False), None) is not None
            if touched and (owns or names != {"rows"}):
                number = next((number for number in touched if _name(shown, number) != "rows"), touched[0])
                plan = plan.role(path, self.name, _name(shown, number), _why(maps, shown, number))
        return plan

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> AppliedStrategy | None:
        """Makes the model's modules run on row-sharded feature maps.

        Returns, for pipeline stages, the functions that shard the model's input and all-gather its output. On one rank
        it changes nothing and returns None.
        """
        maps = maps_of(plan)
        staged = plan.stages is not None
        return AppliedStrategy(frame=apply_maps(job, axes["tp"], maps, staged)) if maps is not None else None

    def traffic(self, plan: Plan, batch: StepCalls, coord: Coord) -> tuple[Traffic, ...]:
        """Returns one step's halo exchanges, all-gathers and sums of each microbatch, then those of gradient sync."""
        maps = maps_of(plan)
        return tuple(price_maps(plan, batch, coord, maps)) if maps is not None else ()


# ---- what `show` prints


def _height(job: Job, maps: FeatureMaps) -> int | None:
    """Returns the number of rows of the example picture, None without one. Raises LayoutError for fewer than ranks."""
    args, named = given_to(job.example)
    x = args[0] if args else named.get(maps.inputs[0])
    if not isinstance(x, Tensor) or x.dim() <= ROWS:
        return None
    check_rows(maps, x)
    return x.shape[ROWS]


def _name(settled: CutMaps, number: int) -> str:
    if number in settled.take:
        return "gathers"
    if number in settled.give:
        return "rows, then gathers"
    return "rows" if number in settled.work else "copied"


def _why(maps: FeatureMaps, settled: CutMaps, number: int) -> str:
    step = maps.steps[number]
    if number in settled.take:
        few = maps.settled() is not settled and number in maps.settled().work
        reason = f"fewer than {maps.parts} rows would come out" if few else "from here on every rank computes the whole"
        return f"its input is gathered over tp: {reason}"
    if number not in settled.work:
        return "every rank computes it whole: there are too few rows to cut"
    why = {
        "batch norm": "statistics of all rows, combined over tp",
        "group norm": "statistics of all rows, combined over tp",
        "mean": "the mean over rows, summed over tp: from here on every rank computes the whole",
    }.get(step.kind, "each row alone")
    if step.resize is not None:
        why = _rows(maps, step.resize, settled.rows[step.takes[0]])
    if number in settled.give:
        why += f"; its output is gathered over tp: '{maps.steps[settled.blame[number]].path}' takes whole maps"
    return f"{why}; its gradient is summed over tp" if number in settled.share else why


def _rows(maps: FeatureMaps, resize: Resize, size: int | None) -> str:
    """Returns text on each rank's rows and its halo, for ``show``; in general terms if ``size`` is unknown."""
    if size is not None:
        reading = reading_of(balanced_rows(size, maps.parts), resize)
        own = [sum(b - a for a, b in runs) for runs in reading.needed]
        halo = [rows - reading.num_given(rank, rank) for rank, rows in enumerate(own)]
        num = resize.num_outputs(size)
        computed, read = _listed(balanced_rows(num, maps.parts)), _listed(halo)
        return f"of {num} rows the ranks compute {computed}, and read {read} of others'"
    why = "each rank computes its rows"
    if isinstance(resize, SlidingWindow):
        halo_rows = max(0, resize.reach - resize.stride)
        why += f", {halo_rows} of others' read at each cut" if halo_rows else ", along its stride"
    return f"{why}; whole where fewer than {maps.parts} would come out"


def _listed(counts: Sequence[int]) -> str:
    if len(counts) <= 8:
        return "+".join(map(str, counts))
    return f"{min(counts)} to {max(counts)} each" if min(counts) < max(counts) else f"{counts[0]} each"


# ---- what is refused


def _refused(model: nn.Module, maps: FeatureMaps | None, parts: int) -> LayoutError:
    model_text, fix = f"{type(model).__name__} without a convolution", f"write tp{parts}, or dp{parts}"
    if any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        if maps is None:
            model_text = f"{type(model).__name__}, whose code depends on values, or on whether it trains"
        else:
            blame = maps.settled().blame.get(0)
            model_text = f"{type(model).__name__}: it goes to no convolution as a picture"
            if blame is not None:
                first = f"'{maps.steps[blame].path}' takes the whole picture"
                model_text = f"{type(model).__name__}: {first} before any convolution works on it"
            fix = f"give the picture to a convolution first, as a layer of its own; or write dp{parts}"
    return LayoutError(
        f"no feature map of the model can be cut in space over tp={parts}",
        given=model_text,
        allowed="models whose first argument is a picture that goes to torch's own convolutions, pools, norms and "
        "elementwise layers, in code that can be followed",
        fix=fix,
    )


STRATEGY = Spatial()
