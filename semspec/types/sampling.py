"""How a next token is drawn."""

from __future__ import annotations

from dataclasses import dataclass

from semspec.errors import BadRequest

COLDEST = 1e-6  # in float32, lower temperatures divide by nothing and mean argmax


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a next token is drawn. Temperature 0 is greedy. The seed makes every draw reproducible (see `noise`)."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise BadRequest(f"temperature is {self.temperature}; give 0 (greedy) or a positive number up to 100")
        if self.temperature < COLDEST:
            object.__setattr__(self, "temperature", 0.0)
        if not 0 <= self.top_k < 2**31:
            raise BadRequest(f"top_k is {self.top_k}; give 0 (off) or a positive number of tokens, of at most 31 bits")
        if not 0.0 < self.top_p <= 1.0:
            raise BadRequest(f"top_p is {self.top_p}; give a number above 0 and at most 1 (1 is off)")
        if not 0.0 <= self.min_p <= 1.0:
            raise BadRequest(f"min_p is {self.min_p}; give a number from 0 (off) to 1")
        if not -(2**63) <= self.seed < 2**63:
            raise BadRequest(f"seed is {self.seed}; give a whole number of at most 64 bits")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether tokens have to be sorted first."""
        return self.top_k > 0 or self.top_p < 1.0

    @property
    def truncated(self) -> bool:
        """Whether unlikely tokens are left out before the draw."""
        return not self.greedy and (self.filtered or self.min_p > 0)


GREEDY = Sampling()
