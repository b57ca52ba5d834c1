"""Replays: the passes and verifications of a run, made again on models of other sizes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import semspec
from semspec.bench import replay as replaying
from semspec.bench.folder import load_run
from semspec.bench.replay_verify import Verification
from semspec.bench.run import Bench
from semspec.bench.shapes import SHAPES
from semspec.errors import BadRequest, ModelError
from semspec.model import ModelRunner
from semspec.model import memory_plan as plan
from semspec.model.config import Shape
from semspec.model.heads.runner import HeadRunner
from semspec.types import Sampling, Score, ScoreOutput, VerifyRequest
from semspec.verify import Rule
from tests.bench.conftest import CONFIG, samples

ARM = {"name": "exact", "verifier": "exact", "role": "method"}


def test_a_replay_makes_exactly_the_recorded_passes(finished: Path, tmp_path: Path):
    _, recorded = load_run(finished)
    passes = [p for s in recorded for p in s["passes"]]
    summary = replaying.replay(finished, "tiny", tmp_path, device="cpu")
    assert summary["replayed_passes"] == {m: sum(p[0] == m for p in passes) for m in ("target", "draft", "verify")}
    run, again = load_run(tmp_path)
    assert run["label"] == "decisions: pocket, cost: tiny on CPU"
    assert [s["tokens"] for s in again] == [s["tokens"] for s in recorded]
    assert all(s["seconds"] > 0 and s["seconds"] != s["seconds_recorded"] for s in again)
    assert all(sum(s["stats"]["seconds"].values()) == s["seconds"] for s in again)
    assert all(s["stats"]["seconds"]["draft"] == 0 for s in again if s["arm"] == "none"), "each model has its own"
    player = replaying.Replay("tiny", 1, 1024, "cpu")
    for s in recorded:
        player.play(s["passes"], ARM | {"name": s["arm"], "verifier": s["verifier"]})
    assert player.executed == passes


def test_a_replay_charges_verification_and_the_host(finished: Path, tmp_path: Path):
    """The one measured here, with the shape's vocabulary, the other as it was recorded."""
    _, recorded = load_run(finished)
    summary = replaying.replay(finished, "tiny", tmp_path, device="cpu")
    _, again = load_run(tmp_path)
    for old, new in zip(recorded, again, strict=True):
        spent = new["stats"]["seconds"]
        assert spent["host"] == old["stats"]["seconds"]["host"] > 0
        assert (spent["verify"] > 0) == (old["arm"] in ("exact:k=3", "sampling"))
        assert new["seconds"] == pytest.approx(sum(spent.values()))
    assert summary["replayed_passes"]["verify"] == sum(
        s["stats"]["rounds"] for s in recorded if "exact" in s["arm"]
    ) + sum(s["stats"]["rounds"] for s in recorded if s["arm"] == "sampling")
    assert summary["host_seconds_of"]


def test_a_run_without_recorded_verifications_is_not_replayed(finished: Path, tmp_path: Path):
    for name in ("run.json", "samples.jsonl"):
        (tmp_path / name).write_text((finished / name).read_text())
    rows = samples(tmp_path)
    for row in rows:
        row["passes"] = [p for p in row["passes"] if p[0] != "verify"]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BadRequest, match="no recorded passes and verifications; run it again"):
        replaying.replay(tmp_path, "tiny", tmp_path / "out", device="cpu")


HEADS = ["exact:k=3,drafter=eagle:pocket", "fly:k=8,drafter=eagle:pocket", "exact:k=4,drafter=eagle:pocket;tree=7"]


