"""Models with recurrent states: back to any length, whatever happened since, at a bounded cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import semspec
from semspec.model import Source
from semspec.model.hf_runner import END, TransformersRunner
from semspec.model.past import CHECKPOINTS, SPACING, bytes_of_past
from semspec.model.wrapper import unwrap
from semspec.types import Score
from tests.checkpoints import SMALL, VOCAB, save
from tests.model.test_hf_runner import RECURRENT, build, text

LENGTH = 300


@pytest.fixture(scope="module", params=["qwen3_5_text", "falcon_h1"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


@pytest.fixture
def reads(model: PreTrainedModel) -> Iterator[list[int]]:
    """How many tokens each pass read."""
    made: list[int] = []

    def note(module: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        made.append(args[0].numel())

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield made
    handle.remove()


def score(runner: TransformersRunner, slot: int, tokens: list[int]) -> torch.Tensor:
    return runner.score([Score(runner, slot, tokens, len(tokens))])[0].logits


def whole(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def test_a_rejected_draft_costs_few_tokens_read_again(model: PreTrainedModel, reads: list[int]) -> None:
    runner, tokens = TransformersRunner(model, 1, LENGTH), text(1, LENGTH)
    expected, slot, at = whole(model, tokens), runner.acquire(), 200
    score(runner, slot, tokens[:at])
    reads.clear()
    rounds = 0
    while at + 8 <= LENGTH:  # of 8 tokens drafted, 3 are accepted
        rows = score(runner, slot, [*tokens[at : at + 3], *[(t + 1) % VOCAB for t in tokens[at + 3 : at + 8]]])
        torch.testing.assert_close(rows[:3], expected[at : at + 3], atol=2e-3, rtol=1e-3)
        at, rounds = at + 3, rounds + 1
        runner.truncate(slot, at)
    assert max(reads) <= SPACING + 3 + 8
    assert sum(reads) <= rounds * (8 + SPACING), "never the whole prompt again"


def test_far_back_is_not_from_the_start(model: PreTrainedModel, reads: list[int]) -> None:
    runner, tokens = TransformersRunner(model, 1, LENGTH), text(2, LENGTH)
    expected, slot = whole(model, tokens), runner.acquire()
    for at in range(0, LENGTH, 20):
        score(runner, slot, tokens[at : at + 20])
    assert len(runner._pasts[slot]._checkpoints) == CHECKPOINTS + 1
    runner.truncate(slot, 240)
    reads.clear()
    rows = score(runner, slot, tokens[240:])
    torch.testing.assert_close(rows, expected[240:], atol=2e-3, rtol=1e-3)
    assert sum(reads) <= 60 + 80


def test_a_pass_that_fails_half_way_leaves_nothing_behind(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, tokens = TransformersRunner(model, 1, LENGTH), text(3, 40)
    expected, slot = whole(model, tokens), runner.acquire()
    score(runner, slot, tokens[:20])
    last = model.base_model.layers[-1]
    for error in (KeyboardInterrupt, RuntimeError):
        with monkeypatch.context() as patch:

            def fail(*args: Any, error: type[BaseException] = error, **kwargs: Any) -> None:
                raise error("in the last layer, when all others have read the draft")

            patch.setattr(last, "forward", fail)
            with pytest.raises(error):
                score(runner, slot, tokens[:5])
        runner.truncate(slot, 20)  # as the loop does
    torch.testing.assert_close(score(runner, slot, tokens[20:]), expected[20:], atol=2e-3, rtol=1e-3)


def test_a_copy_goes_its_own_way(model: PreTrainedModel) -> None:
    runner, tokens, other = TransformersRunner(model, 2, LENGTH), text(4, 60), text(5, 30)
    first, second = runner.acquire(), runner.acquire()
    score(runner, first, tokens[:40])
    runner.copy(first, second, 30)
    torch.testing.assert_close(
        score(runner, second, other), whole(model, tokens[:30] + other)[30:], atol=2e-3, rtol=1e-3
    )
    torch.testing.assert_close(score(runner, first, tokens[40:]), whole(model, tokens)[40:], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", RECURRENT)
def test_the_plan_counts_what_a_slot_holds_at_most(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    plan = Source.find(save(model, tmp_path)).plan("cpu", "float32", 2, LENGTH)
    runner, tokens = TransformersRunner(model, 2, LENGTH), text(6, LENGTH)
    for slot in (runner.acquire(), runner.acquire()):
        for at in range(0, LENGTH, 20):
            score(runner, slot, tokens[at : at + 20])
    past = runner._pasts[0]
    kept = [getattr(layer, name, None) for layer in past.cache.layers for name in ("keys", "values")]
    assert plan.per_token * LENGTH == sum(t.nbytes for t in kept if t is not None)
    held = [past.states(), *[states for _, states in past._checkpoints]]
    size = sum(t.nbytes for states in held for state in states for v in state.values() for t in _tensors(v))
    assert 0.8 * plan.states < size <= plan.states
    assert f"2 x {LENGTH} tokens and 2 x {plan.states / 1e3:.0f} kB of states" in str(plan)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in (value.values() if isinstance(value, dict) else [value]) if isinstance(t, torch.Tensor)]


def test_the_bytes_of_a_published_model_are_known_without_its_weights() -> None:
    """Of four layers of Qwen3.5, three keep a state of 128 x 128 in each head, and the last inputs of a convolution."""
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=4)
    per_token, states = bytes_of_past(config, torch.bfloat16)
    assert per_token == 2 * config.num_key_value_heads * config.head_dim * 2
    heads, wide = config.linear_num_value_heads, config.linear_key_head_dim * config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + heads * config.linear_value_head_dim
    each = heads * wide * 4 + channels * config.linear_conv_kernel_dim * 2
    assert states == 3 * each * (CHECKPOINTS + 2)  # the state in float32, whatever the weights are in


def test_a_file_with_a_vision_tower_serves_its_text(tmp_path: Path, draft_folder: Path) -> None:
    """As Qwen3.5 is published: `Qwen3_5ForConditionalGeneration`, whose text model has a name of its own."""
    torch.manual_seed(0)
    tower = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model("qwen3_5", text_config=RECURRENT["qwen3_5_text"], vision_config=tower)
    wrapped = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    pair = semspec.load(save(wrapped, tmp_path), draft_folder, device="cpu", slots=2, context=100)
    options = {"max_new_tokens": 30, "ignore_eos": True, "num_draft_tokens": 4}
    plain = pair.generate("the quick brown", verifier="none", **options)
    prompt = pair.tokenizer("the quick brown")["input_ids"]
    with torch.inference_mode():
        theirs = wrapped.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None)
    assert plain.tokens == theirs[0, len(prompt) :].tolist() and len(set(plain.tokens)) > 5
    assert pair.generate("the quick brown", verifier="exact", **options).tokens == plain.tokens


def test_a_recurrent_draft_is_lossless_too(target_folder: Path, tmp_path: Path) -> None:
    draft = save(build("qwen3_5_text"), tmp_path)
    pair = semspec.load(target_folder, draft, device="cpu", slots=3, context=100)
    options = {"max_new_tokens": 30, "ignore_eos": True}
    prompts = ["the quick brown", "one two", "the sky"]
    plain = pair.generate(prompts, verifier="none", **options)
    drafted = pair.generate(prompts, verifier="exact", num_draft_tokens=4, **options)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert drafted[0].stats.drafted > 0


LIMITED: dict[str, dict[str, Any]] = {  # the time step of their states has a limit
    "nemotron_h": SMALL
    | {"num_hidden_layers": 4, "hybrid_override_pattern": "M*-M", "mamba_num_heads": 8, "mamba_head_dim": 16}
    | {"ssm_state_size": 16, "n_groups": 2, "chunk_size": 16},
    "zamba2": SMALL
    | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 16, "mamba_ngroups": 1}
    | {"n_mamba_heads": 8, "mamba_headdim": 16, "chunk_size": 16, "num_mem_blocks": 1, "use_mamba_kernels": False},
}


@pytest.mark.parametrize("kind", LIMITED)
def test_one_token_after_another_says_what_several_at_once_do(kind: str, tmp_path: Path, draft_folder: Path) -> None:
    """Transformers leaves the limits out where it reads one token, and the target alone reads nothing else."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **LIMITED[kind]), dtype=torch.float32).eval()
    runner, tokens = TransformersRunner(model, 1, LENGTH), text(7, 70)
    slot = runner.acquire()
    rows = [score(runner, slot, [token]) for token in tokens]
    torch.testing.assert_close(torch.cat(rows), whole(model, tokens), atol=2e-3, rtol=1e-3)
    pair = semspec.load(save(model, tmp_path), draft_folder, device="cpu", slots=1, context=100)
    options = {"max_new_tokens": 50, "ignore_eos": True, "num_draft_tokens": 4}
    plain, drafted = (pair.generate("one two three", verifier=v, **options).tokens for v in ("none", "exact"))
    assert drafted == plain


