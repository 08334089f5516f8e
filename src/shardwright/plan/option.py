"""An option of a strategy: what it does, and how it is written where the strategy is tested."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StrategyOption:
    """What ``/name`` or ``/name:value`` behind an axis does; ``text`` shows a value where one is taken.

    All other fields say what tests write, so that a strategy's file says what it can be tested with.

    Args:
        text: what the option does.
        examples: what is written behind the axis, the option with its values and with other options; its name
            alone where this is left out. With ``()`` a test has to supply what the file cannot know, as a path.
        pins: further values, which need the sizes of a grid written out.
        sizes: further sizes to write it behind: "2x2".
        of_one_model: whether each example names the parts of one model and fits no other.

    >>> StrategyOption("stages by hand: cut:conv1,conv2", ("cut:conv1,conv2",), of_one_model=True).written("cut")
    ('cut:conv1,conv2',)
    >>> StrategyOption("parameters in slices").written("zero3")
    ('zero3',)
    """

    text: str
    examples: tuple[str, ...] | None = None
    pins: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    of_one_model: bool = False

    def written(self, name: str) -> tuple[str, ...]:
        """What tests write behind an axis to try the option of this name."""
        return (name,) if self.examples is None else self.examples
