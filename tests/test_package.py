import ast
import json
import re
import runpy
import shutil
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

import tokenformer_vit
from tokenformer_vit.models.checkpoints import save_model

ROOT = Path(__file__).parents[1]
# What Windows or macOS does not have.
NOT_EVERYWHERE = {"curses", "fcntl", "grp", "pty", "pwd", "resource", "termios", "triton", "tty"}
LINT_IMPORTS = shutil.which("lint-imports", path=Path(sys.executable).parent)


FACTS = """
import json, signal, sys
handler = signal.getsignal(signal.SIGINT)
import tokenformer_vit
modules = sorted(sys.modules)
same = signal.getsignal(signal.SIGINT) is handler
import timm
count = sum(p.numel() for p in timm.create_model("tokenformer_base").parameters())
print(json.dumps({"modules": modules, "same_handler": same, "parameters": count}))
"""
# Modules that an installation without extras does not have.
EXTRA_MODULES = (
    *("mmengine", "mmcv", "mmpretrain", "matplotlib", "pandas", "pyarrow", "sklearn"),
    *("transformers", "tokenizers", "datasets", "zstandard", "lm_eval", "accelerate"),
)
WITHOUT_EXTRAS = f"""
import importlib, pkgutil, sys
for name in {EXTRA_MODULES}:
    sys.modules[name] = None
for part in ("ops", "layers", "models", "growth", "benchmarking"):
    package = importlib.import_module("tokenformer_vit." + part)
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
for command in ("predict", "export", "grow", "costs", "benchmark", "prepare_data", "timm_script"):
    importlib.import_module("tokenformer_vit.cli." + command)
from tokenformer_vit import cli
cli.main(["predict", *sys.argv[1:]])
cli.main(["train", "digits_demo"])
"""


def python(code, *words):
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_import_is_silent_and_light_and_registers_the_models():
    run = python(FACTS)
    assert (run.returncode, run.stderr, run.stdout.count("\n")) == (0, "", 1)
    facts = json.loads(run.stdout)
    assert facts["same_handler"]  # of Ctrl-C, which belongs to the program
    assert facts["parameters"] == 114_759_400
    assert not set(facts["modules"]) & {"matplotlib", "mmcv", "mmengine", "mmpretrain"}
    assert "transformers" not in facts["modules"]


@pytest.mark.slow
def test_models_growth_and_prediction_need_no_extra(tmp_path):
    model = timm.create_model("tokenformer_tiny", depth=1, img_size=32, num_classes=2)
    save_model(model, tmp_path / "run", ["cat", "dog"])
    Image.new("RGB", (40, 40)).save(tmp_path / "x.png")
    checkpoint = tmp_path / "run" / "model.safetensors"
    run = python(WITHOUT_EXTRAS, tmp_path / "x.png", "--checkpoint", checkpoint, "--json")
    assert run.returncode == 2
    assert {guess["label"] for guess in json.loads(run.stdout)["top"]} == {"cat", "dog"}
    assert "pip install '.[train]'" in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.slow
def test_ops_need_torch_alone():
    run = python(
        "import importlib.machinery as m, sys, types;"
        "package = types.ModuleType('tokenformer_vit');"
        "package.__path__ = ['tokenformer_vit'];"
        "sys.modules['tokenformer_vit'] = package;"
        "import tokenformer_vit.ops;"
        "print('timm' in sys.modules, 'torchvision' in sys.modules)"
    )
    assert run.stdout.split() == ["False", "False"], run.stderr


def test_version_is_a_release_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+", tokenformer_vit.__version__)


@pytest.mark.skipif(not LINT_IMPORTS, reason="import-linter is not installed")
def test_imports_go_one_way():
    run = subprocess.run([LINT_IMPORTS], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def imports():
    """Yield the file, the top-level name and whether it runs at import, of every import."""
    for file in sorted((ROOT / "tokenformer_vit").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            else:
                continue
            for name in names:
                yield file.relative_to(ROOT), name.partition(".")[0], node in tree.body


def requirements():
    """Return what setup.py declares, by "" or the name of the extra."""
    with patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    declared = {"": setup.call_args.kwargs["install_requires"]}
    declared |= setup.call_args.kwargs["extras_require"]
    return {key: [Requirement(line) for line in lines] for key, lines in declared.items()}


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 does not know that scikit-learn has sklearn"
)
def test_every_import_is_declared():
    declared = {
        canonicalize_name(requirement.name)
        for extra, lines in requirements().items()
        if extra != "dev"  # users do not install it
        for requirement in lines
    }
    distributions = packages_distributions()
    ours = {"tokenformer_vit", "triton", *sys.stdlib_module_names}
    missing = {
        f"{file}: {name}"
        for file, name, _ in imports()
        if name not in ours
        and not declared & {canonicalize_name(d) for d in distributions.get(name, [name])}
    }
    assert not missing


def test_every_requirement_has_a_lower_bound():
    # Without one, `nox -s floor` would install the first release that there ever was.
    unbounded = [
        str(requirement)
        for lines in requirements().values()
        for requirement in lines
        if not any(bound.operator in (">=", "==") for bound in requirement.specifier)
    ]
    assert not unbounded


def test_the_package_imports_what_every_system_has():
    assert not {(file, name) for file, name, now in imports() if now and name in NOT_EVERYWHERE}


def test_data_that_is_not_here_skips_a_test_and_names_the_variable(
    shared_data, monkeypatch, tmp_path
):
    monkeypatch.setenv("TOKENFORMER_TEST_DATA", str(tmp_path))
    (tmp_path / "here").mkdir()
    assert shared_data("here") == tmp_path / "here"
    with pytest.raises(pytest.skip.Exception, match="TOKENFORMER_TEST_DATA"):
        shared_data("cifar10")
    monkeypatch.delenv("TOKENFORMER_TEST_DATA")
    with pytest.raises(pytest.skip.Exception, match="TOKENFORMER_TEST_DATA"):
        shared_data("here")
