"""The HTML templates, styles and script of the report's pages: package data, put into each page whole."""

from importlib.resources import files
from string import Template


def read_asset(name: str) -> str:
    """Returns the text of one template, style or script of this folder, by file name.

    >>> read_asset("timeline.js").splitlines()[0]
    '(() => {'
    """
    return (files(__name__) / name).read_text(encoding="utf-8")


def fill_template(name: str, **parts: str) -> str:
    """Returns an HTML template of this folder with every ``$name`` in it replaced; the parts must be HTML already."""
    return Template(read_asset(name)).substitute(parts)
