"""What an installation has beside the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_model_card_the_models_and_the_page_are_installed(tmp_path: Path) -> None:
    """As a wheel is made, without packing it."""
    (tmp_path / "about").mkdir()
    steps = ["egg_info", "--egg-base", tmp_path / "about", "build_py", "--build-lib", tmp_path / "built"]
    code = "from setuptools import setup; setup()"
    done = subprocess.run([sys.executable, "-c", code, *map(str, steps)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("pocket/models", "serve/page"):
        source, built = ROOT / "semspec" / name, tmp_path / "built" / "semspec" / name
        files = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
        assert files == {path.relative_to(built) for path in built.rglob("*") if path.is_file()}
    assert (tmp_path / "built/semspec/pocket/models/README.md").read_text().startswith("#"), "the model card"
    assert not (tmp_path / "built/tests").exists()
    points = next((tmp_path / "about").rglob("entry_points.txt")).read_text()
    assert "semspec = semspec" in points
