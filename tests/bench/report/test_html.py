from __future__ import annotations

from pathlib import Path

from torchboost.bench.report.html import environment_section, figure, page, section, table, write_whole_page
from torchboost.measure.stopwatch import environment


def test_a_page_is_complete_and_its_title_escaped():
    text = page("a < b & c", ["<p>first</p>", "", "<p>second</p>"], "the end")
    assert text.startswith("<!doctype html>")
    assert "<title>a &lt; b &amp; c</title>" in text
    assert "<p>first</p>\n<p>second</p>" in text
    assert "<footer>the end</footer>" in text
    assert "<script" not in text


def test_a_table_scrolls_by_itself_and_is_named():
    text = table(("a & b", "c"), [["<td>1</td>", "<td>2</td>"]], class_="text")
    assert '<th scope="col">a &amp; b</th>' in text
    assert "<tr><td>1</td><td>2</td></tr>" in text
    assert 'aria-label="a &amp; b table"' in text
    assert '<table class="text">' in text


def test_sections_and_figures():
    assert section("T & U", "<p>x</p>", lead="lead", class_="c") == (
        '<section class="c">\n<h2>T &amp; U</h2>\n<p class="lead">lead</p><p>x</p>\n</section>'
    )
    assert "<figcaption>a &lt; b</figcaption>" in figure("<svg/>", "<svg/>", "a < b")
    here = environment()
    assert "<dt>Versions</dt>" in environment_section(here)
    assert "<dt>Commit</dt><dd>not recorded</dd>" in environment_section(here.model_copy(update={"commit": ""}))


def test_a_page_is_written_as_a_whole(tmp_path: Path):
    path = tmp_path / "new" / "page.html"
    assert write_whole_page("content", path) == path
    assert path.read_text(encoding="utf-8") == "content"
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
