"""What all pages are made of: one file that holds its style and script, loads nothing, and escapes what it shows."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from shardwright.report.page import data_element, fact_list, html_table, section, write_html

NASTY = "<script>alert('\"&')</script>"


class Checker(HTMLParser):
    """Every tag that is opened is closed, nothing is fetched from outside, and no script is what a text says."""

    def __init__(self):
        super().__init__()
        self.open, self.outside, self.text, self.scripts, self.labels, self.names = [], [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.outside += [value for key, value in attrs if key in ("src", "href", "action", "srcset")]
        self.labels += [value for key, value in attrs if key in ("aria-label", "aria-valuetext")]
        self.names += [value for key, value in attrs if key == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] == "script" else self.text).append(data)


def read(path):
    """The parts of a page that is whole, loads nothing, forbids loading, and names no id twice."""
    checker, source = Checker(), path.read_text(encoding="utf-8")
    checker.feed(source)
    checker.close()
    assert not checker.open
    assert not checker.outside
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<link|innerHTML|eval\(|fetch\(", source)
    assert "default-src 'none'" in source
    assert len(checker.names) == len(set(checker.names))
    return checker


def checked(path):
    return " ".join(read(path).text)


def test_a_page_is_one_file_in_light_and_dark_whose_scripts_are_those_of_its_parts_alone(tmp_path):
    plain = write_html(
        tmp_path / "made" / "plain.html", title="A page", under="of <b>bold</b>", sections=["<p>here</p>"]
    )
    assert not read(plain).scripts
    assert "prefers-color-scheme: dark" in plain.read_text()
    drawn = write_html(tmp_path / "drawn.html", title="A page", under="", sections=["", "<p>x</p>"], parts=("chart",))
    (script,) = read(drawn).scripts
    assert "function startChart" in script
    assert "function startTimelines" not in script


def test_text_of_others_is_shown_and_never_run(tmp_path):
    sections = [
        section(NASTY, "", NASTY, name="a"), html_table([NASTY, "b"], [["<b>cell</b>", "2"]], stacked=True),
        fact_list([(NASTY, NASTY, NASTY)]), data_element({"name": NASTY}),
    ]  # fmt: skip
    path = write_html(tmp_path / "page.html", title=NASTY, under="", sections=sections)
    found = read(path)
    assert path.read_text().count("<script") == 1
    assert found.scripts == ['{"name":"\\u003cscript>alert(\'\\"&\')\\u003c/script>"}']
    assert " ".join(found.text).count(NASTY) == 8


def test_a_table_names_its_heads_and_a_stacked_one_each_cell():
    table = html_table(["rank", "held"], [["0", "1 KiB"]], numbers_from=1)
    assert '<th scope="col">rank</th><th scope="col" class="number">held</th>' in table
    assert '<tr><th scope="row">0</th><td class="number">1 KiB</td></tr>' in table
    assert 'class="scroll" tabindex="0"' in table
    stacked = html_table(["rank", "held"], [["0", "1 KiB"]], stacked=True)
    assert 'role="cell" data-head="held">1 KiB</td>' in stacked
    assert "scroll" not in stacked
