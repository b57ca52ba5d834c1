"""The pocket world: word problems whose every solution step has a known meaning, and the pair trained on them."""

from .chat import CHAT_TEMPLATE, MARKER_TOKENS, SPECIAL_TOKENS, outside, prompt
from .meaning import Meaning, answer_of, judge_steps, meaning, score, steps_of, valid
from .wording import DRAFT_HABITS, TARGET_HABITS, Habits, make_habits, write_solution, write_steps
from .world import HELD_OUT_TEMPLATES, TEMPLATES, TRAIN_TEMPLATES, Problem, Quantity, problem

__all__ = [
    "CHAT_TEMPLATE",
    "DRAFT_HABITS",
    "HELD_OUT_TEMPLATES",
    "MARKER_TOKENS",
    "SPECIAL_TOKENS",
    "TARGET_HABITS",
    "TEMPLATES",
    "TRAIN_TEMPLATES",
    "Habits",
    "Meaning",
    "Problem",
    "Quantity",
    "answer_of",
    "judge_steps",
    "make_habits",
    "meaning",
    "outside",
    "problem",
    "prompt",
    "score",
    "steps_of",
    "valid",
    "write_solution",
    "write_steps",
]
