"""EAGLE-3 heads: both layouts against the published computation, position by position, and every trap that is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from semspec.errors import ModelError
from semspec.model import ModelRunner
from semspec.model.heads import fit
from semspec.model.heads.eagle import EagleHead
from semspec.model.heads.runner import HeadRunner
from semspec.model.hf_runner import TransformersRunner
from semspec.types import Decode, Runner, Sampling, Score
from tests.checkpoints import make_model, save
from tests.heads import close, drafted, make_head

TEXT = [7, 3, 250, 41, 98, 3, 17, 222, 5, 60]
LAYERS = (1, 2, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama3"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> ModelRunner:
    return ModelRunner.load(folder, device="cpu", slots=4, context=256)


def states_of(target: Runner, text: list[int], layers: tuple[int, ...]) -> dict[int, Tensor]:
    slot = target.acquire()
    (rows,) = target.score([Score(target, slot, text, 0, layers, states=len(text))])
    target.release(slot)
    return rows.hidden


def greedy(runner: HeadRunner, slot: int, feed: list[int], n: int) -> tuple[list[int], Tensor]:
    (out,) = runner.decode([Decode(runner, slot, feed, n, Sampling(), 0, keep_logits=True)])
    assert out.logits is not None
    return out.tokens, out.logits


CASES: dict[str, dict[str, Any]] = {
    "midlayer": {},
    "layers": {"layout": "layers", "speculators": True},
    "residual": {"residual": True},
    "no residual": {"layout": "layers", "speculators": True, "residual": False},
    "reduced": {"vocab": 90},
    "reduced speculators": {"vocab": 111, "layout": "layers", "speculators": True, "norms": ("norm_output",)},
    "shared embedding": {"own_embedding": False},
    "shared head": {"own_head": False, "own_embedding": False},
    "norm_before_fc": {"norms": ("norm_before_fc",)},
    "fc_norm": {"norms": ("fc_norm",), "speculators": True},
    "aux_norm": {"norms": ("aux_norm", "norm_output")},
    "no aux": {"aux": 0},
    "no aux, one layer named": {"aux": 0, "layers": [2]},
    "four layers": {"aux": 4, "layers": [0, 1, 2, 3]},
    "four layers at the top of a flat config": {
        "aux": 4,
        "layers": None,
        "eagle_aux_hidden_state_layer_ids": [3, 0, 2, 1],
    },
    "deeper": {"depth": 3, "layout": "layers", "speculators": True},
    "wider": {"width": 96},
    "narrower": {"width": 32, "vocab": 50, "norms": ("fc_norm", "norm_before_fc")},
    "qk norm": {"qk_norm": True},
    "biases": {"biases": True},
    "prefix": {"prefix": "model.", "layout": "layers"},
}


@pytest.mark.parametrize("case", CASES)
def test_heads_guess_what_the_published_computation_guesses(case: str, target: ModelRunner, tmp_path: Path):
    """Five guesses with the head's own states, after a prompt, after an accepted part, and after a rejection."""
    made = make_head(tmp_path, **{"layers": list(LAYERS), "seed": 3} | CASES[case])
    head = EagleHead.load(tmp_path, target)
    runner = HeadRunner(head, target.vocab_size, target.max_seq_len)
    assert head.config.layers == tuple(CASES[case].get("eagle_aux_hidden_state_layer_ids", head.config.layers))
    hidden = states_of(target, TEXT, tuple(sorted(set(runner.layers))))
    embedding = made.tensors.get("embed_tokens.weight", target.transformer.embedding)
    shared = None if "lm_head.weight" in made.tensors else target.transformer.head.weight  # type: ignore[attr-defined]
    states = [hidden[layer] for layer in runner.layers]
    slot, at = runner.acquire(), 0
    for length in (4, 6, 7, 10):  # of the text; the target has read all but its last token
        runner.observe(slot, {layer: h[at : length - 1] for layer, h in hidden.items()})
        at = length - 1
        tokens, logits = greedy(runner, slot, TEXT[runner.length(slot) : length], 5)
        expected, rows = drafted(made, TEXT[:length], states, 5, embedding, shared)
        assert tokens == expected
        close(logits, rows)
        runner.truncate(slot, min(length + 2, runner.length(slot)))  # two are accepted, or what is there
        assert runner.length(slot) == length, "what rests on the head's own states is read again"


