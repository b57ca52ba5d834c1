from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.replicas.running import Running


@pytest.fixture
def running() -> Iterator[Running]:
    with Running() as running:
        yield running
