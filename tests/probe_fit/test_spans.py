from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semspec.probe_fit.spans import among, spans

stems = st.sampled_from(["pocket/probe/", "math-", "", "p/0"])
names = st.one_of(st.builds(lambda stem, n: f"{stem}{n}", stems, st.integers(0, 30)), st.text(max_size=6))


def test_runs_of_numbered_names_become_spans() -> None:
    said = spans(["p/3", "p/1", "p/2", "q/9", "odd", "p/5", "q/007"])
    assert said == ["odd", ["p/", 1, 3], ["p/", 5, 5], ["q/", 9, 9], ["q/00", 7, 7]]
    assert among(said, ["p/0", "p/2", "p/4", "p/5", "q/7", "q/007", "odd", "even"]) == ["odd", "p/2", "p/5", "q/007"]
    assert among(["p/1", "p/2"], ["p/2", "p/3"]) == ["p/2"], "names as older cards list them"


@given(st.sets(names, max_size=20), st.sets(names, max_size=20))
def test_spans_cover_what_they_were_made_of_and_nothing_else(own: set[str], other: set[str]) -> None:
    assert among(spans(own), own | other) == sorted(own)
