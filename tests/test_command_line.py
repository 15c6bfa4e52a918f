"""Every command ends in one line: after an error, a defect, and Ctrl-C at any moment."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tqdm import tqdm

from tokenformer_vit.command_line import (
    printable,
    run_tool,
    typed_command,
    whole_number,
)
from tokenformer_vit.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


def ends(main, capsys):
    with pytest.raises(SystemExit) as raised:
        run_tool(main)
    return raised.value.code, capsys.readouterr().err


def test_a_defect_keeps_its_traceback():
    def main():
        raise RuntimeError("several\nlines")

    with pytest.raises(RuntimeError, match="several"):
        run_tool(main)


def test_a_closed_standard_error_is_no_obstacle(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)  # as Python has it after 2>&-
    run_tool(lambda: print(*tqdm(range(3), disable=None)))
    sys.stderr.close()


def test_names_from_files_do_nothing_to_a_terminal(capsys):
    def main():
        raise InputError("there is no \x1b[31mfile\x07\nof \u202eeman")

    assert ends(main, capsys) == (1, "error: there is no \\x1b[31mfile\\x07\\nof \\u202eeman\n")
    assert printable("Ünïcode 漢字 Θ\t") == "Ünïcode 漢字 Θ\\t"


def test_an_error_in_a_worker_is_its_own_message(capsys):
    def main():
        raise InputError(
            "Caught InputError in DataLoader worker process 0.\nOriginal Traceback (most recent "
            "call last):\n  File ...\ntokenformer_vit.errors.InputError: cannot read image a.png\n"
        )

    assert ends(main, capsys) == (1, "error: cannot read image a.png\n")


@pytest.mark.parametrize("text", ["-1", "1.5", "", "９" * 30, "9" * 5000, "x\x1b"])
def test_what_is_no_whole_number(text):
    with pytest.raises(Exception, match="is not a whole number of at least 1 and at most 7"):
        whole_number(1, 7)(text)
    assert whole_number(1, 7)("7") == 7


def test_a_missing_package_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mmengine.runner", None)

    def main():
        import mmengine.runner  # noqa: F401

    line = "error: mmengine is not installed: in the clone, run pip install '.[train]'\n"
    assert ends(main, capsys) == (1, line)


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (["tokenformer-vit train", "a b.py"], "tokenformer-vit train 'a b.py'"),
        (["tools/train.py", "x.py", "--amp"], "python tools/train.py x.py --amp"),
    ],
)
def test_records_name_the_command_as_it_is_typed(argv, typed, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    assert typed_command() == typed


INTERRUPTIBLE = """
import os, signal, sys, time
sys.modules["__main__"].__file__ = "/bin/tokenformer-vit"  # which does not import PyTorch
from tokenformer_vit.command_line import run_tool
def main():
    try:
        print("ready", flush=True)
        time.sleep(30)
    finally:
        print("tidying", flush=True)
        time.sleep({seconds})
run_tool(main)
"""


@posix
@pytest.mark.parametrize("second", [False, True])
def test_ctrl_c_once_and_twice(second):
    code = INTERRUPTIBLE.format(seconds=30 if second else 0)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "tidying\n"
        if second:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "interrupted; finished results are kept\n")


@pytest.mark.parametrize("caught", [Exception, InputError])
def test_ctrl_c_that_a_library_turns_into_its_own_error(caught, capsys):
    def main():
        try:
            try:
                raise KeyboardInterrupt
            except BaseException:
                raise SyntaxError("cannot format the config")  # noqa: B904  # as mmengine does
        except SyntaxError as error:
            raise caught("the config cannot be used") from error

    before = signal.getsignal(signal.SIGINT)
    try:
        assert ends(main, capsys) == (130, "interrupted; finished results are kept\n")
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_while_a_command_ends_after_ctrl_c_is_said(capsys):
    def main():
        try:
            raise KeyboardInterrupt
        finally:
            raise InputError("cannot write a.pth") from OSError(errno.ENOSPC, "full")

    before = signal.getsignal(signal.SIGINT)
    try:
        assert ends(main, capsys) == (1, "error: cannot write a.pth\n")
    finally:
        signal.signal(signal.SIGINT, before)


IN_A_CALLBACK = """
import os, signal, sys
sys.modules["__main__"].__file__ = "/bin/tokenformer-vit"  # which does not import PyTorch
from tokenformer_vit.command_line import run_tool
class Forgotten:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        print("in the callback", flush=True)
def main():
    Forgotten()
    print("went on", flush=True)
run_tool(main)
"""


@posix
def test_ctrl_c_in_a_callback_of_python_ends_the_command():
    code = [sys.executable, "-c", IN_A_CALLBACK]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted; finished results are kept\n"


PRINTING = """
import sys
sys.modules["__main__"].__file__ = "/bin/tokenformer-vit"  # which does not import PyTorch
from tokenformer_vit.command_line import run_tool
def main():
    print("first", flush=True)
    sys.stdin.readline()
    print("second", flush=True)
run_tool(main)
"""


@posix
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_seen_enough_is_no_error(unbuffered):
    with subprocess.Popen(
        [sys.executable, "-c", PRINTING],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        _, err = process.communicate("\n", timeout=60)
    assert (process.returncode, err) == (1, "")


@posix
@pytest.mark.parametrize("tool", ["test.py", "train.py"])
def test_ctrl_c_while_a_command_imports(tool, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", str(ROOT / "tools" / tool), "--help"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        # Python reports each module on stderr; this is one of the first that PyTorch imports.
        for line in process.stderr:
            if "torch" in line:
                break
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    words = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, words) == (130, ["interrupted; finished results are kept"])
