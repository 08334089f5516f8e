"""API pages from docstrings: one Markdown file for each module, into docs/api."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import shardwright

OUT = Path(__file__).resolve().parents[1] / "docs" / "api"


def page(name: str) -> str:
    """Returns the page of a module: its docstring, then its public classes and functions."""
    module = importlib.import_module(name)
    lines = [f"# {name}", "", inspect.getdoc(module) or "", ""]
    for key, value in vars(module).items():
        if key.startswith("_") or getattr(value, "__module__", None) != name:
            continue
        if inspect.isclass(value) or inspect.isfunction(value):
            try:
                signature = str(inspect.signature(value))
            except (ValueError, TypeError):
                signature = ""
            lines += [f"## `{key}{signature}`", "", "```text", inspect.getdoc(value) or "", "```", ""]
    return "\n".join(lines)


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    names = ["shardwright"]
    names += [m.name for m in pkgutil.walk_packages(shardwright.__path__, "shardwright.") if "__main__" not in m.name]
    for name in names:
        (OUT / f"{name}.md").write_text(page(name))
    (OUT / "index.md").write_text("\n".join(["# API", "", *(f"- [{n}]({n}.md)" for n in names), ""]))
    print(f"{len(names)} pages in {OUT}")


if __name__ == "__main__":
    main()
