"""`semspec vocabulary`: count a text's tokens, for a draft model with a smaller head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semspec.errors import BadRequest


def vocabulary(
    model: Annotated[str, typer.Argument(help="Model whose tokens are counted: a folder, a .gguf file or a hub id.")],
    texts: Annotated[list[Path], typer.Argument(help="Text files, such as answers of the target.")],
    out: Annotated[Path, typer.Option(help="File for the ids, for --draft-vocab.")],
    size: Annotated[int, typer.Option(help="How many tokens to keep.")] = 32768,
) -> None:
    """Choose the most frequent tokens of some texts, to which --draft-vocab limits a draft model's head."""
    from semspec.pair.loading import find
    from semspec.text.frequent import most_frequent, write_ids
    from semspec.text.tokenizer import load_tokenizer

    source = find(model)
    try:
        contents = [path.read_text(encoding="utf-8", errors="replace") for path in texts]
    except OSError as error:
        raise BadRequest(f"{error.filename} cannot be read: {error.strerror}") from error
    ids = most_frequent(load_tokenizer(source.path), contents, size, source.vocab_size)
    write_ids(ids, out)
    typer.echo(f"{len(ids)} of {source.vocab_size} tokens in {out}; give it as --draft-vocab {out}")
