"""What of an answer in words a user needs: names, numbers, commands, and the few words that carry the meaning."""

from __future__ import annotations


def lacks(text: str, *words: str) -> list[str]:
    """Those of the words that the text does not have, in whatever order it has the others."""
    return [word for word in words if word not in text]
