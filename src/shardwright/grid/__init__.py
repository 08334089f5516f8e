"""What the tensor-parallel strategies share: roles for every layer, where everything lies, forwards, prices."""

from shardwright.grid.apply import apply
from shardwright.grid.maps import Maps, Settled, Step, follow
from shardwright.grid.mode import OPTIONS, Mode, mode
from shardwright.grid.overrides import overrides_of
from shardwright.grid.place import place, place_alone, sent
from shardwright.grid.roles import GridAxis, State
from shardwright.grid.spatial import MODEL, apply_maps, check_rows, maps_of, price_maps
from shardwright.grid.traffic import traffic

__all__ = [
    "MODEL",
    "OPTIONS",
    "GridAxis",
    "Maps",
    "Mode",
    "Settled",
    "State",
    "Step",
    "apply",
    "apply_maps",
    "check_rows",
    "follow",
    "maps_of",
    "mode",
    "overrides_of",
    "place",
    "place_alone",
    "price_maps",
    "sent",
    "traffic",
]
