"""Drafters: where proposals come from. Each has four verbs: begin, propose, accept, close (see types.Drafter)."""

from semspec.draft.cascade import CascadeDrafter
from semspec.draft.model import ModelDrafter
from semspec.draft.ngram import NgramDrafter
from semspec.draft.nothing import NoDrafter
from semspec.draft.unsure import Unsure

__all__ = ["CascadeDrafter", "ModelDrafter", "NgramDrafter", "NoDrafter", "Unsure"]
