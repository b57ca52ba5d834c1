"""`semspec.hf.generate` inside transformers' `generate`: the same tokens as our own engine, or a clear refusal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList

import semspec
from semspec.errors import BadRequest
from semspec.verify import REGISTRY
from tests.checkpoints import make_model, make_tokenizer

TOKEN_RULES = sorted(name for name, rule in REGISTRY.items() if rule.unit == "token" and rule.speculates)
OPTIONS = {"fly": "fly:window=1,theta=0.1", "threshold": "threshold:single=0.05", "adaptive": "adaptive:start=0.9"}
N, K = 24, 4


@pytest.fixture(scope="module")
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = make_model("llama3.1")
    draft = copy.deepcopy(target)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return target, draft


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def run(models, tokenizer):
    def generate(ids: Any = None, **options: Any) -> Any:
        given = {"assistant_model": models[1], "processing_class": tokenizer, "max_new_tokens": N, "pad_token_id": 0}
        given |= {"num_draft_tokens": K, "custom_generate": semspec.hf.generate}
        ids = torch.tensor([[5, 6, 7, 8]]) if ids is None else ids
        return models[0].generate(ids, **given | options)

    return generate


@pytest.mark.parametrize("heat", [0.0, 0.8])
@pytest.mark.parametrize("name", TOKEN_RULES)
def test_every_token_rule_gives_the_text_of_our_engine(name: str, heat: float, pair, tokenizer, run) -> None:
    """`pair` has the same weights, read from a folder and run by our own runner."""
    rule, prompt = OPTIONS.get(name, name), [5, 6, 7, 8]
    sampled = {"do_sample": True, "temperature": heat, "top_k": 20, "top_p": 0.95} if heat else {"do_sample": False}
    given = run(verifier=rule, seed=3, return_dict_in_generate=True, **sampled)
    own = {"temperature": heat, "top_k": 20, "top_p": 0.95} if heat else {}
    options = semspec.Options(verifier=rule, seed=3, max_new_tokens=N, num_draft_tokens=K, **own)
    (ticket,) = pair.submit([(prompt, options)])
    while not ticket.task.done:
        pair.executor.tick()
    ticket.collect()
    expected = ticket.result()
    assert given.sequences.tolist() == [prompt + expected.tokens]
    stats = given.results[0].stats
    assert (stats.accepted, stats.relaxed) == (expected.stats.accepted, expected.stats.relaxed)
    assert stats.accepted, "the assistant has drafted"


def test_exact_gives_what_generate_gives_alone(models, run) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = models[0].generate(ids, max_new_tokens=N, do_sample=False, pad_token_id=0)
    assert run(ids).tolist() == plain.tolist() == run(ids, assistant_model=None).tolist()
    assert run(ids, assistant_model=None, draft=models[1]).tolist() == plain.tolist()


def test_a_batch_of_left_padded_prompts(models, run) -> None:
    ids, mask = torch.tensor([[0, 0, 9, 10, 11], [5, 6, 7, 8, 9]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    given = run(ids, attention_mask=mask, do_sample=False)
    assert given[0, 2:].tolist() == run(ids[:1, 2:], do_sample=False)[0].tolist()
    assert given[1].tolist() == run(ids[1:], do_sample=False)[0].tolist()
    with pytest.raises(BadRequest, match="left"):
        run(ids, attention_mask=mask.flip(1))


def test_answers_that_end_early_are_padded(run) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    whole = run(ids)
    end = int(whole[0, 9])  # its sixth new token is the end now
    first = whole[0, 4:].tolist().index(end)
    cut = run(ids, eos_token_id=end)
    assert cut[0, : 5 + first].tolist() == whole[0, : 5 + first].tolist() and set(cut[0, 5 + first :].tolist()) <= {0}


class AtToken(StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids, scores, **_) -> torch.Tensor:
        return input_ids[:, -1] == self.token


def test_stopping_criteria_end_a_text_where_generate_would(models, run) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    token = int(run(ids)[0, 10])
    criteria = StoppingCriteriaList([AtToken(token)])
    plain = models[0].generate(ids, max_new_tokens=N, do_sample=False, pad_token_id=0, stopping_criteria=criteria)
    assert run(ids, stopping_criteria=criteria).tolist() == plain.tolist()
    assert run(ids, stopping_criteria=StoppingCriteriaList([MaxTimeCriteria(0.0)])).shape[1] == 5


def test_the_seed_of_torch_counts(run) -> None:
    def drawn(seed: int) -> Any:
        torch.manual_seed(seed)
        return run(do_sample=True, temperature=1.0, num_return_sequences=1).tolist()

    assert drawn(1) == drawn(1) != drawn(2)


def test_several_sequences_of_one_prompt_differ(run) -> None:
    rows = run(assistant_model=None, do_sample=True, temperature=1.5, num_return_sequences=3, seed=1).tolist()
    assert len({tuple(row) for row in rows}) == 3


class Heard:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_hears_every_token(run) -> None:
    heard = Heard()
    assert run(streamer=heard)[0].tolist() == heard.tokens and heard.ended


def test_a_model_in_training_is_given_back_as_it_was(models, run) -> None:
    models[0].train()
    models[0].model.layers[0].eval()
    try:
        assert run(do_sample=False).tolist() == run(do_sample=False).tolist()
        assert models[0].training and not models[0].model.layers[0].training and models[0].model.layers[1].training
    finally:
        models[0].eval()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor"),
        ({"min_new_tokens": 3, "eos_token_id": 1}, "MinLengthLogitsProcessor"),
        ({"num_beams": 2, "assistant_model": None}, "num_beams"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"prompt_lookup_num_tokens": 3, "assistant_model": None}, "prompt_lookup_num_tokens"),
        ({"verifier": "no-such"}, "no-such"),
        ({"verifier": "semantic"}, "no probes"),
        ({"verifier": "fly", "allow_lossy": False}, "lossy"),
        ({"processing_class": None}, "processing_class"),
        ({"temperature": 0.5, "do_sample": True, "typical_p": 0.5}, "TypicalLogitsWarper"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], named: str, run) -> None:
    with pytest.raises(BadRequest, match=named):
        run(**options)
