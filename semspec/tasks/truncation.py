"""Prompts that are longer than a model's context, cut in the middle: instructions stand at both ends."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest
from semspec.tasks.base import Problem
from semspec.text.tokenizer import Prompt, encode

LEAST = 16  # tokens of a prompt that are worth asking


def without_middle(text: str, tokenizer: PreTrainedTokenizerBase, budget: int) -> str:
    """A text of more than `budget` tokens as its first and its last budget // 2 tokens."""
    tokens = tokenizer.encode(text)
    if len(tokens) <= budget:
        return text
    ends = tokens[: budget // 2], tokens[len(tokens) - budget // 2 :]
    return "".join(str(tokenizer.decode(end, skip_special_tokens=True)) for end in ends)


def fit_prompt(problem: Problem, tokenizer: PreTrainedTokenizerBase, budget: int, room: int) -> Problem:
    """The problem with a text of at most `budget` tokens, as published; and with fewer where what the chat template
    adds, or tokens that the cut made, would leave the prompt longer than `room`."""
    text = problem.prompt if isinstance(problem.prompt, str) else str(problem.prompt[-1]["content"])
    budget = min(budget, room)
    while budget >= LEAST:
        shorter = without_middle(text, tokenizer, budget)
        prompt: Prompt = shorter
        if not isinstance(problem.prompt, str):
            prompt = [*problem.prompt[:-1], problem.prompt[-1] | {"content": shorter}]
        excess = len(encode(tokenizer, prompt)) - room
        if excess <= 0:
            return replace(problem, prompt=prompt)
        budget -= max(excess, 2)
    raise BadRequest(
        f"{problem.id} does not fit: the context leaves {room} tokens for its prompt; give a longer --context or a "
        "smaller --max-new-tokens"
    )
