"""`benchmark --all`, from making a folder ready to rendering the tables, on a CPU."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tokenformer_vit.benchmarking import kit
from tokenformer_vit.benchmarking.stages import STAGES

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
ALL = ("-m", "tokenformer_vit", "benchmark", "--all")


@pytest.fixture
def wheels(tmp_path):
    """Pack installed distributions into wheels again: what pip finds without a network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for each in kit.wanted_wheels():
        name = each.partition("==")[0]
        found = distribution(name)
        tags = re.findall("^Tag: (.+)$", found.read_text("WHEEL") or "", re.MULTILINE)
        python, abi, platform = tags[0].split("-")
        # Of several tags, a name has those that differ, joined by dots.
        python = ".".join(dict.fromkeys(tag.split("-")[0] for tag in tags))
        stem = f"{name.replace('-', '_')}-{found.version}-{python}-{abi}-{platform}"
        with zipfile.ZipFile(folder / f"{stem}.whl", "w") as wheel:
            for file in found.files or ():
                if not file.parts[0].startswith("..") and file.suffix != ".pyc":
                    wheel.write(file.locate(), file.as_posix())
    return folder


@pytest.fixture
def clone(tmp_path):
    """The files of this repository as git knows them, in a repository of their own."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is no git repository")
    root = tmp_path / "clone"
    for name in filter(None, done.stdout.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return root


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="run.sh is a script of the shell")
def test_a_machine_without_network_from_the_first_command_to_the_tables(wheels, clone, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def run(*words):
        done = subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    prepared = run(sys.executable, *ALL, "--prepare", "build/gpu_kit", "--python", PYTHON)
    assert float(re.search(r"([\d.]+) MiB  together, at most 64", prepared)[1]) < 64
    shutil.rmtree(clone / ".git")  # only files travel
    run_there = ("sh", "build/gpu_kit/run.sh", "--minutes", "90", "--device", "cpu")
    summary = run(*run_there)
    results = clone / "build/gpu_kit/results/cpu"
    state = json.loads((results / "stages.json").read_text())
    names = [stage.name for stage in STAGES["cpu"]]
    assert {name: state["stages"][name]["status"] for name in names} == dict.fromkeys(names, "done")
    assert summary.count("| done |") == len(names)
    site = clone / "build/gpu_kit/site"
    assert {path.name for path in site.iterdir()} >= {"mmengine", "mmpretrain", "pydantic", "timm"}
    again = run(*run_there)
    assert again.count("recorded already") == len(names)

    out = run(sys.executable, *ALL, "--collect", f"{results}.zip")
    assert re.search(
        r"new +ablations/results/softmax_digits_demo_in_memory/gelu_l2_seed0.json", out
    )
    hardware = state["hardware"]
    page = (clone / "tokenformer_vit/benchmarking/README.md").read_text()
    row = (
        rf"\[`150m`, 16 tokens, {re.escape(hardware)}\]\(\S+\), decode, float32, batch 1 \| [\d.,]+"
    )
    assert re.search(row, page)
    for rows in (
        rf"\[`imagenet_base_matched`\]\(\S+5_steps\S+\), small tensors, {re.escape(hardware)}",
        rf"\[`tokenformer_tiny`\]\(\S+\), {re.escape(hardware)}, train, float32, batch 2, auto",
    ):
        assert re.search(rows, page)
    tables = (clone / "ablations/TABLES.md").read_text()
    assert "[records](results/softmax_digits_demo_in_memory)" in tables
    assert (clone / "ablations/results/softmax_digits_demo_in_memory.png").exists()
    charts = clone / "tokenformer_vit/benchmarking/results"
    assert (charts / "speed_lm_150m_16_cpu.png").exists()


def test_records_without_tables_are_taken_back(command, clone, monkeypatch):
    from tokenformer_vit.cli import benchmark_all

    monkeypatch.setattr(benchmark_all, "ROOT", clone)
    shutil.rmtree(clone / "ablations/results")
    (clone / "ablations/tables.py").write_text("import sys\nsys.exit('error: n differs')\n")
    name = "configs/results/digits_demo.json"
    record = json.loads((clone / name).read_text())
    folder = clone / "work_dirs/all/cpu"
    new = folder / "records" / name
    new.parent.mkdir(parents=True)
    new.write_text(json.dumps({**record, "seconds": 1.5}))
    other = new.with_name("another.json")
    other.write_text(json.dumps(record))
    done = command("benchmark", "--all", "--collect", folder)
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert "(n differs)" in done.err
    assert "the records in the repository are as before" in done.err
    assert json.loads((clone / name).read_text()) == record
    assert not (clone / "configs/results/another.json").exists()


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (("--collect", "nowhere"), "nowhere is no result of .* give its folder or archive"),
        (("--prepare", "/nowhere"), "choose a folder there"),
        (("--device", "cuda"), "use --device cpu"),
        (("--stages", "data", "theta-2"), "--stages theta-2 needs a GPU; choose from tests, speed"),
    ],
)
def test_mistakes_are_one_line(command, words, pattern, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = command("benchmark", "--all", *words)
    assert (done.status, done.output.count("\n")) == (1, 1)
    assert re.search(pattern, done.output)


def test_an_unknown_stage_is_named(command):
    done = command("benchmark", "--all", "--stages", "speed", "sped")
    assert done.status == 2
    assert "'sped'" in done.err
