"""Work that is launched once and replayed: CUDA graphs, remembered by what they are for.

A launch costs a slow host as much as the GPU takes for it. A graph costs one launch for all of a pass. What a graph
reads and writes lies at fixed addresses, so whoever asks for one fills buffers first and copies results away after.
"""

from __future__ import annotations

import gc
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor


class GraphLauncher(Protocol):
    def run(self, key: Hashable, work: Callable[[], Any], state: Tensor) -> Any:
        """Do `work` and return what it returns. Calls with the same key must mean the same work on the same buffers.
        `state` is what the work changes and what must not change twice if the work is tried first."""
        ...


class NoGraphs:
    """Where there are no graphs: the work itself, every time."""

    def run(self, key: Hashable, work: Callable[[], Any], state: Tensor) -> Any:
        return work()


class GraphCache:
    """All graphs share one memory pool: they never run at the same time, and results are copied away at once."""

    def __init__(self, device: torch.device, most: int = 64) -> None:
        self.device, self.most = device, most
        self.seconds = 0.0  # spent on capturing
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream(device)  # one for all captures: cuBLAS keeps a workspace for every stream
        self._kept: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def run(self, key: Hashable, work: Callable[[], Any], state: Tensor) -> Any:
        if key not in self._kept:
            self._kept[key] = self._capture(work, state)
            while len(self._kept) > self.most:
                torch.cuda.synchronize(self.device)  # it may still be running
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        graph, results = self._kept[key]
        graph.replay()
        return results

    def _capture(self, work: Callable[[], Any], state: Tensor) -> tuple[torch.cuda.CUDAGraph, Any]:
        began = time.perf_counter()
        before = state.clone()
        aside = self._aside
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            work()  # kernels are compiled and libraries set up outside of the capture
            state.copy_(before)
            graph = torch.cuda.CUDAGraph()
            collecting = gc.isenabled()
            gc.disable()  # a tensor that is freed during a capture would break it
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                results = work()
                graph.capture_end()
            except Exception:
                with suppress(RuntimeError):  # what the work said is worth more than that its capture is void
                    graph.capture_end()
                raise
            finally:
                if collecting:
                    gc.enable()
        torch.cuda.current_stream(self.device).wait_stream(aside)
        self.seconds += time.perf_counter() - began
        return graph, results
