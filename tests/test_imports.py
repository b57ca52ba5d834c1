"""Imports point one way: the folders are the architecture, and this table is its order."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import semspec

ROOT = Path(semspec.__file__).parent

# From the bottom up. A unit imports only from rows above its own here, not from its own row.
ROWS = [
    "errors pocket events tree",
    "types registry statistics",
    "sampling",
    "model",
    "text probe",
    "sparse",
    "verify",
    "draft",
    "loop",
    "profile",
    "options",
    "remote",
    "pair",
    "hf",
    "semspec",  # the public names
    "tasks",
    "catalogue",
    "probe_fit head_fit bench serve lm_eval",
    "sparse_fit advise vllm replicas",
    "cli",
    "__main__",
]
RANK = {unit: rank for rank, row in enumerate(ROWS) for unit in row.split()}
# For annotations only: a request names its rule and its processors, and is below both.
FOR_TYPES = {("types", "verify"), ("types", "sampling")}


def unit(module: str) -> str:
    """semspec.probe_fit.rows -> probe_fit; a file at the root is a unit, too."""
    return [*module.split("."), "semspec"][1]


def imports(tree: ast.AST, for_types: bool = False) -> Iterator[tuple[str, int, bool]]:
    """Imported modules of this package, wherever in a file, with their lines and whether they are for types only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for part in node.body:
                yield from imports(ast.Module([part], []), for_types=True)
        elif isinstance(node, ast.Import):
            yield from ((a.name, node.lineno, for_types) for a in node.names if a.name.split(".")[0] == "semspec")
        elif isinstance(node, ast.ImportFrom):
            if node.level:  # within a folder; at the root it would hide the unit
                yield "." * node.level, node.lineno, for_types
            elif node.module == "semspec":
                yield from ((_named(a.name), node.lineno, for_types) for a in node.names)
            elif (node.module or "").startswith("semspec."):
                yield str(node.module), node.lineno, for_types
        else:
            yield from imports(node, for_types)


def _named(name: str) -> str:
    """`from semspec import x` may mean a module or a public name."""
    return f"semspec.{name}" if (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists() else "semspec"


def upward(module: str, source: str) -> list[str]:
    """The imports of one file that point the wrong way."""
    own = unit(module)
    found = []
    for name, line, for_types in imports(ast.parse(source)):
        near = name == "." and (ROOT / own).is_dir()
        other = own if near else unit(name)
        known = other == own or RANK.get(other, len(ROWS)) < RANK[own]
        allowed = known or (for_types and (own, other) in FOR_TYPES)
        if not allowed:
            found.append(f"{module}, line {line}: {own} imports {other}")
    return found


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("semspec", *path.relative_to(ROOT).with_suffix("").parts)
        yield ".".join(parts).removesuffix(".__init__"), path


def test_the_table_has_every_unit_and_no_other() -> None:
    assert {unit(module) for module, _ in modules()} == set(RANK)


def test_imports_point_one_way() -> None:
    wrong = [line for module, path in modules() for line in upward(module, path.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "planted",
    [
        "from semspec.pair import Pair",
        "from semspec import tasks",
        "import semspec.probe_fit.collect as c",
        "def f():\n    from semspec.loop.decoder import Decoder",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from semspec.pair import Pair",
        "from .. import pair",
        "try:\n    from semspec import load\nexcept ImportError:\n    pass",
    ],
)
def test_an_import_upwards_is_found(planted: str) -> None:
    source = (ROOT / "probe" / "features.py").read_text()
    assert not upward("semspec.probe.features", source)
    assert len(upward("semspec.probe.features", f"{source}\n{planted}\n")) == 1


def test_units_of_one_row_do_not_import_each_other() -> None:
    assert upward("semspec.probe_fit.rows", "from semspec.bench.folder import Folder")
    assert not upward(
        "semspec.probe_fit.rows", "from semspec.probe_fit.data import Folder\nfrom semspec.pair import Pair"
    )


def test_only_their_own_packages_import_vllm_and_ray() -> None:
    """They are heavy, of one version, and in environments of their own."""
    for module, path in modules():
        named = [n for node in ast.walk(ast.parse(path.read_text())) for n in _roots(node)]
        assert "vllm" not in named or unit(module) == "vllm", module
        assert "ray" not in named or module == "semspec.replicas.on_ray", module


def _roots(node: ast.AST) -> list[str]:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
    names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return [name.split(".")[0] for name in names]


def test_only_servers_import_what_servers_need() -> None:
    """Models in this process and benchmarks run where it is not installed; others import it when it is first used."""
    heavy = {"httpx", "fastapi", "starlette", "uvicorn", "llguidance", "pydantic", "prometheus_client", "openai"}
    for module, path in modules():
        named = {n for node in ast.parse(path.read_text()).body for n in _roots(node)}
        assert not named & heavy or unit(module) in ("serve", "replicas", "vllm"), module
