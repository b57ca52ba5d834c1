"""Options from a config file and the environment, and what a shell completes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from semspec import options, tasks, verify
from semspec.cli import arguments, settings
from semspec.cli import main as cli

NAMES = {"SEMSPEC_SHOW_WIDTH": "own variable", "SEMSPEC_WIDTH": "variable"}


def toy() -> typer.Typer:
    """Commands that print what they were given."""
    app, group = typer.Typer(), typer.Typer(invoke_without_command=True)
    app.add_typer(group, name="group")

    @app.callback()
    def main(context: typer.Context, config: Path | None = None) -> None:
        settings.apply(context, config)

    @app.command()
    def show(
        target: str,
        width: str = "default",
        tag: list[str] | None = None,
        lossy: bool = typer.Option(True, "--allow-lossy/--no-allow-lossy"),
        number: int = 0,
        problems: int | None = None,
    ) -> None:
        print(json.dumps([target, width, tag or [], lossy, number] + ([] if problems is None else [problems])))

    @group.callback()
    def over(context: typer.Context, width: str = "default") -> None:
        context.obj = width

    @group.command()
    def under(context: typer.Context, width: str = "default") -> None:
        print(json.dumps([context.obj, width]))

    return app


def run(tmp_path: Path, config: str, *words: str, variables: dict[str, str] | None = None):
    (tmp_path / "c.toml").write_text(config)
    return CliRunner().invoke(toy(), ["--config", str(tmp_path / "c.toml"), *words], env=variables or {})


@given(st.sets(st.sampled_from(["line", "own variable", "variable", "table", "top"])))
def test_who_goes_before_whom(tmp_path_factory: pytest.TempPathFactory, given_by: set[str]):
    config = 'width = "top"\n' if "top" in given_by else ""
    config += '[show]\nwidth = "table"\n' if "table" in given_by else ""
    variables = {name: value for name, value in NAMES.items() if value in given_by}
    line = ["--width", "line"] if "line" in given_by else []
    done = run(tmp_path_factory.mktemp("c"), config, "show", "x", *line, variables=variables)
    order = ["line", "own variable", "variable", "table", "top", "default"]
    assert json.loads(done.stdout)[1] == next(who for who in order if who in {*given_by, "default"})


def test_values_are_read_as_on_the_command_line(tmp_path: Path):
    done = run(tmp_path, 'target = "t"\nwidth = 8\ntag = ["a b", "c"]\nallow-lossy = false\nnumber = 7', "show")
    assert json.loads(done.stdout) == ["t", "8", ["a b", "c"], False, 7]
    done = run(tmp_path, 'tag = "a b"', "show", "u", variables={"SEMSPEC_NUMBER": "3", "SEMSPEC_ALLOW_LOSSY": "0"})
    assert json.loads(done.stdout) == ["u", "default", ["a b"], False, 3]
    done = run(tmp_path, '\ufefftarget = "t"', "show")
    assert json.loads(done.stdout)[0] == "t", "as editors of another system save it"
    nested = run(tmp_path, "width = 1\n[group]\nwidth = 2\n[group.under]\nwidth = 3", "group", "under")
    assert json.loads(nested.stdout) == ["2", "3"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("widht = 3", "there is no option 'widht'; did you mean width?"),
        ("colour = 3", "there is no option 'colour'; `semspec --help` and `semspec COMMAND --help` list them"),
        ("[shwo]\nwidth = 3", "there is no command 'shwo'; did you mean show?"),
        ("show = 3", "there is no option 'show'; "),
        ("[show]\ntags = 3", "c.toml: show has no option 'tags'; did you mean tag"),
        (
            "[show]\nx = 3",
            "c.toml: show has no option 'x'; its options are: allow_lossy, number, prob",
        ),
        ("[group.under]\ntag = 3", "c.toml: group under has no option 'tag'; its options are: width"),
        ('number = "many"', "c.toml: number is 'many': "),
        ("allow-lossy = 3.5", "c.toml: allow_lossy is 3.5: "),
        ("width = ", "c.toml cannot be read: "),
    ],
)
def test_refusals_name_the_file_and_what_there_is(tmp_path: Path, config: str, message: str):
    done = run(tmp_path, config, "show", "x")
    assert message in str(done.exception) and done.stdout == ""


def test_every_option_of_every_command_has_a_key_and_variables(semspec, tmp_path: Path):
    root = typer.main.get_command(cli.app)
    settings.name_variables(root, ())
    found = {
        key: parameter.envvar for command in settings.everything(root) for key, parameter in settings.settable(command)
    }
    assert {"verifier", "task", "json", "context", "top_p", "target", "allow_lossy"} <= found.keys()
    assert all(f"SEMSPEC_{key.upper()}" in names for key, names in found.items())
    missing = semspec("--config", tmp_path / "none.toml", "info", "pocket")
    assert missing.returncode == 2 and "none.toml cannot be read" in missing.stderr


def test_a_command_heeds_them(semspec, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.toml").write_text(
        f'target = "{target_folder}"\nverifier = "none"\nmax-new-tokens = 4\njson = true'
    )
    monkeypatch.setenv("SEMSPEC_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("SEMSPEC_DEVICE", "cpu")
    done = json.loads(semspec("generate", stdin="the quick").stdout)
    assert done["verifier"] == "none" and len(done["tokens"]) <= 4
    monkeypatch.setenv("SEMSPEC_VERIFIER", "block")
    assert json.loads(semspec("generate", stdin="the quick").stdout)["verifier"] == "block"
    done = json.loads(semspec("generate", "--verifier", "exact", stdin="the quick").stdout)
    assert done["verifier"] == "exact"


def test_a_misspelt_variable_is_told_and_one_of_others_is_not(semspec, monkeypatch: pytest.MonkeyPatch):
    for name in ("SEMSPEC_VERIFIR", "SEMSPEC_API_KEY", "SEMSPEC_TARGET_API_KEY", "SEMSPEC_INGRESS_SECRET", "SEMSPEC_X"):
        monkeypatch.setenv(name, "fly")
    done = semspec("list", "fly")
    told = "semspec: nothing reads the variable SEMSPEC_VERIFIR; did you mean SEMSPEC_VERIFIER?\n"
    assert done.returncode == 0 and done.stderr == told


def test_the_file_is_found_in_the_users_folder(tmp_path: Path):
    (tmp_path / "semspec").mkdir()
    (tmp_path / "semspec" / "config.toml").write_text("colour = 3")
    env = {k: v for k, v in os.environ.items() if k != "SEMSPEC_CONFIG"} | {"XDG_CONFIG_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "semspec", "info", "pocket"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"{tmp_path}/semspec/config.toml: there is no option 'colour'" in done.stderr


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("generate pocket --verifier s", verify.REGISTRY),
        ("chat pocket --verifier e", verify.REGISTRY),
        ("bench --task m", tasks.REGISTRY),
        ("probe fit pocket --task g", tasks.REGISTRY),
        ("bench --method typ", verify.REGISTRY),
        ("generate pocket --drafter c", options.DRAFTERS),
        ("ch", ["chat"]),
    ],
)
def test_a_shell_completes_names_without_waiting_for_torch(line: str, names: Iterable[str]):
    expected = sorted(name for name in names if name.startswith(line.split()[-1]))
    words = f"semspec {line}"
    env = os.environ | {"_SEMSPEC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "import sys; sys.argv[0] = 'semspec'; from semspec.cli import main as cli\n"
    code += "try: cli.run()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == expected != [] and not done.stderr


def test_names_are_those_of_the_registries():
    assert arguments.verifiers() == sorted(verify.REGISTRY) and arguments.tasks() == sorted(tasks.REGISTRY)
    assert arguments.drafters() == list(options.DRAFTERS)


def test_a_variable_is_one_value_spaces_included(tmp_path: Path):
    done = run(tmp_path, "", "show", "x", variables={"SEMSPEC_TAG": "correct horse  battery\nstaple"})
    assert json.loads(done.stdout)[2] == ["correct horse  battery\nstaple"]
    assert json.loads(run(tmp_path, 'tag = ["a b", "c"]', "show", "x").stdout)[2] == ["a b", "c"]
    assert json.loads(run(tmp_path, "", "show", "x", variables={"SEMSPEC_TAG": ""}).stdout)[2] == []


def test_options_have_their_former_names_for_one_release_with_a_warning(tmp_path: Path):
    for words, config, variables in [
        (["--n", "7"], "", {}),
        (["--n=7"], "", {}),
        ([], "n = 7", {}),
        ([], "[show]\nn = 7", {}),
        ([], "", {"SEMSPEC_N": "7"}),
    ]:
        done = run(tmp_path, config, "show", *words, "x", variables=variables)
        assert json.loads(done.stdout)[-1] == 7, done.output
        assert "is now" in done.stderr and done.stderr.lower().count("problems; the old name goes") == 1
    assert json.loads(run(tmp_path, "n = 7", "show", "x", "--problems", "3").stdout)[-1] == 3
    assert json.loads(run(tmp_path, "", "show", "--", "--n").stdout)[0] == "--n", "an argument is left alone"


def test_a_former_name_that_another_command_uses_today_is_that_commands(tmp_path: Path, monkeypatch):
    """`--data` of `head train` are its prompts now; elsewhere it is the folder of the data sets."""
    monkeypatch.setitem(settings.FORMER_OF, "show", {"width": "data"})
    monkeypatch.setitem(settings.FORMER_OF, "group under", {"width": "number"})

    def width(config: str = "", *words: str, **variables: str) -> str:
        done = run(tmp_path, config, "show", *words, "x", variables=variables)
        return json.loads(done.stdout)[1]

    assert width("", "--data", "own") == width("[show]\ndata = 'own'") == width(SEMSPEC_SHOW_DATA="own") == "own"
    assert width("data = 'own'") == width(SEMSPEC_DATA="own") == "own", "no command has it"
    for config, words, variables, wanted in [
        ("", ["--number", "own"], {}, "own"),
        ("[group.under]\nnumber = 'own'", [], {}, "own"),
        ("number = 3", [], {}, "default"),  # meant for `show`
        ("", [], {"SEMSPEC_NUMBER": "3"}, "default"),
    ]:
        done = run(tmp_path, config, "group", "under", *words, variables=variables)
        assert json.loads(done.stdout) == ["default", wanted]


@pytest.mark.parametrize(("path", "before", "now"), [
    (path, before, now) for path, names in settings.FORMER_OF.items() for now, before in names.items()
])  # fmt: skip
def test_every_renamed_option_is_taken_with_a_warning(path: str, before: str, now: str, monkeypatch) -> None:
    command = typer.main.get_command(cli.app)
    settings.name_variables(command, ())
    for name in path.split():
        command = command.commands[name]  # type: ignore[attr-defined]
    seen: list[str] = []
    old, new = ("--" + name.replace("_", "-") for name in (before, now))
    assert new in {flag for parameter in command.params for flag in parameter.opts}
    monkeypatch.setattr(settings, "_warn", lambda *words: seen.extend(words))
    with pytest.raises(Exception, match="no-such-option"):
        command.main([old, "0.5", "--no-such-option"], standalone_mode=False)
    assert seen == [old, new]


def test_one_old_name_in_the_file_gives_one_warning_and_only_to_who_uses_it(tmp_path: Path):
    """`n` is a former name in eleven commands of ours."""
    assert run(tmp_path, "n = 7", "group", "under").stderr == ""
    root = typer.main.get_command(cli.app)
    settings.name_variables(root, ())
    path = tmp_path / "c.toml"
    assert settings.defaults(root, {"n": 7}, path, "list")[1] == {}
    assert settings.defaults(root, {"n": 7}, path, "generate")[1] == {"n": "answers"}
    found, former = settings.defaults(root, {"n": 7}, path, "probe")
    assert former == {"n": "problems"} and found["probe"]["fit"]["n"] == found["bench"]["n"] == "7"


@pytest.mark.parametrize(
    ("verifier", "warning"),
    [
        ("semantic+:least=0.5", "option 'least' of verifier 'semantic+' is now called 'threshold'"),
        ("fly:reading=code", "fly's reading=code is now called released"),
        ("fly", ""),
    ],
)
def test_old_names_inside_a_verifier_are_told_once(semspec, verifier: str, warning: str):
    done = semspec("generate", "pocket", "hi", "--verifier", verifier, "--answers", "0")
    told = [line for line in done.stderr.splitlines() if "next release" in line]
    wanted = [f"semspec: {warning}; the old name goes with the next release"] if warning else []
    assert done.returncode == 2 and told == wanted


def test_flags_take_no_value_in_the_help(semspec):
    for words in (["generate"], ["bench"], ["serve"], ["sparse", "calibrate"], []):
        told = semspec(*words, "--help").stdout
        assert "--help" in told and "bool" not in told
    assert "256 by default" in " ".join(semspec("generate", "--help").stdout.replace("│", "").split())
