"""A pocket model under other names: the same weights, with ids in another order and other special tokens.

What it proposes is the same text, so whatever differs between it and the original is the price of exchanging text.

    PYTHONPATH=. python3 -m recipes.pocket.rename semspec/pocket/models/draft OUT
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from recipes.pocket.tokenizer import OTHER

EMBEDDING = "model.embed_tokens.weight"
STRIDE = 11  # from one id to the next; has no factor in common with the number of entries


def rename(folder: Path, out: Path) -> Path:
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("generation_config.json", "training_log.json"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_text(OTHER.spell((out / name).read_text()))
    tokenizer = json.loads((out / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    order = {i: (i * STRIDE + 3) % len(vocabulary) for i in range(len(vocabulary))}
    if len(set(order.values())) < len(order):
        raise ValueError(f"{len(vocabulary)} entries cannot be reordered by steps of {STRIDE}")
    tokenizer["model"]["vocab"] = {token: order[i] for token, i in vocabulary.items()}
    for added in tokenizer["added_tokens"]:
        added["id"] = order.get(added["id"], added["id"])  # those behind the plain vocabulary stay
    tokenizer["added_tokens"].sort(key=lambda added: added["id"])
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(out / "model.safetensors")
    rows = weights[EMBEDDING].clone()
    weights[EMBEDDING][list(order.values())] = rows[list(order)]
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config |= {key: order[config[key]] for key in ("eos_token_id", "pad_token_id")}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return out


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python3 -m recipes.pocket.rename FOLDER OUT")
    rename(Path(sys.argv[1]), Path(sys.argv[2]))
