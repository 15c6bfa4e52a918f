"""Whole trainings on a GPU; with -m slow on a CPU, which shows that the tests are right."""

import functools
import json
import os
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from mmengine.hooks import EMAHook
from mmengine.optim.optimizer import amp_optimizer_wrapper
from torch._dynamo.utils import counters

from tokenformer_vit.benchmarking.measures import peak_bytes, saved_bytes
from tokenformer_vit.training import ResumableEpochLoop
from tokenformer_vit.training.reports import read_scalars

ITERATIONS = 18  # of the config: three epochs
STOPPED = 8  # after the first growth, and before the second
BY_ITERATION = """
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=8, max_keep_ckpts=-1))
"""
BFLOAT16 = "optim_wrapper = dict(type='AutocastOptimWrapper')"
# The first gradients overflow, and the scale later grows until they do so again.
FLOAT16 = """
optim_wrapper = dict(
    type="AmpOptimWrapper", dtype="float16", loss_scale=dict(init_scale=2.0**26, growth_interval=3)
)
"""
GROWING = """
custom_hooks = [
    dict(
        type="GrowthHook",
        schedule=[
            dict(epoch=1, num_qkv_param_tokens=36, num_ffn_param_tokens=120),
            dict(epoch=2, num_qkv_param_tokens=48, num_proj_param_tokens=32),
        ],
        new_lr_scale=2.0,
    )
]
"""
IN_MEMORY = "train_dataloader = dict(dataset=dict(type='ImagesInMemory'))"


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request, monkeypatch) -> torch.device:
    if request.param == "cpu":
        if torch.cuda.is_available():
            pytest.skip("mmengine trains on the GPU where there is one")
        # mmengine trains in float16 only on GPUs; PyTorch also on CPUs, in the same way.
        on_cpu = functools.partial(torch.amp.GradScaler, "cpu")
        monkeypatch.setattr(amp_optimizer_wrapper, "GradScaler", on_cpu)
        monkeypatch.setattr(amp_optimizer_wrapper, "is_cuda_available", lambda: True)
        on_cpu = functools.partial(torch.autocast, "cpu")
        monkeypatch.setattr("mmengine.runner.amp.autocast", on_cpu)
    return torch.device(request.param)


@pytest.fixture
def run(device, train, config, tmp_path, monkeypatch) -> Callable:
    """Return a function that trains in this process, with ``watch`` around each iteration."""
    run_iter = ResumableEpochLoop.run_iter

    def run(name, *options, more="", watch=lambda runner, batch, iterate: iterate()):
        def watched(loop, batch_idx, data_batch):
            watch(loop.runner, data_batch, lambda: run_iter(loop, batch_idx, data_batch))

        path = tmp_path / "own.py"
        path.write_text(f"_base_ = {str(config)!r}\n{BY_ITERATION}\n{more}")
        monkeypatch.setattr(ResumableEpochLoop, "run_iter", watched)
        words = train.of(path).arguments
        done = train.command("train", *words, "--work-dir", tmp_path / name, *options)
        assert done.status == 0, done.output
        return tmp_path / name

    return run


def losses(work_dir):
    scalars, _ = read_scalars(sorted(work_dir.glob("*/vis_data/scalars.json")))
    return {step: record["loss"] for step, record in scalars.items()}


def last_checkpoint(work_dir):
    return torch.load((work_dir / "last_checkpoint").read_text(), weights_only=True)


def moments(runner):
    """Return the gradient moments of each parameter."""
    states = runner.optim_wrapper.optimizer.state
    return [(p, states[p][name]) for p in states for name in ("exp_avg", "exp_avg_sq")]


def average(runner):
    (hook,) = (hook for hook in runner.hooks if isinstance(hook, EMAHook))
    return dict(hook.ema_model.module.named_parameters())


def test_compiled_steps_in_bfloat16_follow_eager_ones(run):
    options = ("--amp", "--cfg-options", "train_cfg.max_epochs=4")
    # Compiled code draws other random numbers for drop path.
    more = "model = dict(backbone=dict(drop_path_rate=0.0))"
    eager = losses(run("eager", *options, more=more))
    graphs = counters["stats"]["unique_graphs"]
    work_dir = run("compiled", "--compile", *options, more=more)
    assert counters["stats"]["unique_graphs"] > graphs
    compiled = losses(work_dir)
    assert list(compiled) == list(range(1, 25))
    assert list(compiled.values()) == pytest.approx(list(eager.values()), rel=1e-2)
    assert json.loads((work_dir / "record.json").read_text())["dtype"] == "bfloat16 autocast"


