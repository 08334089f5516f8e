"""What the tensor-parallel strategies share: roles for every layer, where everything lies, forwards, prices."""

from shardwright.grid.apply import apply
from shardwright.grid.mode import OPTIONS, Mode, mode
from shardwright.grid.place import place, place_alone, sent
from shardwright.grid.roles import GridAxis, State
from shardwright.grid.traffic import traffic

__all__ = ["OPTIONS", "GridAxis", "Mode", "State", "apply", "mode", "place", "place_alone", "sent", "traffic"]
