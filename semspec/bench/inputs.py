"""What the names in a run's config stood for: a file of prompts may be written anew, and a model be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256

from semspec.errors import ModelError
from semspec.pair import Pair
from semspec.tasks import Problem


def inputs_of(pair: Pair, problems: Sequence[Problem]) -> dict[str, str]:
    """Digests by name. Servers do not tell which models they have, nor do some runners."""
    found = {"problems": digest(problems)}
    with suppress(ModelError, AttributeError):
        found |= zip(("target", "draft"), pair.resources.fingerprints, strict=True)
    return found


def digest(problems: Sequence[Problem]) -> str:
    text = "\n".join(f"{p.id}\t{p.prompt}\t{p.turns}\t{p.answer}" for p in problems)
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
