"""The pages of the site: each link and anchor leads somewhere, each command parses, each block of Python is run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
import typer.main
from tools.docstrings import markdown
from tools.plans import OUT, row_of
from tools.site_pages import LINK, blocks, links_of, of_file, of_folder, outside_of_fences, relinked, text_of

import shardwright
from shardwright.cli.main import app
from shardwright.cost.cluster import Cluster
from shardwright.cost.device import figures_of, profile
from shardwright.layout import Layout
from shardwright.strategies import choose

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*/README.md")],
    key=lambda path: path.as_posix(),
)
OF_SCRIPTS = sorted((ROOT / "examples" / "tutorials").glob("*.ipynb"))
EXAMPLES_OF_STYLE = "docs/conventions.md"
"""The page whose code shows how code is written; `make check` holds to it what a machine can."""
RUN_WHOLE = "docs/transformers.md"
"""The page whose lines tests/site/test_transformers_page.py runs in their order, in one folder."""


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def anchors_of(path):
    """The anchors of a page's headings, as both the site and code hosts make them."""
    found = set()

    def collect(part):
        for heading in re.findall(r"^#+ (.+)$", part, flags=re.M):
            plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading).replace("`", "")
            found.add(re.sub(r"[^\w\- ]", "", plain).strip().lower().replace(" ", "-"))
        return part

    outside_of_fences(text_of(path), collect)
    return found


