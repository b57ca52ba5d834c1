"""A model behind an OpenAI-compatible server: what it can do, and the calls that a pair makes to it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any, Literal, TypeVar

from semspec.errors import BadRequest, RemoteError
from semspec.remote.answers import Answer, Malformed, read_answer
from semspec.remote.connection import Connection, Refused
from semspec.text.tokenizer import THINKING
from semspec.types import Sampling

T = TypeVar("T")
Ending = Literal["blank line", "length", "end of text", "unknown"]  # unknown: a blank line or the end of the text
BLANK = "\n\n"  # ends a reasoning step
TOPS = (10, 5)  # likeliest tokens to ask for; OpenAI itself gives 5
UNKNOWN_CONTEXT = 32768  # tokens, where a server does not say
MAX_SEED = 2**31
COMMON = (" ", "e", ".", "\n")  # no text is long without any of these
ANSWER, TURN = "answer-so-far", "turn-after-it"  # stand for those in a rendered chat
TRIAL = "One and one is two.\n\nTwo and two is"
FORMS = ("echo", "prompt_logprobs")  # how a prompt's log-probabilities are asked for


class Background:
    """An event loop on a thread of its own, on which all calls of a process run; it begins with the first."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = Lock()

    def start(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                Thread(target=self._loop.run_forever, name="semspec-remote", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        return self.start(call).result()


BACKGROUND = Background()


@dataclass(slots=True)
class Abilities:
    """What a server turned out to do when it was tried."""

    name: str
    context: int | None = None  # tokens; None: it does not say
    scores: str | None = None  # how it reports log-probabilities of a prompt: echo, prompt_logprobs; None: not at all
    top: int = TOPS[-1]
    scores_last: bool = False  # it can leave out those before a prompt's last tokens, so that its cache is of use
    keeps_stop: bool = False  # it can leave the stop string in the text
    names_stop: bool = False  # or it says which one it met; else a stop string and the end of the text look the same
    tokenizes: bool = False  # /tokenize and /detokenize, as vLLM has them
    templates: bool = False  # /apply-template, as llama.cpp has it
    thinking: tuple[str, str] | None = None  # the markers of thinking that it has tokens for, if it can be asked


class RemoteModel:
    def __init__(self, connection: Connection, abilities: Abilities) -> None:
        self.connection, self.abilities = connection, abilities

    def __repr__(self) -> str:
        return f"<{self.abilities.name} on {self.connection!r}>"

    @staticmethod
    async def connect(connection: Connection, name: str | None = None) -> RemoteModel:
        """Ask the server what it has, and try what a pair needs."""
        model = RemoteModel(connection, await _card(connection, name))
        able = model.abilities
        await model._try_stops()
        for form, top in ((form, top) for top in TOPS for form in FORMS):
            if (whole := await model._tries(form, **_scoring(form, top))) is not None:
                able.scores, able.top = form, top
                part = await model._tries(form, **_scoring(form, top, last=2))
                able.scores_last = part is not None and len(part.prompt or ()) < len(whole.prompt or ())
                break
        else:
            able.top = max([top for top in TOPS if await model._tries(logprobs=top) is not None], default=0)
        try:
            able.tokenizes = bool(await model._detokenize(await model._tokenize({"prompt": "one"})))
        except RemoteError:
            able.templates = await model._try_template()
        able.thinking = await model._find_thinking()
        return model

    async def _tries(self, scored: str | None = None, **more: Any) -> Answer | None:
        """An answer to a trial request with these fields; None: it does not take them."""
        body = {"model": self.abilities.name, "prompt": TRIAL, "max_tokens": 1, "temperature": 0} | more
        try:
            return read_answer(await self.connection.post("/completions", body), scored)
        except (Refused, Malformed) as error:
            if isinstance(error, Refused) and error.status in (401, 403):
                raise
            return None

    async def _try_stops(self) -> None:
        """What it tells of a stop string that it has met; some take a field and do nothing with it."""
        for keep in (True, False):
            more: dict[str, Any] = {"include_stop_str_in_output": True} if keep else {}
            answer = await self._tries(None, max_tokens=16, stop=list(COMMON), **more)
            if answer is not None:
                self.abilities.keeps_stop = keep and answer.text.endswith(COMMON)
                self.abilities.names_stop = answer.stop in COMMON
                return
        self.connection.fail("takes no stop strings, so it cannot write a step")

    async def _try_template(self) -> bool:
        try:
            return bool(await self._template([{"role": "user", "content": "one"}]))
        except RemoteError:
            return False

    async def _find_thinking(self) -> tuple[str, str] | None:
        """Markers that are one token each: written three times, they are the same two tokens three times."""
        for begin, end in THINKING if self.abilities.tokenizes else ():
            try:
                tokens = await self._tokenize({"prompt": 3 * (begin + end)})
            except RemoteError:
                return None
            starts = range(len(tokens) - 5 if len(tokens) <= 8 else 0)  # it may put a token of its own at either end
            if any(tokens[i : i + 6] == 3 * tokens[i : i + 2] and tokens[i] != tokens[i + 1] for i in starts):
                return begin, end
        return None

    # -- prompts

    async def render(self, messages: list[dict[str, Any]]) -> tuple[str, int | None]:
        """A chat as the text that the model reads, by its own template, and its tokens' number, if that is known."""
        if self.abilities.templates:
            return await self._template(messages), None
        if not self.abilities.tokenizes:
            raise BadRequest(
                f"{self.connection!r} cannot turn a chat into a prompt (it has neither /tokenize nor /apply-template); "
                "give the prompt as text"
            )
        tokens = await self._tokenize({"messages": messages})
        text = await self._detokenize(tokens)
        again = await self._tokenize({"prompt": text})
        if len(again) == len(tokens) + 1 and again[:2] == [tokens[0]] * 2:  # it begins every text with this token
            text = await self._detokenize(tokens[1:])
        return text, len(tokens)

    async def next_turn(self) -> tuple[str, str] | None:
        """What its template has around a user's turn after an answer; None: it does not tell."""
        turns = [("user", "-"), ("assistant", ANSWER), ("user", TURN)]
        try:
            text, _ = await self.render([{"role": role, "content": content} for role, content in turns])
        except (BadRequest, RemoteError):  # the pocket model takes one question only
            return None
        before, found, after = text.rpartition(ANSWER)[2].partition(TURN)
        return (before, after) if found else None

    async def count(self, text: str) -> int:
        """Tokens of a text; a guess where the server does not say."""
        if self.abilities.tokenizes:
            return len(await self._tokenize({"prompt": text}))
        return max(1, len(text) // 4)

    async def _tokenize(self, what: dict[str, Any]) -> list[int]:
        body = {"model": self.abilities.name} | what
        found = (await self.connection.post("/tokenize", body, root=True)).get("tokens")
        if not isinstance(found, list) or not found or not all(type(token) is int for token in found):
            self.connection.fail("has a /tokenize that gives no tokens")
        return found

    async def _detokenize(self, tokens: list[int]) -> str:
        body = {"model": self.abilities.name, "tokens": tokens}
        return self._prompt_in(await self.connection.post("/detokenize", body, root=True))

    async def _template(self, messages: list[dict[str, Any]]) -> str:
        return self._prompt_in(await self.connection.post("/apply-template", {"messages": messages}, root=True))

    def _prompt_in(self, body: dict[str, Any]) -> str:
        if not isinstance(text := body.get("prompt"), str):
            self.connection.fail("gives no prompt where one was asked for")
        return text

    # -- completions

    def ending(self, answer: Answer) -> tuple[str, Ending]:
        """A continuation's text, with the blank line that ended it, and why it ended."""
        if answer.finish == "length":
            return answer.text, "length"
        if answer.finish not in ("stop", "eos", "end_turn"):
            self.connection.fail(f"ended a text for a reason of its own: {answer.finish[:40]!r}")
        if self.abilities.keeps_stop and answer.text.endswith(BLANK):
            return answer.text, "blank line"
        if answer.stop == BLANK:
            return answer.text + BLANK, "blank line"
        return answer.text, "end of text" if self.abilities.keeps_stop or self.abilities.names_stop else "unknown"

    async def write(
        self, prompt: str, max_tokens: int, sampling: Sampling, stop: Sequence[str] = (), top: int = 0
    ) -> Answer:
        """A continuation. A stop string that ended it is at the end of its text, where the server can tell."""
        more: dict[str, Any] = {"stop": list(stop)} if stop else {}
        if stop and self.abilities.keeps_stop:
            more["include_stop_str_in_output"] = True
        if self.abilities.top:
            more["logprobs"] = max(top, 1)
        return await self._complete(prompt, max_tokens, sampling, more)

    async def score(self, prompt: str, sampling: Sampling, last: int | None = None) -> Answer:
        """The prompt's log-probabilities, or those of its last tokens, and the token that follows it."""
        able = self.abilities
        assert able.scores is not None
        return await self._complete(prompt, 1, sampling, _scoring(able.scores, able.top, last), able.scores)

    async def _complete(
        self, prompt: str, max_tokens: int, sampling: Sampling, more: dict[str, Any], scored: str | None = None
    ) -> Answer:
        body = {"model": self.abilities.name, "prompt": prompt, "max_tokens": max_tokens} | more
        body |= {"temperature": sampling.temperature} | _filters(sampling)
        try:
            return read_answer(await self.connection.post("/completions", body), scored)
        except Malformed as error:
            self.connection.fail(f"sends {error}")


def _scoring(form: str, top: int, last: int | None = None) -> dict[str, Any]:
    more = {} if last is None else {"prompt_logprobs_last": last}
    return {"logprobs": top, form: True if form == "echo" else top} | more


def _filters(sampling: Sampling) -> dict[str, Any]:
    """Fields beyond the temperature, each only where it says something: not every server has all."""
    if sampling.greedy:
        return {}
    found: dict[str, Any] = {"seed": sampling.seed % MAX_SEED}
    found |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
    found |= {"top_k": sampling.top_k} if sampling.top_k else {}
    return found | ({"min_p": sampling.min_p} if sampling.min_p else {})


async def _card(connection: Connection, name: str | None) -> Abilities:
    """The model that the server has, or of several the one of this name."""
    try:
        found = (await connection.get("/models")).get("data")
    except Refused as error:
        if error.status != 404:
            raise
        raise BadRequest(
            f"{connection!r} has nothing under {connection.url}/models; give the address of an OpenAI-compatible "
            "server up to its /v1"
        ) from None
    listed = found if isinstance(found, list) else []
    cards = [card for card in listed if isinstance(card, dict) and isinstance(card.get("id"), str)]
    if not cards:
        connection.fail("names no model under /models")
    names = [str(card["id"]) for card in cards]
    if name is None and len(cards) > 1:
        raise BadRequest(
            f"{connection!r} has several models ({', '.join(names[:8])}); say which after a #, as in "
            f"{connection.url}#{names[0]}"
        )
    if name is not None and name not in names:
        raise BadRequest(f"{connection!r} has no model {name!r}; it has: {', '.join(names[:8])}")
    card = cards[0 if name is None else names.index(name)]
    length = card.get("max_model_len")
    return Abilities(str(card["id"]), length if type(length) is int and length > 0 else None)
