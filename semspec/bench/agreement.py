"""How far final texts agree with the target's own over other seeds: by an encoder, by words, by the number they give.

The reference is what the target writes with other seeds. The target's own text is held against the same references, so
"as close as the target is to itself" has a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from semspec.bench.folder import Key, Sample, key_of
from semspec.tasks.answers import final_number, visible
from semspec.tasks.scripts import spaced
from semspec.tasks.similarity import token_f1

WORDS = "words in common (no encoder)"
Values = dict[Key, float]


def final_text(text: str) -> str:
    """What is left for a reader; all of it where the reasoning never ended."""
    return visible(text).strip() or text.strip()


def references(samples: Iterable[Sample], roles: dict[str, str]) -> dict[str, list[Sample]]:
    """Of each problem, the target's samples with other seeds than the arms have."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        if roles[sample["arm"]] == "resampled":
            found.setdefault(sample["problem"], []).append(sample)
    return found


def agreements(
    samples: Sequence[Sample], others: dict[str, list[Sample]], alike: Callable[[Sample, Sample], float | None]
) -> Values:
    """Each sample's mean likeness to the references of its problem, itself aside; none where nothing is comparable."""
    found: Values = {}
    for sample in samples:
        seen = [alike(sample, other) for other in others.get(sample["problem"], ()) if other is not sample]
        known = [value for value in seen if value is not None]
        if known:
            found[key_of(sample)] = sum(known) / len(known)
    return found


def by_words(sample: Sample, other: Sample) -> float:
    return token_f1(spaced(final_text(sample["text"])), spaced(final_text(other["text"])))


def by_number(samples: Iterable[Sample]) -> Callable[[Sample, Sample], float | None]:
    """1 where both give the same number, 0 where one gives another or none; not known where the target gives none."""
    numbers = {id(sample): final_number(sample["text"]) for sample in samples}

    def alike(sample: Sample, other: Sample) -> float | None:
        theirs = numbers[id(other)]
        return None if theirs is None else float(numbers[id(sample)] == theirs)

    return alike


def by_encoder(samples: Sequence[Sample], encoder: Any) -> Callable[[Sample, Sample], float]:
    """The cosine of two final texts' vectors, each distinct text encoded once."""
    texts = list(dict.fromkeys(final_text(s["text"]) for s in samples))
    vectors = dict(zip(texts, encoder.embed_long(texts), strict=True))
    of = {id(s): vectors[final_text(s["text"])] for s in samples}
    return lambda sample, other: float(of[id(sample)] @ of[id(other)])
