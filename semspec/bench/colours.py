"""One colour for a method, in every report: its rule decides the hue, its options the shade. None is red, which means
"worse than the target alone"."""

from __future__ import annotations

import colorsys
from hashlib import blake2b

OF_RULES = {
    "exact": "#3b7dd8", "sampling": "#2a9d8f", "block": "#5b6ee1", "fly": "#e09f3e", "topk": "#8c9a2b",
    "typical": "#9467bd", "margin": "#17a2b8", "threshold": "#7fa650", "ensemble": "#b07aa1", "cascade-rule": "#c27c4e",
    "adaptive": "#4e9f6d", "reflective": "#6f8fa8", "accept-all": "#d17ab5", "random": "#a0785a", "semantic": "#35b07a",
    "semantic+": "#2e8b3d", "specreason": "#7a6ff0", "random-step": "#c98bb9", "accept-all-steps": "#dd6fc0",
    "accept-no-step": "#8f8fb3", "oracle": "#4c5f9e",
}  # fmt: skip
DRAFT = "#8c6d46"
DARKEST, LIGHTEST = 0.44, 0.66  # readable on white and on black


def colour_of(arm: str, role: str, target: str) -> str:
    """The colour of an arm; the target alone has the one that is given, which suits the ground."""
    if role in ("target", "draft"):
        return target if role == "target" else DRAFT
    rule, _, options = arm.partition(":")
    base = OF_RULES.get(rule) or _of_unknown(rule)
    return _shaded(base, options) if options else base


def _of_unknown(rule: str) -> str:
    """For rules of other packages: any hue but red's."""
    hue = 0.08 + 0.82 * (_number(rule) % 1000) / 1000
    return _hex(*colorsys.hls_to_rgb(hue, 0.5, 0.45))


def _shaded(colour: str, options: str) -> str:
    """Another lightness, and a hue close by: options with the same shade are rare."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, _, full = colorsys.rgb_to_hls(red, green, blue)
    number = _number(options)
    light = DARKEST + (LIGHTEST - DARKEST) * (number % 97) / 96
    aside = 0.08 * (number // 97 % 89 / 88 - 0.5)
    return _hex(*colorsys.hls_to_rgb((hue + aside) % 1, light, full))


def _number(text: str) -> int:
    """The same for a text in every run of Python."""
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=4).digest())


def _hex(red: float, green: float, blue: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))
