"""One-pass block heads against their published computation, and through the whole path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import semspec
from semspec import tree
from semspec.draft.head import HeadDrafter
from semspec.draft.tree import CHAIN, TreeOptions
from semspec.errors import ModelError
from semspec.model import ModelRunner
from semspec.model.heads import fit
from semspec.model.heads.block import BlockHead
from semspec.model.heads.block_runner import BlockRunner
from semspec.model.heads.eagle import EagleHead
from semspec.types import Decode, DraftRequest, Sampling, Score
from tests.checkpoints import make_model, save
from tests.draft.test_tree import draft_of
from tests.heads import close, filled, make_block_head, make_head

TEXT = [7, 3, 250, 41, 98, 3, 17, 222, 5, 60]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama3"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> ModelRunner:
    return ModelRunner.load(folder, device="cpu", slots=4, context=256)


def states_of(target: ModelRunner, text: list[int]) -> dict[int, Tensor]:
    slot = target.acquire()
    (rows,) = target.score([Score(target, slot, text, 0, (0, 1, 2, 3), states=len(text))])
    target.release(slot)
    return rows.hidden


def runner_for(folder: Path, target: ModelRunner) -> BlockRunner:
    return BlockRunner(BlockHead.load(folder, target), target.vocab_size, target.max_seq_len)


CASES: dict[str, dict[str, Any]] = {
    "as published": {},
    "shortest": {"block": 2, "depth": 1},
    "mask embedding": {"mask_embedding": True, "layers": (1, 0, 1), "block": 9},
    "mask embedding in a file": {"mask_file": "tensor"},
    "a row of bfloat16": {"mask_file": "row"},
    "with its token": {"mask_file": "table", "speculators": True},
    "speculators": {"speculators": True, "layers": (0, 3)},
    "reduced": {"speculators": True, "layers": (1, 2), "vocab": 77, "block": 4},
    "reduced, own config": {"vocab": 90},
}


@pytest.mark.parametrize("case", CASES)
def test_a_block_is_what_the_published_computation_fills_in(case: str, target: ModelRunner, tmp_path: Path):
    """After a prompt, after an accepted part, and after a rejection; drawn at once or in parts."""
    changes = CASES[case]
    made = make_block_head(tmp_path, seed=2, **changes)
    runner, hidden = runner_for(tmp_path, target), states_of(target, TEXT)
    ids = changes.get("layers", (0, 1))
    # With DFlash id i is the state after layer i, with speculators the state before it.
    assert runner.layers == (ids if "speculators" in changes else tuple(i + 1 for i in ids))
    shared: Tensor = target.transformer.head.weight  # type: ignore[attr-defined]
    slot, at = runner.acquire(), 0
    for length in (4, 6, 7, 10):
        runner.observe(slot, {layer: h[at : length - 1] for layer, h in hidden.items()})
        at = length - 1
        feed, rows = TEXT[runner.length(slot) : length], list[Tensor]()
        for n in (runner.longest - runner.longest // 2, runner.longest // 2):
            if n:
                (out,) = runner.decode([Decode(runner, slot, feed, n, Sampling(), 0, keep_logits=True)])
                assert out.logits is not None
                feed, rows = out.tokens[-1:], [*rows, out.logits]
        states = [hidden[i][: length - 1] for i in runner.layers]
        expected = filled(made, TEXT[length - 1], runner.longest + 1, states, target.transformer.embedding, shared)
        close(torch.cat(rows), expected)
        runner.truncate(slot, min(length + 2, runner.length(slot)))
        assert runner.length(slot) == length


def test_text_is_the_targets_alone_and_in_a_batch(folder: Path, tmp_path: Path):
    make_block_head(tmp_path, block=12)
    pair = semspec.load(folder, device="cpu", context=256, slots=4)
    prompts = ["the quick brown fox", "one", "the sky is blue because light scatters " * 2]
    options = {
        "drafter": f"dflash:{tmp_path},threshold=0",
        "num_draft_tokens": 20,
        "max_new_tokens": 24,
        "ignore_eos": True,
    }
    wanted = [pair.generate(p, verifier="none", max_new_tokens=24, ignore_eos=True).text for p in prompts]
    assert [pair.generate(p, **options).text for p in prompts] == wanted
    batch = pair.generate(prompts, **options)
    assert [result.text for result in batch] == wanted
    assert max(event.drafted for result in batch for event in result.events) == 11, "as long as a block, no longer"
    warm = pair.generate(prompts, **options | {"verifier": "sampling", "temperature": 1.0, "seed": 1})
    alone = [
        pair.generate(p, **options | {"verifier": "sampling", "temperature": 1.0, "seed": 1}).text for p in prompts
    ]
    assert [result.text for result in warm] == alone


class Observed(HeadDrafter):
    """Whose target has read the text but its last token."""

    def __init__(self, head: BlockRunner, hidden: dict[int, Tensor], tree: TreeOptions) -> None:
        super().__init__(head, tree=tree)
        self.hidden = hidden

    def begin(self, slots: list[int]) -> None:
        super().begin(slots)
        self.observe(TEXT[:-1], {layer: h[:-1] for layer, h in self.hidden.items()})


def test_a_tree_follows_the_likeliest_paths_through_a_block(target: ModelRunner, tmp_path: Path):
    """What follows a token depends on its place alone, so the tree is known from the rows of a chain."""
    make_block_head(tmp_path, seed=5, block=6)
    runner, hidden = runner_for(tmp_path, target), states_of(target, TEXT)
    rows = draft_of(Observed(runner, hidden, CHAIN), TEXT, DraftRequest(5, keep_logits=True)).logits
    assert rows is not None
    rows = rows.log_softmax(-1)
    draft = draft_of(Observed(runner, hidden, TreeOptions(12, 0, 3)), TEXT, DraftRequest(4))
    level = {(): 0.0}  # paths of tokens, and their log-probability; each level goes on from the best three
    met = dict[tuple[int, ...], float]()
    for row in rows[:4]:
        values, ids = row.topk(3)
        best = sorted(level.items(), key=lambda item: -item[1])[:3]
        level = {(*p, int(i)): chance + float(v) for p, chance in best for v, i in zip(values, ids, strict=True)}
        met |= level
    wanted = set(sorted(met, key=lambda path: -met[path])[:12])
    found = {tuple(draft.tokens[i] for i in tree.path(draft.parents, last)) for last in range(len(draft.tokens))}
    assert found == wanted

    request = DraftRequest(4, Sampling(1.0, seed=3), keep_logits=True)
    drawn = draft_of(Observed(runner, hidden, TreeOptions(12, 0, 3)), TEXT, request)
    assert drawn.logits is not None and len(drawn.parents) == 12
    for depth, row in zip(tree.depths(drawn.parents), drawn.logits, strict=True):
        close(row.log_softmax(-1), rows[depth])


@pytest.mark.parametrize("verifier", ["exact", "sampling", "traversal", "fly"])
def test_trees_of_a_block_through_the_whole_path(verifier: str, folder: Path, tmp_path: Path):
    make_block_head(tmp_path, block=8)
    pair = semspec.load(folder, device="cpu", context=256, slots=3)
    prompts = ["the quick brown fox", "one", "the sky is blue because light scatters " * 2]
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "seed": 4, "verifier": verifier}
    options |= {"temperature": 0.0 if verifier == "exact" else 0.8, "num_draft_tokens": 20}
    drafted = options | {"drafter": f"dflash:{tmp_path},threshold=0,tree=16"}
    alone = [pair.generate(p, **drafted) for p in prompts]
    assert [r.text for r in pair.generate(prompts, **drafted)] == [r.text for r in alone]
    assert max(event.drafted for result in alone for event in result.events) == 16
    if verifier == "exact":
        assert [r.text for r in alone] == [pair.generate(p, **options | {"verifier": "none"}).text for p in prompts]
    assert pair.target.free == 3


def test_it_is_measured_and_refused_like_other_heads(target: ModelRunner, tmp_path: Path):
    make_block_head(tmp_path)
    head = BlockHead.load(tmp_path, target)
    readings = fit.measure(head, target, TEXT)
    assert [reading.offset for reading in readings] == [0, -1] and readings[0].tokens >= 24
    with pytest.raises(ModelError, match=r"does not fit.*ids -1"):
        fit.fitted(head, target, TEXT, "head").above(0.9)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no block": ({"block": 1}, "block_size is 1"),
    "mask": ({"dflash_config": {"mask_token_id": 999, "target_layer_ids": [0, 1]}}, "mask_token_id is 999"),
    "layers": (
        {"dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 7]}},
        "layers of the target, which has 2",
    ),
    "other number": ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [0]}}, "names 1 layers"),
    "width": ({"width": 32}, "for another target"),
    "speculators' window": (
        {"speculators": True, "layer_types": ["full_attention", "sliding_attention"]},
        "sliding window",
    ),
    "speculators' layers": ({"speculators": True, "aux_hidden_state_layer_ids": [0, 4]}, "which has 3"),
    "no layers": ({"speculators": True, "aux_hidden_state_layer_ids": None}, "names 0 layers"),
    "another type": ({"speculators": True, "speculators_model_type": "dspark"}, "of type 'dspark'"),
    "anchors": ({"speculators": True, "sample_from_anchor": True}, "has sample_from_anchor"),
    "domino": ({"speculators": True, "projector_type": "domino"}, "has projector_type domino"),
    "window": ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding window"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(case: str, target: ModelRunner, tmp_path: Path):
    changes, message = REFUSED[case]
    make_block_head(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        BlockHead.load(tmp_path, target)


class Harmful:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (exec, ("raise SystemExit('code of a pickle was run')",))


MASKS: dict[str, tuple[Any, str]] = {
    "another width": (torch.zeros(63), r"has the shape \(63,\); it should be 64"),
    "several": (torch.zeros(2, 64), r"has the shape \(2, 64\)"),
    "not finite": (torch.full((64,), torch.nan), "64 finite numbers"),
    "integers": (torch.zeros(64, dtype=torch.long), "no tensor of numbers"),
    "text": ("mask", "no tensor of numbers"),
    "no embedding": ({"mask_token_id": 9}, "no tensor of numbers"),
    "another token": ({"mask_token_id": 8, "embedding": torch.zeros(64)}, "of mask token 8, and the config's is 9"),
    "code": (Harmful(), "cannot be read as a tensor and nothing else"),
}


@pytest.mark.parametrize("case", MASKS)
def test_files_that_hold_no_embedding_of_the_mask_are_refused(case: str, target: ModelRunner, tmp_path: Path):
    make_block_head(tmp_path)
    held, message = MASKS[case]
    torch.save(held, tmp_path / "mask_embedding.pt")
    with pytest.raises(ModelError, match=message):
        BlockHead.load(tmp_path, target)
    (tmp_path / "mask_embedding.pt").write_bytes(b"damaged")
    with pytest.raises(ModelError, match="cannot be read"):
        BlockHead.load(tmp_path, target)


def test_ids_by_speculators_are_tried_one_higher(target: ModelRunner, tmp_path: Path):
    make_block_head(tmp_path, speculators=True)
    readings = fit.measure(BlockHead.load(tmp_path, target), target, TEXT)
    assert [(reading.offset, reading.layers) for reading in readings] == [(0, (0, 1)), (1, (1, 2))]


def test_kinds_of_heads_are_not_taken_for_each_other(target: ModelRunner, tmp_path: Path):
    make_block_head(tmp_path / "block")
    make_head(tmp_path / "eagle", layers=[0, 1, 2])
    with pytest.raises(ModelError, match="dflash:PATH"):
        EagleHead.load(tmp_path / "block", target)
    with pytest.raises(ModelError, match="eagle:PATH"):
        BlockHead.load(tmp_path / "eagle", target)
    make_block_head(tmp_path / "by speculators", speculators=True)
    make_head(tmp_path / "eagle by speculators", layers=[0, 1, 2], speculators=True)
    with pytest.raises(ModelError, match="dflash:PATH"):
        EagleHead.load(tmp_path / "by speculators", target)
    with pytest.raises(ModelError, match="eagle:PATH"):
        BlockHead.load(tmp_path / "eagle by speculators", target)
    weights = load_file(tmp_path / "block" / "model.safetensors")
    save_file({**weights, "selector.weight": torch.zeros(2, 2)}, tmp_path / "block" / "model.safetensors")
    with pytest.raises(ModelError, match="selector"):
        BlockHead.load(tmp_path / "block", target)
    (tmp_path / "block" / "config.json").write_text(json.dumps([]))
    with pytest.raises(ModelError, match="no table"):
        BlockHead.load(tmp_path / "block", target)
