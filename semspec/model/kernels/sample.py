"""Sampling the tokens of a decode in Triton: `semspec.sampling.kernels` over the state that graphs keep.

As single operations it is some forty, each a launch, and a draft model writes a token in the time of a few hundred.
Here it is six, and some more for top-k and top-p.
"""

from __future__ import annotations

from torch import Tensor

from semspec.model.kernels import COUNT, SEED, START, STEP, STREAM
from semspec.sampling.draw import SamplingUse
from semspec.sampling.kernels import Filter, draw, keys


def sample(logits: Tensor, columns: Tensor, use: SamplingUse, state: Tensor, history: Tensor | None) -> Tensor:
    """A token for each row of logits [B, V] -> [B]; any one where a row has NaN in it.

    columns [B, 4] and what they use as in `SamplingRows`. state [FIELDS, B] as `advance` keeps it.
    Row state[STEP] of history [steps, B, V] gets the processed logits, or the raw ones where the temperature is 0.
    """
    key = keys(state[SEED], state[START] + state[COUNT], state[STREAM])
    return draw(Filter(logits, columns, use), key, history=history, step=state[STEP], if_nan=0)
