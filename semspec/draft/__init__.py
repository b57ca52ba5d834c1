"""Drafters: where proposals come from. Each has four methods: begin, propose, accept, close (see types.Drafter)."""

from semspec.draft.cascade import CascadeDrafter
from semspec.draft.early_exit import EarlyExit
from semspec.draft.head import HeadDrafter
from semspec.draft.hidden_states import HiddenStateDrafter
from semspec.draft.kinds import REGISTRY, DrafterKind, register
from semspec.draft.model import ModelDrafter
from semspec.draft.ngram import NgramDrafter
from semspec.draft.none import NoDrafter
from semspec.draft.translating import TranslatingDrafter
from semspec.draft.within_context import WithinContext

__all__ = [
    "REGISTRY",
    "CascadeDrafter",
    "DrafterKind",
    "EarlyExit",
    "HeadDrafter",
    "HiddenStateDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "NoDrafter",
    "TranslatingDrafter",
    "WithinContext",
    "register",
]
