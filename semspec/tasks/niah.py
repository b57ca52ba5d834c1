"""`niah`: several numbers that belong to one word, hidden in a long text; made from the seed, in any length."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest
from semspec.tasks.answers import visible
from semspec.tasks.base import Problem, Task, ask, existing, made_numbers
from semspec.text.tokenizer import encode

DEPTHS = 40  # places for needles, from the beginning of the text to its end
INTRODUCTION = "Some special magic numbers are hidden in the text below. Remember them: you will be asked about them."
NEEDLE = "One of the special magic numbers for {} is: {}."
QUESTION = "What are all the special magic numbers for {} in the text above?"
WORDS = (
    "amber brisk calm dusty eager faint gentle hollow icy jolly keen lively mellow narrow odd plain",
    "anchor basket candle desert engine forest garden harbor island kettle ladder meadow needle orchard pillow",
)
SENTENCES = (  # who, does, what, when
    "The baker|A sailor|My neighbour|The old teacher|A young painter|The mayor|Our guide|The gardener",
    "looked for|repaired|wrote about|remembered|sold|carried home|painted|forgot",
    "a wooden boat|the broken clock|two letters|a map of the coast|the red bicycle|a bag of seeds|the winter coat",
    "before noon|in early spring|after the long rain|on the way to town|without a word|for the second time",
)


@dataclass(frozen=True)
class Niah(Task):
    """Needles in a haystack, multi-value: RULER's task of that name (Hsieh et al. 2024), in our words. A score is the
    share of the numbers that an answer has."""

    name = "niah"
    graded = True
    max_new_tokens = 128

    length: int = field(
        default=4096, metadata={"label": "tokens of prompt and answer together", "min": 2 * max_new_tokens}
    )
    values: int = field(default=4, metadata={"label": "numbers to find", "min": 1, "max": DEPTHS})
    haystack: str = field(default="", metadata={"label": "file of text; empty: made-up sentences"})

    def problems(self, n: int | None, seed: int) -> list[Problem]:
        return [self._problem(i, self.length // 16) for i in made_numbers(self.name, n, seed)]

    def shortened(self, problem: Problem, tokenizer: PreTrainedTokenizerBase, room: int) -> Problem:
        """With as many sentences as the length allows, less the answer."""
        number, most = int(problem.id.rsplit("/", 1)[1]), min(room, self.length - self.max_new_tokens)

        def fits(sentences: int) -> bool:
            return len(encode(tokenizer, self._problem(number, sentences).prompt)) <= most

        low = self.values
        if not fits(low):
            raise BadRequest(
                f"{self.values} numbers do not fit in {most} tokens; give a longer --context, or niah:length="
            )
        high = 2 * low
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return self._problem(number, low)

    def score(self, problem: Problem, text: str) -> float:
        shown = visible(text)
        return sum(value in shown for value in problem.answer) / len(problem.answer)

    def _problem(self, number: int, sentences: int) -> Problem:
        rng = Random(number)
        word = "-".join(rng.choice(words.split()) for words in WORDS)
        values = [str(value) for value in rng.sample(range(10**6, 10**7), self.values)]
        depths = sorted(rng.sample(range(DEPTHS), self.values))
        text = self._sentences[:sentences] if self._sentences else [_sentence(rng) for _ in range(sentences)]
        for depth, value in sorted(zip(depths, values, strict=True), reverse=True):
            text.insert(len(text) * depth // (DEPTHS - 1), NEEDLE.format(word, value))
        prompt = ask(f"{INTRODUCTION}\n{' '.join(text)}\n{QUESTION.format(word)}")
        return Problem(f"niah/{self.length}/{number}", prompt, values, f"{self.length} tokens")

    @cached_property
    def _sentences(self) -> list[str]:
        """Of the haystack, repeated if it is short."""
        if not self.haystack:
            return []
        path = Path(self.haystack).expanduser()
        if not path.is_file() and self.data is not None:
            path = self.data / path
        words = existing(path, self.name).read_text(encoding="utf-8", errors="replace").split()
        found = [s + "." for s in " ".join(words).split(". ") if s]
        if not found:
            raise BadRequest(f"{path} has no words; a haystack is a text of sentences")
        return found * -(-self.length // len(found))  # a sentence has a token or more


def _sentence(rng: Random) -> str:
    return " ".join(rng.choice(parts.split("|")) for parts in SENTENCES) + "."
