"""The JSON-Schema-Test-Suite against structured output: what is refused, and whether anything invalid gets through.

    python bench/schema_suite.py FOLDER > results/schema-suite-DATE.json

FOLDER holds the suite's files of one draft, such as tests/draft2020-12 (the source package of `jsonschema` has a copy).
Of every schema that is not refused, no instance that the suite calls invalid may be taken, and texts drawn at random
under the masks are checked by `jsonschema`. One JSON document is printed.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from transformers import AutoTokenizer

from bench.grammar import machine
from semspec.errors import BadRequest
from semspec.pocket.shipped import SHIPPED
from semspec.text.structured import Compiled, Grammars, grammar_of

DRAWS, TOKENS = 3, 120  # texts of each schema, and how long one may be


class Suite:
    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(SHIPPED["pocket"]))
        self.eos, self.size = self.tokenizer.eos_token_id, len(self.tokenizer)
        self.grammars = Grammars(self.tokenizer, self.size, [self.eos])
        self.mask = allocate_token_bitmask(1, self.size)
        self.refused: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.missed: list[str] = []  # valid, but not a text that is ever written

    def group(self, name: str, group: dict[str, Any]) -> None:
        self.counts["schemas"] += 1
        try:
            compiled = self.grammars.compiled(grammar_of({"json": group["schema"]}))
        except BadRequest as error:
            self.refused[re.sub(r"['\"].*", "", str(error).rpartition("obeyed: ")[2])[:60].strip()] += 1
            return
        self.counts["obeyed"] += 1
        for test in group["tests"]:
            kind, taken = ("valid" if test["valid"] else "invalid"), self.takes(compiled, json.dumps(test["data"]))
            self.counts[f"{kind} instances"] += 1
            self.counts[f"{kind} instances taken"] += taken
            if taken != test["valid"]:
                where = self.wrong if taken else self.missed
                where.append(f"{name}: {group['description']}: {test['description']}")
        for seed in range(DRAWS):
            text = self.drawn(compiled, random.Random(seed))
            self.counts["texts drawn"] += 1
            if text is not None:
                self.counts["texts that ended"] += 1
                self.check(f"{name}: {group['description']}", group["schema"], text)

    def takes(self, compiled: Compiled, text: str) -> bool:
        matcher, tokens = compiled.matcher(), self.tokenizer.encode(text, add_special_tokens=False)
        return (
            matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
        )

    def drawn(self, compiled: Compiled, rng: random.Random) -> str | None:
        """A text that the masks allow; None: it did not come to an end."""
        matcher, tokens = compiled.matcher(), list[int]()
        while len(tokens) < TOKENS:
            fill_next_token_bitmask(matcher, self.mask, 0)
            words = self.mask[0]
            allowed = [i for i in range(self.size) if words[i // 32] >> (i % 32) & 1]
            if not allowed or (self.eos in allowed and rng.random() < 0.5):
                return str(self.tokenizer.decode(tokens))
            token = rng.choice([t for t in allowed if t != self.eos] or [self.eos])
            if token == self.eos:
                return str(self.tokenizer.decode(tokens))
            assert matcher.consume_token(token)
            tokens.append(token)
        return None

    def check(self, name: str, schema: Any, text: str) -> None:
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            self.wrong.append(f"{name}: drew {text[:80]!r}: {str(error).splitlines()[0][:80]}")


def main(folder: Path) -> dict[str, Any]:
    suite = Suite()
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text()):
            suite.group(file.stem, group)
    return machine() | {
        "draft": folder.name, **suite.counts, "refused": dict(suite.refused.most_common()),
        "invalid_and_taken": suite.wrong, "valid_and_not_taken": suite.missed,
    }  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(json.dumps(main(Path(sys.argv[1])), indent=1))
