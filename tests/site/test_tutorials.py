"""Each tutorial runs, on threads; its notebook has the cells of its script; what its text shows is what the code is."""

from __future__ import annotations

import ast
import difflib
import json
import re

import pytest
from tools.notebooks import FOLDER, cells_in, cells_of, notebook, printed

SCRIPTS = sorted(FOLDER.glob("*.py"))
NEEDS = {"transformers_model": "transformers", "lora": "peft"}


def names(paths):
    return [path.stem for path in paths]


def test_the_notebooks_are_those_of_the_scripts():
    assert names(SCRIPTS) == names(sorted(FOLDER.glob("*.ipynb")))
    for script in SCRIPTS:
        cells = cells_of(script.read_text())
        assert cells_in(script.with_suffix(".ipynb")) == cells, f"{script.stem}: make notebooks"
        assert cells[0][0] == "markdown"
        assert cells[0][1].startswith("# ")


def test_a_notebook_is_one_that_jupyter_reads():
    found = json.loads(notebook([("markdown", "# A"), ("code", "print(1)\nprint(2)")], ["", "1\n2\n"]))
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert found["cells"][1] == {
        "cell_type": "code", "id": "cell-1", "metadata": {}, "execution_count": None,
        "source": ["print(1)\n", "print(2)"],
        "outputs": [{"name": "stdout", "output_type": "stream", "text": ["1\n", "2\n"]}],
    }  # fmt: skip


@pytest.mark.sampled(0)
@pytest.mark.parametrize("script", SCRIPTS, ids=names(SCRIPTS))
def test_a_tutorial_runs_and_prints_as_many_lines_as_its_notebook_shows(script, monkeypatch):
    pytest.importorskip(NEEDS.get(script.stem, "torch"), reason="make zoo-contract has it")
    monkeypatch.delenv("CIFAR10", raising=False)
    found = printed(cells_of(script.read_text()), script.stem)
    shown = [
        "".join(line for output in cell.get("outputs", ()) for line in output["text"])
        for cell in json.loads(script.with_suffix(".ipynb").read_text())["cells"]
    ]
    assert [text.count("\n") for text in found] == [text.count("\n") for text in shown]
    assert any(found)
    assert not re.search(r"/(home|tmp|work|root|Users)/", "".join(shown)), "a path of the machine that made it"


def test_the_difference_that_the_first_tutorial_shows_is_that_of_its_loops():
    script = FOLDER / "own_loop.py"
    text = script.read_text()
    defined = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    functions = {node.name: ast.get_source_segment(text, node) for node in defined}
    found = difflib.ndiff(functions["train"].splitlines(), functions["train_on"].splitlines())
    found = sorted(line[0] + line[2:] for line in found if line[0] != "?")
    (shown,) = (re.search(r"```diff\n(.*?)\n```", cell, re.S) for kind, cell in cells_of(text) if "```diff" in cell)
    assert sorted(shown[1].splitlines()) == found
