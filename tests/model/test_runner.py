"""The runner's contract: slots that are kept apart, undone in no time, and never overrun."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from semspec.errors import BadRequest, SemspecError
from semspec.model import ModelRunner
from semspec.model.placement import Precision, choose_context, choose_device
from semspec.sampling.noise import TARGET
from semspec.types import Decode, Sampling, Score
from tests.checkpoints import VOCAB, edit_config, make_model, save

tokens_of_one = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen2"), tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return ModelRunner.load(folder, device="cpu", slots=4, context=64)


@pytest.fixture(autouse=True)
def clean(runner: ModelRunner) -> None:
    """Every test begins with all slots free."""
    for slot in range(4):
        if slot not in runner.cache._free:
            runner.release(slot)


def score(runner: ModelRunner, slot: int, tokens: list[int]) -> Tensor:
    return runner.score([Score(runner, slot, tokens, len(tokens))])[0].logits


def fresh(runner: ModelRunner, tokens: list[int]) -> Tensor:
    """What the model says of these tokens in a slot that has seen nothing else."""
    slot = runner.acquire()
    logits = score(runner, slot, tokens)
    runner.release(slot)
    return logits


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def request(runner: ModelRunner, slot: int, tokens: list[int], n: int, **options: object) -> Decode:
    return Decode(runner, slot, tokens, n, options.pop("sampling", Sampling()), TARGET, **options)  # type: ignore[arg-type]


# -- slots


def test_scoring_again_after_truncation_equals_scoring_afresh(runner: ModelRunner) -> None:
    slot = runner.acquire()
    score(runner, slot, [1, 2, 3, 4, 5, 6, 7])
    runner.truncate(slot, 3)
    assert runner.length(slot) == 3
    close(score(runner, slot, [50, 60]), fresh(runner, [1, 2, 3, 50, 60])[3:])


def test_truncation_moves_a_length_and_touches_no_memory(runner: ModelRunner) -> None:
    slot = runner.acquire()
    score(runner, slot, list(range(1, 30)))
    keys, version = runner.cache.keys.clone(), runner.cache.keys._version
    runner.truncate(slot, 2)
    assert torch.equal(runner.cache.keys, keys) and runner.cache.keys._version == version
    runner.truncate(slot, 0)
    assert runner.length(slot) == 0


@given(st.lists(st.tuples(st.integers(0, 2), tokens_of_one, st.integers(0, 6)), max_size=6))
@settings(max_examples=30, deadline=None)
def test_whatever_happens_in_other_slots_a_slot_says_what_its_tokens_say(
    runner: ModelRunner, course: list[tuple[int, list[int], int]]
) -> None:
    slots = [runner.acquire() for _ in range(3)]
    held: list[list[int]] = [[], [], []]
    try:
        for which, tokens, back in course:
            logits = score(runner, slots[which], tokens)
            held[which] += tokens
            close(logits, fresh(runner, held[which])[-len(tokens) :])
            keep = max(len(held[which]) - back, 0)
            runner.truncate(slots[which], keep)
            del held[which][keep:]
            assert [runner.length(slot) for slot in slots] == [len(tokens) for tokens in held]
    finally:
        for slot in slots:
            runner.release(slot)


def test_a_reused_slot_remembers_nothing(runner: ModelRunner) -> None:
    before = fresh(runner, [9, 8, 7])
    slot = runner.acquire()
    score(runner, slot, list(range(60)))
    runner.release(slot)
    again = runner.acquire()
    assert again == slot and runner.length(again) == 0
    assert torch.equal(score(runner, again, [9, 8, 7]), before)


def test_slots_are_counted(runner: ModelRunner) -> None:
    assert runner.free == 4
    slots = [runner.acquire() for _ in range(4)]
    assert sorted(slots) == [0, 1, 2, 3] and runner.free == 0
    with pytest.raises(SemspecError, match="all 4 slots are taken; release one or load the model with more"):
        runner.acquire()
    runner.release(slots[2])
    assert runner.free == 1 and runner.acquire() == slots[2]


def test_a_slot_released_twice_is_an_error(runner: ModelRunner) -> None:
    slot = runner.acquire()
    runner.release(slot)
    with pytest.raises(SemspecError, match=f"slot {slot} was released twice"):
        runner.release(slot)
    assert runner.free == 4


def test_truncation_beyond_what_a_slot_holds_is_an_error(runner: ModelRunner) -> None:
    slot = runner.acquire()
    score(runner, slot, [1, 2, 3])
    for length in (4, -1):
        with pytest.raises(SemspecError, match=f"cannot truncate slot {slot} to {length}: it holds 3 tokens"):
            runner.truncate(slot, length)


def test_a_full_slot_refuses_more_and_keeps_what_it_has(runner: ModelRunner) -> None:
    slot = runner.acquire()
    full = [i % VOCAB for i in range(64)]
    score(runner, slot, full[:60])
    with pytest.raises(SemspecError) as error:
        score(runner, slot, [1] * 5)
    assert str(error.value) == (
        f"slot {slot} is full: 60 tokens and 5 more exceed its capacity of 64; load the model with a larger context"
    )
    close(score(runner, slot, full[60:]), fresh(runner, full)[60:])


def test_a_pass_that_one_sequence_overruns_leaves_the_others_as_they_were(runner: ModelRunner) -> None:
    one, other = runner.acquire(), runner.acquire()
    score(runner, one, [1, 2, 3])
    score(runner, other, [5] * 60)
    with pytest.raises(SemspecError, match="is full"):
        runner.score([Score(runner, one, [4, 5], 2), Score(runner, other, [6] * 9, 1)])
    assert (runner.length(one), runner.length(other)) == (3, 60)
    close(score(runner, one, [4]), fresh(runner, [1, 2, 3, 4])[3:])


# -- score and roll


def test_only_the_wanted_rows_come_back(runner: ModelRunner) -> None:
    whole = fresh(runner, [1, 2, 3, 4])
    slot = runner.acquire()
    last = runner.score([Score(runner, slot, [1, 2, 3, 4], 1)])[0]
    close(last.logits, whole[3:])
    none = runner.score([Score(runner, slot, [5, 6], 0)])[0]
    assert none.logits.shape == (0, VOCAB) and runner.length(slot) == 6


def test_logits_are_cut_to_the_vocabulary_that_a_pair_shares(folder: Path) -> None:
    runner = ModelRunner.load(folder, device="cpu", slots=1, context=16)
    whole = score(runner, runner.acquire(), [1, 2])
    paired = ModelRunner.load(folder, device="cpu", slots=1, context=16, vocab=300)
    cut = score(paired, paired.acquire(), [1, 2])
    assert cut.shape == (2, 300) and torch.equal(cut, whole[:, :300])


def test_the_last_token_of_a_decode_is_not_fed(runner: ModelRunner) -> None:
    slot = runner.acquire()
    (output,) = runner.decode([request(runner, slot, [1, 2, 3], 5)])
    assert len(output.tokens) == 5 and runner.length(slot) == 3 + 4
    (more,) = runner.decode([request(runner, slot, output.tokens[-1:], 5)])
    runner.truncate(slot, 0)
    (whole,) = runner.decode([request(runner, slot, [1, 2, 3], 10)])
    assert output.tokens + more.tokens == whole.tokens


def test_a_decode_ends_with_a_stop_token(runner: ModelRunner) -> None:
    slot = runner.acquire()
    (free,) = runner.decode([request(runner, slot, [1, 2, 3], 12)])
    runner.truncate(slot, 0)
    stop = free.tokens[4]
    (stopped,) = runner.decode([request(runner, slot, [1, 2, 3], 12, stop=frozenset([stop]))])
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]


def test_decodes_of_different_lengths_in_a_batch_equal_each_alone(runner: ModelRunner) -> None:
    warm = Sampling(1.0, top_k=20, seed=5)
    plans = [([1, 2, 3], 9, Sampling()), ([7], 2, warm), ([5, 5, 5, 5], 6, warm)]
    alone = []
    for prompt, n, sampling in plans:
        slot = runner.acquire()
        alone.append(runner.decode([request(runner, slot, prompt, n, sampling=sampling)])[0].tokens)
        runner.release(slot)
    slots = [runner.acquire() for _ in plans]
    requests = [request(runner, s, prompt, n, sampling=o) for s, (prompt, n, o) in zip(slots, plans, strict=True)]
    assert [output.tokens for output in runner.decode(requests)] == alone


def test_a_decode_returns_the_logits_its_tokens_were_sampled_from(runner: ModelRunner) -> None:
    slot = runner.acquire()
    options = {"sampling": Sampling(0.8, top_k=9), "keep_logits": True, "layers": (1, 3), "logprobs": 2}
    (output,) = runner.decode([request(runner, slot, [1, 2, 3], 4, **options)])
    rows = fresh(runner, [1, 2, 3, *output.tokens])[2:6]
    assert output.logits is not None and output.logits.shape == (4, VOCAB)
    assert ((output.logits > float("-inf")).sum(-1) == 9).all()
    best = rows.topk(9).values / 0.8
    close(output.logits.topk(9).values.log_softmax(-1), best.log_softmax(-1))
    assert {layer: hidden.shape for layer, hidden in output.hidden.items()} == {1: (4, 64), 3: (4, 64)}
    assert output.logprobs is not None and [lp.token for lp in output.logprobs] == output.tokens
    expected = rows.log_softmax(-1)[range(4), output.tokens]
    close(torch.tensor([lp.logprob for lp in output.logprobs]), expected)
    assert all(len(lp.top) == 2 for lp in output.logprobs)


# -- options


def test_bfloat16_is_near_float32(folder: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    half = ModelRunner.load(folder, device="cpu", dtype="bfloat16", slots=1, context=16)
    assert half.transformer.dtype == half.cache.keys.dtype == half.transformer.embedding.dtype == torch.bfloat16
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # some virtual machines announce AMX and forbid it
    logits = score(half, half.acquire(), [1, 2, 3, 4])
    exact = fresh(runner, [1, 2, 3, 4])
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - exact).abs().mean() < 0.05 * exact.std()
    assert not torch.equal(logits.float(), exact)


def test_dtype_auto_is_float32_on_a_cpu_and_the_checkpoints_own_on_a_gpu(runner: ModelRunner, folder: Path) -> None:
    assert runner.transformer.dtype == torch.float32
    own, gpu, cpu = runner.shape.dtype, torch.device("cuda"), torch.device("cpu")
    assert Precision.choose("auto", own, gpu) == Precision(own)
    assert Precision.choose(torch.float16, own, cpu) == Precision(torch.float16)
    # Weights stay as a quantised checkpoint has them where kernels multiply with them; else they become floats.
    assert Precision.choose("auto", torch.bfloat16, gpu, "stored") == Precision(torch.bfloat16, "stored")
    assert Precision.choose("auto", torch.bfloat16, cpu, "blocks") == Precision(torch.float32, "blocks")
    assert Precision.choose("auto", torch.bfloat16, cpu) == Precision(torch.float32)
    assert Precision.choose("fp8", torch.float32, gpu) == Precision(torch.bfloat16, "fp8")
    assert Precision.choose("int8", torch.float16, gpu) == Precision(torch.float16, "int8")
    assert Precision.choose("int4", torch.float16, cpu) == Precision(torch.float32, "int4")


def test_the_checkpoints_own_dtype_is_read_from_its_config(tmp_path: Path) -> None:
    folder = save(make_model("qwen2"), tmp_path / "half")
    edit_config(folder, dtype="bfloat16")
    shape = ModelRunner.load(folder, device="cpu", slots=1, context=16).shape
    assert shape.dtype == torch.bfloat16
    assert Precision.choose("auto", shape.dtype, torch.device("cuda")) == Precision(torch.bfloat16)


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(BadRequest) as error:
        ModelRunner.load(folder, device="cpu", dtype="int3")
    assert str(error.value) == "dtype 'int3' is not known; give auto, float32, bfloat16, float16, fp8, int8, int4"


def test_devices_are_chosen_by_name() -> None:
    assert choose_device("cpu") == choose_device(torch.device("cpu")) == torch.device("cpu")
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_an_unknown_device_is_refused(folder: Path) -> None:
    with pytest.raises(BadRequest) as error:
        ModelRunner.load(folder, device="gpu")
    assert str(error.value) == "device 'gpu' is not known to torch; give auto, cpu, cuda or cuda:N"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadRequest) as error:
        choose_device("cuda:1")
    assert str(error.value) == "device 'cuda:1' was asked for, but torch finds no CUDA device here; give cpu or auto"


@pytest.mark.parametrize("context", [0, 1, -5, 1025])
def test_an_impossible_context_is_refused(runner: ModelRunner, context: int) -> None:
    with pytest.raises(BadRequest) as error:
        choose_context(context, runner.shape.context)
    assert str(error.value) == f"context is {context}; this checkpoint takes 2 to 1024 tokens"


def test_the_context_is_what_was_asked_for_or_what_the_checkpoint_was_made_for(runner: ModelRunner) -> None:
    assert runner.max_seq_len == 64
    assert choose_context(None, runner.shape.context) == choose_context(1024, runner.shape.context) == 1024
    assert choose_context(2, runner.shape.context) == 2


def test_a_long_context_takes_no_more_than_4096_unless_asked_for(tmp_path: Path) -> None:
    folder = save(make_model("qwen2", max_position_embeddings=32768), tmp_path / "long")
    runner = ModelRunner.load(folder, device="cpu", slots=1)
    assert runner.max_seq_len == 4096
    assert choose_context(30000, runner.shape.context) == 30000


def test_a_gpu_without_a_number_is_the_one_its_tensors_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "cuda" and "cuda:0" are two devices to torch: a pair on both would be planned as if it had two memories, and a
    target would not begin to read what a draft on the same card has written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch, "empty", lambda size, device: None)
    assert [choose_device(asked) for asked in ("auto", "cuda", "cuda:1", torch.device("cuda"))] == 4 * [
        torch.device("cuda", 1)
    ]
    assert choose_device("cuda:0") == torch.device("cuda", 0) and choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_a_device_that_torch_knows_and_has_not_is_refused_in_words(device: str) -> None:
    """What a Mac's user gives; it was a traceback. So was the number of a GPU that is not there."""
    kind = {"mps": torch.backends.mps, "xpu": torch.xpu}[device]
    if kind.is_available():
        pytest.skip(f"there is {device} here")
    with pytest.raises(BadRequest, match=f"device '{device}' was asked for, but torch cannot use it here; give auto"):
        choose_device(device)
