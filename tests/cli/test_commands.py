"""`tokenformer-vit COMMAND`: one door to every command, which opens at once."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tokenformer_vit
from tokenformer_vit import cli

ROOT = Path(__file__).resolve().parents[2]


def tokenformer(monkeypatch, capsys, *words):
    """Run `tokenformer-vit` within this process; return its status, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["tokenformer-vit", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, *capsys.readouterr()


def test_help_lists_the_commands_without_importing_pytorch():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tokenformer_vit", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    for name, command in cli.COMMANDS.items():
        assert f"  {name:<14}{command.help}\n" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & {"torch", "numpy", "timm"}


def test_no_command_is_help_and_version_is_the_version(monkeypatch, capsys):
    assert tokenformer(monkeypatch, capsys)[1] == tokenformer(monkeypatch, capsys, "--help")[1]
    status, out, _ = tokenformer(monkeypatch, capsys, "--version")
    assert (status, out) == (0, f"tokenformer-vit {tokenformer_vit.__version__}\n")


@pytest.mark.parametrize(("word", "close"), [("trian", "train"), ("prepare", "prepare-data")])
def test_an_unknown_command_names_the_close_ones(word, close, monkeypatch, capsys):
    status, out, err = tokenformer(monkeypatch, capsys, word, "x")
    assert (status, out) == (2, "")
    assert f"'{word}'" in err
    assert close in err
    assert err.count("\n") == 1


def test_usage_lines_name_the_command(monkeypatch, capsys):
    assert tokenformer(monkeypatch, capsys, "predict", "--help")[1].startswith(
        "usage: tokenformer-vit predict "
    )
    monkeypatch.setattr(sys, "argv", ["tools/test.py", "--help"])
    with pytest.raises(SystemExit):
        cli.run("test")
    assert capsys.readouterr().out.startswith("usage: test.py ")


def test_errors_have_the_status_of_the_command(monkeypatch, capsys):
    status, _, err = tokenformer(monkeypatch, capsys, "predict", "nowhere.png", "--model", "x")
    assert (status, err) == (2, "error: there is no file or folder nowhere.png\n")


def test_every_command_has_its_module():
    modules = {command.module for command in cli.COMMANDS.values()}
    assert all(find_spec(f"tokenformer_vit.cli.{module}") for module in modules)
    for name in ("train", "test"):
        assert f'run("{name}")' in (ROOT / "tools" / f"{name}.py").read_text()
