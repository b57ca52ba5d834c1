"""Scripts that put no spaces between words: there a word, or a number, may begin beside any letter."""

from __future__ import annotations

import re

# Thai to Tibetan, Burmese, Khmer, kana, Han, Hangul (whose particles are attached), and half-width kana.
SPACELESS = r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uff66-\uff9f"
LETTER = rf"[^\W{SPACELESS}]"  # of a word that ends at a space; or a digit
_EACH = re.compile(rf"([{SPACELESS}])")


def spaced(text: str) -> str:
    """With each letter of such scripts by itself, so that what is counted by words has something to count."""
    return _EACH.sub(r" \1 ", text)
