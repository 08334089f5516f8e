"""``StrategyOption``: an option that a strategy declares in its file, with the spellings that the tests try."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StrategyOption:
    """An option of a strategy, written ``/name`` or ``/name:value`` behind an axis in a layout line.

    Args:
        text: what the option does; shows a value if it takes one.
        examples: spellings for tests, with values and other options; by default the name alone. ``()`` if tests must
            supply what the file cannot know, as a path.
        pins: further values for tests, which need the sizes of a grid written out.
        sizes: further sizes behind which tests write it: "2x2".
        of_one_model: whether each example names the parts of one model and fits no other.
    """

    text: str
    examples: tuple[str, ...] | None = None
    pins: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    of_one_model: bool = False

    def written(self, name: str) -> tuple[str, ...]:
        """Returns the spellings of the option ``name`` that tests try in layout lines."""
        return (name,) if self.examples is None else self.examples
