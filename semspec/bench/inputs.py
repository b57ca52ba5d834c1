"""What the names in a run's config stood for: a file of prompts may be written anew, and a model be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

from semspec.errors import BadRequest, ModelError
from semspec.pair import Pair
from semspec.tasks import Problem, Task
from semspec.text.tokenizer import encode


def fitting(task: Task, problems: Sequence[Problem], pair: Pair, longest: int | None) -> list[Problem]:
    """Problems as the target can read them. One that it cannot is told before any is answered, not hours later."""
    room = pair.target.max_seq_len
    found = task.for_model(problems, pair.tokenizer, room, longest)
    check_room(found, pair.tokenizer, room)
    return found


def check_room(problems: Sequence[Problem], tokenizer: Any, room: int, answer: int = 1) -> None:
    """Refuse prompts that leave no room for so many tokens of an answer, or are none."""
    long = list[tuple[int, str]]()
    for problem in problems:
        try:
            tokens = len(encode(tokenizer, problem.prompt))
        except BadRequest as error:
            raise BadRequest(f"problem {problem.id}: {error}") from None
        if tokens + answer > room:
            long.append((tokens, problem.id))
    if long:
        first = ", ".join(name for _, name in long[:3]) + (", ..." if len(long) > 3 else "")
        beside = f" beside {answer} tokens of an answer" if answer > 1 else ""
        raise BadRequest(
            f"{len(long)} of {len(problems)} prompts do not fit into the context of {room} tokens{beside}: {first}; "
            f"the longest has {max(long)[0]}. Leave them out or, if the model can, load it with a larger --context"
        )


def inputs_of(pair: Pair, problems: Sequence[Problem]) -> dict[str, str]:
    """Digests by name. Servers do not tell which models they have, nor do some runners."""
    found = {"problems": digest(problems)}
    with suppress(ModelError, AttributeError):
        found |= zip(("target", "draft"), pair.resources.fingerprints, strict=True)
    return found


def digest(problems: Sequence[Problem]) -> str:
    text = "\n".join(f"{p.id}\t{p.prompt}\t{p.turns}\t{p.answer}" for p in problems)
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
