"""An answer: while it is generated (Ticket, Stream), and when it is complete (Result)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from semspec.loop.decoder import Job
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.loop.work import Task
from semspec.profile import Drift, Profile
from semspec.text.stream import TextStream
from semspec.types import Event, FinishReason, TokenLogprob


@dataclass(slots=True)
class Result:
    """An answer, with what it took and what it guarantees."""

    text: str
    tokens: list[int]
    events: list[Event]
    stats: Stats
    lossless: bool  # the text is, or is distributed as, the target's own
    sparse: str  # what the target left out when it checked drafts, in words; empty: nothing
    finish_reason: FinishReason | None  # None: not finished yet; "thinking": max_new_tokens ended inside the thinking
    thinking_cut: bool  # its end was forced by max_thinking_tokens
    verifier: str
    seed: int
    prompt_tokens: int
    drift: Drift | None = None  # from what the profile was calibrated on, where there is a profile

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [lp for event in self.events for lp in event.logprobs or []]


@dataclass(slots=True)
class Ticket:
    """A submitted prompt: its task in the Executor and its growing text."""

    executor: Executor
    task: Task
    job: Job
    stats: Stats
    text: TextStream
    sparse: str = ""
    profile: Profile | None = None
    otherwise: tuple[str, ...] = ()  # how the models compute, where that is not as the profile's did
    events: list[Event] = field(default_factory=list)

    def collect(self) -> list[Event]:
        """New events, their text filled in. A sequence that was cancelled gives the text held back for stop strings."""
        with self.executor.lock:  # another thread may be making a pass that adds to this text
            new = []
            while self.task.events:
                event = self.task.events.popleft()
                event.spans = self.text.take(event.origins, final=event.finish_reason is not None)
                event.span_tokens = self.text.span_tokens
                new.append(event)
            if self.task.done and not self.text.finished:
                spans = self.text.take([], final=True)
                if spans:
                    new.append(Event([], [], spans=spans, span_tokens=self.text.span_tokens))
            self.events += new
            return new

    def _drift(self) -> Drift | None:
        processed = [] if self.job.processors is None else [one.option for one in self.job.processors.each]
        otherwise = (*self.otherwise, *processed)
        return None if self.profile is None else self.profile.drift(self.stats, self.job.sampling, otherwise)

    def result(self) -> Result:
        finish = next((event.finish_reason for event in reversed(self.events)), None)
        return Result(
            text="".join(event.text for event in self.events),
            tokens=[token for event in self.events for token in event.tokens],
            events=self.events,
            stats=self.stats,
            lossless=self.job.rule.lossless and not self.sparse,
            sparse=self.sparse,
            finish_reason=finish or ("cancelled" if self.task.done else None),
            thinking_cut=self.job.thinking is not None and self.job.thinking.cut,
            verifier=self.job.rule.name,
            seed=self.job.sampling.seed,
            prompt_tokens=len(self.job.prompt),
            drift=self._drift(),
        )


class Stream:
    """An answer while it is generated: iterate for events, then ask for the `result`."""

    def __init__(self, executor: Executor, ticket: Ticket) -> None:
        self._executor, self._ticket = executor, ticket
        self._ready: deque[Event] = deque()
        self._stopping = False

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        task = self._ticket.task
        try:
            while True:
                done = task.done  # before events are collected: another thread may end the sequence in between
                self._ready += self._ticket.collect()
                if self._ready:
                    return self._ready.popleft()
                if done and task.error is not None:
                    raise task.error
                if done:
                    raise StopIteration
                if self._stopping:
                    self._executor.cancel(task)
                else:
                    self._executor.tick()
        except BaseException:  # an interrupt or a failure leaves nothing behind
            self.close()
            raise

    def stop(self) -> None:
        """End the sequence after the pass that is being made. A signal handler or another thread may ask for this."""
        self._stopping = True

    @property
    def stats(self) -> Stats:
        """What it has taken until now."""
        return self._ticket.stats

    @property
    def error(self) -> Exception | None:
        """Why it failed, if it did."""
        return self._ticket.task.error

    def close(self) -> None:
        """End the sequence, if it has not ended; what it has committed until now counts."""
        self._executor.cancel(self._ticket.task)
        self._ticket.collect()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._executor.discard(self._ticket.task)  # garbage is collected anywhere, in the middle of a pass too

    def result(self) -> Result:
        """The answer so far; complete once the stream has ended."""
        return self._ticket.result()
