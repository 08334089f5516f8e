"""Makes Markdown of the docstrings that the reference pages show: sections in bold, names as code, examples fenced."""

import re
from typing import Any

try:
    import griffe
except ImportError:  # where `markdown` alone is tested
    griffe = None

SECTION = re.compile(r"^([A-Z]\w*):(?= |$)")
SECTIONS = {"Shapes", "Traffic", "Raises", "Source", "Returns", "Args", "Attributes", "Errors", "Yields"}
ROLE = re.compile(r":\w+:`~?([\w.]+)`")


def markdown(text: str) -> str:
    r"""Returns a docstring of this library as Markdown.

    A paragraph that begins with a section's word has it in bold; entries below ``Args:`` and ``Attributes:`` are a
    list; lines from ``>>>`` on to the next empty line are a fenced block.

    >>> print(markdown("Sums.\n\nTraffic: none. Raises: ``PlanError``: no."))
    Sums.
    <BLANKLINE>
    **Traffic:** none. **Raises:** `PlanError`: no.
    """
    lines: list[str] = []
    in_example = in_list = False
    for line in text.splitlines():
        if line.startswith(">>>") and not in_example:
            lines += ["```pycon"] if not lines or not lines[-1] else ["", "```pycon"]
            in_example = True
        if in_example:
            lines += [line] if line.strip() else ["```", ""]
            in_example = bool(line.strip())
            continue
        line = ROLE.sub(lambda found: f"`{found[1].rpartition('.')[2]}`", line).replace("``", "`")
        entry = re.match(r"^    (\*{0,2}[\w, ]+): (.*)", line) if in_list else None
        if line.strip() in {"Args:", "Attributes:"}:
            lines += ["", f"**{line.strip()}**", ""]
            in_list = True
        elif entry:
            names = ", ".join(f"`{name.strip()}`" for name in entry[1].split(","))
            lines.append(f"- {names}: {entry[2]}")
        elif in_list and line.startswith("     "):
            lines.append(f"    {line.strip()}")
        else:
            if in_list and line.strip():
                lines.append("")
                in_list = False
            found = SECTION.match(line)
            if found and found[1] in SECTIONS and lines and lines[-1].strip() and not lines[-1].endswith("```"):
                lines.append("")  # each section is a paragraph
            named = "|".join(sorted(SECTIONS))
            line = re.sub(rf"(^|[.;] )({named}):(?= |$)", r"\1**\2:**", line)
            lines.append(line.strip() if line.startswith("    ") else line)
    return "\n".join([*lines, "```"] if in_example else lines).strip()


if griffe is not None:

    class Docstrings(griffe.Extension):
        """Replaces every docstring that is loaded by its Markdown."""

        def on_instance(self, *, obj: Any, **_: object) -> None:
            """Is called by griffe for each module, class, function and attribute."""
            if obj.docstring is not None:
                obj.docstring.value = markdown(obj.docstring.value)
