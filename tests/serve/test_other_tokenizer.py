"""A server whose draft model has another tokenizer: many clients get what the target alone would have said."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import semspec
from semspec.model.prefix_cache import PrefixCache
from semspec.serve.limits import Settings
from tests.checkpoints import make_model, save
from tests.serve.live import Live, serving
from tests.text.tokenizers_of_all_kinds import byte_level

PROMPTS = ["the quick brown", "one two three four one two three", "naïve 日本", "<eos> is text here", "q"]
RULES = [("exact", 0.0), ("exact", 0.8), ("sampling", 0.0), ("block", 0.0)]


@pytest.fixture(scope="module")
def folders(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    tokenizer = byte_level(380)
    model = make_model("llama3.1", seed=3, vocab_size=len(tokenizer) + 7, eos_token_id=tokenizer.eos_token_id)
    return target_folder, save(model, tmp_path_factory.mktemp("other"), tokenizer)


@pytest.fixture(scope="module")
def live(folders: tuple[Path, Path]) -> Iterator[Live]:
    load = lambda: semspec.load(*folders, device="cpu", slots=4, context=256).wrapped(PrefixCache)  # noqa: E731
    with serving(load, Settings(name="two")) as server:
        yield server


def test_mixed_clients_get_the_targets_text(live: Live, folders: tuple[Path, Path]) -> None:
    def asked(prompt: str, rule: str, temperature: float) -> Any:
        body = {"model": "two", "prompt": prompt, "max_tokens": 24, "temperature": temperature, "seed": 4}
        found = live.post("/v1/completions", body | {"speculation": {"verifier": rule, "num_draft_tokens": 4}})
        assert found.status_code == 200, found.text
        return found.json()

    cases = [(prompt, *rule) for prompt in PROMPTS for rule in RULES]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda case: asked(*case), cases))
    alone = semspec.load(folders[0], device="cpu", slots=4, context=256)
    for (prompt, _, temperature), answer in zip(cases, answers, strict=True):
        options = {"max_new_tokens": 24, "temperature": temperature, "seed": 4, "verifier": "none"}
        assert answer["choices"][0]["text"] == alone.generate(prompt, **options).text
        assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert live.idle()
