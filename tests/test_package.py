"""The package is light to import, declares what it imports, and needs no extra for its core."""

import ast
import json
import re
import runpy
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from unittest.mock import patch

import pytest
import timm
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

from tokenformer_vit.models.checkpoints import save_model

ROOT = Path(__file__).parents[1]
# What Windows or macOS does not have.
NOT_EVERYWHERE = {"curses", "fcntl", "grp", "pty", "pwd", "resource", "termios", "triton", "tty"}
FACTS = """
import contextlib, io, json, os, signal, sys
import timm, torch._dynamo
def state():
    return (
        signal.getsignal(signal.SIGINT),  # Ctrl-C belongs to the program
        {**os.environ},
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch._dynamo.config.get_config_copy(),
    )
before = state()
import tokenformer_vit
same = state() == before
from tokenformer_vit import cli
told = io.StringIO()
for name in ("train", "test"):
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        cli.main([name, "--help"])
assert told.getvalue().count("usage: ") == 2
modules = sorted(sys.modules)
count = sum(p.numel() for p in timm.create_model("tokenformer_base").parameters())
print(json.dumps([modules, same, count]))
"""
WITHOUT_EXTRAS = """
import importlib, pkgutil, sys
for name in (
    *("mmengine", "mmcv", "mmpretrain", "matplotlib", "pandas", "pyarrow", "sklearn", "cv2"),
    *("transformers", "tokenizers", "datasets", "zstandard", "lm_eval", "accelerate"),
):
    sys.modules[name] = None
for part in ("ops", "layers", "models", "growth", "benchmarking"):
    package = importlib.import_module("tokenformer_vit." + part)
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
for command in ("predict", "export", "grow", "costs", "benchmark", "timm_script"):
    importlib.import_module("tokenformer_vit.cli." + command)
from tokenformer_vit import cli
cli.main(["predict", *sys.argv[1:]])
cli.main(["train", "digits_demo"])
"""
OPS_ALONE = """
import sys, types
package = types.ModuleType("tokenformer_vit")
package.__path__ = ["tokenformer_vit"]
sys.modules["tokenformer_vit"] = package
import tokenformer_vit.ops
print("timm" in sys.modules, "torchvision" in sys.modules)
"""


def python(code, *words):
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_import_is_silent_and_light_changes_nothing_and_registers_the_models(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    run = python(FACTS)
    assert (run.returncode, run.stderr, run.stdout.count("\n")) == (0, "", 1)
    modules, same, parameters = json.loads(run.stdout)
    assert (same, parameters) == (True, 114_759_400)
    assert not {*modules} & {"matplotlib", "mmcv", "mmengine", "mmpretrain", "transformers"}


@pytest.mark.slow
def test_models_growth_and_prediction_need_no_extra(tmp_path):
    model = timm.create_model("tokenformer_tiny", depth=1, img_size=32, num_classes=2)
    save_model(model, tmp_path / "run", ["cat", "dog"])
    Image.new("RGB", (40, 40)).save(tmp_path / "x.png")
    run = python(WITHOUT_EXTRAS, tmp_path / "x.png", "--checkpoint", tmp_path / "run", "--json")
    assert run.returncode == 2
    assert {guess["label"] for guess in json.loads(run.stdout)["top"]} == {"cat", "dog"}
    assert re.fullmatch(r"error: .*mm\w+.* run pip install '\.\[train\]'.*\n", run.stderr)


@pytest.mark.slow
def test_ops_need_torch_alone():
    run = python(OPS_ALONE)
    assert run.stdout.split() == ["False", "False"], run.stderr


def imports():
    """Yield the file, the top-level name and whether it runs at import, of every import."""
    for file in sorted((ROOT / "tokenformer_vit").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            for name in names:
                yield file.relative_to(ROOT), name.partition(".")[0], node in tree.body


def requirements():
    """Return what setup.py declares, by "" or the name of the extra."""
    with patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    declared = {"": setup.call_args.kwargs["install_requires"]}
    declared |= setup.call_args.kwargs["extras_require"]
    return {key: [Requirement(line) for line in lines] for key, lines in declared.items()}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 finds no scikit-learn")
def test_every_import_is_declared_and_every_system_has_it():
    users = [lines for extra, lines in requirements().items() if extra != "dev"]
    declared = {canonicalize_name(each.name) for lines in users for each in lines}
    known = {"tokenformer_vit", "triton", *sys.stdlib_module_names}  # torch brings triton
    distributions = packages_distributions()
    for file, name, now in imports():
        owners = {canonicalize_name(each) for each in distributions.get(name, [name])}
        assert name in known or declared & owners, f"{file}: {name}"
        assert not now or name not in NOT_EVERYWHERE, f"{file}: {name}"


def test_every_requirement_has_a_lower_bound():
    # Without one, `nox -s floor` would install the first release that there ever was.
    for requirement in (each for lines in requirements().values() for each in lines):
        assert {bound.operator for bound in requirement.specifier} & {">=", "=="}, requirement
