"""The benchmark measures what it says, keeps what it measured, and needs torch and timm alone."""

import json
import math
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from tokenformer_vit.benchmarking import measures, variants
from tokenformer_vit.benchmarking.images import MATCHED, Images
from tokenformer_vit.benchmarking.variants import BenchmarkVariant, Group, Setting
from tokenformer_vit.cli import benchmark
from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.records import environment

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "benchmark.py"
CPU = torch.device("cpu")
TINY = ["--model", "tokenformer_tiny", "--baseline", "vit_tiny_patch16_224"]
TINY += ["--depth", "1", "--img-size", "32", "--device", "cpu"]
IMAGES = Images("tokenformer_tiny", "vit_tiny_patch16_224", 32, 1)
SETTING = Setting(IMAGES, CPU, 0, 3)
# What a machine that only measures may lack.
ABSENT = ("matplotlib", "mmcv", "mmengine", "mmpretrain", "rich", "transformers")


def run_without(absent, *arguments):
    """Run the tool where some packages cannot be imported."""
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({absent})); "
        f"sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    words = [str(word) for word in (TOOL, *arguments)]
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)


def check_arithmetic(record, unit="image"):
    """Compute the figures of a record again, with NumPy, from the raw seconds."""
    for group in record["groups"]:
        items, rows = group["items"], {row["variant"]: row for row in group["variants"]}
        ceiling = record["ceilings"][group["precision"]]
        flops = record[f"flops_per_{unit}"]["model"][group["mode"]]
        seconds = {
            "matmul": items * flops / ceiling["matmul_tflops"] / 1e12,
            "copy": group["minimal_bytes"] / ceiling["copy_gb_per_s"] / 1e9,
        }
        assert group["bound_by"] == max(seconds, key=seconds.get)
        bound = group[f"bound_{unit}s_per_s"]
        assert bound == pytest.approx(items / max(seconds.values()), rel=1e-4)
        against = "baseline eager" if group["mode"] == "decode" else "baseline compiled"
        for row in rows.values():
            assert len(row["seconds"]) == record["n"]
            points = np.percentile(row["seconds"], (20, 50, 80))
            assert [row[f"seconds_p{p}"] for p in (20, 50, 80)] == pytest.approx(points, rel=1e-4)
            assert row[f"{unit}s_per_s"] == pytest.approx(items / points[1], rel=1e-4)
            ours = "baseline" if row["implementation"] == "baseline" else "model"
            rate = record[f"flops_per_{unit}"][ours][group["mode"]] * items / points[1]
            assert row["mfu"] == pytest.approx(rate / ceiling["matmul_tflops"] / 1e12, rel=1e-4)
            assert ("ratio_p50" in row) == (against in rows)
            if against in rows:
                ratios = np.divide(rows[against]["seconds"], row["seconds"])
                points = np.percentile(ratios, (20, 50, 80))
                assert [row[f"ratio_p{p}"] for p in (20, 50, 80)] == pytest.approx(points, rel=1e-4)


