"""Drafting with a head: text is the target's, in batches, sessions and after cancellation; samples keep its law."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

import semspec
from semspec import verify
from semspec.draft import HeadDrafter
from semspec.draft.tree import CHAIN, TreeOptions
from semspec.errors import BadRequest, ModelError
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.model.heads.block import BlockConfig, BlockHead
from semspec.model.heads.block_runner import BlockRunner
from semspec.model.heads.config import HeadConfig, HeadTensors
from semspec.model.heads.eagle import EagleHead, TargetParts
from semspec.model.heads.runner import ENOUGH, HeadRunner, StateRunner
from semspec.model.linear import DenseLinear
from semspec.model.weights import Checkpoint
from semspec.options import Options
from semspec.types import Decode, DecodeOutput, Sampling
from tests.checkpoints import CHAT, make_model, make_tokenizer, save
from tests.chi import chi_square
from tests.fakes import FakeRunner, chain
from tests.heads import make_block_head, make_head

VOCAB, LENGTH, DRAWS = 4, 3, 1500
TARGET = chain(VOCAB, seed=1, memory=2, sharpness=1.2)
PROMPT = [1, 2]


def small_head(folder: Path, target: FakeRunner, cls: type[HeadRunner] = HeadRunner) -> HeadRunner:
    """A random head over three of four tokens, for a target whose states are its logits."""
    make_head(folder, width=16, target_width=VOCAB, target_vocab=VOCAB, vocab=3, layers=[0, 1, 2])
    parts = TargetParts(torch.zeros(VOCAB, VOCAB), DenseLinear(torch.zeros(VOCAB, VOCAB)), 2, VOCAB, torch.float32)
    with Checkpoint(folder) as checkpoint:
        tensors = HeadTensors(checkpoint)
        head = EagleHead(HeadConfig.read(tensors, 2, VOCAB), tensors, parts, torch.device("cpu"))
    return cls(head, VOCAB, target.max_seq_len)


def small_block(folder: Path, target: FakeRunner) -> BlockRunner:
    """A random block head for the same target."""
    named = {"mask_token_id": 3, "target_layer_ids": [0, 1]}
    make_block_head(folder, width=VOCAB, layers=(0, 1), block=4, dflash_config=named)
    weights = torch.randn(2, VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
    parts = TargetParts(weights[0], DenseLinear(weights[1]), 2, VOCAB, torch.float32)
    with Checkpoint(folder) as checkpoint:
        tensors = HeadTensors(checkpoint)
        head = BlockHead(BlockConfig.read(tensors, parts), tensors, parts, torch.device("cpu"))
    return BlockRunner(head, VOCAB, target.max_seq_len)


def p_value(
    folder: Path,
    rule: str,
    make: Callable[[Path, FakeRunner], StateRunner] = small_head,
    tree: TreeOptions = CHAIN,
) -> tuple[float, int]:
    target, executor = FakeRunner(TARGET, VOCAB, slots=500), Executor()
    head, tasks, accepted = make(folder, target), [], []
    for seed in range(DRAWS):
        stats, job = Stats(), Job(PROMPT, verify.make(rule), 2, LENGTH, Sampling(1.0, seed=seed))
        tasks.append(executor.submit(Decoder(job, target, HeadDrafter(head, tree=tree), stats).decode(), stats))
        accepted.append(stats)
    executor.run()
    assert not any(task.error for task in tasks) and head.free == ENOUGH
    counts = torch.zeros([VOCAB] * LENGTH)
    for task in tasks:
        counts[tuple(t for event in task.events for t in event.tokens)] += 1
    expected = torch.zeros([VOCAB] * LENGTH)
    for tokens in product(range(VOCAB), repeat=LENGTH):
        p, context = 1.0, list(PROMPT)
        for token in tokens:
            p *= torch.tensor(TARGET(context)).softmax(-1)[token].item()
            context.append(token)
        expected[tokens] = p
    return chi_square(counts, expected), sum(stats.accepted for stats in accepted)


class Careless(HeadRunner):
    """A planted fault: what it says it drew from is not what it drew from."""

    def decode(self, requests: list[Decode]) -> list[DecodeOutput]:  # type: ignore[override]
        outputs = super().decode(requests)
        for out in outputs:
            assert out.logits is not None
            out.logits = out.logits.roll(1, -1)
        return outputs


@pytest.mark.parametrize("rule", ["sampling", "block"])
def test_sampled_drafts_of_a_head_keep_the_targets_distribution(rule: str, tmp_path: Path):
    p, accepted = p_value(tmp_path, rule)
    assert p > 1e-3 and accepted > DRAWS // 4


def test_draft_probabilities_of_other_tokens_would_be_noticed(tmp_path: Path):
    assert p_value(tmp_path, "sampling", lambda folder, target: small_head(folder, target, Careless))[0] < 1e-6


def test_tokens_of_a_block_drawn_at_once_keep_it_too(tmp_path: Path):
    p, accepted = p_value(tmp_path, "sampling", small_block)
    assert p > 1e-3 and accepted > DRAWS // 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    return save(make_model("llama3"), tmp_path_factory.mktemp("target"), tokenizer)


@pytest.fixture(scope="module")
def pair(folder: Path) -> semspec.Pair:
    return semspec.load(folder, context=256, slots=3)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """It knows some of what the target writes, so that some drafts are accepted."""
    folder = tmp_path_factory.mktemp("head")
    make_head(folder, layers=[1, 2, 3], vocab=250)
    return f"eagle:{folder},threshold=0"


def head_of(pair: semspec.Pair) -> StateRunner:
    """The only one that the pair has loaded."""
    (found,) = pair.resources._heads.values()
    return found.runner


PROMPTS = ["the quick brown fox", "one two", "the sky is blue because light scatters " * 3, "x"]


@pytest.mark.parametrize("length", [4, "auto-repeatable"])
def test_text_is_the_targets_alone_and_in_a_batch(pair: semspec.Pair, drafter: str, length: int | str):
    wanted = [pair.generate(p, verifier="none", max_new_tokens=24).text for p in PROMPTS]
    options = {"drafter": drafter, "num_draft_tokens": length, "max_new_tokens": 24}
    assert [pair.generate(p, **options).text for p in PROMPTS] == wanted
    batch = pair.generate(PROMPTS, **options)
    assert [result.text for result in batch] == wanted
    if length == 4:
        assert all(result.stats.drafted for result in batch)
    warm = {"temperature": 1.0, "seed": 3, "verifier": "exact"} | options
    assert [r.text for r in pair.generate(PROMPTS, **warm)] == [
        pair.generate(p, **warm | {"verifier": "none"}).text for p in PROMPTS
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_trees_of_a_head_leave_the_text_as_it_is(pair: semspec.Pair, drafter: str, temperature: float):
    options = {"num_draft_tokens": 4, "max_new_tokens": 24, "temperature": temperature, "seed": 3}
    wanted = [pair.generate(p, **options | {"verifier": "none"}).text for p in PROMPTS]
    tree = {"drafter": f"{drafter},tree=20,top=5"} | options
    batch = pair.generate(PROMPTS, verifier="exact", **tree)
    assert [r.text for r in batch] == wanted and all(r.stats.drafted > 20 for r in batch)
    assert [pair.generate(p, verifier="exact", **tree).text for p in PROMPTS] == wanted
    for rule in ("sampling", "traversal", "fly:window=1", "typical"):
        assert pair.generate("one two", verifier=rule, **tree).stats.drafted
    head = head_of(pair)
    assert head.free == ENOUGH and pair.target.free == 3


@pytest.mark.parametrize("rule", ["sampling", "traversal"])
def test_drawn_trees_of_a_head_keep_the_targets_distribution(rule: str, tmp_path: Path):
    p, accepted = p_value(tmp_path, rule, tree=TreeOptions(size=4, top=2))
    assert p > 1e-3 and accepted > DRAWS // 4


def test_lossy_and_sampling_rules_and_early_exits_take_its_drafts(pair: semspec.Pair, drafter: str):
    for verifier in ("fly:window=2", "typical", "sampling", "block", "ensemble"):
        result = pair.generate(
            "one two", verifier=verifier, drafter=drafter, num_draft_tokens=4, max_new_tokens=16, temperature=0.8
        )
        assert result.stats.drafted
    unsure = pair.generate("one two", drafter=drafter, num_draft_tokens=4, max_new_tokens=16, draft_min_p=0.99)
    assert unsure.text == pair.generate("one two", verifier="none", max_new_tokens=16).text


@pytest.mark.parametrize("tree", ["", ",tree=12"])
def test_sessions_and_cancelled_streams_leave_nothing_behind(pair: semspec.Pair, drafter: str, tree: str):
    options = Options(drafter=drafter + tree, num_draft_tokens=3, max_new_tokens=12, ignore_eos=True)
    with semspec.Session(pair) as session:
        for question in ("the quick brown fox", "one two three"):
            answer = "".join(event.text for event in session.ask(question, options))
            messages = session.messages[:-1]
            assert answer == pair.generate(messages, verifier="none", max_new_tokens=12, ignore_eos=True).text
        assert session.reused > 20, "states of the first turn are remembered"
    head = head_of(pair)
    before = head.free
    stream = pair.stream("one two", options)
    next(iter(stream))
    assert head.free == before - 1
    stream.close()
    assert head.free == before and pair.target.free == 3


@pytest.mark.parametrize("cached", [False, True])
def test_a_head_is_loaded_while_all_slots_are_taken(folder: Path, drafter: str, cached: bool):
    """By streams that nobody has read to their ends; the answer waits for a slot, as any other does."""
    pair = semspec.load(folder, device="cpu", context=256, slots=2)
    pair = pair.cached() if cached else pair
    options = {"max_new_tokens": 12, "ignore_eos": True}
    wanted = [pair.generate(p, verifier="none", **options).text for p in PROMPTS[:3]]
    streams = [pair.stream(p, verifier="none", **options) for p in PROMPTS[:2]]
    first = [next(iter(stream)).text for stream in streams]
    assert pair.target.free == 0
    assert pair.generate(PROMPTS[2], drafter=drafter, num_draft_tokens=3, **options).text == wanted[2]
    rest = ["".join(event.text for event in stream) for stream in streams]
    assert [a + b for a, b in zip(first, rest, strict=True)] == wanted[:2], "nobody's slot was touched"
    assert pair.target.free == 2 and head_of(pair).free == ENOUGH


def test_a_session_with_the_only_slot_keeps_it_when_a_head_is_loaded(folder: Path, drafter: str):
    pair = semspec.load(folder, device="cpu", context=256, slots=1)
    with semspec.Session(pair) as session:
        for options in ({"verifier": "none"}, {"drafter": drafter, "num_draft_tokens": 3}):
            before = session.reused
            answer = "".join(event.text for event in session.ask("one two three", max_new_tokens=8, **options))
            assert answer
        # Nothing of the first turn has states for the head, so its text is read again, into the same slot.
        assert before == 0 and pair.target.free == 0
        text = "".join(event.text for event in session.ask("four", max_new_tokens=8, drafter=drafter))
        assert text and session.reused > 20
    assert pair.target.free == 1


def test_a_head_is_loaded_once_whatever_share_is_asked_of_it(
    folder: Path, drafter: str, monkeypatch: pytest.MonkeyPatch
):
    pair, loaded = semspec.load(folder, device="cpu", context=256, slots=1), list[object]()
    load = EagleHead.load
    monkeypatch.setattr(EagleHead, "load", lambda *given: loaded.append(given) or load(*given))
    for threshold in ("0", "0.001", "0.9", "0"):
        options = {"drafter": drafter.replace("threshold=0", f"threshold={threshold}"), "max_new_tokens": 4}
        if threshold == "0":
            pair.generate("one two", **options)
            continue
        with pytest.raises(ModelError, match=r"does not fit.*\d+% of \d+ tokens"):
            pair.generate("one two", **options)
    assert len(loaded) == 1


def test_mistakes_are_told(pair: semspec.Pair, drafter: str, tmp_path: Path):
    with pytest.raises(BadRequest, match="eagle:PATH"):
        Options(drafter="eagle")
    with pytest.raises(BadRequest, match="give 0 to 1"):
        Options(drafter="eagle:somewhere,threshold=2")
    with pytest.warns(DeprecationWarning, match="'least' of drafter 'eagle' is now called 'threshold'"):
        assert Options(drafter="eagle:somewhere,least=0.2").drafter
    with pytest.raises(ModelError, match="no folder"):
        pair.generate("x", drafter=f"eagle:{tmp_path}/missing/head/")
    with pytest.raises(ModelError, match="does not fit"):
        pair.generate("x", drafter=drafter.replace("threshold=0", "threshold=0.9").replace("eagle:", "eagle:path="))
    with pytest.raises(BadRequest, match="draft model"):
        pair.generate("x", verifier="specreason", drafter=drafter)
