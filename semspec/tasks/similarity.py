"""How near an output is to a reference, from 0 to 1: the measures of LongBench (Bai et al. 2023)."""

from __future__ import annotations

import re
import string
from collections import Counter
from functools import cache
from typing import Any

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_CODE = ("`", "#", "//")  # marks of fences and comments


def token_f1(text: str, reference: str) -> float:
    """F1 of the words that both have, as SQuAD counts them: case, punctuation and articles aside."""
    ours, theirs = (_words(one) for one in (text, reference))
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0


def _words(text: str) -> Counter[str]:
    return Counter(re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (rouge-score, without stemming)."""
    return float(_scorer().score(reference, text)["rougeL"].fmeasure)


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)


def edit_similarity(text: str, reference: str) -> float:
    """Of the first line that is code: the share of characters that insertions and deletions leave (rapidfuzz's ratio,
    in whole per cent)."""
    from rapidfuzz.fuzz import ratio

    lines = text.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in _NO_CODE)), "")
    return round(ratio(code, reference)) / 100
