"""The launcher runs a script as python would, and our models exist in it."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import beside
import timm
model = timm.create_model("tokenformer_tiny", depth=1, img_size=32, num_classes=3)
print(json.dumps({
    "name": __name__,
    "argv": sys.argv,
    "beside": beside.VALUE,
    "listed": "tokenformer_tiny" in timm.list_models("tokenformer*"),
    "classes": model.num_classes,
}))
sys.exit(int(sys.argv[-1]))
"""


def launch(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "tokenformer_vit.cli.timm_script", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def test_script_sees_our_models_its_arguments_and_its_neighbours(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text("VALUE = 7\n")
    (folder / "script.py").write_text(SCRIPT)
    # --help among the arguments must reach the script, not the launcher.
    done = launch(folder / "script.py", "data dir", "--model", "x", "--help", "3", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout) == {
        "name": "__main__",
        "argv": [str(folder / "script.py"), "data dir", "--model", "x", "--help", "3"],
        "beside": 7,
        "listed": True,
        "classes": 3,
    }


@pytest.mark.parametrize("arguments", [["nowhere/validate.py", "--model", "x"], []])
def test_missing_script_is_one_line_and_status_2(arguments, monkeypatch, capsys):
    from tokenformer_vit.cli.timm_script import main

    monkeypatch.setattr(sys, "argv", ["timm_script", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: ")
    if arguments:
        assert "nowhere/validate.py" in error


def test_help_names_the_usage(capsys):
    from tokenformer_vit.cli.timm_script import main

    main(["--help"])
    assert "python -m tokenformer_vit.cli.timm_script SCRIPT" in capsys.readouterr().out
