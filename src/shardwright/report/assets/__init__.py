"""The HTML template, styles and scripts of the report's pages, as package data that is copied into each page."""

from importlib.resources import files
from string import Template


def read_asset(name: str) -> str:
    """Returns the text of a template, style or script of this folder, by file name.

    >>> read_asset("page.html").splitlines()[0]
    '<!doctype html>'
    """
    return (files(__name__) / name).read_text(encoding="utf-8")


def fill_template(name: str, **parts: str) -> str:
    """Returns an HTML template of this folder with every ``$name`` replaced by the part of that name, unescaped.

    Raises: KeyError: a part of the template is not given.
    """
    return Template(read_asset(name)).substitute(parts)