@pytest.mark.slow
def test_where_only_torch_and_timm_are_installed(tmp_path):
    path = tmp_path / "deep" / "speed.json"
    run = run_without(
        ABSENT,
        *(*TINY, "--eager", "--precisions", "autocast", "--batch-sizes", 2, "--rounds", 3),
        *("--threads", 1, "--out", path),
    )
    assert run.returncode == 0, run.stderr
    last = run.stdout.splitlines()[-1]
    assert last == (
        f"Done. Record: {path}; no chart: pip install matplotlib, then "
        f"tokenformer-vit benchmark --draw {path}"
    )
    text = path.read_text()
    record = json.loads(text)
    assert "--precisions autocast" in record["command"]
    assert record["hardware"].startswith(f"{os.cpu_count()} CPU cores")
    assert record["cpu"].endswith(f", {torch.backends.cpu.get_cpu_capability()}")
    assert record["versions"].keys() >= {"python", "torch", "timm"}
    assert not record["versions"].keys() & {"mmengine", "mmpretrain"}
    assert (record["device"], record["threads"], record["n"]) == ("cpu", 1, 3)
    assert (record["model"], record["img_size"], record["depth"]) == ("tokenformer_tiny", 32, 1)
    model = timm.create_model("tokenformer_tiny", img_size=32, depth=1)
    assert record["parameters"]["model"] == sum(p.numel() for p in model.parameters())
    assert [group["mode"] for group in record["groups"]] == ["train", "infer"]
    for group in record["groups"]:
        assert (group["precision"], group["dtype"]) == ("autocast", "bfloat16 autocast")
        assert group["input_shape"] == [2, 3, 32, 32]
        assert [row["variant"] for row in group["variants"]] == [
            *("baseline eager", "released eager", "reference eager", "auto eager")
        ]
        for row in group["variants"]:
            assert (row["saved_mb_per_image"] is None) == (group["mode"] == "infer")
            assert f"{row['images_per_s']:.2f}" in run.stdout
    train = {row["implementation"]: row for row in record["groups"][0]["variants"]}
    saved = {name: row["saved_mb_per_image"] for name, row in train.items()}
    assert saved["auto"] < saved["released"] < saved["reference"]
    if sys.platform == "linux":  # four bytes each of parameter, two moments and gradient
        assert train["auto"]["peak_mib"] > 16 * record["parameters"]["model"] / 2**20
    check_arithmetic(record)
    assert not re.search(r"^[\s\d.,e-]+$", text, re.MULTILINE)  # lists stand on one line each


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurement by random seconds; return the measured groups."""
    groups = []

    def measure_group(setting, group, variants, tick):
        if group.batch_size == 13:
            raise KeyboardInterrupt
        groups.append(group)
        return {
            **group._asdict(),
            "dtype": group.precision,
            "input_shape": setting.subject.shape(group),
            "items": setting.subject.items(group),
            "variants": [
                {
                    "variant": variant.name,
                    "implementation": variant.implementation,
                    "compiled": variant.compiled,
                    "seconds": (0.1 + torch.rand(setting.rounds)).tolist(),
                    f"saved_mb_per_{setting.subject.unit}": 1.0 if group.mode == "train" else None,
                    "peak_mib": 9.0,
                }
                for variant in variants
            ],
        }

    monkeypatch.setattr(benchmark, "measure_group", measure_group)
    monkeypatch.setattr(measures, "matmul_rate", lambda device, dtype: 2e11)
    monkeypatch.setattr(measures, "copy_rate", lambda device: 3e10)
    return groups


def run(path, *arguments):
    benchmark.main([*TINY, "--out", str(path), *map(str, arguments)])
    return json.loads(path.read_text())


def test_an_interrupted_run_goes_on(measured, tmp_path, capsys):
    path, words = tmp_path / "speed.json", ("--precisions", "float32", "--modes", "train")
    with pytest.raises(KeyboardInterrupt):
        run(path, *words, "--batch-sizes", 1, 13, "--backends", "auto")
    first = json.loads(path.read_text())
    check_arithmetic(first)
    measured.clear()
    both = run(path, *words, "--batch-sizes", 1, 2, "--backends", "auto", "--resume")
    assert measured == [Group("train", "float32", 2)]
    assert both["groups"][0] == first["groups"][0]
    check_arithmetic(both)
    # A group that lacks a variant is measured again with those it has, and none is there twice.
    measured.clear()
    more = run(path, *words, "--batch-sizes", 1, "--resume", "--backends", "reference")
    assert measured == [Group("train", "float32", 1)]
    assert [group["batch_size"] for group in more["groups"]] == [2, 1]
    names = [row["variant"] for row in more["groups"][1]["variants"] if not row["compiled"]]
    assert names[:2] == ["baseline eager", "released eager"]
    assert sorted(names[2:]) == ["auto eager", "reference eager"]
    # Without --resume the record is a new one.
    again = run(path, *words, "--batch-sizes", 3)
    assert [group["batch_size"] for group in again["groups"]] == [3]
    assert f"Record: {path}; chart: {path.with_suffix('.png')}" in capsys.readouterr().out


def test_another_run_is_not_gone_on_with(measured, tmp_path):
    path = tmp_path / "speed.json"
    run(path, "--quick", "--rounds", 2)
    with pytest.raises(InputError, match=r"n is 2 in .*speed.json, but now it is 3: give another"):
        run(path, "--quick", "--rounds", 3, "--resume")
    path.write_text("[]")
    with pytest.raises(InputError, match=r"speed.json is not a record"):
        run(path, "--resume")


def test_later_and_higher_ceilings_count_for_all_groups(measured, tmp_path, monkeypatch):
    rates = iter((1e11, 4e11, 2e11, 2e11))
    monkeypatch.setattr(measures, "matmul_rate", lambda device, dtype: next(rates))
    record = run(tmp_path / "speed.json", "--precisions", "float32", "--batch-sizes", 1, 2)
    assert record["ceilings"]["float32"]["matmul_tflops"] == 0.4
    check_arithmetic(record)


def test_quick_and_chart(measured, tmp_path, capsys):
    path = tmp_path / "speed.json"
    record = run(path, "--quick", "--rounds", 4)
    assert (record["n"], record["depth"]) == (4, 1)  # what is given counts
    assert {(g["precision"], g["batch_size"]) for g in record["groups"]} == {("float32", 2)}
    assert [row["variant"] for row in record["groups"][0]["variants"]] == [
        *("baseline compiled", "released eager", "auto eager", "auto compiled")
    ]
    check_arithmetic(record)
    train, infer = (group["minimal_bytes"] for group in record["groups"])
    assert infer == 4 * (2 * 3 * 32 * 32 + record["parameters"]["model"])
    assert train == infer + 9 * 4 * record["parameters"]["model"] + 2 * 2 * 1e6
    path.with_suffix(".png").unlink()
    capsys.readouterr()
    benchmark.main(["--draw", str(path)])
    charts = path.with_suffix(".png"), path.with_name(f"{path.stem}_summary.png")
    assert capsys.readouterr().out == f"chart: {charts[0]}, {charts[1]}\n"
    for chart in charts:
        with Image.open(chart) as picture:
            assert picture.width > 1000
            assert len(picture.convert("RGB").getcolors(1_000_000)) > 10


def test_language_models(measured, tmp_path, capsys):
    pytest.importorskip("transformers", reason="pip install '.[language]'")
    path = tmp_path / "speed.json"
    words = ["--lm", "tiny", "--depth", "2", "--num-tokens", "96", "--batch-sizes", "3"]
    words += ["--precisions", "bfloat16", "--rounds", "4", "--device", "cpu", "--out", str(path)]
    benchmark.main(words)
    record = json.loads(path.read_text())
    modes = {group["mode"]: group for group in record["groups"]}
    assert list(modes) == ["train", "prefill", "decode"]
    assert [group["items"] for group in modes.values()] == [3 * 96, 3 * 96, 3 * 32]
    assert {group["input_shape"][1] for group in modes.values()} == {96}
    names = [row["variant"] for row in modes["train"]["variants"]]
    assert [row["variant"] for row in modes["decode"]["variants"]] == names[::2]
    assert (record["unit"], record["model"], record["baseline"]) == ("token", "tiny", "transformer")
    assert (record["num_tokens"], record["depth"], record["config"]["depth"]) == (96, 2, 2)
    assert record["hidden_features"] == 6 * 128
    assert "transformers" in record["versions"]
    check_arithmetic(record, "token")
    model = 2 * record["parameters"]["model"]
    tokens = 8 * 3 * 96
    assert modes["prefill"]["minimal_bytes"] == tokens + model
    assert modes["decode"]["minimal_bytes"] == tokens + 32 * model
    assert modes["train"]["minimal_bytes"] == tokens + 10 * model + 2 * 3 * 96 * 1e6
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "tokens/s" in capsys.readouterr().out
    # All are there: nothing is measured again.
    measured.clear()
    benchmark.main([*words, "--resume"])
    assert not measured


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lm", "150m", "--img-size", "32"], "--img-size is for images"),
        (["--lm", "150m", "--num-tokens", "4096"], "4096: 150m takes at most 2048"),
        (["--lm", "150m", "--modes", "infer"], "--modes infer: choose from train, prefill, dec"),
        (["--num-tokens", "64"], "--num-tokens needs --lm"),
        (["--positions", "rotary"], "--positions needs --lm"),
        (["--modes", "decode"], "--modes decode: choose from train, infer"),
    ],
)
def test_options_of_the_other_field(words, message):
    with pytest.raises(InputError, match=message):
        benchmark.main(["--device", "cpu", *words])


def test_the_transformer_may_have_rotary_positions(measured, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="pip install '.[language]'")
    monkeypatch.chdir(tmp_path)
    words = ["--lm", "tiny", "--depth", "1", "--num-tokens", "8", "--device", "cpu", "--eager"]
    benchmark.main([*words, *["--modes", "prefill", "--rounds", "1", "--positions", "rotary"]])
    record = json.loads(Path("work_dirs/speed_lm_tiny_8_rotary_cpu.json").read_text())
    assert record["baseline"] == "transformer, rotary"
    weights = 50_304 * 128 + 4 * 128**2 + 2 * 128 * 6 * 128  # embedding, attention, feed-forward
    biases_and_norms = (3 + 1 + 6 + 1) * 128 + 3 * 2 * 128
    assert record["parameters"]["baseline"] == weights + biases_and_norms


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "tokenformer_bsae"], "no model 'tokenformer_bsae'; did you mean tokenformer_"),
        (["--baseline", "vit_bse_patch16_224"], "--baseline: there is no model 'vit_bse_patch16"),
        (["--model", "vit_tiny_patch16_224"], "choose one of tokenformer_base"),
        (["--baseline", "resnet18"], "--baseline resnet18 cannot be measured"),
        (["--img-size", "8"], "--model tokenformer_tiny cannot be measured: "),
        (["--draw", str(TOOL)], "benchmark.py is not a record"),
    ],
)
def test_bad_input(words, message, measured, tmp_path):
    with pytest.raises(InputError, match=message) as error:
        benchmark.main([*TINY, "--out", str(tmp_path / "speed.json"), *words])
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu(capsys):
    with pytest.raises(InputError, match="use --device cpu"):
        benchmark.main(["--device", "cuda"])


def test_compilation_that_is_switched_off(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(InputError, match=r"TORCHDYNAMO_DISABLE=1 .* give --eager"):
        benchmark.main(TINY)


def test_numbers_that_are_none(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--batch-sizes", "0"])
    assert "'0' is not a whole number of at least 1" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_what_does_not_fit_drops_out(monkeypatch, tmp_path):
    step = variants.PreparedVariant.step

    def failing_step(run):
        if not any(isinstance(module, Pattention) for module in run.model.modules()):
            raise torch.OutOfMemoryError
        step(run)

    monkeypatch.setattr(variants.PreparedVariant, "step", failing_step)
    monkeypatch.setattr(measures, "matmul_rate", lambda device, dtype: 2e11)
    words = ("--eager", "--backends", "auto", "--modes", "train", "--precisions", "bfloat16")
    record = run(tmp_path / "speed.json", *words, "--rounds", 1, "--batch-sizes", 1)
    rows = {row["variant"]: row for row in record["groups"][0]["variants"]}
    assert rows["released eager"]["failed"] == "out of memory"  # it has no Pattention of ours
    assert rows["baseline eager"] == {
        "variant": "baseline eager",
        "implementation": "baseline",
        "compiled": False,
        "failed": "out of memory",
    }
    assert rows["auto eager"]["images_per_s"] > 0
    assert (tmp_path / "speed.png").exists()


def test_an_error_of_one_variant_does_not_cost_the_others(monkeypatch, tmp_path, capsys):
    create, broken = Images.create, ["auto"]

    def failing(images, implementation, seed):
        if implementation in broken:
            raise RuntimeError("ptxas failed\nwith error code 255")
        return create(images, implementation, seed)

    monkeypatch.setattr(Images, "create", failing)
    monkeypatch.setattr(measures, "matmul_rate", lambda device, dtype: 2e11)
    monkeypatch.setattr(measures, "copy_rate", lambda device: 3e10)
    path, words = tmp_path / "speed.json", ["--eager", "--modes", "infer", "--rounds", 1]
    words += ["--precisions", "float32", "--batch-sizes", 1, "--resume", "--out", path]
    with pytest.raises(InputError, match=r"auto eager \(infer .* 1: ptxas failed with .* leave"):
        benchmark.main([*TINY, *map(str, words)])
    (group,) = json.loads(path.read_text())["groups"]
    rows = {row["variant"]: row for row in group["variants"]}
    assert rows["auto eager"]["failed"] == "ptxas failed with error code 255"
    assert rows["reference eager"]["images_per_s"] > 0
    assert "in failing" in capsys.readouterr().err
    broken.clear()
    benchmark.main([*TINY, *map(str, words)])
    (group,) = json.loads(path.read_text())["groups"]
    assert not [row for row in group["variants"] if "failed" in row]


def test_profile(capsys):
    benchmark.main([*TINY, "--profile", "--eager", "--backends", "auto", "--batch-sizes", "1"])
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w+) eager$", printed, re.MULTILINE) == ["baseline", "released", "auto"]
    assert len(re.findall(r"^ +aten::(?:add)?mm ", printed, re.MULTILINE)) >= 3
    assert printed.count("Self CPU time total") == 3


def test_the_matched_vit_costs_as_much_and_has_random_weights():
    subject = Images("tokenformer_cifar10_micro", MATCHED, 32, 2)
    for ours, theirs in zip(subject.costs("reference"), subject.costs("baseline"), strict=True):
        if isinstance(ours, dict):
            ours, theirs = ours["train"], theirs["train"]
        assert theirs == pytest.approx(ours, rel=0.01)
    vit = subject.create("baseline", 0)
    assert type(vit).__name__ == "VisionTransformer"
    assert vit(torch.randn(1, 3, 32, 32)).std() > 0
    assert torch.equal(vit.head.weight, subject.create("baseline", 0).head.weight)
    assert not torch.equal(vit.cls_token, subject.create("baseline", 1).cls_token)


def test_no_vit_matches_a_model_with_registers():
    with pytest.raises(ValueError, match=r"1 tokens before those of the patches, and .* has 5"):
        Images("tokenformer_small_rope_reg4", MATCHED, 32, 1).costs("baseline")


def test_released_computes_what_the_reference_does():
    images = IMAGES._replace(depth=2)
    reference, released = (images.create(name, 0) for name in ("reference", "released"))
    for layer in reference.modules():
        if isinstance(layer, Pattention):
            layer.eps = 0.0
            layer.tau = torch.tensor(layer.num_param_tokens, dtype=torch.float64).sqrt()
    assert not any(isinstance(layer, Pattention) for layer in released.modules())
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    features, gradients = [], []
    for model in (reference.double(), released.double()):
        tokens = model.forward_features(images)
        tokens.square().sum().backward()
        features.append(tokens)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*features, rtol=1e-11, atol=1e-12)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        if gradient is not None:  # the head has no part in the features
            torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-10)


def saved_by_a_small_network(prepare):
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    prepare(model)
    x = torch.randn(5, 8)
    whole = torch.randn(7, 20)  # of which the loss needs a part, and so keeps all
    float32 = measures.saved_bytes(lambda: (model(x) * whole[:5, :4]).sum(), model)
    with torch.autocast("cpu", torch.bfloat16):
        bfloat16 = measures.saved_bytes(lambda: model(x).sum(), model)
    return float32, bfloat16


def test_saved_activations_of_a_small_network():
    float32, bfloat16 = saved_by_a_small_network(lambda model: None)
    assert float32 == 4 * (5 * 8 + 5 * 16 + 7 * 20)  # input, hidden layer after ReLU, factor
    assert bfloat16 == 2 * (5 * 8 + 5 * 16)  # and no copy of a weight


@pytest.mark.slow
def test_saved_activations_of_a_compiled_network():
    float32, bfloat16 = saved_by_a_small_network(lambda model: model.compile())
    assert float32 == 4 * (5 * 8 + 5 * 16 + 7 * 20)
    assert 2 * (5 * 8 + 5 * 16) <= bfloat16 <= 2 * (5 * 8 + 5 * 16) + 5 * 16  # a mask as well


@pytest.mark.skipif(sys.platform != "linux", reason="measured on Linux alone")
def test_peak_memory_on_the_cpu():
    def allocate():
        parts = [torch.ones(2**20) for _ in range(64)]  # 4 MiB each
        del parts

    allocate()  # what is freed here must not be missing from the rise
    rise = measures.peak_bytes(allocate, CPU)
    if rise is None:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert 250 < rise / 2**20 < 280


def test_flops_by_hand():
    with torch.device("meta"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(48, 10), nn.ReLU(), nn.Linear(10, 6))
    assert measures.count_flops(model, (3, 4, 4)) == {
        "infer": 2 * (48 * 10 + 10 * 6),
        "train": 2 * (2 * 48 * 10 + 3 * 10 * 6),  # no gradient of the image
    }


def test_rounds_rotate_and_every_timed_call_follows_its_own():
    called, told = [], []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    seconds = measures.measure_rounds(calls, 4, CPU, told.append)
    assert "".join(told) == "abcbcacababc"
    assert "".join(called) == "aabbccbbccaaccaabbaabbcc"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4, "c": 4}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_timed_calls_use_the_same_memory_again():
    code = """
