"""What the passes of a GPU take beside weights, keys and values: buffers at fixed places, and the memory of graphs.

Some of it is taken when a model is loaded, the rest as sizes of passes are first met. All of it is bounded by the
shapes in `graph_runner.py` and `graph_decode.py`, so it is known before loading. It is a bound, reached by a model
that has met every size with every kind of sampling. Not in it: what the driver keeps for the launches of a graph, the
activations of long prompts, which are given back after their pass, and states of more layers than one.
"""

from __future__ import annotations

import torch

from semspec.model.config import Shape
from semspec.model.fused_forward import covers
from semspec.model.graph_decode import CHUNK, STOP_SETS
from semspec.model.graph_runner import BATCHES, LONGEST, MOST_ROWS, QUERIES, bucket
from semspec.model.kernels import FIELDS

FLOAT = torch.float32.itemsize
LONG = torch.long.itemsize
DRAWN = 64  # bytes for each entry of the vocabulary while a token is drawn: sorted, indexed, summed up, in float32
WORKSPACE = 2 * 32 * 2**20  # of cuBLAS, on the stream of passes and on that of captures
PARTS = 256 * 128  # rows that programs of attention have under way, on a card of that many processors
POOLED = 2  # sizes about double from bucket to bucket, so all of them together take twice the largest


def graph_bytes(shape: Shape | None, device: torch.device, itemsize: int, slots: int, context: int) -> int:
    """Bytes; 0 where passes run without graphs (see `GraphRunner.of`). A shape of None: transformers runs the model."""
    if device.type != "cuda" or shape is None or not covers(shape):
        return 0
    most = bucket(min(slots, BATCHES[-1]), BATCHES)
    rows = min(MOST_ROWS, most * LONGEST)
    results = rows * shape.vocab * itemsize  # copied away from each pass
    pool = rows * _activations(shape, itemsize) + PARTS * shape.head_dim * FLOAT + most * shape.vocab * DRAWN
    return (
        static_bytes(shape, itemsize, context) + lazy_bytes(shape, itemsize, most) + results + POOLED * pool + WORKSPACE
    )


def static_bytes(shape: Shape, itemsize: int, context: int) -> int:
    """Taken at once: logits, sets of stop tokens, and cosines and sines of every place."""
    rotaries = {sight.rotary for sight in shape.sights if sight.rotary is not None}
    turns = sum(2 * context * len(rotary.inv_freq) * FLOAT for rotary in rotaries)
    return (MOST_ROWS * itemsize + STOP_SETS) * shape.vocab + turns


def lazy_bytes(shape: Shape, itemsize: int, most: int) -> int:
    """Taken when a size is first met: what passes read, what rolls keep, and states of one layer that graphs give."""
    batches = [size for size in BATCHES if size <= most]
    scores = [(b, q) for b in batches for q in QUERIES if b * q <= MOST_ROWS]
    numbers = sum(b * (q + 5) for b, q in scores) + sum(batches) * (FIELDS + LONGEST + CHUNK)
    options = 4 * sum(batches) * FLOAT
    kept = CHUNK * sum(batches) * (shape.vocab * FLOAT + shape.width * itemsize)
    states = sum(b * q for b, q in scores) * shape.width * itemsize
    return numbers * LONG + options + kept + states


def _activations(shape: Shape, itemsize: int) -> int:
    """Bytes for one token that a layer has in hand at most: the stream, its norm, what attention and the feed-forward
    network read and make, and parts of a product that its reader adds up."""
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.heads * shape.head_dim
    ffn, parts = shape.ffn, 4
    if shape.mixture is not None:
        ffn, parts = max(ffn, shape.mixture.chosen * shape.mixture.ffn), max(parts, shape.mixture.chosen)
        parts += shape.mixture.experts * shape.mixture.chosen // shape.width + 1  # lists of who chose an expert
    return (4 * shape.width + attention + 3 * ffn) * itemsize + parts * shape.width * FLOAT
