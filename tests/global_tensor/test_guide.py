"""The guide shows the code that runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_program_of_the_guide_is_in_the_example_that_tests_run():
    guide, example = ((ROOT / path).read_text() for path in ("docs/global_tensors.md", "examples/global_tensors.py"))
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    programs = [block for block in blocks if not block.startswith((">>>", "import"))]
    assert len(programs) == 2
    assert all(block in example for block in programs)
