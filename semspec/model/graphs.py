"""CUDA graphs: work that is captured once and replayed, in a cache by key.

A kernel's launch costs a slow host as much time as the kernel costs the GPU. A graph is one launch for a whole pass.
What it reads and writes lies at fixed addresses: the caller fills buffers before and copies results away after.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

# A draft and its target on two devices may want to capture at once, and the first to end would turn `gc` on for both.
_capturing = threading.Lock()
_captured = 0.0


def captured_seconds() -> float:
    """That this process has spent on captures: once for each size, so they say nothing of what a pass takes."""
    return _captured


class GraphLauncher(Protocol):
    def run(self, key: Hashable, work: Callable[[], Any], state: Tensor) -> Any:
        """Do `work` and return what it returns. Calls with the same key must mean the same work on the same buffers.
        `state` is what the work changes; it is restored where the work runs once more before a capture."""
        ...

    def knows(self, key: Hashable) -> bool:
        """Whether this work begins at once, without a capture, which waits for the device."""
        ...


class NoGraphs:
    """The work itself, every time."""

    def run(self, key: Hashable, work: Callable[[], Any], state: Tensor) -> Any:
        return work()

    def knows(self, key: Hashable) -> bool:
        return True


class GraphCache:
    """All graphs share one memory pool: they never run at the same time, and results are copied away at once."""

    def __init__(self, device: torch.device, capacity: int = 64) -> None:
        self.device, self.capacity = device, capacity
        self.seconds = 0.0  # spent on capturing
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # one for all captures: cuBLAS keeps a workspace for every stream
        self._graphs: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def knows(self, key: Hashable) -> bool:
        return key in self._graphs

    def run(self, key: Hashable, work: Callable[[], Any], state: Tensor) -> Any:
        if key not in self._graphs:
            self._graphs[key] = self._capture(work, state)
            while len(self._graphs) > self.capacity:
                torch.cuda.synchronize(self.device)  # it may still be running
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        graph, results = self._graphs[key]
        graph.replay()
        return results

    def _capture(self, work: Callable[[], Any], state: Tensor) -> tuple[torch.cuda.CUDAGraph, Any]:
        began = time.perf_counter()
        before = state.clone()
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            work()  # kernels are compiled and libraries set up outside of the capture
            state.copy_(before)
            graph = torch.cuda.CUDAGraph()
            with _capturing:
                collecting = gc.isenabled()
                gc.disable()  # a tensor that is freed during a capture would break it
                try:
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    results = work()
                    graph.capture_end()
                except Exception:
                    with suppress(RuntimeError):  # the first error says more
                        graph.capture_end()
                    raise
                finally:
                    if collecting:
                        gc.enable()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self._took(time.perf_counter() - began)
        return graph, results

    def _took(self, seconds: float) -> None:
        global _captured
        with _capturing:
            self.seconds, _captured = self.seconds + seconds, _captured + seconds
