"""A trained head as others publish and read it: safetensors in the `midlayer` layout, a config, a card."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import semspec
from semspec.errors import BadRequest
from semspec.head_fit.module import HeadSize
from semspec.head_fit.texts import Text
from semspec.head_fit.train import Trainer
from semspec.model.heads.config import usual_layers
from semspec.model.heads.eagle import TargetParts
from semspec.model.wrapper import unwrap
from semspec.types import Runner

MOST_TOKENS = 32000  # of a head's vocabulary, if nothing else is said


def size_of(target: Runner, layers: Sequence[int], vocab: int, ffn: int | None = None) -> HeadSize:
    """A head of the target's width; its layer has the shape of the target's, or a usual one where that is not known,
    with another inner width if one is given."""
    if ffn is not None and ffn < 1:
        raise BadRequest(f"ffn is {ffn}; give the inner width of the head's layer, 1 or more")
    shape, width = getattr(unwrap(target), "shape", None), TargetParts.of(target).embedding.shape[1]
    if shape is None:
        heads = max(1, width // 64)
        return HeadSize(width, heads, heads, 64, ffn or 3 * width, len(layers), width, vocab, 1e-5, 10000.0)
    return HeadSize(
        width,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        ffn or shape.ffn,
        len(layers),
        width,
        vocab,
        shape.norm_eps,
        10000.0,
    )


def layers_in(given: str) -> tuple[int, ...]:
    """None where none are given."""
    try:
        return tuple(int(i) for i in given.split(",")) if given else ()
    except ValueError:
        raise BadRequest(f"layers are {given!r}; give numbers such as 2,15,27") from None


def layers_of(target: Runner, given: str) -> tuple[int, ...]:
    layers = layers_in(given) or usual_layers(target.num_layers)
    if not all(0 <= i <= target.num_layers for i in layers):
        raise BadRequest(f"layers are {given}; the target has layers 0 (the embedding) to {target.num_layers}")
    return layers


def frequent(texts: Sequence[Text], vocab: int, most: int | None) -> Tensor:
    """The tokens that the target writes most often, in order of their ids."""
    most = min(vocab, MOST_TOKENS if most is None else most)
    if most < 1:
        raise BadRequest(f"a vocabulary of {most} tokens; give 1 or more")
    counts = Counter(token for text in texts for token in text.tokens[text.prompt :])
    ranked = sorted(range(vocab), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:most]))


def published(trainer: Trainer) -> dict[str, Tensor]:
    """The head's tensors as they are written: rounded."""
    return {key: value.detach().to(torch.bfloat16) for key, value in trainer.module.state_dict().items()}


def lying_there(trainer: Trainer, folder: Path) -> dict[str, Tensor] | None:
    """The tensors of the head that the folder has already, to compare a new one with; what is no such head is not
    written over."""
    file = folder / "model.safetensors"
    if not file.exists():
        return None
    try:
        tensors, config = load_file(file, str(trainer.target.device)), json.loads((folder / "config.json").read_text())
        layers = tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        ids = torch.arange(config["draft_vocab_size"]) + tensors.pop("d2t", torch.zeros(1, dtype=torch.long)).cpu()
    except Exception as error:  # whatever lies there
        raise BadRequest(
            f"{folder} has a head that cannot be read ({error}); move it away, or give another --out"
        ) from error
    tensors.pop("t2d", None)
    sizes = {key: value.shape for key, value in trainer.module.state_dict().items()}
    same = {key: value.shape for key, value in tensors.items()} == sizes and layers == trainer.how.layers
    if not same or not torch.equal(ids, trainer.ids.cpu()):
        raise BadRequest(
            f"{folder} has a head with other tokens, sizes or layers, and its training is not there; move it away, or "
            "give another --out"
        )
    return tensors


def export(trainer: Trainer, folder: Path, name: str, vocab: int, context: int, curve: list[float], data: str) -> None:
    size, ids, how = trainer.module.size, trainer.ids.cpu(), trainer.how
    tensors = {key: value.cpu() for key, value in published(trainer).items()}
    if len(ids) < vocab:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    new = folder / "model.new"
    save_file({key: value.contiguous() for key, value in tensors.items()}, new)
    new.replace(folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size.width,
        "intermediate_size": size.ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": size.eps,
        "rope_theta": size.theta,
        "max_position_embeddings": context,
        "vocab_size": vocab,
        "draft_vocab_size": size.vocab,
        "target_hidden_size": size.target_width,
        "num_aux_hidden_states": size.states,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(how.layers), "use_aux_hidden_state": True},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "README.md").write_text(card(trainer, name, vocab, curve, data))


def tau_of(curve: Sequence[float]) -> float:
    """Tokens per round that these conditional acceptances give in greedy drafts of that length."""
    tau = all_right = 1.0
    for share in curve:
        all_right *= share
        tau += all_right
    return tau


def card(trainer: Trainer, name: str, vocab: int, curve: list[float], data: str) -> str:
    size, how = trainer.module.size, trainer.how
    parameters = sum(p.numel() for p in trainer.module.parameters())
    tokens = sum(len(text.tokens) - text.prompt for text in trainer.texts)
    places = " | ".join(str(i + 1) for i in range(len(curve)))
    shares = " | ".join(f"{share:.1%}" for share in curve)
    return f"""# EAGLE-3 head for {name}

Trained with `semspec head train` {semspec.__version__} on {date.today().isoformat()}. It drafts for this very model and for no other:
`semspec generate {name} --drafter eagle:DIR "..."`.

- {parameters / 1e6:.2f}M parameters; reads the target's states after {", ".join(map(str, how.layers))} layers; drafts {size.vocab} of {vocab} tokens
- {len(trainer.texts)} texts, {tokens} tokens written by the target after prompts of `{data}`
- {how.steps} steps of {how.batch} texts of at most {how.length} tokens, {how.depth} draft steps, peak rate {how.rate:g}, seed {how.seed}

Acceptance of greedy drafts on {len(trainer.held_out)} held-out texts of the same kind: of the drafts that were right so
far, the share whose next token is the target's, too. A draft of {len(curve)} tokens gives {tau_of(curve):.2f} tokens a round.

| draft token | {places} |
|---|{"---|" * len(curve)}
| accepted | {shares} |
"""  # noqa: E501