def test_one_token_after_another_reads_few_again(reads: list[int], model: PreTrainedModel) -> None:
    runner, tokens = TransformersRunner(model, 1, LENGTH), text(8, 100)
    runner._alone = False
    slot = runner.acquire()
    score(runner, slot, tokens[:50])
    reads.clear()
    for token in tokens[50:]:
        score(runner, slot, [token])
    assert min(reads) > 1 and max(reads[1:]) <= SPACING + 1 and reads[0] <= 50 + 1


def test_states_of_a_whole_prompt_leave_a_checkpoint_near_its_end(model: PreTrainedModel, reads: list[int]) -> None:
    """As draft heads want them."""
    runner, tokens = TransformersRunner(model, 1, LENGTH), text(9, 90)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    slot = runner.acquire()
    rows = runner.score([Score(runner, slot, tokens, 1, (0, 2), states=88)])[0]
    assert rows.logits.shape == (1, VOCAB)
    for layer in (0, 2):
        torch.testing.assert_close(rows.hidden[layer], expected[layer][0, 2:], atol=2e-3, rtol=1e-3)
    runner.truncate(slot, 89)
    reads.clear()
    score(runner, slot, tokens[89:])
    assert sum(reads) <= END


@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h"])
def test_answers_to_one_prompt_read_it_once_and_figures_say_so(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(LIMITED | RECURRENT)[kind])
    folder = save(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tmp_path)
    pair = semspec.load(folder, device="cpu", slots=4, context=LENGTH)
    prompt = "the quick brown fox jumps over the lazy dog " * 8
    length, made = len(pair.tokenizer(prompt)["input_ids"]), list[int]()
    unwrap(pair.target).model.register_forward_pre_hook(lambda module, args: made.append(args[0].numel()))

    def reads(prompts: list[str], pair: semspec.Pair = pair) -> tuple[int, int]:
        """How many tokens were read for them, and found, as the stats say."""
        made.clear()
        answers = pair.generate(prompts, verifier="none", max_new_tokens=1, ignore_eos=True)
        return sum(made), sum(answer.stats.cached_tokens for answer in answers)

    assert length > 100
    for prompts in ([prompt], [prompt] * 4):
        read, found = reads(prompts)
        assert read <= length + 10 * (len(prompts) - 1) and found == length * len(prompts) - read
    cached = pair.cached()
    assert reads([prompt], cached)[0] == length
    for other in (prompt, prompt + "one two three", prompt[: len(prompt) // 2] + "one two three"):
        read, found = reads([other], cached)
        assert read + found == len(pair.tokenizer(other)["input_ids"])
