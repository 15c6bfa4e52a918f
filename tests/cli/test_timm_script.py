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


@pytest.mark.slow
def test_script_sees_our_models_its_arguments_and_its_neighbours(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text("VALUE = 7\n")
    (folder / "script.py").write_text(SCRIPT)
    # --help among the arguments must reach the script, not the launcher.
    words = ["data dir", "--model", "x", "--help", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "tokenformer_vit", "timm", str(folder / "script.py"), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout) == {
        "name": "__main__",
        "argv": [str(folder / "script.py"), *words],
        "beside": 7,
        "listed": True,
        "classes": 3,
    }


def test_an_error_of_the_script_has_its_traceback(tmp_path, command, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script's folder comes first in it
    (tmp_path / "script.py").write_text("raise RuntimeError('what')\n")
    with pytest.raises(RuntimeError, match="what"):
        command("timm_script", tmp_path / "script.py")


@pytest.mark.parametrize(
    ("words", "said"),
    [(["nowhere/x.py", "--model", "x"], "nowhere/x.py"), ([], "SCRIPT")],
)
def test_missing_script_is_one_line_and_status_2(words, said, command):
    done = command("timm_script", *words)
    assert done.status == 2
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert said in done.err
