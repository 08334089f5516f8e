"""Hooks of mkdocs, which `make docs` runs: pages made of files outside of docs/, and links that lead to them.

The README, the other pages of the root, those of ``benchmarks`` and the notebooks of ``examples/tutorials`` become
pages; so does each file of the repository that a page links to. Pages keep the links that work in the repository.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # tests read this module without mkdocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^\s*(```+|~~~+)")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".csv": "text", ".txt": "text", ".ipynb": "json"}

ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

REFERENCE = {
    "shardwright": ("index", "run", "global_tensor"),
    "shardwright.models": ("models",),
    "shardwright.global_tensor": ("global_tensor",),
}
"""The pages of docs/reference that have the public names of a module."""

page_of: dict[str, str] = {}
"""By a file's path in the repository, the page or picture of the site that shows it."""


# ---- notebooks and files as Markdown


def text_of(path: Path) -> str:
    """Returns the text of a page: a file of Markdown, or a notebook as Markdown."""
    return of_notebook(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")


def blocks(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the fenced blocks of a page, each with its language."""
    lines: list[str] = []
    fence = language = ""
    for line in text_of(path).split("\n"):
        found = FENCE.match(line)
        if found and not fence:
            fence, language, lines = found[1], line.strip().lstrip("`~").split(" ")[0], []
        elif fence and line.strip().startswith(fence):
            yield language, "\n".join(lines)
            fence = ""
        elif fence:
            lines.append(line)


def of_notebook(path: Path) -> str:
    """Returns a tutorial's notebook as Markdown: its cells, and what they printed when it was made."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        printed = "".join(line for output in cell["outputs"] for line in output["text"])
        if printed:
            parts.append(f'```text title="prints"\n{printed.rstrip()}\n```')
    name = path.relative_to(ROOT).as_posix()
    links = f"[the script]({path.stem}.py), [the notebook]({path.name})"
    parts.append(f"*This page is `{name}`: {links}. The tests run it.*")
    return "\n\n".join(parts)


def of_file(path: Path) -> str:
    """Returns the page that shows a file's text."""
    name = path.relative_to(ROOT).as_posix()
    language = LANGUAGES.get(path.suffix, "text")
    text = path.read_text(encoding="utf-8").rstrip()
    return f"---\nsearch:\n  exclude: true\n---\n# {path.name}\n\n`{name}`\n\n~~~~{language}\n{text}\n~~~~\n"


def of_folder(path: Path) -> str:
    """Returns the page that lists a folder's files, each with the first line of its docstring."""
    name = path.relative_to(ROOT).as_posix()
    lines = [f"---\nsearch:\n  exclude: true\n---\n# {name}\n"]
    for each in sorted(path.iterdir()):
        if each.suffix in {".py", ".md"}:
            first = each.read_text(encoding="utf-8").lstrip().partition("\n")[0].strip('"# ')
            lines.append(f"- [{each.name}]({each.name}): {first}")
        elif each.is_dir() and not each.name.startswith((".", "_")):
            lines.append(f"- [{each.name}/]({each.name})")
    return "\n".join(lines)


def of_decisions(folder: Path) -> str:
    """Returns the list of all decision records."""
    lines = ["# Decisions\n", "Why the design is as it is, a page for each choice that a reader may question.\n"]
    for path in sorted(folder.glob("*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines)


# ---- links


def target_of(path: str, link: str) -> str | None:
    """Returns the repository's file to which a link of the file ``path`` leads; None for addresses and for none."""
    if not link or link.startswith(("#", "http://", "https://", "mailto:")):
        return None
    found = os.path.normpath(ROOT / PurePosixPath(path).parent / link.partition("#")[0])
    return Path(found).relative_to(ROOT).as_posix() if Path(found).exists() else None


def outside_of_fences(text: str, change: Callable[[str], str]) -> str:
    """Returns the text with ``change(part)`` for each part that is not within a fenced block."""
    parts, fence, own = [], "", []
    for line in text.split("\n"):
        found = FENCE.match(line)
        if found and not fence:
            parts.append(change("\n".join([*own, ""])) + line)
            fence, own = found[1], []
        elif fence:
            parts.append(line)
            fence = "" if line.strip().startswith(fence) else fence
        else:
            own.append(line)
    return "\n".join([*parts, change("\n".join(own))])


def links_of(text: str) -> list[str]:
    """Returns the targets of all links and pictures of a page."""
    found: list[str] = []

    def collect(part: str) -> str:
        found.extend(link for _, link, _ in LINK.findall(part))
        return part

    outside_of_fences(text, collect)
    return found


def relinked(text: str, path: str, page: str) -> str:
    """Returns a page with links to pages of the site, where it has links to the repository's files."""

    def moved(found: re.Match[str]) -> str:
        before, link, after = found.groups()
        target = target_of(path, link)
        if target is None or target not in page_of:
            return found[0]
        _, mark, anchor = link.partition("#")
        return f"{before}{os.path.relpath(page_of[target], os.path.dirname(page) or '.')}{mark}{anchor}{after}"

    return outside_of_fences(text, lambda part: LINK.sub(moved, part))


def four_spaces(text: str) -> str:
    """Returns a page whose nested lists are indented as Python-Markdown wants them, by four spaces."""
    return outside_of_fences(text, lambda part: re.sub(r"^ {2,3}(?=([-*]|\d+\.) )", "    ", part, flags=re.M))


# ---- hooks


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made of files outside of docs/."""
    from mkdocs.structure.files import File

    page_of.clear()
    texts: dict[str, str] = {}  # by path in the repository, what links are read from
    for file in files:
        page_of[f"docs/{file.src_uri}"] = file.src_uri
        if file.is_documentation_page():
            texts[f"docs/{file.src_uri}"] = file.content_string

    def add(path: str, page: str, text: str) -> None:
        page_of[path] = page
        texts[path] = text
        files.append(File.generated(config, page, content=text))

    for name, page in ROOT_PAGES.items():
        add(name, page, (ROOT / name).read_text(encoding="utf-8"))
    for path in sorted((ROOT / "benchmarks").glob("*/README.md")):
        add(path.relative_to(ROOT).as_posix(), f"benchmarks/{path.parent.name}.md", path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "examples" / "tutorials").glob("*.ipynb")):
        add(path.relative_to(ROOT).as_posix(), f"tutorials/{path.stem}.md", of_notebook(path))
    add("docs/decisions", "decisions/all.md", of_decisions(ROOT / "docs" / "decisions"))
    page_of["benchmarks"] = "how_fast.md"
    page_of["examples/tutorials"] = "tutorials/index.md"

    waiting = list(texts)
    while waiting:  # each file that a page links to, and what the pages of folders list
        path = waiting.pop()
        inside = path if (ROOT / path).is_file() else f"{path}/list"
        for link in links_of(texts[path]):
            target = target_of(inside, link)
            if target is None or target in page_of:
                continue
            found = ROOT / target
            if found.is_dir():
                add(target, f"source/{target}/index.md", of_folder(found))
                waiting.append(target)
            elif found.suffix in {".png", ".svg"}:
                page_of[target] = f"source/{target}"
                files.append(File.generated(config, page_of[target], abs_src_path=str(found)))
            else:
                add(target, f"source/{target}.md", of_file(found))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Leads links to the site's pages."""
    uri = page.file.src_uri
    path = next(path for path, found in page_of.items() if found == uri)
    inside = path if (ROOT / path).is_file() else f"{path}/list"
    return four_spaces(relinked(markdown, inside, uri))


def public_names(path: Path) -> set[str]:
    """Returns the names in a module's ``__all__``, read from its source."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            names |= set(ast.literal_eval(node.value))
    return names


def on_post_build(config: MkDocsConfig) -> None:
    """Refuses a reference that lacks a public name."""
    from mkdocs.exceptions import PluginError

    for module, pages in REFERENCE.items():
        html = "".join((Path(config.site_dir) / "reference" / f"{page}.html").read_text("utf-8") for page in pages)
        shown = {name.rpartition(".")[2] for name in re.findall(r'id="(shardwright[\w.]*)"', html)}
        missing = public_names(ROOT / "src" / module.replace(".", "/") / "__init__.py") - shown
        if missing:
            raise PluginError(f"the reference lacks {', '.join(sorted(missing))} of {module}")


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Refuses a page that would load anything from the network."""
    from mkdocs.exceptions import PluginError

    loading = r'<(?:script|img|iframe|link [^>]*rel="?(?:stylesheet|preconnect))[^>]*(?:src|href)="?https?:[^>]*>'
    found = re.search(loading, output)
    if found:
        raise PluginError(f"{page.file.src_uri} would load something from the network: {found[0]}")
    return output