def broken(path):
    """The links of a page that lead nowhere."""
    for link in links_of(text_of(path)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        found = (path.parent / target).resolve() if target else path
        has_headings = found.suffix in {".md", ".ipynb"}
        if not found.exists() or (anchor and has_headings and anchor not in anchors_of(found)):
            yield link


def test_every_link_of_every_page_leads_to_a_file_and_to_a_heading_of_it():
    assert not {name_of(path): found for path in [*PAGES, *OF_SCRIPTS] if (found := list(broken(path)))}


def test_links_and_anchors_that_lead_nowhere_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Two words: here\n[a](none.md) [b](#no-such) [c](#two-words-here)\n```\n[e](no)\n```\n")
    assert list(broken(page)) == ["none.md", "#no-such"]


def commands(path):
    """The commands of ``shardwright`` that a page shows, each as its words, and the targets of ``make``."""
    for language, text in blocks(path):
        for line in text.replace("\\\n", " ").split("\n") if language in {"sh", "text", "bash"} else ():
            line = line.strip().removeprefix("$ ") if language == "text" else line.strip()
            line = re.sub(r"^(\w+=\S+ +)+", "", line)
            if re.match(r"(srun .*)?shardwright [a-z]", line):
                line = line[line.index("shardwright ") :].partition(" && ")[0]
                words = shlex.split(line, comments=True)
                yield [word for word in words if word != "..."]
            elif line.startswith(("make ", "python examples/")):
                yield shlex.split(line, comments=True)[:2]


def parse(words):
    """Parses a command as the command line does, without running it."""
    command, rest = typer.main.get_command(app), words[1:]
    if "--dry-run" not in rest and "launch" in rest:
        rest = [*rest[: rest.index("--")], "--dry-run", *rest[rest.index("--") :]]
    context = command.make_context("shardwright", list(rest), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        _, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(command.name, rest, parent=context)
    return context.params


SHOWN = [(name_of(path), words) for path in [*PAGES, *OF_SCRIPTS] for words in commands(path)]


def test_the_pages_show_commands():
    assert len([words for _, words in SHOWN if words[0] == "shardwright"]) > 40


@pytest.mark.sampled(0)
def test_every_command_that_a_page_shows_parses_and_its_layout_is_one():
    makefile = (ROOT / "Makefile").read_text()
    for page, words in SHOWN:
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.M), (page, words)
        elif words[0] == "python":
            assert (ROOT / words[1]).exists(), (page, words)
        else:
            try:
                params = parse(words)
            except Exception as failure:
                raise AssertionError(f"{page}: {' '.join(words)}: {failure}") from failure
            line = params.get("layout")
            if isinstance(line, str) and "auto" not in line:  # chosen when the model is known
                choose(Layout.parse(line))  # options that no strategy has are refused here


def test_a_command_that_is_wrong_does_not_parse():
    with pytest.raises(Exception, match="no-such"):
        parse(["shardwright", "verify", "--no-such"])


def test_every_block_of_python_is_a_doctest_or_part_of_an_example():
    code = "\n".join(path.read_text() for path in sorted((ROOT / "examples").rglob("*.py")))
    squeezed = re.sub(r"\s+", " ", code)
    for path in [*PAGES, *OF_SCRIPTS]:
        for language, text in blocks(path):
            if language in {"python", "pycon", "py"} and name_of(path) not in (EXAMPLES_OF_STYLE, RUN_WHOLE):
                in_example = re.sub(r"\s+", " ", text).strip() in squeezed
                is_run = text.startswith(">>> ") or in_example
                assert is_run, f"{name_of(path)}: neither a doctest nor of an example\n{text}"


def test_the_reference_has_every_public_name_once():
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md")))
    shown = re.findall(r"^::: (\S+)$", text, re.M)
    names = {name.rpartition(".")[2] for name in shown}
    assert names >= set(shardwright.__all__), set(shardwright.__all__) - names
    assert len(shown) == len(set(shown))
    for path in shown:  # each is what the public name means
        module, _, attribute = path.rpartition(".")
        owner = importlib.import_module(module)
        found = getattr(owner, attribute)
        if attribute in shardwright.__all__ and not inspect.ismodule(found):
            assert getattr(shardwright, attribute) is found


def test_the_cluster_of_the_guide_is_read_and_has_the_figures_of_its_profile():
    texts = [text for language, text in blocks(ROOT / "docs" / "guide.md") if language == "toml"]
    (table,) = (tomllib.loads(text) for text in texts if "[constants]" in text)
    cluster, known = Cluster.of_table("cluster.toml", table), profile("h100-80gb")
    assert figures_of(cluster.device).keys() <= table.keys(), "a figure is not shown"
    assert figures_of(cluster.device) == {**figures_of(known), "host_memory_GB": 2000}, "which no profile has"
    assert (cluster.device.peaks, cluster.num_ranks) == (known.peaks, 128)


def test_links_of_pages_lead_to_pages_of_the_site(monkeypatch):
    monkeypatch.setattr("tools.site_pages.page_of", {"docs/guide.md": "guide.md", "README.md": "index.md"})
    text = "[a](../README.md) [b](guide.md#zero) [c](https://x.y)\n```\n[d](guide.md)\n```\n"
    found = relinked(text, "docs/moving/ddp.md".replace("moving/", ""), "moving/ddp.md")
    assert found == "[a](../index.md) [b](../guide.md#zero) [c](https://x.y)\n```\n[d](guide.md)\n```\n"


def test_examples_of_the_tools_are_right():
    for name in ("docstrings", "notebooks"):
        found = doctest.testmod(importlib.import_module(f"tools.{name}"))
        assert found.attempted
        assert not found.failed, name


def test_a_docstring_becomes_markdown():
    text = "Cuts.\n\nArgs:\n    a, b: two\n        lines.\n\nShapes: (B,).\nRaises: :class:`~x.Error`.\n"
    assert markdown(f"{text}\n>>> 1 + 1\n2\n\nEnd.").split("\n") == [
        *["Cuts.", "", "", "**Args:**", "", "- `a`, `b`: two", "    lines.", "", "", "**Shapes:** (B,).", ""],
        *["**Raises:** `Error`.", "", "```pycon", ">>> 1 + 1", "2", "```", "", "End."],
    ]


def test_a_file_and_a_folder_become_pages():
    assert "~~~~python\n" in of_file(ROOT / "examples" / "two_ranks.py")
    assert "- [two_ranks.py](two_ranks.py): The smallest use of the library" in of_folder(ROOT / "examples")
    assert LINK.findall("[a [b]](c.md)") == [("[a [b]](", "c.md", ")")]


@pytest.mark.sampled(0)
def test_the_prices_of_the_page_are_what_the_planner_says():
    rows = json.loads(OUT.read_text())["rows"]
    row = next(row for row in rows if row["layout"] == "dp8/zero3 mb8 bf16")
    found = row_of(row["layout"])
    assert (found["fits"], found["most"]) == (row["fits"], row["most"]), "make plans"
    assert found["step_s"] == pytest.approx(row["step_s"], rel=1e-6), "make plans"
    assert found["memory_bytes"] == pytest.approx(row["memory_bytes"], rel=1e-6), "make plans"
