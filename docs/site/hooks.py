"""The pages of the repository's root become pages of the site, and links to its source files plain text."""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    folder = ROOT if uri in PAGES.values() else (ROOT / "docs" / uri).parent

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups(default="")
        path = (folder / target).resolve().relative_to(ROOT).as_posix()
        if path not in PAGES and not path.startswith("docs/"):
            return text
        there = PAGES.get(path, path.removeprefix("docs/"))
        return f"[{text}]({os.path.relpath(there, os.path.dirname(uri))}{anchor})"

    return LINK.sub(link, markdown)
