"""The tokenizer that a GGUF file carries, with its chat template: that of the checkpoint the file was made from.

The file has the vocabulary, the merges or scores, and which tokens are special. How a text is cut before tokens are
merged is only named. Nothing is added to a vocabulary: the model has no embedding for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from semspec.errors import ModelError
from semspec.model.gguf_header import Header

log = logging.getLogger(__name__)

SPACE = "\u2581"  # how SentencePiece writes a space
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}  # in metadata: ..._id
SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)

# Parts of what cuts a text. Merges never cross a cut.
SHORT = r"'s|'t|'re|'ve|'m|'ll|'d"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")  # camelCase is two
SIGNS, PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = rf"{SHORT}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Cuts:
    """How a byte-level vocabulary is used."""

    patterns: tuple[str, ...]  # one after the other
    whole: bool = False  # a piece that is a token is that token, whatever the merges say
    begins: bool = False  # texts begin with a BOS token unless the file says otherwise
    composed: bool = False  # characters are composed first (NFC)


LLAMA3 = rf"(?i:{SHORT})|{WORD}|\p{{N}}{{1,3}}|{SIGNS}|{SPACES}"
ONE_DIGIT = rf"(?i:{SHORT})|{WORD}|\p{{N}}|{SIGNS}|{SPACES}"
KINDS: dict[Cuts, tuple[str, ...]] = {
    Cuts((GPT2,)): ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais", "trillion"),
    Cuts((r"\p{N}", GPT2)): ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    Cuts((LLAMA3,), whole=True, begins=True): (
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    ),
    Cuts((LLAMA3,)): ("dbrx", "smaug-bpe"),
    Cuts((ONE_DIGIT,), composed=True): ("qwen2",),
    Cuts((ONE_DIGIT,)): ("deepseek-r1-qwen", "stablelm2", "megrez", "kormo", "f2llmv2"),
    Cuts(("|".join((*CASED, r"\p{N}", PATHS, SPACES)),), whole=True, begins=True): ("tekken",),
    Cuts(("|".join((*(f"{c}(?i:{SHORT})?" for c in CASED), r"\p{N}{1,3}", PATHS, SPACES)),)): (
        "gpt-4o", "llama4", "kanana2",
    ),
    Cuts((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")): ("deepseek-coder",),
}  # fmt: skip
CUTS = {name: cuts for cuts, names in KINDS.items() for name in names}


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    metadata = Header.read(path).metadata
    own = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items() if k.startswith("tokenizer.ggml.")}
    kind, tokens = own.get("model"), own.get("tokens")
    if kind is None or tokens is None:
        raise ModelError(f"{path} has no tokenizer in it; take a file that has one")
    if kind not in ("gpt2", "llama") or not isinstance(tokens, list):
        raise ModelError(
            f"{path}: a tokenizer of kind {kind!r} is not supported; supported are gpt2 (byte-level BPE) and llama "
            "(SentencePiece BPE)"
        )
    named = {name: _token(path, own, f"{key}_token_id") for name, key in NAMED.items()}
    if kind == "gpt2":
        cuts = _cuts(path, own.get("pre"))
        made, begins = _byte_level(own, cuts), cuts.begins
    else:
        made, begins = _sentence_piece(own, str(metadata.get("general.architecture")), named["unk_token"]), True
    _add_special(made, own, strips=kind == "llama" and metadata.get("general.architecture") == "phi3")
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=_template(metadata),
        add_bos_token=bool(own.get("add_bos_token", begins)),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token is not None},
    )


def _token(path: Path, own: Mapping[str, Any], key: str) -> str | None:
    tokens, at = own["tokens"], own.get(key)
    if at is None:
        return None
    if not isinstance(at, int) or not 0 <= at < len(tokens):
        raise ModelError(f"{path}: its {key} is {at!r:.60}, and its vocabulary has {len(tokens)} tokens")
    return str(tokens[at])


def _cuts(path: Path, name: Any) -> Cuts:
    if name not in CUTS:
        says = "is not said" if name in (None, "default") else f"is said by a name that is not known, {name!r:.60}"
        log.warning("%s: how texts are cut into words %s; they are cut as GPT-2's: answers may be worse", path, says)
    return CUTS.get(name, CUTS["gpt-2"])


def _byte_level(own: Mapping[str, Any], cuts: Cuts) -> Tokenizer:
    made = Tokenizer(BPE(_ids(own["tokens"]), [_pair(m) for m in own["merges"]], ignore_merges=cuts.whole))
    split = [pre_tokenizers.Split(Regex(p), "isolated") for p in cuts.patterns]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_of])
    made.decoder = decoders.ByteLevel()
    if cuts.composed:
        made.normalizer = normalizers.NFC()
    return made


def _sentence_piece(own: Mapping[str, Any], architecture: str, unknown: str | None) -> Tokenizer:
    """As transformers reads these models; a file does not say where their texts begin with a space, but for none."""
    tokens, gemma = own["tokens"], architecture == "gemma3"
    if gemma:  # which spells several spaces as themselves, and merges in the order of its tokens
        tokens = [SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
    scores = range(0, -len(tokens), -1) if gemma else own["scores"]
    merges = [_pair(m) for m in own["merges"]] if "merges" in own else _merges(tokens, scores)
    made = Tokenizer(BPE(_ids(tokens), merges, fuse_unk=True, byte_fallback=True, unk_token=unknown))
    spaces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    prefixed = own.get("add_space_prefix", True) and not gemma
    made.decoder = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)] if prefixed else spaces)
    if prefixed and architecture == "phi3":  # behind each special token, too
        made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        scheme = "first" if prefixed else "never"
        made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    return made


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens to a third, in the order in which SentencePiece would: by the third's score."""
    ids = _ids(tokens)
    found = []
    for token, at in ids.items():
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = sorted((ids[a], ids[b], a, b) for a, b in halves if a in ids and b in ids)
        found += [(-float(scores[at]), -len(a), -len(b), a, b) for _, _, a, b in known]
    return [(a, b) for *_, a, b in sorted(found, key=lambda join: join[:3])]


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _pair(merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    return first, second


def _add_special(made: Tokenizer, own: Mapping[str, Any], strips: bool) -> None:
    """Tokens that are found in a text as they are. `strips`: most special ones take the white space after them, as
    Phi-3's do, whose file does not say so."""
    of_kind = [*zip(own["tokens"], own.get("token_type", ()), strict=False)]
    plain = ("<unk>", "<s>", "<|endoftext|>")
    made.add_special_tokens(
        [AddedToken(t, normalized=False, rstrip=strips and t not in plain) for t, k in of_kind if k in SPECIAL]
    )
    made.add_tokens([AddedToken(t, normalized=False) for t, k in of_kind if k == TokenType.USER_DEFINED])


def _template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or several by their names, such as one for tools."""
    default = metadata.get("tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates", [])
    more = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    return {"default": default} | more if default and more and all(more.values()) else default
