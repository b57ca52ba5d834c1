"""Which branches of a draft may be proposed at all."""

from __future__ import annotations

from semspec import tree
from semspec.sampling.processors import Processors
from semspec.types import Draft


def legal_branches(draft: Draft, context: list[int], processors: Processors | None, end: int | None) -> Draft:
    """The draft without what may not follow the context, and without what follows an `end`."""
    some = set[int]()
    for path in tree.paths(draft.parents):
        tokens = [draft.tokens[i] for i in path]
        n = len(tokens) if processors is None else processors.legal(context, tokens)
        some.update(path[: tokens.index(end) + 1 if end in tokens[:n] else n])
    return draft if len(some) == len(draft.tokens) else draft.only(some)
