"""The same steps in transformers: `bench/gpu.py --only transformers`, by itself, since both do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from bench.gpu import Bench


def time_transformers(bench: Bench) -> None:
    """Plain and assisted generation, in milliseconds a token and a verification step."""
    bench.drop(*list(bench.models))
    models = []
    for which in ("target", "draft"):
        with torch.device(bench.device):
            model = AutoModelForCausalLM.from_config(bench.config(which), dtype=bench.dtype).eval()
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
        models.append(model)
    target, draft = models
    vocab = min(m.config.vocab_size for m in models)
    prompt = torch.randint(vocab, [1, bench.asked.context], device=bench.device)
    options: dict[str, Any] = {"do_sample": False, "attention_mask": torch.ones_like(prompt)}
    for which, model in (("target", target), ("draft", draft)):
        made = {
            n: bench.ms(lambda n=n, model=model: model.generate(prompt, max_new_tokens=n, **options), 3, 1)
            for n in (4, 20)
        }
        read = bench.weights(which) + bench.kv(which, bench.asked.context)
        bench.add(f"transformers, {which} token", (made[20] - made[4]) / 16, read)
    if target.config.vocab_size != vocab:  # assisted generation wants both alike; the rows cut are padding
        target.resize_token_embeddings(vocab)
    draft.generation_config.num_assistant_tokens = 8
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    passes = [0]
    target.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))

    def assisted(n: int) -> tuple[float, int]:
        passes[0] = 0
        ms = bench.ms(lambda: target.generate(prompt, max_new_tokens=n, assistant_model=draft, **options), 1, 0)
        return ms, passes[0]

    assisted(2)
    (short, few), (long, many) = assisted(3), assisted(11)
    read = bench.weights("target") + 8 * bench.weights("draft")
    bench.add("transformers, one K=8 step", (long - short) / max(many - few, 1), read)
