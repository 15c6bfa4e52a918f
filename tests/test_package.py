import ast
import re
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from unittest.mock import patch

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tokenformer_vit

ROOT = Path(__file__).parents[1]
# What Windows or macOS does not have.
NOT_EVERYWHERE = {"curses", "fcntl", "grp", "pty", "pwd", "resource", "termios", "triton", "tty"}
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
    # torch brings triton, and pydantic the pydantic_core that fits it.
    ours = {"tokenformer_vit", "triton", "pydantic_core", *sys.stdlib_module_names}
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