import resource, torch
from tokenformer_vit.benchmarking.measures import kept_heap

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(2**24)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

returned = page_faults()
with kept_heap():
    page_faults()  # takes the memory
    kept = page_faults()
print(returned, kept)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    returned, kept = map(int, run.stdout.split())
    assert returned > 10 * kept  # with pages of 2 MiB, 160 are returned


@pytest.mark.parametrize("n", [1, 2, 11])
def test_percentiles(n):
    values = torch.rand(n).tolist()
    assert measures.percentiles(values) == pytest.approx(np.percentile(values, (20, 50, 80)))


def test_environment_leaves_out_what_is_not_installed():
    versions = environment(("torch", "timm", "no_such_package"))["versions"]
    assert versions.keys() == {"python", "torch", "timm"}
    assert versions["timm"] == timm.__version__


def test_environment_where_python_does_not_know_what_distributions_contain(monkeypatch):
    monkeypatch.setattr("tokenformer_vit.records.packages_distributions", dict)
    versions = environment(("timm", "no_such_package"))["versions"]
    assert versions == {"python": versions["python"], "timm": timm.__version__}


@pytest.mark.slow
@pytest.mark.parametrize("mode", Images.modes)
@pytest.mark.parametrize("precision", variants.PRECISIONS)
def test_all_variants_compiled(mode, precision):
    compared = [
        BenchmarkVariant(name, compiled)
        for name in ("baseline", "released", "reference", "auto")
        for compiled in (False, True)
    ]
    entry = variants.measure_group(SETTING, Group(mode, precision, 2), compared)
    assert len(entry["variants"]) == 8
    saved = {row["variant"]: row["saved_mb_per_image"] for row in entry["variants"]}
    for row in entry["variants"]:
        assert len(row["seconds"]) == 3
        assert all(math.isfinite(value) and value > 0 for value in row["seconds"])
    if mode == "train":
        assert saved["auto compiled"] == pytest.approx(saved["auto eager"], rel=0.05)
        assert saved["reference compiled"] < saved["reference eager"]