def test_float16_skips_the_steps_whose_gradients_overflow(run):
    scales, weights = [2.0**26], []

    def watch(runner, batch, iterate):
        iterate()
        scales.append(runner.optim_wrapper.loss_scaler.get_scale())
        weights.append(runner.model.head.fc.weight.detach().clone())

    work_dir = run("float16", more=FLOAT16, watch=watch)
    skipped = [after < before for before, after in pairwise(scales)]
    assert skipped[0]
    assert any(after > before for before, after in pairwise(scales))
    for number in range(1, ITERATIONS):
        assert torch.equal(weights[number], weights[number - 1]) == skipped[number]
    checkpoint = last_checkpoint(work_dir)["optimizer"]
    assert checkpoint["loss_scaler"]["scale"] == scales[-1]
    steps = {int(state["step"]) for state in checkpoint["state"].values()}
    assert steps == {ITERATIONS - sum(skipped)}
    assert json.loads((work_dir / "record.json").read_text())["dtype"] == "float16 autocast"


@pytest.mark.parametrize(
    "more",
    [BFLOAT16, FLOAT16, GROWING, IN_MEMORY],
    ids=["bfloat16", "float16", "growing", "in_memory"],
)
def test_a_stopped_run_goes_on_bit_for_bit_with_all_states_on_its_device(run, device, more):
    sizes = set()

    def watch(runner, batch, iterate):
        iterate()
        weights = dict(runner.model.named_parameters())
        for name, tensor in average(runner).items():
            assert tensor.shape == weights[name].shape
            assert tensor.device.type == weights[name].device.type == device.type
        for weight, moment in moments(runner):
            assert moment.shape == weight.shape
            assert moment.device.type == device.type
            assert moment.dtype == torch.float32
        sizes.add(sum(weight.numel() for weight in weights.values()))

    whole = run("whole", "--deterministic", more=more, watch=watch)
    stopped = str(whole / f"iter_{STOPPED}.pth")
    rest = run("rest", "--deterministic", "--resume", stopped, more=more, watch=watch)
    expected = losses(whole)
    assert list(expected) == list(range(1, ITERATIONS + 1))
    assert losses(rest) == {step: expected[step] for step in expected if step > STOPPED}
    one, other = last_checkpoint(whole), last_checkpoint(rest)
    for part in ("state_dict", "ema_state_dict"):
        assert one[part].keys() == other[part].keys()
        for name, tensor in one[part].items():
            assert torch.equal(tensor, other[part][name]), name
    assert one["optimizer"].get("loss_scaler") == other["optimizer"].get("loss_scaler")
    assert len(sizes) == (3 if more is GROWING else 1)


def test_one_process_of_torchrun_trains_as_one_without(train, device, tmp_path):
    launched = train.of(tmp_path / "own.py")
    (tmp_path / "own.py").write_text(f"_base_ = {train.arguments[0]!r}\n{BFLOAT16}")
    visible = "" if device.type == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    # The library's own line shows that it connects the processes.
    launched.environment = {"CUDA_VISIBLE_DEVICES": visible, "NCCL_DEBUG": "VERSION"}
    options = ("--deterministic", "--cfg-options", "train_cfg.max_epochs=2")
    launched(tmp_path / "plain", *options)
    output = launched(
        tmp_path / "launched",
        *("--launcher", "pytorch", *options),
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"),
    )
    assert ("NCCL version" in output) == (device.type == "cuda")
    expected = losses(tmp_path / "plain")
    assert len(expected) == 12
    assert losses(tmp_path / "launched") == pytest.approx(expected, rel=1e-4)


LARGER = """
model = dict(
    backbone=dict(patch_size=1, embed_dim=192, num_heads=3, depth={depth}),
    head=dict(in_channels=192),
)
train_dataloader = dict(batch_size={batch}, num_batch_per_epoch=3)
train_cfg = dict(max_epochs=2)
"""


def test_a_step_needs_the_memory_that_is_counted(run, device):
    if device.type == "cpu":
        pytest.skip("PyTorch counts the memory of tensors only on a GPU")
    measured = {}

    def watch(runner, batch, iterate):
        if runner.iter != 2:  # then there are moments and the average
            return iterate()
        measured["peak"] = peak_bytes(iterate, device)
        data = runner.model.data_preprocessor(batch, True)
        with runner.optim_wrapper.optim_context(runner.model):
            measured["saved"] = saved_bytes(
                lambda: runner.model(**data, mode="loss")["loss"], runner.model
            )
        measured["weights"] = sum(weight.numel() for weight in runner.model.parameters())

    # PyTorch gives cuBLAS up to 32 MiB for a product; a larger model needs much more.
    depth, batch, workspace = 12, 16, 2**25
    run("larger", more=BFLOAT16 + LARGER.format(depth=depth, batch=batch), watch=watch)
    scores = batch * 65 * 768  # of the feed-forward layer
    # Gradients in float32, copies of weights in bfloat16, and the tensors of the backward of one
    # Θ: z, its activation, three products and the result in float32, four others in bfloat16.
    counted = measured["saved"] + (4 + 2) * measured["weights"] + (6 * 4 + 4 * 2) * scores
    assert 0.6 * counted < measured["peak"] < 1.1 * counted + workspace
