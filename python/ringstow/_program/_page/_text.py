"""Text in HTML: escaped, without characters that hide or reverse other text."""

from __future__ import annotations

import html
import math
import unicodedata

from ringstow._native import size

# Marks that change the direction of the text after them, and spaces without width.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def shown(text: object) -> str:
    """Return text for HTML and its attributes; invisible characters are written as escapes."""
    seen = "".join(
        f"\\u{{{ord(char):x}}}" if unicodedata.category(char) in _HIDDEN else char
        for char in str(text)
    )
    return html.escape(seen, quote=True)


def lines(text: object) -> str:
    """Return text of several lines, such as an error's, for the content of an element."""
    each = str(text).replace("\r\n", "\n").replace("\t", " ").split("\n")
    return "<br>".join(shown(line) for line in each)


def cut(text: str, room: int) -> str:
    """Return text of at most ``room`` characters: longer text loses its middle."""
    if len(text) <= room:
        return text
    head, tail = room // 2, room - room // 2 - 1
    return f"{text[:head]}\u2026{text[len(text) - tail :]}"


def number(value: float) -> str:
    """Return a number with four significant digits."""
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def nbytes(count: int | None) -> str:
    """Return bytes as text: ``1.50 GB``."""
    return "?" if count is None else size(count)


def counted(count: int, what: str) -> str:
    """Return a number of things: ``1 tensor``, ``2 tensors``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
