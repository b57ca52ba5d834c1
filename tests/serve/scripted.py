"""A model that answers from a script, through a chat template that knows tools: for what no tiny model would write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import semspec
from tests.checkpoints import make_tokenizer
from tests.fakes import FakeRunner

GO, END = "<go>", "<eos>"
TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.reasoning_content %} thought {{
m.reasoning_content }}{% endif %}{% for c in m.tool_calls or [] %} called {{ c.function.name }} {{
c.function.arguments | tojson }}{% endfor %}
{% endfor %}{% if tools %}tools {{ tools | tojson }}
{% endif %}{% if enable_thinking is defined and not enable_thinking %}quickly
{% endif %}{% if reasoning_effort is defined %}effort {{ reasoning_effort }}
{% endif %}{% if add_generation_prompt %}<go>{% endif %}"""


def scripted_pair(
    answers: Mapping[str, Sequence[str]],
    specials: tuple[str, ...] = (),
    slots: int = 4,
    template: str = TEMPLATE,
    think: bool = False,
) -> semspec.Pair:
    """Each key that is in the prompt is answered with its pieces, which are tokenized one by one."""
    markers = ("<think>", "</think>") if think else ()
    tokenizer = make_tokenizer((END, GO, *specials, *markers))
    tokenizer.chat_template = template
    go, end = tokenizer.convert_tokens_to_ids([GO, END])
    scripts = {
        key: [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
        for key, pieces in answers.items()
    }

    @lru_cache(maxsize=64)
    def script(prompt: tuple[int, ...]) -> list[int]:
        text = tokenizer.decode(prompt)
        return next((tokens for key, tokens in reversed(scripts.items()) if key in text), [])

    def logits(context: list[int]) -> list[float]:
        row = [0.0] * len(tokenizer)
        if go in context:
            at = len(context) - 1 - context[::-1].index(go)
            tokens, done = script(tuple(context[:at])), len(context) - 1 - at
            row[tokens[done] if done < len(tokens) else end] = 100.0  # at any temperature
        return row

    runner = FakeRunner(logits, len(tokenizer), slots=slots, max_seq_len=4096)
    return semspec.Pair(runner, tokenizer, eos=frozenset({end}))
