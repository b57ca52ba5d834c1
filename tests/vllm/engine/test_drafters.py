"""Other drafters of vLLM, real models, and rules that compare both models' distributions. V1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from semspec.pocket.shipped import SHIPPED
from semspec.types import Score
from semspec.vllm.arguments import Launch
from tests.heads import drafted, make_head
from tests.vllm.engine.engines import PROMPTS, K, N, launch, metric, ours, pair, relaxed, running, written
from tests.vllm.engine.interpreted import prepare

prepare(v2=False)


def test_eagle3_with_a_random_head(tmp_path: Path) -> None:
    """Strict text is the target's; of a loose rule every token is one that the rule allows; accept-all accepts all,
    and what it accepts is what the published computation drafts, to which our own heads are held as well."""
    layers = [0, 1, 2]
    head = make_head(tmp_path, width=128, target_width=128, layers=layers, head_dim=32, num_hidden_layers=1, seed=2)
    own, top = Launch(**vars(launch()) | {"draft": str(tmp_path), "method": "eagle3"}), 20
    with running(own) as llm:
        strict, loose = written(llm, PROMPTS[:2], ["exact", f"topk:top={top},delta=1"])
        assert relaxed(llm)
        drafts, accepted = metric(llm, "draft_tokens"), metric(llm, "accepted_tokens")
        (everything,) = written(llm, PROMPTS[:1], ["accept-all"], n=2 * (K + 1) + 1)
        assert metric(llm, "draft_tokens") - drafts == metric(llm, "accepted_tokens") - accepted >= 2 * K
    assert strict == ours(launch(), PROMPTS[0], "exact")[0]
    runner = pair(launch().target, str(launch().draft)).target
    slot, text = runner.acquire(), [*PROMPTS[1], *loose]
    rows = runner.score([Score(runner, slot, text[:-1], len(loose))])[0].logits
    ranks = [int((row > row[token]).sum()) for row, token in zip(rows, loose, strict=True)]
    assert max(ranks) < top and any(ranks)
    for begin in (1, K + 2):
        so_far, slot = [*PROMPTS[0], *everything[:begin]], runner.acquire()
        hidden = runner.score([Score(runner, slot, so_far, len(so_far), tuple(layers))])[0].hidden
        expected, _ = drafted(head, so_far, [hidden[i] for i in layers], K, head.tensors["embed_tokens.weight"])
        assert everything[begin : begin + K] == expected


def test_rules_that_need_the_drafts_probabilities() -> None:
    """Drafts are sampled, and each such rule accepts more of them than the lossless sampler does."""
    rules, share = ["ensemble:weight=0.3", "cascade-rule", "adaptive:start=0.9", "top-or-ratio"], dict[str, float]()
    with running(launch(verifier=rules[0]), max_num_seqs=64) as llm:
        for name in ("exact", *rules):
            drafts, accepted = metric(llm, "draft_tokens"), metric(llm, "accepted_tokens")
            before = relaxed(llm)
            written(llm, PROMPTS * 4, [name] * 4 * len(PROMPTS), temperature=0.8)
            share[name] = (metric(llm, "accepted_tokens") - accepted) / (metric(llm, "draft_tokens") - drafts)
            assert (relaxed(llm) > before) == (name != "exact"), name
    assert all(share[rule] > share["exact"] > 0 for rule in rules), share


def test_the_pocket_pair() -> None:
    """Real models, small: fly as our engine has it, on problems of their own world."""
    names: dict[str, Any] = {"target": str(SHIPPED["pocket"]), "draft": str(SHIPPED["pocket-draft"])}
    own = Launch(**vars(launch()) | names | {"verifier": "fly", "num_draft_tokens": K, "max_model_len": 512})
    tokenizer = pair(own.target, str(own.draft)).tokenizer
    questions = [
        "Mia has 4 bags with 6 pens each. Tom has 5 more pens than Mia. How many pens does Tom have?",
        "Ana has 12 books. Ben has 3 books fewer than Ana. How many books does Ben have?",
    ]
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = [list(tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)) for c in chats]
    rules = ["typical", "fly:window=2,theta=0.1"]
    with running(own) as llm:
        texts = written(llm, prompts, rules, n=2 * N)
    for rule, prompt, text in zip(rules, prompts, texts, strict=True):
        assert text == ours(own, prompt, rule, n=2 * N)[0], rule


def test_lookups() -> None:
    """A rule with vLLM's own n-gram lookups: strict text is the target's, and accept-all accepts whatever was found.
    The last in this file: where numba has been imported, vLLM cannot look through all modules for its kernels again."""
    own = Launch(**vars(launch()) | {"draft": None, "num_draft_tokens": 3})
    lookups = own.arguments()["speculative_config"] | {"prompt_lookup_min": 1}
    prompt = list(range(10, 200))
    with running(own, speculative_config=lookups) as llm:
        strict, loose = written(llm, [prompt] * 2, ["exact", "accept-all"])
        assert relaxed(llm) and loose != strict == ours(launch(), prompt, "exact")[0]
        drafts, accepted = metric(llm, "draft_tokens"), metric(llm, "accepted_tokens")
        written(llm, [prompt], ["accept-all"])
        assert metric(llm, "draft_tokens") - drafts >= metric(llm, "accepted_tokens") - accepted > 0
