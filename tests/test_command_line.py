"""A wrong input ends a command in one line, a defect with its traceback, Ctrl-C with status 130."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tokenformer_vit
from tokenformer_vit import cli
from tokenformer_vit.cli.arguments import Parser, device, key_value, whole_number
from tokenformer_vit.errors import InputError, one_line

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys, tokenformer_vit
from tokenformer_vit import cli
assert "tokenformer_vit.models" in sys.modules
def main(argv):
    print("é", flush=True)
    sys.stdin.readline()
    {end}
cli.run(main)
"""


def ends(capsys, main, argv=()):
    with pytest.raises(SystemExit) as raised:
        cli.run(main, argv)
    return raised.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian", "x"], "there is no command 'trian'; did you mean train?"),
        (["predict", "nowhere.png", "--model", "x"], "there is no file or folder nowhere.png"),
        (["costs", "--tokens", "0"], "--tokens: '0' is not a whole number of at least 1"),
        (["timm", "nowhere/x.py"], "there is no script nowhere/x.py"),
    ],
)
def test_a_wrong_input_is_one_line_and_status_2(words, line, capsys):
    status, err = ends(capsys, lambda _: cli.main(words))
    assert status == 2
    assert err.startswith("error: ")
    assert line in err
    assert err.count("\n") == 1


def test_help_and_version(capsys):
    ends(capsys, lambda _: cli.main([]))
    with pytest.raises(SystemExit):
        cli.main(["costs", "--help"])
    assert capsys.readouterr().out.startswith("usage: tokenformer-vit costs ")
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"tokenformer-vit {tokenformer_vit.__version__}\n"
    assert all(find_spec(f"tokenformer_vit.cli.{module}") for module, _ in cli.COMMANDS.values())


def test_a_missing_package_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mmengine.dist", None)
    monkeypatch.delitem(sys.modules, "tokenformer_vit.cli.test", raising=False)
    status, err = ends(capsys, lambda _: cli.main(["test", "x"]))
    assert status == 2
    assert "pip install '.[train]'" in err


def test_a_worker_s_error_is_its_own_message_and_a_defect_keeps_its_traceback(capsys):
    def main(argv):
        raise InputError("Traceback ...\ntokenformer_vit.errors.InputError: no image a.png\n")

    assert ends(capsys, main) == (2, "error: no image a.png\n")
    with pytest.raises(ZeroDivisionError):
        cli.run(lambda _: 1 / 0)
    assert one_line(ValueError("a\n b" * 200)) == ("a b" * 200)[:300] + "..."


@pytest.mark.parametrize(
    ("end", "interrupt", "status"),
    [("print('x')", False, 1), ("print('x')", True, 130)],  # nobody reads x
)
def test_a_script_in_tools_knows_the_models_prints_in_ascii_and_can_be_stopped(
    end, interrupt, status, tmp_path
):
    path = tmp_path / "tools" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT.format(end=end))
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    how = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, path], text=True, env=how, **pipes) as process:
        assert process.stdout.readline() == "\\xe9\n"
        if interrupt:
            process.send_signal(signal.SIGINT)
        process.stdout.close()
        _, err = process.communicate("\n", timeout=60)
    assert (process.returncode, err) == (status, "")


def test_arguments():
    parser = Parser()
    for name, kind in (("--n", whole_number(1)), ("--device", device), ("--pair", key_value)):
        parser.add_argument(name, type=kind)
    assert vars(parser.parse_args(["--n", "7", "--pair", "a=1"]))["n"] == 7
    for wrong in (["--n", "-1"], ["--n", "1.5"], ["--pair", "a"]):
        with pytest.raises(InputError, match=f"{wrong[1]}.* is not"):
            parser.parse_args(wrong)
