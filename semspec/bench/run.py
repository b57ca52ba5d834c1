"""A bench run: the same problems and seeds through every arm, interleaved, with the time of each.

The unit of work is one arm on one group of problems (a group has `batch` of them, decoded as one batch). On every group
the arms run one after the other, and which is first rotates, so that noise of the machine affects all alike. A finished
unit is on the disk before the next begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from semspec import tasks, verify
from semspec.bench.arms import GREEDY_SPREAD, Arm, arms_for, parse_arm
from semspec.bench.controls import PILOT, coin_for, unchecked_for
from semspec.bench.examples import asked
from semspec.bench.folder import RunFolder, load_run, surroundings
from semspec.bench.inputs import fitting, inputs_of
from semspec.bench.likelihood import Likelihood, likelihoods, summed_up
from semspec.bench.names import model_name
from semspec.bench.record import HeadRecorder, Pass, Recorder, RecordingExecutor
from semspec.bench.replay_verify import probe_cards
from semspec.bench.summary import summarise
from semspec.errors import BadRequest
from semspec.loop.stats import FORMER, Stats
from semspec.model.wrapper import unwrap
from semspec.pair import Pair
from semspec.pair.loading import load, readable
from semspec.pair.result import Result
from semspec.sparse import PlanSwitch, SparsePlan, dense
from semspec.tasks import Problem, Task
from semspec.text.tokenizer import Prompt, encode
from semspec.types import Runner, Sampling

MAX_TRIES = 4  # of a unit in which graphs are captured: adaptive draft lengths may bring new sizes every time
RESEED = 7_919 * 1_000_003**2  # between the seeds of the target's samples: no run has so many problems and repeats
LOADING = (
    "target", "draft", "device", "draft_device", "dtype", "draft_dtype", "draft_vocab", "kv_dtype", "context",
    "sparse",
)  # fmt: skip
LETTER = {"draft": "d", "relaxed": "r", "target": "t"}


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run does; two runs with equal configs can be one run."""

    task: str
    methods: list[str]
    n: int | None = None
    target: str = "pocket"
    draft: str | None = None
    data: str | None = None
    repeats: int = 1
    seed: int = 0
    batch: int = 1
    num_draft_tokens: int | str | None = None  # None: each rule's own
    drafter: str = "auto"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int | None = None
    device: str = "auto"
    draft_device: str | None = None
    dtype: str = "auto"
    draft_dtype: str | None = None
    draft_vocab: str | None = None
    kv_dtype: str = "auto"
    context: int | None = None
    sparse: str | None = None  # folder of the plan by which the target verifies drafts
    controls: bool | None = None  # measures without right answers, and their controls; None: where nothing is scored
    resamples: int = 3  # of the target with other seeds, as a control
    entropy: bool = False  # count the target's entropy
    shared_prompts: bool = False  # prefilled once for all arms, outside the clock: seconds are of decoding

    def __post_init__(self) -> None:
        for name, least in (("repeats", 1), ("batch", 1), ("resamples", 2)):
            if getattr(self, name) < least:
                raise BadRequest(f"{name} is {getattr(self, name)}; give {least} or more")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise BadRequest(f"max_new_tokens is {self.max_new_tokens}; give 1 or more, or nothing for the task's own")
        Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)  # refuses what no request could have


Progress = Callable[[int, int], None]  # units done, units in all


