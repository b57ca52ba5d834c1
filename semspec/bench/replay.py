"""Decisions from one pair, cost from another: do again what a run did, with models of other sizes.

Acceptance is decided by a pair we can afford to run for quality; what its rounds cost at 32 billion parameters is not
guessed but measured, on random weights of that shape. Charged are:
- every recorded pass, with its rows and context lengths, and the tokens that a GPU computes before it sees a stop;
- every recorded verification, with its copy to the host: the rule itself, on logits of the other vocabulary and, where
  it has probes, on states of the other width (see `replay_verify`);
- the host's work between them (the loop, text, a referee, how sure a draft is of a step) as the run recorded it. It is
  Python on a CPU and does not depend on the size of the models, but on that CPU, which `run.json` names: record a run
  on the machine on which it will be replayed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from semspec.bench.folder import RunFolder, load_run
from semspec.bench.record import HEAD, VERIFY
from semspec.bench.replay_verify import Cards, Verification
from semspec.bench.shapes import SHAPES, planned, random_head, random_runner
from semspec.bench.summary import summarise
from semspec.draft.kinds import Dflash, Eagle, Mtp
from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.model.memory_plan import check
from semspec.model.placement import choose_device
from semspec.types import GREEDY, Decode, Sampling, Score

NAMES = ("target", "draft")
PAST_STOP = 32  # room in a slot for tokens that are computed before a stop is seen
DECODE = ("decode", "roll")  # the latter in files of older versions
WARM_UP_TOKENS = 20  # of a decode that is only made for its graphs


class Replay:
    """Two random models of a named shape, and with `head` a draft head for the target, that repeat passes and
    verifications, counting what they execute."""

    def __init__(
        self,
        shape: str,
        slots: int,
        capacity: int,
        device: str = "auto",
        sampling: Sampling = GREEDY,
        cards: dict[str, Cards] | None = None,
        head: bool = False,
    ) -> None:
        if shape not in SHAPES:
            raise BadRequest(f"there is no shape {shape!r}; the shapes are: {', '.join(SHAPES)}")
        self.device = choose_device(device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        configs = dict(zip(NAMES, SHAPES[shape], strict=True))
        check([planned(name, c, slots, capacity, self.device, dtype) for name, c in configs.items()])
        self.runners = {name: random_runner(c, slots, capacity, self.device, dtype) for name, c in configs.items()}
        self.sampling = sampling  # how tokens are drawn; which they are does not matter
        self.executed: list[list[Any]] = []
        self.head = random_head(self.runners["target"]) if head else None
        for _ in range(slots):
            for runner in self.runners.values():
                runner.acquire()
            if self.head:
                self.head.acquire()
        self.verification = Verification(self.runners, sampling, cards or {})

    def play(
        self, passes: list[list[Any]], arm: dict[str, Any], clock: Callable[[], float] = time.perf_counter
    ) -> dict[str, float]:
        """Execute what was recorded of an arm; returns the seconds of each model and of verification."""
        seconds = dict.fromkeys([*self.runners, HEAD, VERIFY], 0.0)
        # A head reads states of every token that the target reads.
        layers = self.head.layers if self.head and any(name == HEAD for name, _, _ in passes) else ()
        self._wait()
        for name, kind, rows in passes:
            began = clock()
            if name == VERIFY:
                self.verification.verify(arm, kind, rows)
            elif name == HEAD:
                self._head_pass(kind, rows)
            else:
                self._pass(self.runners[name], kind, rows, layers if name == "target" else ())
            self._wait()
            seconds[name] += clock() - began
            self.executed.append([name, kind, rows])
        return seconds

    def _head_pass(self, kind: str, rows: list[list[int]]) -> None:
        head = self.head
        assert head is not None
        for slot, (_, length, _, *held) in enumerate(rows):
            head.pretend(slot, length, *held[:3])
        if kind == "score":
            head.score([Score(head, i, [1] * r[0], r[2], parents=tuple(r[6:])) for i, r in enumerate(rows)])
        else:
            head.decode([
                Decode(head, i, [1] * r[0], r[2], GREEDY if r[7] else self.sampling, 0, keep_logits=bool(r[6]))
                for i, r in enumerate(rows)
            ])  # fmt: skip

    def _pass(self, runner: ModelRunner, kind: str, rows: list[list[int]], layers: tuple[int, ...]) -> None:
        for slot, (_, context, *_) in enumerate(rows):
            runner.cache.pretend(slot, context)
        if kind == "score":
            runner.score([
                Score(runner, i, [1] * fed, out, layers, states=fed if layers else 0, parents=tuple(parents))
                for i, (fed, _, out, *parents) in enumerate(rows)
            ])  # fmt: skip
        elif kind == "keep":
            for slot, row in enumerate(rows):
                runner.compact(slot, row[3], row[4:])
        else:
            runner.decode([
                Decode(
                    runner, i, [1] * row[0], n, self._sampling_of(row), 0, _never(runner, row), any(row[4:5]),
                    layers=layers,
                )
                for i, (row, n) in enumerate(zip(rows, written(runner, rows), strict=True))
            ])  # fmt: skip

    def _sampling_of(self, row: list[int]) -> Sampling:
        return GREEDY if any(row[5:6]) else self.sampling

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _never(runner: ModelRunner, row: list[int]) -> frozenset[int]:
    """A stop token that never comes, for a decode that could have stopped: the runner looks for it as it did."""
    return frozenset([runner.vocab_size] if any(row[6:7]) else [])


def written(runner: ModelRunner, rows: list[list[int]]) -> list[int]:
    """Tokens that each sequence of a decode computes: what it wrote; the longest also what follows before it stops."""
    counts = [row[2] for row in rows]
    longest = counts.index(max(counts))
    allowed = max(max(row[2:4]) for row in rows)  # runs of older versions do not say; then it is what was written
    counts[longest] = runner.computed(counts[longest], allowed)
    return counts


def once_each(passes: list[list[Any]]) -> list[list[Any]]:
    """One pass and one verification of every size, so that all graphs are captured before anything is timed."""
    sizes: dict[str, list[Any]] = {}
    for name, kind, rows in passes:
        short = [[*row[:2], min(row[2], WARM_UP_TOKENS), *row[3:]] for row in rows] if kind in DECODE else rows
        sizes.setdefault(json.dumps([name, kind, [_size(name, kind, row) for row in short]]), [name, kind, short])
    return list(sizes.values())


def _size(name: str, kind: str, row: list[int]) -> list[int]:
    """What a graph depends on: not on how long a text is, nor on how a tree branches."""
    if name == VERIFY:
        return [*row[:3], len(row)] if row[3:4] == [-1] else row
    return [row[0], row[2], len(row)] if kind == "score" else [row[0], *row[2:]]


def replay(folder: Path, shape: str, out: Path, device: str = "auto", progress: Any = None) -> dict[str, Any]:
    """Write a copy of a run whose seconds are those of another shape; returns its summary."""
    run, samples = load_run(folder)
    arms = {arm["name"]: arm for arm in run["arms"]}
    by_arm = {name: [p for s in samples if s["arm"] == name for p in s["passes"]] for name in arms}
    passes = [p for found in by_arm.values() for p in found if p[0] != VERIFY]
    methods = [found for name, found in by_arm.items() if found and arms[name]["role"] == "method"]
    if not passes or not all(any(p[0] == VERIFY for p in found) for found in methods):
        raise BadRequest(f"{folder} has no recorded passes and verifications; run it again with this version")
    config = run["config"]
    if config.get("sparse") or any(arm.get("sparse") for arm in arms.values()):
        raise BadRequest(
            f"{folder} verified by a sparse plan, which fits one model only; its passes cannot be repeated with another"
        )
    for name in {str(arm.get("drafter")).partition(":")[0] for arm in arms.values()} & {Dflash.name, Mtp.name}:
        raise BadRequest(f"{folder} drafted with {name}, of which there is no random one of another size yet")
    headed = any(p[0] == HEAD for p in passes)
    if not headed and any(str(arm.get("drafter")).partition(":")[0] == Eagle.name for arm in arms.values()):
        raise BadRequest(f"{folder} drafted with a head and did not record its passes; run it again with this version")
    sampling = Sampling(**{key: config[key] for key in ("temperature", "top_k", "top_p", "min_p") if key in config})
    slots = max(len(rows) for _, _, rows in passes)
    capacity = max(sum(row[:3]) for _, _, rows in passes for row in rows) + PAST_STOP
    player = Replay(shape, slots, capacity, device, sampling, run.get("probes"), headed)
    device_name = torch.cuda.get_device_name() if player.device.type == "cuda" else "CPU"
    decisions = run["label"].split(",")[0]
    target = RunFolder(out)
    target.open(run | {"label": f"{decisions}, cost: {shape} on {device_name}", "finished": False})
    for name, found in by_arm.items():
        player.play(once_each(found), arms[name])
    for s in samples[: len(arms)]:
        player.play(s["passes"], arms[s["arm"]])
    player.executed.clear()
    took: dict[str, float] = {}
    replayed = []
    for i, s in enumerate(samples):
        if s["passes"]:  # the first of a batch carries the passes of all
            took = player.play(s["passes"], arms[s["arm"]])
        shares = {key: seconds / s["batch"] for key, seconds in took.items()}
        spent = {"draft": shares["draft"] + shares[HEAD], "score": shares["target"], "verify": shares[VERIFY]}
        spent["host"] = s["stats"]["seconds"]["host"]
        made = {"seconds": sum(spent.values()), "seconds_recorded": s["seconds"]}
        replayed.append(s | made | {"stats": s["stats"] | {"seconds": spent}})
        if progress:
            progress(i + 1, len(samples))
    target.samples_file.unlink(missing_ok=True)
    target.append(replayed)
    summary = summarise(json.loads(target.run_file.read_text()), replayed)
    summary["replayed_passes"] = {
        name: sum(p[0] == name for p in player.executed) for name in (*NAMES, *([HEAD] if headed else []), VERIFY)
    }
    summary["host_seconds_of"] = run.get("hardware", {}).get("cpu")
    target.finish(summary)
    return summary