def test_sequences_in_one_pass_get_what_they_get_alone(target: ModelRunner, tmp_path: Path):
    make_head(tmp_path, layers=list(LAYERS), vocab=200)
    runner = HeadRunner(EagleHead.load(tmp_path, target), target.vocab_size, target.max_seq_len)
    texts = [TEXT, TEXT[3:], TEXT[:2], (TEXT[5:] * 60)[:250]]  # the last soon needs more room than a new slot has
    alone, slots = [], []
    for text in texts:
        hidden = states_of(target, text[:-1], (0, 1, 2))
        single, slot = runner.acquire(), runner.acquire()
        runner.observe(single, hidden)
        alone.append(greedy(runner, single, text, 8)[0])
        runner.release(single)
        for part in (slice(1), slice(1, None)):  # states may come in parts
            runner.observe(slot, {i: h[part] for i, h in hidden.items()})
        slots.append(slot)
    assert len(set(slots)) == len(texts)
    requests = [Decode(runner, slot, text, 8, Sampling(), 0) for slot, text in zip(slots, texts, strict=True)]
    assert [out.tokens for out in runner.decode(requests)] == alone


def write_fitting_head(
    target: Runner, prompt: list[int], true: list[int], named: list[int] | None, folder: Path, attention: float = 1.0
) -> None:
    """A head that knows the measured text by heart if it gets the states of the layers `true`: its outputs are solved
    for, with attention and feed-forward network left as they are. Its config names other layers."""
    make_head(folder, layers=true, own_embedding=False, seed=5)
    text, hidden = fit.written(target, prompt, tuple(sorted(set(true))))
    weights = load_file(folder / "model.safetensors")
    weights["midlayer.self_attn.o_proj.weight"] *= attention
    weights["lm_head.weight"] = torch.eye(320, 64)  # outputs are the normalised states themselves
    save_file(weights, folder / "model.safetensors")
    probe = HeadRunner(EagleHead.load(folder, target), target.vocab_size, target.max_seq_len)
    slot = probe.acquire()
    probe.observe(slot, hidden)
    count = len(text) - len(prompt)
    (rows,) = probe.score([Score(probe, slot, text[:-1], count)])
    wanted = torch.nn.functional.one_hot(torch.tensor(text[-count:]), 320).double()
    solved = torch.linalg.lstsq(rows.logits[:, :64].double(), wanted).solution
    weights["lm_head.weight"] = solved.T.float().contiguous()
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if named is None:
        del config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    else:
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = named
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("named", "chosen"), [([1, 2, 1], 0), ([0, 1, 0], 1)])
def test_layer_ids_that_count_otherwise_are_found(
    named: list[int], chosen: int, target: ModelRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    write_fitting_head(target, TEXT, [1, 2, 1], named, tmp_path)
    readings = fit.measure(EagleHead.load(tmp_path, target), target, TEXT)
    assert readings[chosen].agreement > 0.6 > 0.2 > readings[1 - chosen].agreement
    runner = fit.fitted(EagleHead.load(tmp_path, target), target, TEXT, "my-head").above(0.1)
    assert runner.layers == (1, 2, 1)
    assert f"ids +{chosen}" in caplog.text and "my-head" in caplog.text, "it says which it took"


def test_without_ids_the_usual_ones_are_tried(target: ModelRunner, tmp_path: Path):
    write_fitting_head(target, TEXT, [2, 1, 0], None, tmp_path)  # 2, depth // 2, depth - 3
    assert fit.fitted(EagleHead.load(tmp_path, target), target, TEXT, "head").above(0.1).layers == (2, 1, 0)


def test_an_embedding_that_was_never_trained_gives_way_to_the_targets(target: ModelRunner, tmp_path: Path):
    write_fitting_head(target, TEXT, [1, 2, 1], [1, 2, 1], tmp_path, attention=30.0)
    weights = load_file(tmp_path / "model.safetensors")
    weights["embed_tokens.weight"] = torch.randn(320, 64) * float(target.transformer.embedding.std())
    save_file(weights, tmp_path / "model.safetensors")
    head = EagleHead.load(tmp_path, target)
    runner = fit.fitted(head, target, TEXT, "head").above(0.1)
    assert runner.head.embedding is target.transformer.embedding


def test_a_head_that_does_not_fit_is_refused_with_figures(target: ModelRunner, tmp_path: Path):
    make_head(tmp_path, layers=list(LAYERS))
    with pytest.raises(ModelError, match=r"does not fit.*\d+% of \d+ tokens.*ids \+1.*\d+% of"):
        fit.fitted(EagleHead.load(tmp_path, target), target, TEXT, "head").above(0.5)
    assert fit.fitted(EagleHead.load(tmp_path, target), target, TEXT, "head").above(0.0).layers == LAYERS


def test_offsets_that_are_ignored_would_be_noticed(target: ModelRunner, tmp_path: Path):
    """`d2t` is an offset: a planted head that takes its outputs for the first tokens guesses other tokens."""
    made = make_head(tmp_path, layers=list(LAYERS), vocab=90)
    runner = HeadRunner(EagleHead.load(tmp_path, target), target.vocab_size, target.max_seq_len)
    hidden = states_of(target, TEXT, (0, 1, 2))
    slot = runner.acquire()
    runner.observe(slot, {i: h[:-1] for i, h in hidden.items()})
    tokens, _ = greedy(runner, slot, TEXT, 4)
    assert set(tokens) <= set(made.ids.tolist())
    made.tensors["d2t"] = torch.zeros_like(made.tensors["d2t"])
    wrong, _ = drafted(made, TEXT, [hidden[i] for i in LAYERS], 4, made.tensors["embed_tokens.weight"])
    assert wrong != tokens


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another width": ({"target_width": 48}, "for another target"),
    "four layers, three ids": ({"aux": 4}, "layer_ids are wrong"),
    "three layers, four ids": ({"layers": [0, 1, 2, 3]}, "layer_ids are wrong"),
    "a layer beyond": ({"layers": [1, 2, 40]}, "which has 3"),
    "ids that are none": ({"layers": ["a"]}, "a list of layers"),
    "another type": ({"speculators": True, "speculators_model_type": "hass"}, "'hass'"),
    "promised norm": ({"speculators": True, "norm_before_fc": True}, "no tensor input_norm"),
    "promised norms": ({"fc_norm": True}, "no tensor fc_norm"),
    "own embedding too small": ({"target_vocab": 200}, "200 tokens"),
    "damaged config": ({"hidden_size": "wide"}, "config"),
    "other sizes": ({"intermediate_size": 50}, "has shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(case: str, target: ModelRunner, tmp_path: Path):
    changes, message = REFUSED[case]
    make_head(tmp_path, **{"layers": list(LAYERS)} | changes)
    with pytest.raises(ModelError, match=message):
        EagleHead.load(tmp_path, target)


def test_heads_of_other_methods_and_tokens_beyond_the_vocabulary_are_refused(target: ModelRunner, tmp_path: Path):
    make_head(tmp_path, layers=list(LAYERS), vocab=90)
    weights = load_file(tmp_path / "model.safetensors")

    def refused(changed: dict[str, Tensor], message: str) -> None:
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            EagleHead.load(tmp_path, target)

    refused({**weights, "d2t": weights["d2t"] + 300}, "for another target")
    refused({**weights, "d2t": -torch.arange(90)}, "1 of them different")
    refused({**weights, "mask_hidden": torch.zeros(1, 64)}, "P-EAGLE")
    single = {
        f"midlayer.self_attn.{x}_proj.weight": weights[f"midlayer.self_attn.{x}_proj.weight"][:, :64] for x in "qkv"
    }
    refused({**weights, **{k: v.contiguous() for k, v in single.items()}}, "EAGLE-1")
    refused({k: v for k, v in weights.items() if "norm" not in k}, "no EAGLE-3 head")
    for name in ("norm.weight", "fc.weight", "midlayer.self_attn.q_proj.weight", "lm_head.weight"):
        refused({**weights, name: torch.tensor(1.0)}, "is a single number; the checkpoint is damaged")


def test_a_model_that_transformers_runs_takes_heads_too(folder: Path, target: ModelRunner, tmp_path: Path):
    make_head(tmp_path, layers=list(LAYERS), own_embedding=False, own_head=False)
    other = TransformersRunner.load(folder, torch.device("cpu"), torch.float32, 2, 64)
    drafts = []
    for runner in (target, other):
        head = HeadRunner(EagleHead.load(tmp_path, runner), runner.vocab_size, runner.max_seq_len)
        slot = head.acquire()
        head.observe(slot, states_of(runner, TEXT[:-1], (0, 1, 2)))
        drafts.append(greedy(head, slot, TEXT, 4)[0])
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_heads_are_measured_beside_the_targets_slots(folder: Path, tmp_path: Path, kind: str):
    """All of which may be taken; what they hold stays."""
    native = ModelRunner.load(folder, device="cpu", slots=1, context=256)
    other = TransformersRunner.load(folder, torch.device("cpu"), torch.float32, 1, 256)
    taken: Runner = native if kind == "native" else other
    slot = taken.acquire()
    taken.score([Score(taken, slot, TEXT, 0)])
    make_head(tmp_path, layers=list(LAYERS))
    readings = fit.measure(EagleHead.load(tmp_path, taken), taken, TEXT)
    assert [r.offset for r in readings] == [0, 1, 0, 1] and readings[0].tokens >= 24
    assert taken.free == 0 and taken.length(slot) == len(TEXT)