class Bench:
    def __init__(
        self,
        config: Config,
        pair: Pair | None = None,
        clock: Callable[[], float] = time.perf_counter,
        report: Callable[[str], None] | None = None,  # as `load` wants it
    ) -> None:
        self.config, self.clock = config, clock
        self.task: Task = tasks.make(config.task, Path(config.data) if config.data else None)
        self.problems = self.task.problems(config.n, config.seed)
        # Methods are checked before any model is loaded.
        arms = arms_for(config.methods, True, config.num_draft_tokens, config.drafter)
        plans = {arm.name: SparsePlan.load(Path(arm.sparse)) for arm in arms if arm.sparse}
        how = {name: getattr(config, name) for name in LOADING}
        how |= {"dtype": readable(config.dtype, config.device)} if plans else {}
        self.pair = pair or load(
            **how,
            slots=config.batch * (2 if config.shared_prompts else 1),  # those that hold prompts, and those that write
            report=report,
        )
        if config.shared_prompts:
            self.pair = self.pair.cached()
        self.problems = fitting(self.task, self.problems, self.pair, config.max_new_tokens)
        self._places: dict[str, int] = {}  # of problems, by id
        self.measured = not self.task.scored if config.controls is None else config.controls
        self.arms = arms_for(
            config.methods, self.pair.draft is not None, config.num_draft_tokens, config.drafter,
            config.resamples if self.measured else 0,
        )  # fmt: skip
        if self.pair.sparse:  # then no method gives what the target alone would have
            self.arms = [replace(a, lossless=False) if a.role == "method" else a for a in self.arms]
        # No arm may find what another has read, nor what it read itself while it warmed up.
        self._turns, self._remembers = 0, unwrap(self.pair.target) is not self.pair.target
        self.plans = PlanSwitch(self.pair.target, plans)
        self.passes: list[Pass] = []
        names = iter(("target", "draft"))
        self.recorders: list[Recorder] = []

        def record(runner: Runner) -> Runner:
            self.recorders.append(Recorder(runner, next(names), self.passes))
            return self.recorders[-1]

        self.both = self.pair.wrapped(
            record, RecordingExecutor(self.passes), lambda head: HeadRecorder(head, self.passes)
        )
        self.draft_only = self.both.draft_alone() if self.both.draft else None

    def run(self, out: Path, progress: Progress = lambda done, total: None) -> dict[str, Any]:
        """Run what is not on the disk yet; returns the summary."""
        folder = RunFolder(out)
        if self.measured:
            self._add_controls(folder)
        done = folder.open(self._about())
        units = self._units()
        warm: set[str] = set()
        for i, (arm, group, repeat) in enumerate(units):
            progress(i, len(units))
            missing = [p for p in group if (arm.name, p.id, repeat) not in done]
            if not missing:
                continue
            if self.config.shared_prompts:
                self._read(arm, group, repeat)
            elif arm.name not in warm:  # the first pass of its kind is slower than all others
                self._answer(arm, group, repeat)
                warm.add(arm.name)
            samples = self._measure_warm(arm, group, repeat)
            folder.append([s for s in samples if (arm.name, s["problem"], repeat) not in done])
        progress(len(units), len(units))
        summary = summarise(*load_run(out))
        folder.finish(summary)
        return summary

    def _add_controls(self, folder: RunFolder) -> None:
        """The controls that check nothing; a run that goes on has them already, at the rate that they had."""
        known = folder.before() or {"arms": ()}
        before = [arm for arm in known["arms"] if arm.get("control") and arm["role"] == "method"]
        found: list[Arm | None] = [replace(parse_arm(a["name"], drafter=a["drafter"]), control=True) for a in before]
        if not before:
            pilot = self.problems[:PILOT]
            found = [coin_for(self.arms, lambda arm: self.tried(arm, pilot)), unchecked_for(self.arms)]
        names = {arm.name for arm in self.arms}
        self.arms += [arm for arm in found if arm is not None and arm.name not in names]

    def tried(self, arm: Arm, problems: list[Problem]) -> list[Result]:
        """An arm's answers that are not recorded."""
        size = self.config.batch
        groups = [problems[i : i + size] for i in range(0, len(problems), size)]
        return [result for group in groups for turns in self._answer(arm, group, 0) for _, result in turns]

    def _about(self) -> dict[str, Any]:
        where = surroundings()
        pair = " + ".join(model_name(name) for name in (self.config.target, self.config.draft) if name is not None)
        return {
            "finished": False,
            "config": asdict(self.config),
            "arms": [arm.to_dict() for arm in self.arms],
            "inputs": inputs_of(self.pair, self.problems),
            "probes": {arm.name: cards for arm in self.arms if (cards := self._probe_cards(arm))},
            "label": f"decisions: {pair}, cost: {pair} on {where['hardware']['gpu'] or 'CPU'}",
            **where,
        }

    def _probe_cards(self, arm: Arm) -> dict[str, Any]:
        return {} if arm.role == "draft" else probe_cards(verify.make(arm.verifier).bind(self.pair.resources))

    def _units(self) -> list[tuple[Arm, list[Problem], int]]:
        size = self.config.batch
        groups = [self.problems[i : i + size] for i in range(0, len(self.problems), size)]
        units = []
        for repeat in range(self.config.repeats):
            for number, group in enumerate(groups):
                first = (number + repeat) % len(self.arms)
                units += [(arm, group, repeat) for arm in self.arms[first:] + self.arms[:first]]
        return units

    def _measure_warm(self, arm: Arm, group: list[Problem], repeat: int) -> list[dict[str, Any]]:
        """Once more where a pass of a new size was captured as a graph: that is no part of a round's time."""
        for _ in range(MAX_TRIES):
            before = self._capture_seconds()
            samples = self._measure(arm, group, repeat)
            if self._capture_seconds() == before:
                break
        return samples

    def _capture_seconds(self) -> float:
        return sum(recorder.capture_seconds for recorder in self.recorders)

    def _measure(self, arm: Arm, group: list[Problem], repeat: int) -> list[dict[str, Any]]:
        self.passes.clear()
        began = self.clock()
        answers = self._answer(arm, group, repeat)
        seconds = (self.clock() - began) / len(group)
        passes, samples, marked = list(self.passes), [], self._pair(arm).resources.common_markers
        for i, (problem, told) in enumerate(zip(group, answers, strict=True)):
            turns = [result for _, result in told]
            text = "\n\n".join(marked(r.tokens, r.text) for r in turns)  # for scorers, judges and readers alike
            samples.append(
                {
                    "arm": arm.name,
                    "problem": problem.id,
                    "index": self._place(problem),
                    "repeat": repeat,
                    "group": problem.group,
                    "seed": turns[0].seed,
                    "text": text,
                    "tokens": [t for r in turns for t in r.tokens],
                    "origins": "".join(LETTER[o] for r in turns for e in r.events for o in e.origins),
                    # Cut off is cut off, inside the thinking or after it.
                    "finish_reason": "length" if turns[-1].finish_reason == "thinking" else turns[-1].finish_reason,
                    "correct": self._score(problem, text),
                    "seconds": seconds,
                    "batch": len(group),
                    "prompt_tokens": sum(r.prompt_tokens for r in turns),
                    "verifier": arm.verifier,
                    "lossless": arm.lossless,
                    "drafted_steps": self._drafted_steps(problem, turns),
                    "stats": Stats.pooled(r.stats for r in turns).to_dict(),
                    "passes": passes if i == 0 else [],  # a batch's passes are everybody's
                    **({"likelihood": self._likelihood(arm, told)} if self.measured else {}),
                    **(asked(problem) if arm.role == "target" and repeat == 0 else {}),
                }
            )
        return samples

    def _likelihood(self, arm: Arm, turns: list[tuple[Prompt, Result]]) -> Likelihood | None:
        """What the target, which leaves nothing out here, thinks of an answer; servers do not say."""
        if not hasattr(self.pair.target, "score"):
            return None
        tokenizer, texts = self.pair.tokenizer, []
        for prompt, result in turns:
            before, own = encode(tokenizer, prompt), result.tokens
            if arm.role == "draft" and self.pair.exchange is not None:
                own = tokenizer.encode(result.text, add_special_tokens=False)
            texts.append((before, own[: self.pair.target.max_seq_len - len(before)]))
        with dense(self.pair.target):
            rows = likelihoods(self.pair.target, texts, self.config.temperature)
        return summed_up([row for turn in rows for row in turn])

    def _score(self, problem: Problem, text: str) -> float | None:
        """True or False, or the score of a graded task; None where nothing is scored."""
        if not self.task.scored:
            return None
        score = self.task.score(problem, text)
        return float(score) if self.task.graded else bool(score)

    def _drafted_steps(self, problem: Problem, turns: list[Result]) -> list[dict[str, Any]]:
        """Reasoning steps that a draft wrote: the outcome of each, and whether it is valid, if the task can tell."""
        referee, found = self.task.referee(problem), list[dict[str, Any]]()
        spell, marked = self.pair.tokenizer.decode, self.both.resources.common_markers
        for result in turns:
            for event in result.events:
                for step in event.drafted_steps:
                    parts = (step.tokens, result.tokens[: step.start])
                    text, before = (marked(tokens, str(spell(tokens))) for tokens in parts)
                    valid, former = referee(before, text) if referee else None, FORMER.get(step.outcome, step.outcome)
                    found.append({"outcome": step.outcome, "fate": former, "valid": valid, "text": text})
                    if step.candidates > 1:
                        found[-1] |= {"candidate": step.candidate, "candidates": step.candidates}
        return found

    def _pair(self, arm: Arm) -> Pair:
        if arm.role != "draft":
            return self.both
        assert self.draft_only is not None
        return self.draft_only

    def _answer(self, arm: Arm, group: list[Problem], repeat: int) -> list[list[tuple[Prompt, Result]]]:
        """Answer a group as one batch, turn by turn where problems have several; each turn's prompt and result."""
        pair = self._pair(arm)
        self.plans.use(arm.name)
        chats = [p.prompt for p in group]
        answers: list[list[tuple[Prompt, Result]]] = [[] for _ in group]
        for turn in range(1 + max(len(p.turns) for p in group)):
            live = [i for i, p in enumerate(group) if turn <= len(p.turns)]
            for i in live:
                if turn:
                    so_far = chats[i] if isinstance(chats[i], list) else [{"role": "user", "content": chats[i]}]
                    reply = {"role": "assistant", "content": answers[i][-1][1].text}
                    chats[i] = [*so_far, reply, {"role": "user", "content": group[i].turns[turn - 1]}]
            self._turns += 1
            options = [self._options(arm, group[i], chats[i], repeat) for i in live]
            for i, result in zip(live, pair.generate([chats[i] for i in live], options), strict=True):
                answers[i].append((chats[i], result))
        return answers

    def _read(self, arm: Arm, group: list[Problem], repeat: int) -> None:
        """Have the arm find all first prompts read, by it or by those before it."""
        options = [replace(self._options(arm, p, p.prompt, repeat), max_new_tokens=1) for p in group]
        self._pair(arm).generate([p.prompt for p in group], options)

    def _place(self, problem: Problem) -> int:
        """Where it is in the run: of many problems a search would take as long as a pass, on the clock."""
        if len(self._places) != len(self.problems):
            self._places = {p.id: i for i, p in enumerate(self.problems)}
        return self._places[problem.id]

    def _options(self, arm: Arm, problem: Problem, chat: Any, repeat: int) -> Any:
        """The same seed for every arm but a resampled target, another for every problem and repeat."""
        c, index = self.config, self._place(problem)
        again = arm.role == "resampled" and not c.temperature
        left = self.pair.target.max_seq_len - len(encode(self.pair.tokenizer, chat))
        return arm.options(
            temperature=GREEDY_SPREAD if again else c.temperature,
            top_k=c.top_k,
            top_p=c.top_p,
            min_p=c.min_p,
            seed=((c.seed * 1_000_003 + repeat) * 1_000_003 + index + arm.reseed * RESEED)
            % 2**63,  # a date has room, too
            max_new_tokens=max(1, min(self.task.new_tokens(problem, c.max_new_tokens), left)),
            stop=self.task.stop,
            referee=self.task.referee(problem),
            count_entropy=c.entropy,
            cache_salt=str(self._turns) if self._remembers and not c.shared_prompts else "",
        )
