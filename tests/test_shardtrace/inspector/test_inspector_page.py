"""The page as HTML: fragments of it, and that nothing in it is taken for HTML that is not."""

import base64
import json
import linecache
import re
import zlib
from html.parser import HTMLParser

import shardtrace
from shardtrace.inspector.lines import Mark
from shardtrace.inspector.page import page_data

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn


@pytest.fixture(scope="module")
def html(three_blocks, tmp_path_factory):
    return three_blocks.to_html(tmp_path_factory.mktemp("page") / "page.html").read_text()


def fragment(html, start, stop):
    """The page between two texts, one element on each line, without times (they differ from run to run)."""
    inside = html.partition(start)[2].partition(stop)[0]
    return (
        re.sub(r"<span>[\d.]+ (?:s|ms|µs)</span>", "", inside).replace("><", ">\n<").replace("µ", "u").replace("✓", "=")
    )


def test_passes(html):
    backward = html.partition("<h3>backward</h3>")[2].partition("</div><div class=")[0]
    assert_expected_inline(
        fragment("|" + html.partition("<h3>forward</h3>")[2], "|", '<div role="option" class="stage" data-stage="7"'),
        """\
<div role="option" class="stage" data-stage="0">
<b>traced</b>
<small>
<span>47 lines</span>
</small>
</div>
<div role="option" class="stage" data-stage="1">
<b>Return arguments to track copies onto them</b>
<small>
<span>47 lines</span>
<span class="added">+1</span>
<span class="removed">&minus;1</span>
</small>
</div>
<div role="option" class="stage ours" data-stage="3">
<b>shard_parameters</b>
<small>
<span>47 lines</span>
<span class="added">+12</span>
<span class="removed">&minus;12</span>
</small>
</div>
<div role="option" class="stage ours" data-stage="4">
<b>insert_synchronize</b>
<small>
<span>50 lines</span>
<span class="added">+12</span>
<span class="removed">&minus;9</span>
</small>
</div>""",
    )
    assert 'class="stage ours"' in backward


def test_modules(html):
    assert_expected_inline(
        fragment(html, '<details open><summary class="row">', '<span class="share"'),
        """\
<span class="module">
<a data-at="forward:14" href="#">Sequential</a>
</span>
<span>1.29 KiB</span>
<span>660 B</span>
<span>120</span>""",
    )
    assert '0 … 2</a> <span class="times">&times;3</span>' in html


def test_numbers(html):
    assert_expected_inline(
        fragment(html, "<h3>Collectives of a step</h3>", "</figure>"),
        """\
<p>Bytes of unsharded buckets, padding included; each rank sends and receives (N - 1) / N of them. P: all parameters; G: the gradients of trained parameters.</p>
<table>
<thead>
<tr>
<th>phase</th>
<th>kind</th>
<th class="n">number</th>
<th class="n">bytes</th>
<th class="n">formula</th>
<th>
</th>
</tr>
</thead>
<tbody>
<tr>
<td>forward</td>
<td>all_gather</td>
<td class="n">3</td>
<td class="n">1.29 KiB</td>
<td class="n">P = 1.29 KiB</td>
<td>=</td>
</tr>
<tr>
<td>backward</td>
<td>all_gather</td>
<td class="n">3</td>
<td class="n">1.29 KiB</td>
<td class="n">P = 1.29 KiB</td>
<td>=</td>
</tr>
<tr>
<td>backward</td>
<td>reduce_scatter</td>
<td class="n">3</td>
<td class="n">1.29 KiB</td>
<td class="n">G = 1.29 KiB</td>
<td>=</td>
</tr>
</tbody>
</table>""",
    )


def test_lanes_share_an_axis(html):
    assert len(set(re.findall(r'<svg viewBox="0 0 (\d+) \d+" preserveAspectRatio="none"', html))) == 1
    gutter, track = (
        re.findall(r'<div class="lane ([a-z]*)">', part) for part in html.partition('class="scroller"')[::2]
    )
    assert gutter == track == ["phases", "axis", "compute", "network", "held", "memory"]


def test_data(three_blocks):
    """The script can put each stage together again."""
    data = json.loads(page_data(three_blocks.record))
    for stage, drawn in zip(three_blocks.stages, data["stages"], strict=True):
        lines = []
        for row in drawn["rows"]:
            line, mark = divmod(row, 4)
            template, _, *names = data["lines"][line]
            pieces = [re.sub("<.*?>", "", piece) for piece in data["templates"][template][0]]
            if mark != Mark.REMOVED:
                lines.append(pieces[0] + "".join(data["names"][n] + p for n, p in zip(names, pieces[1:], strict=True)))
        assert lines == [line.code.replace('"', "&quot;").replace("'", "&#x27;") for line in stage.lines]
    for phase, drawn in zip(three_blocks.record.phases, data["phases"], strict=True):
        assert sum(drawn["starts"]) == round(phase.timeline.end * 1e9)
        assert data["stages"][drawn["stage"]]["phase"] == phase.name


def test_needs_no_network(html):
    urls = re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?([^"\')\s>]*)', html)
    assert set(urls) <= {"#"}


class Elements(HTMLParser):
    """The tags of a page, and what its elements say."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attributes), attributes

    def handle_data(self, data):
        self.texts.append(data)


HOSTILE = "</script><script>title='mine'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def hostile():
    """A model whose class, file, source and modules have names that are HTML. (Thunder makes Python names of those of
    parameters, so that these cannot.)"""
    name = f"<b>{HOSTILE}".replace(".", "")
    source = (
        "class Hostile(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = nn.Linear(3, 3)\n"
        f"        self.add_module({name!r}, nn.Tanh())\n"
        "    def forward(self, x):\n"
        f"        return self._modules[{name!r}](torch.sin(self.linear(x)))  # {HOSTILE}\n"
    )
    file = f"/{HOSTILE}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = {"torch": torch, "nn": nn, "__name__": "hostile"}
    exec(compile(source, file, "exec"), names)
    names["Hostile"].__name__ = HOSTILE
    yield shardtrace.inspect(names["Hostile"](), torch.ones(2, 3), world_size=2)
    del linecache.cache[file]


def test_hostile_names_are_text(hostile, tmp_path):
    html = hostile.to_html(tmp_path / "page.html").read_text()
    page = Elements(html)
    assert page.tags.count("script") == 2  # the data, and the page's own
    assert not {"img", "iframe", "link"} & set(page.tags)
    assert HOSTILE not in html
    assert HOSTILE in page.texts  # the heading
    packed = html.partition('id="data">')[2].partition("<")[0]
    data = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert any("&lt;script&gt;" in file for file, *_ in data["sources"])
    assert any("&lt;script&gt;" in text for *_, text in data["sources"])
    assert any("&lt;script&gt;" in module for module in data["modules"])


def test_notebook(hostile, three_blocks):
    bundle = three_blocks._repr_mimebundle_()
    assert bundle["text/plain"] == str(three_blocks)
    frame = Elements(hostile._repr_html_())
    assert frame.tags.count("iframe") == 1
    assert not {"script", "img"} & set(frame.tags)
    assert "table" in frame.tags  # what is left where frames and styles are taken out
