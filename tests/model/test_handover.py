"""A target begins to read a draft before the host knows it: the same rows and texts as without, and no pass more."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import semspec
from bench.gpu_checks import drafts_read_before_the_host_knows_them as check
from semspec.model import ModelRunner, graph_runner
from semspec.model.graph_runner import GraphRunner
from semspec.model.kernels import DEFAULT_FLAGS, reference_kernels
from semspec.model.prefix_cache import PrefixCache
from semspec.types import Decode, Handover, Sampling, Score, ScoreOutput
from tests.checkpoints import make_model, make_tokenizer, save
from tests.model.test_graph_runner import Rehearsed, close, keys, text

FLAGS = replace(DEFAULT_FLAGS, hand_over=True)
CONTEXT = 192


class Launcher(Rehearsed):
    """Only what was run before begins at once."""

    def knows(self, key: Hashable) -> bool:
        return key in self.keys


def twin(plain: ModelRunner, flags: Any = FLAGS, **options: Any) -> ModelRunner:
    made = ModelRunner(plain.transformer, 4, plain.max_seq_len, **options)
    made.use(GraphRunner(plain.transformer, made.cache, reference_kernels(), Launcher(), flags))
    return made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[ModelRunner]:
    """Target and draft, whose best tokens are often the same."""
    model = make_model("qwen2")
    runners = [ModelRunner.load(save(model, tmp_path_factory.mktemp("target")), device="cpu", slots=4, context=CONTEXT)]
    for parameter in model.parameters():
        parameter.data += 0.15 * parameter.data.std() * torch.randn(parameter.shape, generator=torch.manual_seed(5))
    runners += [ModelRunner.load(save(model, tmp_path_factory.mktemp("draft")), device="cpu", slots=4, context=CONTEXT)]
    return runners


class Rounds:
    """Sequences on a target and a draft, one round of which is a decode and a score of what it wrote."""

    def __init__(self, target: ModelRunner, draft: ModelRunner, prompts: list[list[int]], layers: tuple[int, ...] = ()):
        self.target, self.draft, self.layers = target, draft, layers
        self.slots = [(target.acquire(), draft.acquire()) for _ in prompts]
        self.pending = [prompt[-1:] for prompt in prompts]
        for (slot, other), prompt in zip(self.slots, prompts, strict=True):
            for runner, own in ((target, slot), (draft, other)):
                runner.score([Score(runner, own, prompt[:-1], 0)])
        target.score([self._score(i, [0] * 5, None) for i in range(len(prompts))])  # so that it begins at once
        for slot, _ in self.slots:
            target.truncate(slot, target.length(slot) - 6)

    def _score(self, i: int, draft: list[int], handover: Handover | None) -> Score:
        feed = [*self.pending[i], *draft]
        return Score(self.target, self.slots[i][0], feed, len(feed), self.layers, handover=handover)

    def decode(self, n: int = 5, stop: frozenset[int] = frozenset()) -> list[Score]:
        """The scores that follow."""
        over = [
            Handover(self.target, slot, p, self.layers) for (slot, _), p in zip(self.slots, self.pending, strict=True)
        ]
        wrote = self.draft.decode([
            Decode(self.draft, slot, p, n, Sampling(1.0, seed=i), 8, stop, handover=h)
            for i, ((_, slot), p, h) in enumerate(zip(self.slots, self.pending, over, strict=True))
        ])  # fmt: skip
        return [self._score(i, out.tokens, h) for i, (out, h) in enumerate(zip(wrote, over, strict=True))]


def passes(runner: ModelRunner) -> int:
    return sum(key[0] in ("score", "packed") for key in keys(runner))


def plain_rows(plain: ModelRunner, rounds: Rounds, prompts: list[list[int]], scores: list[Score]) -> list[ScoreOutput]:
    rows = []
    for score, prompt in zip(scores, prompts, strict=True):
        slot = plain.acquire()
        plain.score([Score(plain, slot, prompt[:-1], 0)])
        rows += plain.score([replace(score, runner=plain, slot=slot, handover=None)])
        plain.release(slot)
    return rows


def same(ours: list[ScoreOutput], theirs: list[ScoreOutput]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.logits.shape == other.logits.shape and one.hidden.keys() == other.hidden.keys()
        close(one.logits, other.logits)
        for layer, states in other.hidden.items():
            close(one.hidden[layer], states)


PROMPTS = [text(3, 20), text(4, 33), text(5, 7)]


@pytest.mark.parametrize(("count", "layers"), [(1, ()), (3, ()), (2, (0, 2))])
def test_rows_are_those_of_a_pass_and_there_is_one(
    plain: list[ModelRunner], count: int, layers: tuple[int, ...]
) -> None:
    prompts, target = PROMPTS[:count], twin(plain[0])
    rounds = Rounds(target, twin(plain[1]), prompts, layers)
    before = passes(target), [target.length(slot) for slot, _ in rounds.slots]
    scores = rounds.decode()
    assert passes(target) == before[0] + 1 and [target.length(slot) for slot, _ in rounds.slots] == before[1]
    rows = target.score(scores)
    assert passes(target) == before[0] + 1, "nothing is computed twice"
    assert [target.length(s) for s, _ in rounds.slots] == [n + 6 for n in before[1]]
    same(rows, plain_rows(plain[0], rounds, prompts, scores))
    # What was written to the cache is what later tokens see.
    later = target.score([Score(target, slot, [7, 8], 2) for slot, _ in rounds.slots])
    fed = [replace(s, tokens=[*s.tokens, 7, 8], logits_to_keep=2, layers=()) for s in scores]
    same(later, plain_rows(plain[0], rounds, prompts, fed))


def test_a_draft_that_stops_is_the_beginning_of_what_was_begun(plain: list[ModelRunner]) -> None:
    target, draft = twin(plain[0]), twin(plain[1])
    rounds = Rounds(target, draft, PROMPTS[:1])
    (whole,) = rounds.decode()
    draft.truncate(rounds.slots[0][1], len(PROMPTS[0]) - 1)
    (score,) = rounds.decode(stop=frozenset(whole.tokens[3:4]))
    assert len(score.tokens) == 4 < len(whole.tokens)
    same(target.score([score]), plain_rows(plain[0], rounds, PROMPTS[:1], [score]))


def other_tokens(rounds: Rounds, scores: list[Score]) -> list[Score]:
    return [replace(s, tokens=[*s.tokens[:-1], (s.tokens[-1] + 1) % 16]) for s in scores]


def another_pass(rounds: Rounds, scores: list[Score]) -> list[Score]:
    slot = rounds.target.acquire()
    rounds.target.score([Score(rounds.target, slot, text(9, 40), 1)])
    return scores


def a_fork(rounds: Rounds, scores: list[Score]) -> list[Score]:
    slot, held = rounds.target.acquire(), rounds.slots[0][0]
    rounds.target.copy(held, slot, rounds.target.length(held))
    return scores


def a_longer_draft(rounds: Rounds, scores: list[Score]) -> list[Score]:
    return [replace(s, tokens=[*s.tokens, 3], logits_to_keep=s.logits_to_keep + 1) for s in scores]


def other_layers(rounds: Rounds, scores: list[Score]) -> list[Score]:
    return [replace(s, layers=(1,)) for s in scores]


def another_place(rounds: Rounds, scores: list[Score]) -> list[Score]:
    slot = rounds.slots[0][0]
    rounds.target.truncate(slot, rounds.target.length(slot) - 3)
    return scores


@pytest.mark.parametrize("between", [other_tokens, another_pass, a_fork, a_longer_draft, other_layers])
def test_what_does_not_fit_is_computed(plain: list[ModelRunner], between: Any) -> None:
    target = twin(plain[0])
    rounds = Rounds(target, twin(plain[1]), PROMPTS[:1])
    scores = between(rounds, rounds.decode())
    count = passes(target)
    same(target.score(scores), plain_rows(plain[0], rounds, PROMPTS[:1], scores))
    assert passes(target) == count + 1


def test_a_slot_that_was_cut_is_computed_from_there(plain: list[ModelRunner]) -> None:
    target = twin(plain[0])
    rounds = Rounds(target, twin(plain[1]), PROMPTS[:1])
    scores = another_place(rounds, rounds.decode())
    same(target.score(scores), plain_rows(plain[0], rounds, [PROMPTS[0][:-3]], scores))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pages_that_were_given_back_meanwhile_are_written_again(plain: list[ModelRunner], count: int) -> None:
    """Whoever asks for room that is not there makes slots give back what they keep beyond their lengths."""
    prompts, target = PROMPTS[:count], twin(plain[0], page=4, tokens=200)
    rounds = Rounds(target, twin(plain[1]), prompts)
    scores = rounds.decode()
    assert target.lacks_room([(None, 190)])
    same(target.score(scores), plain_rows(plain[0], rounds, prompts, scores))
    later = target.score([Score(target, slot, [7, 8], 2) for slot, _ in rounds.slots])
    fed = [replace(s, tokens=[*s.tokens, 7, 8], logits_to_keep=2) for s in scores]
    same(later, plain_rows(plain[0], rounds, prompts, fed))


def test_a_target_elsewhere_is_left_alone(plain: list[ModelRunner]) -> None:
    """It may be in the middle of a pass."""

    class Elsewhere(ModelRunner):
        device = torch.device("meta")

        def begin(self, *_: Any) -> None:
            raise AssertionError("a pass was begun from the draft's")

    target = twin(plain[0])
    target.__class__ = Elsewhere
    assert Rounds(target, twin(plain[1]), PROMPTS[:1]).decode()


def test_others_of_the_same_pass_are_computed(plain: list[ModelRunner]) -> None:
    target = twin(plain[0])
    rounds = Rounds(target, twin(plain[1]), PROMPTS[:2])
    scores, slot = rounds.decode(), target.acquire()
    rows = target.score([scores[0], Score(target, slot, text(6, 30), 2), scores[1]])
    same([rows[0], rows[2]], plain_rows(plain[0], rounds, PROMPTS[:2], scores))
    own = plain[0].acquire()
    same([rows[1]], plain[0].score([Score(plain[0], own, text(6, 30), 2)]))
    plain[0].release(own)


@pytest.mark.parametrize("kind", ["exact", "sampling", "reflective"])
@pytest.mark.parametrize("batch", [1, 3])
def test_pairs_write_the_same_texts(plain: list[ModelRunner], kind: str, batch: int) -> None:
    prompts, texts, counts = ["the quick", "one two three", "and then"][:batch], [], []
    for flags in (DEFAULT_FLAGS, FLAGS):
        target, draft = (twin(runner, flags) for runner in plain)
        begun = count_begun(target)
        pair = semspec.Pair(target, make_tokenizer(), draft)
        options: Any = {"max_new_tokens": 30, "ignore_eos": True, "temperature": 0.8, "seed": 4, "num_draft_tokens": 5}
        for _ in range(2):  # of what was never run before nothing is begun
            answers = pair.generate(prompts, verifier=kind, **options)
        texts.append([a.tokens for a in answers])
        counts.append((len(begun), passes(target)))
    assert texts[0] == texts[1]
    (none, usual), (some, ours) = counts
    assert none == 0 and ours <= usual, "a pass that is begun takes the place of one"
    assert some > 3 or kind == "reflective", "its target reads another layout"


def count_begun(target: ModelRunner) -> list[int]:
    begun, graphs = list[int](), target.graph_runner
    assert graphs is not None
    begin = graphs.begin

    def counted(*args: Any) -> Any:
        begun.append(len(args[0]))
        return begin(*args)

    graphs.begin = counted  # type: ignore[method-assign]
    return begun


requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # the prompt
        st.sampled_from(["exact", "sampling", "fly", "none"]),
        st.integers(1, 7),
        st.integers(3, 25),
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


@given(requests, st.sampled_from([None, 96, 160]))
@settings(max_examples=8, deadline=None)
def test_batches_of_all_kinds_in_small_pools(plain: list[ModelRunner], some: Any, tokens: int | None) -> None:
    """With preemption, prompts that begin alike, and sequences that end at different times."""
    prompts = ["the quick brown fox", "the quick brown", "one", "one two three"]
    texts = []
    for flags, room in ((DEFAULT_FLAGS, None), (FLAGS, tokens)):
        target, draft = (twin(runner, flags, page=16, tokens=room) for runner in plain)
        pair = semspec.Pair(PrefixCache(target), make_tokenizer(), PrefixCache(draft))
        common: Any = {"ignore_eos": True, "temperature": 0.7, "seed": 3}
        options = [
            semspec.Options(verifier=kind, num_draft_tokens=k, max_new_tokens=n, **common) for _, kind, k, n in some
        ]
        answers = pair.generate([prompts[p] for p, *_ in some], options)
        texts.append([a.tokens for a in answers])
    assert texts[0] == texts[1]


def test_the_check_for_a_card_finds_drafts_that_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    check(torch.device("cpu"))
    monkeypatch.setattr(graph_runner, "put_drafts", lambda drafts, feeds: None)
    with pytest.raises(AssertionError, match="round 0"):
        check(torch.device("cpu"))