@pytest.fixture(scope="module")
def headed(pocket: semspec.Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("headed")
    Bench(replace(CONFIG, methods=HEADS, n=2, batch=2, max_new_tokens=16), pocket).run(folder)
    return folder


def test_a_replay_makes_a_heads_passes_again(headed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the states that it had and was given, its trees, and the target's states that it reads."""
    recorded = {arm: [p for s in samples(headed) if s["arm"] == arm for p in s["passes"]] for arm in ("none", *HEADS)}
    assert not any(p[0] == "head" for p in recorded["none"])
    done, asked = list[list](), list[Score]()
    score, target_score = HeadRunner.score, ModelRunner.score

    def scored(self: HeadRunner, requests: list[Score]) -> list[ScoreOutput]:
        done.extend(
            [len(r.tokens), self.length(r.slot), r.logits_to_keep, *self.held(r.slot), *r.parents] for r in requests
        )
        return score(self, requests)

    def read(self: ModelRunner, requests: list[Score]) -> list[ScoreOutput]:
        asked.extend(requests)
        return target_score(self, requests)

    monkeypatch.setattr(HeadRunner, "score", scored)
    monkeypatch.setattr(ModelRunner, "score", read)
    player = replaying.Replay("tiny", 2, 512, "cpu", head=True)
    for arm in HEADS:
        heads = [p for p in recorded[arm] if p[0] == "head"]
        assert heads and ("tree" in arm) == any(len(rows[0]) > 6 for _, kind, rows in heads if kind == "score")
        done.clear(), asked.clear()
        spent = player.play(recorded[arm], ARM | {"name": arm, "verifier": arm.split(":")[0]})
        assert spent["head"] > 0 and spent["draft"] == 0
        wanted = [row for _, kind, rows in heads if kind == "score" for row in rows]
        assert [row for row in done if row in wanted] == wanted
        steps = sum(max(row[2] for row in rows) for _, kind, rows in heads if kind == "decode")
        assert steps == 0 or len(done) >= steps, "a decode reads one token after the other"
        read_by = [r for r in asked if r.runner is player.runners["target"]]
        assert read_by and all(r.layers == player.head.layers and r.states == len(r.tokens) for r in read_by)
    asked.clear()
    player.play(recorded["none"], ARM | {"name": "none", "verifier": "none"})
    assert not any(r.layers for r in asked), "no head, no states"


def test_the_seconds_of_a_head_are_the_drafts(headed: Path, tmp_path: Path):
    summary = replaying.replay(headed, "tiny", tmp_path, device="cpu")
    passes = [p for s in samples(headed) for p in s["passes"]]
    assert summary["replayed_passes"]["head"] == sum(p[0] == "head" for p in passes) > 0
    for sample in samples(tmp_path):
        assert (sample["stats"]["seconds"]["draft"] > 0) == (sample["arm"] in (*HEADS, "draft"))


def test_a_run_that_did_not_record_its_head_is_not_replayed(headed: Path, tmp_path: Path):
    run, rows = json.loads((headed / "run.json").read_text()), samples(headed)
    for row in rows:
        row["passes"] = [p for p in row["passes"] if p[0] != "head"]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(BadRequest, match="did not record its passes; run it again"):
        replaying.replay(tmp_path, "tiny", tmp_path / "out", device="cpu")
    (tmp_path / "run.json").write_text(json.dumps(run).replace("eagle:pocket", "dflash:somewhere"))
    with pytest.raises(BadRequest, match="drafted with dflash"):
        replaying.replay(tmp_path, "tiny", tmp_path / "out", device="cpu")


def test_a_replay_verifies_with_the_rules_of_the_run(
    pocket: semspec.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Step rules with probes of the shape's sizes, what rewrites their steps, rules that read words after a draft."""
    methods = ["semantic", "semantic+", "specreason", "reflective:k=3", "fly:k=4"]
    config = replace(CONFIG, methods=methods, n=2, max_new_tokens=60, top_k=7, min_p=0.01, batch=2)
    Bench(config, pocket).run(tmp_path / "run")
    seen = dict[str, list]()
    inner = Verification._request

    def request(self: Verification, rule: Rule, *row: int) -> VerifyRequest:
        made = inner(self, rule, *row)
        seen.setdefault(rule.name, []).append(made)
        return made

    monkeypatch.setattr(Verification, "_request", request)
    replaying.replay(tmp_path / "run", "tiny", tmp_path / "again", device="cpu")
    assert set(seen) == {"semantic", "semantic+", "specreason", "reflective", "fly", "exact"}
    for made in (m for found in seen.values() for m in found):
        assert made.rows.logits.shape[-1] == 256 and made.sampling == Sampling(0.6, top_k=7, min_p=0.01)
        assert len(made.rule.layout(made.draft.tokens)) + 1 == len(made.rows.logits)
    step = next(m for m in seen["semantic"] if m.draft.steps.ends)
    assert {s.shape[1] for s in step.rows.hidden.values()} == {64} and {
        s.shape[1] for s in step.draft.hidden.values()
    } == {32}
    assert max(len(rows) for s in samples(tmp_path / "run") for kind, _, rows in s["passes"] if kind == "verify") == 2


def test_a_replay_of_trees_makes_their_passes_and_their_paths_again(
    pocket: semspec.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Parents in passes of both models and in verifications, and the path that stays in the target's cache."""
    methods = [f"{rule}:k=3,drafter=model:tree=7" for rule in ("exact", "sampling", "fly")]
    Bench(replace(CONFIG, methods=methods, n=1, max_new_tokens=16), pocket).run(tmp_path / "run")
    recorded = [p for s in samples(tmp_path / "run") for p in s["passes"]]
    done: list[list] = []
    score, keep = ModelRunner.score, ModelRunner.compact

    def scored(self: ModelRunner, requests: list[Score]) -> list[ScoreOutput]:
        done.append(["score", [[len(r.tokens), self.length(r.slot), r.logits_to_keep, *r.parents] for r in requests]])
        return score(self, requests)

    def kept_path(self: ModelRunner, slot: int, start: int, rows: list[int]) -> None:
        done.append(["keep", [[0, self.length(slot), 0, start, *rows]]])
        keep(self, slot, start, rows)

    monkeypatch.setattr(ModelRunner, "score", scored)
    monkeypatch.setattr(ModelRunner, "compact", kept_path)
    drafts = []
    request = Verification._request
    monkeypatch.setattr(Verification, "_request", lambda self, *row: drafts.append(made := request(self, *row)) or made)
    player = replaying.Replay("tiny", 1, 512, "cpu")
    for s in samples(tmp_path / "run"):
        player.play(s["passes"], ARM | {"name": s["arm"], "verifier": s["verifier"]})
    wanted = [[kind, rows] for model, kind, rows in recorded if kind in ("score", "keep") and rows[0][3:]]
    assert [made for made in done if made[1][0][3:]] == wanted, "of trees; others are parts of decodes, too"
    branching = [rows[0] for model, kind, rows in recorded if model == "target" and kind == "score" and rows[0][3:]]
    assert branching and all(row[0] >= row[2] == len(row[3:]) + 1 for row in branching), "the first after the prompt"
    assert any(rows[0][3:] for model, kind, rows in recorded if model == "draft" and kind == "score")
    kept = [rows[0] for model, kind, rows in recorded if kind == "keep"]
    assert len(kept) == len(branching)
    assert [list(d.draft.parents) for d in drafts if d.draft.parents] == [row[3:] for row in branching]
    summary = replaying.replay(tmp_path / "run", "tiny", tmp_path / "again", device="cpu")
    assert summary["replayed_passes"]["target"] == sum(p[0] == "target" for p in recorded)


def test_a_replay_of_candidates_judges_each(pocket: semspec.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rule = "semantic+:candidates=3"
    Bench(replace(CONFIG, methods=[rule], n=1, max_new_tokens=60), pocket).run(tmp_path / "run")
    (sample,) = (s for s in samples(tmp_path / "run") if s["arm"] == rule)
    judged = sample["stats"]["candidates"]
    steps = [step for step in sample["drafted_steps"] if "candidates" in step]
    assert steps and all(0 <= step["candidate"] < step["candidates"] <= 3 for step in steps)
    drafts = []
    request = Verification._request
    monkeypatch.setattr(Verification, "_request", lambda self, *row: drafts.append(made := request(self, *row)) or made)
    replaying.replay(tmp_path / "run", "tiny", tmp_path / "again", device="cpu")
    several = [d.draft for d in drafts if d.draft.parents]
    assert all(draft.is_candidates for draft in several)
    assert Counter(str(len(draft.steps.ends)) for draft in several) >= Counter(judged) > Counter()


def test_warming_up_meets_a_size_of_tree_once():
    trees = ([-1, 0, 0], [-1, -1, 1])
    passes = [["target", "score", [[4, 9, 4, *tree]]] for tree in trees]
    passes += [["verify", "exact", [[3, 4, 0, *tree]]] for tree in trees] + [["target", "keep", [[0, 13, 0, 10, 0, 2]]]]
    assert replaying.once_each(passes) == [passes[0], passes[2], passes[4]]


@pytest.mark.parametrize("kind", replaying.DECODE)
def test_a_replay_computes_what_a_gpu_computes_past_a_stop(kind: str):
    player = replaying.Replay("tiny", 2, 64, "cpu")
    target = player.runners["target"]
    rows = [[1, 9, 3, 40], [1, 9, 5, 40]]
    assert replaying.written(target, rows) == [3, 5], "a processor stops at once"
    target.computed = lambda wrote, n: min(n, wrote + 4)  # type: ignore[method-assign]
    assert replaying.written(target, rows) == [3, 9]
    assert replaying.written(target, [[1, 9, 5]]) == [5], "runs of older versions"
    player.play([["target", kind, rows]], ARM)
    assert [target.length(slot) for slot in (0, 1)] == [9 + 1 + 3 - 1, 9 + 1 + 9 - 1]


def test_a_replay_draws_as_the_run_did(monkeypatch: pytest.MonkeyPatch):
    player = replaying.Replay("tiny", 1, 64, "cpu", sampling=Sampling(0.6))
    rolled = []
    monkeypatch.setattr(player.runners["draft"], "decode", rolled.extend)
    player.play(
        [["draft", "decode", [row]] for row in ([1, 9, 3, 40, 1, 0], [1, 9, 3, 40, 0, 0], [1, 9, 3, 40, 0, 1])], ARM
    )
    assert [(r.sampling.temperature, r.keep_logits) for r in rolled] == [(0.6, True), (0.6, False), (0.0, False)]


def test_warming_up_meets_every_size_once():
    passes = [["target", "score", [[9, at, 9]]] for at in range(5)] + [["target", "score", [[8, 0, 8]]]]
    passes += [["draft", "roll", [[1, at, 300 + at, 400]]] for at in range(5)]
    found = replaying.once_each(passes)
    assert [p[2] for p in found] == [[[9, 0, 9]], [[8, 0, 8]], [[1, 0, replaying.WARM_UP_TOKENS, 400]]]


@pytest.mark.parametrize(
    ("shape", "billions"), [("32B/1.5B", (32.8, 1.54)), ("8B/1B", (8.03, 1.24)), ("30B-A3B/0.6B", (30.5, 0.60))]
)
def test_named_shapes_have_the_sizes_of_the_models_they_stand_for(shape: str, billions: tuple[float, float]):
    sizes = [Shape.of(config).parameters / 1e9 for config in SHAPES[shape]]
    assert sizes == pytest.approx(billions, rel=0.01)


def test_recorded_passes_account_for_every_token(finished: Path):
    for s in samples(finished):
        scored = [rows for model, kind, rows in s["passes"] if model == "target" and kind == "score"]
        if s["arm"] == "exact:k=3":
            assert sum(keep > 0 for rows in scored for _, _, keep in rows) == s["stats"]["target_passes"]
            assert sum(keep - 1 for rows in scored for _, _, keep in rows) == s["stats"]["drafted"]
        if s["arm"] == "none":
            written = sum(out for model, kind, rows in s["passes"] for _, _, out, *_ in rows if kind == "decode")
            assert len(s["tokens"]) <= written + 1


def test_a_replay_that_cannot_fit_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available", lambda device: 10**9)
    with pytest.raises(ModelError, match="GB too much"):
        replaying.Replay("32B/1.5B", 1, 1024, "cpu")
    assert replaying.Replay("tiny", 1, 64, "cpu").runners
