"""A wrong input ends a command in one line, a defect with its traceback, Ctrl-C with status 130."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tokenformer_vit
from tokenformer_vit import cli
from tokenformer_vit.cli.arguments import Parser, add_run
from tokenformer_vit.errors import InputError, one_line

ROOT = Path(__file__).parents[1]
CONFIG = """
import os, sys
rank = os.environ.get("LOCAL_RANK")
print(os.environ["OMP_WAIT_POLICY"], rank, sys.flags.utf8_mode, *sys.argv[-3:])
raise RuntimeError("enough")
"""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("xyz", "there is no command 'xyz'; see --help"),
        ("trian x", "there is no command 'trian'; did you mean train?"),
        ("predict nowhere.png --model x", "there is no file or folder nowhere.png"),
        ("costs --tokens 0", "--tokens: '0' is not a whole number of at least 1"),
        ("costs --tokens 1.5", "'1.5' is not a whole number"),
        ("costs --model-kwargs depth", "'depth' is not KEY=VALUE"),
        ("predict x.png --device cuda:99", "PyTorch sees no cuda:99 here; use cpu"),
        ("test", "required: [CONFIG] CHECKPOINT (see tokenformer-vit test --help)"),
        ("train exiting.py", "exiting.py ends the program: leave exit() out"),
        ("timm nowhere/x.py", "there is no script nowhere/x.py"),
        ("lm-eval", "'.[evaluation]' for language models"),
    ],
)
def test_a_wrong_input_is_one_line_and_status_2(words, line, capsys, monkeypatch, tmp_path):
    (tmp_path / "exiting.py").write_text("exit()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.delitem(sys.modules, "tokenformer_vit.cli.harness", raising=False)
    with pytest.raises(SystemExit, match="2"):
        cli.main(words.split())
    _, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert line in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "usage: tokenformer-vit "),
        ("costs --help", "usage: tokenformer-vit costs "),
        ("--version", f"{tokenformer_vit.__version__}\n"),
    ],
)
def test_help_and_version(words, said, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(words.split())
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("/data/run (1)", "/data/run (1)"),
        ("/x/a,b", "/x/a,b"),
        ("[1, 2]", [1, 2]),
        ("{'a': (1,)}", {"a": (1,)}),
        ("1e-3", 1e-3),
        ("None", None),
        ("true", True),
        ("a=b", "a=b"),
    ],
)
def test_options_are_literals_or_texts(text, value):
    parser = Parser()
    add_run(parser)
    words = ["--cfg-options", "first=1", f"key={text}", "--cfg-options", "last='2'"]
    found = parser.parse_args(words).cfg_options
    assert found == [("first", 1), ("key", value), ("last", "2")]
    with pytest.raises(InputError, match=r"key=\[a,b\] is no literal of Python: quote texts"):
        parser.parse_args(["--cfg-options", "key=[a,b]"])


def test_a_worker_s_error_is_its_own_message_and_a_defect_keeps_its_traceback(capsys):
    def main(argv):
        raise InputError("Traceback ...\ntokenformer_vit.errors.InputError: no image a.png\n")

    with pytest.raises(SystemExit, match="2"):
        cli.run(main, [])
    assert capsys.readouterr().err == "error: no image a.png\n"
    with pytest.raises(ZeroDivisionError):
        cli.run(lambda _: 1 / 0, [])
    assert one_line(ValueError("a\n b" * 200)) == f"{('a b' * 200)[:300]}..."


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no exec")
@pytest.mark.parametrize("way", ["script", "torchrun", "tools"])
def test_training_has_openmp_threads_that_do_not_spin(way, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "tokenformer-vit"
    script.write_text("import sys; from tokenformer_vit.__main__ import main; sys.exit(main())")
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=1", "-m", "tokenformer_vit")
    program = {"script": ["-Xutf8", script, "train"], "tools": ["-Xutf8", ROOT / "tools/train.py"]}
    line = [sys.executable, *program.get(way, (*torchrun, "train")), "config.py", "--seed", "7"]
    (tmp_path / "config.py").write_text(CONFIG)
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    rank, utf8 = ("0", 0) if way == "torchrun" else (None, 1)
    assert done.stdout == f"passive {rank} {utf8} config.py --seed 7\n", done.stderr


@pytest.mark.parametrize(("interrupt", "status"), [(False, 1), (True, 130)])
def test_a_command_prints_in_ascii_and_stops_without_a_word(interrupt, status, in_another_process):
    def work():
        reader, writer = os.pipe()
        sys.stdout = os.fdopen(writer, "w", encoding="ascii")

        def main(argv):
            print("é", flush=True)
            assert os.read(reader, 9) == b"\\xe9\n"
            os.close(reader)
            if interrupt:
                signal.raise_signal(signal.SIGINT)
            print("nobody reads this")

        try:
            cli.run(main, [])
        finally:
            sys.stdout.close()  # as Python does at its end

    done = in_another_process(work)
    assert (done.status, done.output) == (status, "")
