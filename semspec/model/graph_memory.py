"""GPU memory besides weights, keys and values: buffers at fixed addresses, and the memory of graphs.

Some of it is taken when a model is loaded, the rest when a size of pass is first needed. The shapes in
`graph_runner.py` and `graph_decode.py` bound it, so it is known before loading; a model that has run every size with
every kind of sampling reaches the bound. Not counted: the driver's own memory for graphs, activations of long prompts,
which are freed after their pass, and hidden states of more than one layer.
"""

from __future__ import annotations

import torch

from semspec.model.buckets import BATCHES, MAX_QUERIES, MAX_ROWS, QUERIES, bucket
from semspec.model.config import Shape
from semspec.model.fused_forward import covers
from semspec.model.graph_decode import CHUNK, STOP_SETS
from semspec.model.kernels import DEFAULT_FLAGS, FIELDS
from semspec.model.packed_rows import NUMBERS, ROWS
from semspec.tree import MAX_TREE

FLOAT = torch.float32.itemsize
LONG = torch.long.itemsize
SAMPLING = 64  # bytes for each entry of the vocabulary while a token is sampled: sorted, indexed, summed, in float32
WORKSPACE = 2 * 32 * 2**20  # of cuBLAS, on the stream of passes and on that of captures
PARTS = 256 * 128  # rows that the programs of attention hold, on a GPU of that many processors
RULE_ROWS = 160  # of a verification in a graph, at most; drafts with more are verified in several
RULE_BUFFERS = (40, RULE_ROWS)  # rows for which logits of both models are kept; a larger batch takes the larger buffer
RULE_ENTRY = 48  # bytes for each entry of the vocabulary and row: what rules make of both models' logits; 45 were taken
TREE_ROWS = 128  # of tree drafts, in one call of a rule; more are verified in several
POOLED = 2  # sizes about double from bucket to bucket, so all of them together take twice the largest


def graph_bytes(
    shape: Shape | None,
    device: torch.device,
    itemsize: int,
    slots: int,
    context: int,
    packed: bool = DEFAULT_FLAGS.packed,
) -> int:
    """Bytes; 0 where passes run without graphs (see `GraphRunner.of`). A shape of None: transformers runs the model."""
    if device.type != "cuda" or shape is None or not covers(shape):
        return 0
    batch = bucket(min(slots, BATCHES[-1]), BATCHES)
    together = packed and batch > 1  # a few sequences may have long pieces in one row
    rows = MAX_ROWS if together else min(MAX_ROWS, batch * MAX_QUERIES)
    results = rows * shape.vocab_size * itemsize  # copied away from each pass
    pool = rows * _activations(shape, itemsize) + PARTS * shape.head_dim * FLOAT + batch * shape.vocab_size * SAMPLING
    return (
        static_bytes(shape, itemsize, context)
        + lazy_bytes(shape, itemsize, batch, packed)
        + results
        + POOLED * pool
        + WORKSPACE
    )


def rule_bytes(vocab: int, device: torch.device, slots: int) -> int:
    """Of the graphs of rules (semspec.loop.rule_graphs), of the logits that they read, and of what rules make of trees,
    which are verified without graphs; a pair has them once."""
    if device.type != "cuda":
        return 0
    rows, trees = min(RULE_ROWS, slots * (MAX_QUERIES + 1)), min(TREE_ROWS, slots * (MAX_TREE + 1))
    return vocab * (sum(min(size, rows) for size in RULE_BUFFERS) * 2 * FLOAT + (rows + trees) * RULE_ENTRY)


def static_bytes(shape: Shape, itemsize: int, context: int) -> int:
    """Taken at once: logits, sets of stop tokens, and cosines and sines of every position."""
    rotaries = {spec.rotary for spec in shape.attention_specs if spec.rotary is not None}
    tables = sum(2 * context * len(rotary.inv_freq) * FLOAT for rotary in rotaries)
    return (MAX_ROWS * itemsize + STOP_SETS) * shape.vocab_size + tables


def lazy_bytes(shape: Shape, itemsize: int, batch: int, packed: bool = DEFAULT_FLAGS.packed) -> int:
    """Taken when a size is first needed: inputs of passes, logits and states of decodes, and states of one layer.
    Packed passes have theirs besides: sparse plans still make rectangles."""
    batches = [size for size in BATCHES if size <= batch]
    scores = [(b, q) for b in batches for q in QUERIES if b * q <= MAX_ROWS]
    numbers = sum(b * (3 * q + 6) for b, q in scores) + sum(batches) * (FIELDS + MAX_QUERIES + CHUNK)
    options = 4 * sum(batches) * FLOAT
    logits = CHUNK * sum(batches) * (shape.vocab_size * FLOAT + shape.width * itemsize)
    states = sum(b * q for b, q in scores) * shape.width * itemsize
    if packed:
        numbers, states = numbers + NUMBERS, states + sum(ROWS) * shape.width * itemsize
    return numbers * LONG + options + logits + states


def _activations(shape: Shape, itemsize: int) -> int:
    """Bytes that a layer holds for one token at most: the residual stream, its norm, inputs and outputs of attention
    and of the feed-forward network, and parts of a product that its reader adds up."""
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.heads * shape.head_dim
    ffn, parts = shape.ffn, 4
    if shape.mixture is not None:
        ffn, parts = max(ffn, shape.mixture.chosen * shape.mixture.ffn), max(parts, shape.mixture.chosen)
        parts += shape.mixture.experts * shape.mixture.chosen // shape.width + 1  # lists of the tokens of each expert
    return (4 * shape.width + attention + 3 * ffn) * itemsize + parts * shape.width * FLOAT
