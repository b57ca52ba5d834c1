"""Prompts that the target writes itself: what it would say in a user's place.

A chat model has learnt users' turns with its own. Begun where the chat template puts the user's words, it writes them,
about anything it knows, so a head is trained without a file of prompts, and on more subjects than most files have.
Source: Magpie, Xu et al. 2024 (arXiv 2406.08464).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest
from semspec.head_fit.texts import AT_A_TIME, replace_text
from semspec.options import Options
from semspec.pair import Pair
from semspec.text.tokenizer import Prompt

NAME = "self"  # in place of a file or a task
FILE, ABOUT = "prompts.jsonl", "prompts.json"
MARK = "semspec-user-turn"
LONGEST = 128  # tokens of a prompt; longer ones have no end and are left out
LEAST_NEW = 0.1  # share of a batch that has to be new, or the model has nothing more to say


def write_prompts(
    pair: Pair, n: int, seed: int, folder: Path, progress: Callable[[int, int], None], slots: int
) -> list[Prompt]:
    """n different ones; those in the folder already are not written again."""
    before, stops = opening(pair.tokenizer)
    kept = _Kept.read(folder, seed)
    options = Options(verifier="none", temperature=1.0, max_new_tokens=LONGEST, stop_ids=stops)
    while len(kept.found) < n:
        progress(len(kept.found), n)
        some = [f"{seed} {i}" for i in range(kept.tried, kept.tried + AT_A_TIME * slots)]
        given = [replace(options, seed=Random(name).getrandbits(31)) for name in some]
        results = pair.generate([before] * len(given), given)
        texts = dict.fromkeys(result.text.strip() for result in results if result.finish_reason == "stop")
        new = [text for text in texts if text and text not in kept.found]
        if len(new) < min(LEAST_NEW * len(given), n - len(kept.found)):
            raise BadRequest(
                f"of {len(given)} prompts that the target wrote itself {len(new)} are new and have an end; give a file "
                "of prompts, or a task, with --prompts"
            )
        kept.add(new, len(given))
    progress(n, n)
    return [[{"role": "user", "content": text}] for text in list(kept.found)[:n]]


@dataclass(slots=True)
class _Kept:
    """What was written so far. A prompt belongs to its number, so an interrupted run ends as one that was not."""

    folder: Path
    seed: int
    tried: int
    found: dict[str, None]

    @staticmethod
    def read(folder: Path, seed: int) -> _Kept:
        file, about = folder / FILE, folder / ABOUT
        if not about.exists():
            return _Kept(folder, seed, 0, {})
        try:
            begun = json.loads(about.read_text())
            lines = file.read_text().splitlines()[: begun["found"]]
            kept = _Kept(folder, begun["seed"], begun["tried"], {json.loads(line)["content"]: None for line in lines})
            if len(kept.found) < begun["found"]:  # the rest would not be what it was
                raise ValueError(f"it has {len(kept.found)} prompts of {begun['found']}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadRequest(f"{file} is damaged: {error}; delete {about}, and it is written again") from error
        if kept.seed != seed:
            raise BadRequest(f"{file} has prompts of seed {kept.seed}; give the same, or another --out")
        return kept

    def add(self, new: Sequence[str], tried: int) -> None:
        self.found |= dict.fromkeys(new)
        self.tried += tried
        replace_text(self.folder / FILE, "".join(json.dumps({"content": text}) + "\n" for text in self.found))
        begun = {"seed": self.seed, "tried": self.tried, "found": len(self.found)}
        replace_text(self.folder / ABOUT, json.dumps(begun))


def opening(tokenizer: PreTrainedTokenizerBase) -> tuple[str, tuple[int, ...]]:
    """A chat up to where the user's words begin, and the tokens that end them."""
    if not tokenizer.chat_template:
        raise BadRequest("the target has no chat template, so it cannot write prompts itself; give a file or a task")
    whole = str(tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False))
    before, mark, after = whole.partition(MARK)
    if not mark or MARK in after:
        raise BadRequest("the target's chat template repeats or changes what users say; give a file or a task")
    special = [
        token for token in tokenizer.encode(after, add_special_tokens=False) if token in tokenizer.all_special_ids
    ]
    first = tokenizer.bos_token
    if first and before.startswith(first) and tokenizer.encode(MARK)[:1] == [tokenizer.bos_token_id]:
        before = before.removeprefix(first)  # a text gets it when it is encoded
    return before, tuple(special[:1])
