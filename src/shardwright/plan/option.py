"""``StrategyOption``: an option of a strategy in a layout line, with its description and examples for tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StrategyOption:
    """An option of a strategy, written ``/name`` or ``/name:value`` after an axis in a layout line.

    Args:
        text: what the option does; it names a value if the option takes one.
        examples: spellings that tests try, with values and other options; by default the name alone. ``()`` if tests
            must supply the value, such as a path.
        pins: further values of the option that tests try, after written-out axis sizes such as ``tp2x2``.
        sizes: further axis sizes, such as "2x2", after which tests write the option.
        searched: spellings that a search of layouts tries; by default that of the first example. ``()`` for an option
            that does not change the prediction, or that chooses among other options itself.
        of_one_model: whether each example names parts of one test model and so fits no other model.
    """

    text: str
    examples: tuple[str, ...] | None = None
    pins: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    of_one_model: bool = False
    searched: tuple[str, ...] | None = None

    def written(self, name: str) -> tuple[str, ...]:
        """Returns the spellings of the option called ``name`` that tests try in layout lines."""
        return (name,) if self.examples is None else self.examples

    def tried(self, name: str) -> tuple[str, ...]:
        """Returns the spellings of the option called ``name`` that a search of layouts tries, () if none.

        >>> StrategyOption("at once", ("least:0", "least:8")).tried("least")
        ('least:0',)
        """
        if self.searched is not None or self.of_one_model:
            return self.searched or ()
        words = (word for spelling in self.written(name) for word in spelling.split("/"))
        return tuple(word for word in words if word.partition(":")[0] == name)[:1]
