"""How text that candidates wrote is shown to a model: marked as data, with nothing hidden in it."""

from __future__ import annotations

import secrets
import unicodedata

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


class Fence:
    """Marks text that candidates wrote as data. The mark is random, so that it cannot be forged."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)

    def __call__(self, text: str) -> str:
        return f"<data {self.mark}>\n{visible(text)}\n</data {self.mark}>"


def visible(text: str) -> str:
    """Text with control, format and lone surrogate characters written out as escapes; newline and tab stay.

    >>> visible("a\\x1b[2Jb\\u202ec\\n")
    'a\\\\x1b[2Jb\\\\u202ec\\n'
    """
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in _HIDDEN
        else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )
