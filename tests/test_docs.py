"""The API reference, as `make docs` builds it."""

import inspect
import re
import runpy
from html import unescape
from pathlib import Path

import passes
import shardtrace  # isort: split  before passes, as users do

import pytest


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of the pages."""
    folder = tmp_path_factory.mktemp("api")
    runpy.run_path(str(Path(__file__).parents[1] / "docs/build.py"))["build"](folder)
    return folder


def words(text):
    """Without markup: letters and digits alone, as roles, quotes and line ends are rendered differently."""
    return "".join(re.findall(r"\w+", re.sub(r":\w+:`", " ", text)))


@pytest.mark.parametrize("module", [shardtrace, passes])
def test_every_public_name_is_in_it(reference, module):
    html = (reference / f"{module.__name__}.html").read_text()
    shown = words(unescape(re.sub(r"<[^>]*>", " ", html)))
    for name in module.__all__:
        docstring = inspect.getdoc(getattr(module, name))
        assert docstring, f"{module.__name__}.{name} has no docstring"
        assert f'id="{name}"' in html, name
        first = re.split(r"\n\n|(?<=\.)\s", docstring)[0]
        assert words(first) in shown, f"{name}: {first}"


def test_arguments_and_errors_are_lists(reference):
    html = (reference / "shardtrace.html").read_text()
    assert "<li><strong>sharding_strategy:</strong>" in html
    assert "<li><strong>RankMismatchError:</strong>" in html


def test_pages(reference):
    assert {str(page.relative_to(reference)) for page in reference.rglob("*.html")} == {
        "index.html", "passes.html", "shardtrace.html", "shardtrace/testing.html",
    }  # fmt: skip
