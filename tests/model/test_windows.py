"""Layers with a window keep their window only: no text is other than with all of it kept, however it is cut, copied,
preempted or found again; and the memory that is planned for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import semspec
from semspec.draft import ModelDrafter
from semspec.errors import SemspecError
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.work import Task
from semspec.model import ModelRunner
from semspec.model.graph_runner import GraphRunner
from semspec.model.kernels import reference_kernels
from semspec.model.page_pool import PASS, PagePool, pages_of
from semspec.model.page_tables import PageTables
from semspec.model.paged_cache import PagedCache
from semspec.model.prefix_cache import PrefixCache
from semspec.types import Decode, Sampling, Score
from tests.checkpoints import make_model, make_tokenizer, save
from tests.fakes import FakeRunner
from tests.model.test_graph_runner import Rehearsed, close, text
from tests.test_every_rule import DRAFT, TARGET, VOCAB, rule_of

SLOTS, SIZE, WINDOW, CAPACITY = 3, 4, 6, 400
Step = tuple[str, int, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "extend", "cut", "copy", "drop", "ask"]),
        st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1), st.integers(0, PASS * SIZE),
    ),
    max_size=40,
)  # fmt: skip


def wrong_after(history: list[Step]) -> str | None:
    """What a pool of a window does not have of plain lists of tokens, whose last ones are what anybody reads."""
    pages = pages_of(None, SLOTS, CAPACITY, SIZE, WINDOW)
    pool = PagePool((1, pages, 1, SIZE, 1), WINDOW, SLOTS, CAPACITY, torch.device("cpu"), torch.float32)
    held: list[list[int]] = [[] for _ in range(SLOTS)]
    token = 0

    def window(slot: int, length: int) -> str | None:
        """Whether a token after the first `length` finds all it sees."""
        seen = range(max(0, length - WINDOW + 1), length)
        keys, _ = pool.gather(slice(None), slot, seen.start, seen.stop)
        right = keys.flatten().tolist() == held[slot][seen.start : seen.stop]
        return None if right else f"slot {slot} of {len(held[slot])} has lost its window at {length}"

    for kind, slot, other, n in history:
        lengths = [len(tokens) for tokens in held]
        if kind == "extend" and (n := min(n, CAPACITY - lengths[slot])):
            if pool.short([(slot, n)], lengths):
                return "there is no room for one pass"
            pool.reserve([(slot, n)], lengths)
            if lost := window(slot, lengths[slot]):  # what the first token of the pass sees is still there
                return lost
            new = torch.arange(token + 1, token + n + 1).float()[:, None, None]
            pool.write(0, slot, lengths[slot], new, new)
            held[slot] += range(token + 1, token + n + 1)
            token += n
        elif kind == "cut" and (n := min(n, lengths[slot])) >= pool.min_length(slot):
            del held[slot][n:]
        elif kind == "copy" and slot != other and (n := lengths[slot] - n % 70) >= max(1, pool.min_length(slot)):
            pool.blocks.shrink(other, 0)
            pool.fork(slot, other, n)
            held[other] = held[slot][:n]
        elif kind == "drop":
            pool.blocks.shrink(slot, 0)
            held[slot] = []
        elif kind == "ask" and pool.lacks_room([(one, 400) for one in range(SLOTS)], lengths):
            return "slots that have pages for all they hold lack some"
        for one, tokens in enumerate(held):
            least = max(pool.min_length(one), len(tokens) - 70)
            for length in {len(tokens), *range(max(least, 0), len(tokens), 7)}:
                if lost := window(one, length):
                    return lost
    used = {block for slot in range(SLOTS) for block in pool.blocks.tables[slot][pool.blocks.first[slot] :]}
    return None if pool.blocks.free == pages - len(used) else "a page was lost"


@settings(max_examples=80, deadline=None)
@given(steps)
def test_every_slot_has_its_window(history: list[Step]) -> None:
    assert wrong_after(history) is None


def too_soon(shared: bool, live: int, tokens: int, count: int) -> bool:
    """Whether a pool that is asked before every pass, and of which slots are dropped where it lacks pages, has too few
    for a pass after all."""
    pages = pages_of(tokens, live, CAPACITY, SIZE, WINDOW)
    pool = PagePool((1, pages, 1, SIZE, 1), WINDOW, live, CAPACITY, torch.device("cpu"), torch.float32)
    lengths, going = [0] * live, list[int]()

    def lacks_some(asked: list[tuple[int, int]]) -> bool:
        if pool.short(asked, lengths):
            return True
        pool.reserve(asked, lengths)
        for slot, n in asked:
            lengths[slot] += n
        return False

    for slot in range(live):
        if pool.lacks_room([(slot, 100)], lengths):
            break
        if shared and going:
            pool.fork(going[0], slot, 100)
            lengths[slot] = 100
        elif any(lacks_some([(slot, n)]) for n in (60, 40)):
            return True
        going.append(slot)
    for _ in range(300 // count):
        asked = [(slot, count) for slot in going][: PASS * SIZE // count]
        while asked and pool.lacks_room(asked, lengths):
            slot, _ = asked.pop()  # preempted
            going.remove(slot)
            pool.blocks.shrink(slot, 0)
            lengths[slot] = 0
        if asked and lacks_some(asked):
            return True
    return False


@pytest.mark.parametrize("shared", [False, True])
def test_a_pool_that_says_it_has_pages_has_them(shared: bool) -> None:
    cases = [(live, tokens, count) for live in (23, 40) for tokens in range(300, 3000, 170) for count in (1, 3)]
    assert not [case for case in cases if too_soon(shared, *case)]


LONG_TEXTS: list[Step] = [("extend", i % SLOTS, 0, 61) for i in range(16)]
COPIES: list[Step] = [*LONG_TEXTS[:9], ("copy", 0, 1, 0), *LONG_TEXTS[:12], ("copy", 1, 2, 3), *LONG_TEXTS[:9]]


def _too_early(patch: pytest.MonkeyPatch) -> None:
    """A page goes when its last token is still in the window, by one."""
    patch.setattr(PagePool, "_first", lambda self, length: max(0, length - (WINDOW - 1) + 1) // SIZE)


def _stale(patch: pytest.MonkeyPatch) -> None:
    """A page that another slot has too is free."""
    patch.setattr(PageTables, "_release", lambda self, blocks: self._free.extend(blocks))


def _not_told(patch: pytest.MonkeyPatch) -> None:
    """What a slot can be cut to does not count the window."""
    patch.setattr(PagePool, "min_length", lambda self, slot: self.blocks.first[slot] * SIZE)


@pytest.mark.parametrize("plant", [_too_early, _stale, _not_told])
def test_planted_faults_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrong_after(LONG_TEXTS) is None and wrong_after(COPIES) is None
    plant(monkeypatch)
    offsets = [[(k, s, o, n - i) for k, s, o, n in history] for history in (LONG_TEXTS, COPIES) for i in range(4)]
    assert any(wrong_after(history) for history in offsets)


# Models: several windows of text, in pages of 8. One slot's window is then 14 to 16 pages, where all of it is 51.
CONTEXT = 400
WINDOWED = {"mistral": 32, "gemma3": 24, "qwen2-window": 40, "phi3": 50}


def twins(family: str, folder: Path, graphs: bool, tokens: int | None = None) -> tuple[ModelRunner, ModelRunner]:
    plain = ModelRunner.load(save(make_model(family), folder), device="cpu", slots=3, context=CONTEXT)
    twin = ModelRunner(plain.transformer, 3, CONTEXT, tokens=tokens, page=8)
    if graphs:
        twin.use(GraphRunner(plain.transformer, twin.cache, reference_kernels(), Rehearsed()))
    assert twin.windowed and not plain.windowed and twin.cache.nbytes < 0.8 * plain.cache.nbytes
    return plain, twin


def feed(runner: ModelRunner, slot: int, tokens: list[int], parents: tuple[int, ...] = ()) -> torch.Tensor:
    return runner.score([Score(runner, slot, tokens, len(tokens), parents=parents)])[0].logits


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", WINDOWED)
def test_every_family_scores_and_writes_the_same(family: str, graphs: bool, tmp_path: Path) -> None:
    plain, twin = twins(family, tmp_path, graphs)
    (a, b), (c, d) = ([r.acquire(), r.acquire()] for r in (plain, twin))
    third = twin.acquire()
    feed(twin, third, text(9, 390))
    for begin, end in pairwise([0, 150, 158, 290, 299, 330]):  # longer than a pass, than a window, and drafts
        feeds = [text(1, 330)[begin:end], text(2, 330)[begin : begin + (end - begin + 1) // 2]]
        left = plain.score([Score(plain, s, f, len(f)) for s, f in zip((a, b), feeds, strict=True)])
        right = twin.score([Score(twin, s, f, len(f)) for s, f in zip((c, d), feeds, strict=True)])
        for ours, theirs in zip(right, left, strict=True):
            close(ours.logits, theirs.logits)
    assert twin.cache.min_length(c) > 200, "pages have been given back"
    for runner, slot in ((plain, a), (twin, c)):  # a rejected draft, then a tree
        runner.truncate(slot, 321)
    close(feed(twin, c, [3, 4, 5]), feed(plain, a, [3, 4, 5]))
    parents = (-1, 0, 0, 2)
    close(feed(twin, c, [6, 7, 8, 9], parents), feed(plain, a, [6, 7, 8, 9], parents))
    for runner, slot, other in ((plain, a, b), (twin, c, d)):
        runner.compact(slot, 324, [0, 2, 3])
        runner.copy(slot, other, 320)
    close(feed(twin, d, text(3, 20)), feed(plain, b, text(3, 20)))
    requests = [
        [Decode(r, s, [5, 6], 40, Sampling(1.0, seed=3), 8) for s in of] for r, of in ((plain, (a, b)), (twin, (c, d)))
    ]
    (theirs, ours) = plain.decode(requests[0]), twin.decode(requests[1])
    assert [o.tokens for o in ours] == [o.tokens for o in theirs]
    with pytest.raises(SemspecError, match="truncate it to 0 and feed it again"):
        twin.truncate(c, 100)
    for slot in (c, d, third):
        twin.release(slot)
    assert isinstance(twin.cache, PagedCache)
    assert all(pool.blocks.free == pool.blocks.blocks for pool in twin.cache.pools), "no page is lost"


def test_a_long_decode_goes_on_in_parts(tmp_path: Path) -> None:
    plain, twin = twins("mistral", tmp_path, graphs=True)
    request = [Decode(r, r.acquire(), text(1, 9), 380, Sampling(1.0, seed=5), 8) for r in (plain, twin)]
    (theirs,), (ours,) = plain.decode(request[:1]), twin.decode(request[1:])
    assert ours.tokens == theirs.tokens and len(ours.tokens) == 380 and twin.length(0) == plain.length(0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family in ("gemma3", "mistral"):
        made[family] = save(make_model(family), tmp_path_factory.mktemp(family))
        make_tokenizer().save_pretrained(made[family])
    return made


def paged_twin(pair: semspec.Pair, tokens: int | None = None) -> semspec.Pair:
    """The same models in pages, a windowed target and a windowed draft."""
    made = []
    for runner in (pair.target, pair.draft):
        assert isinstance(runner, ModelRunner)
        made.append(ModelRunner(runner.transformer, 4, CONTEXT, runner.vocab_size, tokens=tokens, page=8))
        assert made[-1].windowed
    return semspec.Pair(made[0], pair.tokenizer, made[1]).cached()


PROMPTS = ["the quick brown fox jumps over the lazy dog " * n for n in (9, 6, 11, 7)]


@pytest.mark.parametrize(("rule", "tokens"), [("none", None), ("exact", 620), ("block", None)])
def test_texts_are_what_they_were(rule: str, tokens: int | None, folders: dict[str, Path]) -> None:
    """Contexts of several windows in a batch, the same prompt four times, then more turns of each; with pages for all,
    and with too few."""
    pair = semspec.load(folders["gemma3"], folders["mistral"], device="cpu", slots=4, context=CONTEXT)
    twin = paged_twin(pair, tokens)
    options = {
        "verifier": rule,
        "ignore_eos": True,
        "max_new_tokens": 70,
        "temperature": 0.8 * (rule == "block"),
        "seed": 3,
    }
    options |= {"num_draft_tokens": 4} if rule != "none" else {}
    preempted = 0
    for prompts in (PROMPTS, PROMPTS[:1] * 4, [p + "the sky is blue" for p in PROMPTS]):
        ours, theirs = twin.generate(prompts, **options), pair.generate(prompts, **options)
        assert [r.tokens for r in ours] == [r.tokens for r in theirs]
        preempted += sum(r.stats.preempted for r in ours)
    assert (preempted > 0) == (tokens is not None)
    for cache in (twin.target, twin.draft):
        assert isinstance(cache, PrefixCache)
        if tokens is None and (cache is twin.target or rule != "none"):
            assert max(map(cache.inner.min_length, cache._idle)) > 0, "pages have been given back"
        cache.close()
        pools = cache.inner.cache.pools  # type: ignore[attr-defined]
        assert all(pool.blocks.free == pool.blocks.blocks for pool in pools), "no page is lost"


def test_a_prefix_whose_window_is_gone_is_read_again_and_a_shorter_one_is_found(folders: dict[str, Path]) -> None:
    pair = semspec.load(folders["gemma3"], device="cpu", slots=4, context=CONTEXT)
    assert isinstance(pair.target, ModelRunner)
    target = PrefixCache(ModelRunner(pair.target.transformer, 4, CONTEXT, page=8))
    system = text(1, 48)

    def rows(tokens: list[int]) -> tuple[torch.Tensor, int]:
        slot = target.acquire(tokens)
        (row,) = target.score([Score(target, slot, tokens, 1)])
        target.release(slot)
        return row.logits, row.cached

    rows(system)
    for seed in (2, 3, 4, 5):  # conversations of several windows: the first pages of each slot are given back
        alone = pair.target.score([Score(pair.target, pair.target.acquire(), system + text(seed, 300), 1)])[0].logits
        close(rows(system + text(seed, 300))[0], alone)
    assert max(map(target.inner.min_length, target._idle)) > 48
    held = dict(target._index.tokens)
    whole = [slot for slot, tokens in held.items() if tokens[:48] == system and not target.inner.min_length(slot)]
    logits, cached = rows(system + text(6, 20))
    assert cached == (48 if whole else 0) and any(len(tokens) > 300 for tokens in held.values())
    pair.target.truncate(0, 0)
    close(logits, pair.target.score([Score(pair.target, 0, system + text(6, 20), 1)])[0].logits)


def test_a_slot_that_is_cut_behind_its_window_is_read_again(folders: dict[str, Path]) -> None:
    """As after a long step that was rejected: its user does not notice."""
    pair = semspec.load(folders["gemma3"], device="cpu", slots=1, context=CONTEXT)
    assert isinstance(pair.target, ModelRunner)
    target, tokens = PrefixCache(ModelRunner(pair.target.transformer, 2, CONTEXT, page=8)), text(1, 380)
    slot, other = target.acquire(), target.acquire()
    for at in range(0, 380, 20):
        target.score([Score(target, slot, tokens[at : at + 20], 1)])
        target.score([Score(target, other, text(2, 380)[at : at + 20], 1)])
    least = target.inner.min_length(slot)
    assert least > 200
    target.truncate(slot, least - 50)
    assert target.length(slot) == least - 50 and target.tokens_to_recompute(slot) == tokens[: least - 50]
    while lost := target.tokens_to_recompute(slot):
        target.score([Score(target, slot, lost[:64], 0)])
    (row,) = target.score([Score(target, slot, [7, 8], 2)])
    plain = pair.target.acquire()
    close(row.logits, pair.target.score([Score(pair.target, plain, [*tokens[: least - 50], 7, 8], 2)])[0].logits)


def test_any_order_of_feeds_cuts_and_copies_through_a_prefix_cache(folders: dict[str, Path]) -> None:
    """Against a runner that keeps everything; long cuts are read again."""
    pair = semspec.load(folders["mistral"], device="cpu", slots=1, context=CONTEXT)
    assert isinstance(pair.target, ModelRunner)
    plain, target = pair.target, PrefixCache(ModelRunner(pair.target.transformer, 3, CONTEXT, page=8))
    rng, held = random.Random(1), dict[int, list[int]]()
    check = plain.acquire()
    for turn in range(60):
        if len(held) < 3:
            known = rng.choice(list(held.values())) if held and rng.random() < 0.6 else []
            prompt = known[: rng.randrange(len(known) + 1)] + text(turn, 30)
            slot = target.acquire(prompt)
            held[slot] = []
        else:
            slot = rng.choice(list(held))
            prompt = text(turn, rng.choice([1, 9, 60, 130]))
        if rng.random() < 0.4 and held[slot]:
            del held[slot][rng.randrange(1, len(held[slot]) + 1) :]
            target.truncate(slot, len(held[slot]))
        prompt = prompt[: CONTEXT - len(held[slot])]
        while lost := target.tokens_to_recompute(slot):
            target.score([Score(target, slot, lost[:100], 0)])
        if prompt:
            piece = rng.choice([17, 40, 200])
            for at in range(0, len(prompt), piece):
                keep = int(at + piece >= len(prompt))
                (row,) = target.score([Score(target, slot, prompt[at : at + piece], keep)])
            held[slot] += prompt
            plain.truncate(check, 0)
            close(row.logits, plain.score([Score(plain, check, held[slot], 1)])[0].logits)
        if rng.random() < 0.2 or len(held[slot]) > 350:
            target.release(slot)
            del held[slot]


@pytest.mark.parametrize("room", [10**6, 700])
@pytest.mark.parametrize("name", ["exact", "sampling"])
def test_long_drafts_are_taken_back(name: str, room: int) -> None:
    """Drafts of 90 tokens, of which few are accepted: what they were cut back to is read again where it is gone. With
    pages for all and, under preemption, without."""
    jobs = [Job([i, 2, 3] * 20, rule_of(name), 90, 60, Sampling(0.9 * (i % 2), seed=i)) for i in range(4)]
    said = []
    for tokens, window in ((None, None), (room, 8)):
        inner = [FakeRunner(language, VOCAB, 4, 300, room=tokens, window=window) for language in (TARGET, DRAFT)]
        target, draft = (PrefixCache(runner) for runner in inner)
        executor, tasks = Executor(budget=128), list[Task]()
        for job in jobs:
            stats = Stats()
            tasks.append(executor.submit(Decoder(job, target, ModelDrafter(draft), stats).decode(), stats))
        executor.run()
        said.append([(task.error, [t for event in task.events for t in event.tokens]) for task in tasks])
        assert target.windowed == (window is not None) and not target._lost and not draft._lost
    assert said[0] == said[1]
