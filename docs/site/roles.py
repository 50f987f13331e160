"""Sphinx's roles and literal blocks in docstrings, as Markdown."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Module, Object

ROLE = re.compile(r":\w+:`~?([\w.]+)`")


class Roles(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = ROLE.sub(r'<autoref optional identifier="\1"><code>\1</code></autoref>', obj.docstring.value)
        obj.docstring.value = re.sub(r"[ ]?::$", ":", text, flags=re.MULTILINE)

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        self.on_object(obj=pkg)
