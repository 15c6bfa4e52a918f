"""Each session makes an environment and tests the package in it: ``nox -l`` lists them.

``UV_TORCH_BACKEND=cpu nox ...`` downloads PyTorch without CUDA.
"""

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["newest", "floor", "lint"]

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]  # [dev] has transformers, which needs 3.11
OPENMMLAB = ("mmengine", "mmcv", "mmpretrain")
# PyTorch before its newest minor release; raise it with each.
PREVIOUS = "torch<2.15"
IMPORT_ALL = """
import importlib, pkgutil, tokenformer_vit as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
"""


def run_tests(session: nox.Session, *versions: str) -> None:
    """Install the package as ``versions`` says and run the tests, or the words after ``--``."""
    session.install("--editable", ".[dev]", *versions)
    words = session.posargs or ["-n", "2", "--dist", "worksteal"]
    session.run("python", "-m", "pytest", *words, env={"OMP_WAIT_POLICY": "passive"})


@nox.session(python=PYTHONS)
def floor(session: nox.Session) -> None:
    """Run the tests with the lowest version of everything that setup.py allows."""
    run_tests(session, "--resolution", "lowest-direct")


@nox.session(python=PYTHONS)
def previous(session: nox.Session) -> None:
    """Run the tests with the PyTorch before the newest."""
    run_tests(session, PREVIOUS)


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """Run the tests with the newest release of everything."""
    run_tests(session)


@nox.session(python=["3.11", "3.13"])
def originals(session: nox.Session) -> None:
    """Run the tests of training on mmengine and mmpretrain themselves, before Python 3.14."""
    session.install("--editable", ".[dev]")
    session.run_install("uv", "pip", "uninstall", *(f"onedl-{name}" for name in OPENMMLAB))
    session.install("mmengine>=0.11.0rc3", "mmcv-lite>=2.2", "mmpretrain>=1.2")
    session.run("python", "-m", "pytest", "-n", "2", "tests/training", "tests/test_configs.py")


@nox.session
def clients(session: nox.Session) -> None:
    """Train language models with TRL and peft, evaluate them with lm-eval, quantise one."""
    # Not in [dev]: TRL needs Python 3.11.
    session.install("--editable", ".[dev]", "trl>=1.16", "peft>=0.21", "torchao>=0.18")
    session.run("python", "-m", "pytest", "-m", "slow", "tests/language/test_clients.py")
    session.run("python", "-m", "pytest", "tests/examples", "-k", "quantised")


@nox.session
def imports(session: nox.Session) -> None:
    """Import every module of the installed package, as users of other systems do."""
    session.install(".[train,language,evaluation]")
    session.cd(session.create_tmp())  # away from the checkout
    session.run("python", "-c", IMPORT_ALL)


@nox.session(python="3.10")
def wheel(session: nox.Session) -> None:
    """Train, test and predict in an empty folder, with the package as a user installs it."""
    session.install(".[train]")
    session.cd(session.create_tmp())  # away from the checkout
    weights = "work_dirs/digits_demo/model.safetensors"
    for command in (
        ("prepare-data", "--digits", "data/digits"),
        ("train", "configs/digits_demo.py", "--cfg-options", "train_cfg.max_epochs=4"),
        ("test", "configs/digits_demo.py", weights),
        ("predict", "data/digits/val/7", "--checkpoint", weights),
        ("predict", "data/digits/val/7", "--model", "tokenformer_cifar10_stem"),
        ("train", "data/digits", "--cfg-options", "train_cfg.max_epochs=4"),
    ):
        session.run("tokenformer-vit", *command)


@nox.session
def lint(session: nox.Session) -> None:
    """Run ``make lint``."""
    session.install("--editable", ".[dev]")
    session.run("make", "lint", f"BIN={session.bin}", "READY=", external=True)
