"""HTML elements from text that anyone may have written: every string is escaped, unless an element made it."""

from __future__ import annotations

import html
from typing import Final

from kvstore.tools.fsck_outcome import printable

VOID: Final = {"br", "hr", "meta"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(content: str) -> Markup:
    """A string as HTML, Markup as it is."""
    return content if isinstance(content, Markup) else Markup(html.escape(printable(content), quote=True))


def el(name: str, /, *children: str, **attributes: str) -> Markup:
    """An element. `class_` is the attribute class, `data_label` is data-label."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items() if value
    )
    if name in VOID:
        return Markup(f"<{name}{said}>")
    return Markup(f"<{name}{said}>{''.join(map(text, children))}</{name}>")


def join(*parts: str) -> Markup:
    """Parts side by side."""
    return Markup("".join(map(text, parts)))
