"""The most frequent tokens of a text: what a draft model's head may be limited to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest


def most_frequent(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], size: int, vocab: int) -> list[int]:
    """Ids in order: special tokens first, then by frequency; what the texts do not have follows by id, since tokenizers
    that merge pairs number them by their frequency."""
    if not 0 < size <= vocab:
        raise BadRequest(f"a head of {size} tokens; give 1 to {vocab}, as many as the model has")
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer(text, add_special_tokens=False)["input_ids"])
    special = {i for i in (*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder) if i < vocab}
    ranked = sorted(range(vocab), key=lambda i: (i not in special, -counts[i], i))
    return sorted(ranked[:size])


def write_ids(ids: list[int], path: Path) -> None:
    path.write_text(json.dumps({"ids": ids}) + "\n")


def head_ids(given: int | str | Path, tokenizer: PreTrainedTokenizerBase, vocab: int) -> list[int]:
    """From a number, which means the first tokens by id, or from a file of `semspec vocabulary`."""
    if str(given).isdigit():
        return most_frequent(tokenizer, (), int(str(given)), vocab)
    try:
        ids = json.loads(Path(str(given)).read_text())["ids"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadRequest(
            f"draft_vocab {given} is no number and no file of `semspec vocabulary` that can be read: {error}"
        ) from error
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocab for i in ids):
        raise BadRequest(
            f"draft_vocab {given} has ids that the draft model does not have; count them with its own tokenizer"
        )
    return sorted(set(ids))
