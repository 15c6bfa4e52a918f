import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tokenformer_vit

ROOT = Path(__file__).parents[1]
LINT_IMPORTS = shutil.which("lint-imports", path=Path(sys.executable).parent)


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


def test_import_is_silent():
    run = python("import tokenformer_vit")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_import_needs_neither_openmmlab_nor_matplotlib():
    heavy = ("matplotlib", "mmcv", "mmengine", "mmpretrain", "transformers")
    run = python(
        "import sys, tokenformer_vit, tokenformer_vit.models;"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert run.stdout.strip() == "[]", run.stderr


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


def test_the_readme_line_counts_the_parameters():
    run = python(
        "import tokenformer_vit, timm;"
        "print(sum(p.numel() for p in timm.create_model('tokenformer_base').parameters()))"
    )
    assert run.stdout.strip() == "114759400", run.stderr


def test_version_is_a_release_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+", tokenformer_vit.__version__)


@pytest.mark.skipif(not LINT_IMPORTS, reason="import-linter is not installed")
def test_imports_go_one_way():
    run = subprocess.run([LINT_IMPORTS], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
