"""Whole trainings on a GPU."""

import os
from collections.abc import Callable

import pytest
from torch._dynamo.utils import counters

from .conftest import growing, last_checkpoint, losses, same_weights

pytestmark = pytest.mark.gpu
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
IN_MEMORY = "train_dataloader = dict(dataset=dict(type='ImagesInMemory'))"


@pytest.fixture
def run(train, own, tmp_path) -> Callable:
    def run(name, *options, more=""):
        words = train.of(own(f"{BY_ITERATION}\n{more}")).arguments
        # In this process, also with a GPU.
        done = train.command("train", *words, "--work-dir", tmp_path / name, *options)
        assert done.status == 0, done.output
        return tmp_path / name

    return run


def test_compiled_steps_in_bfloat16_follow_eager_ones(run):
    # Compiled code draws other random numbers for drop path.
    more = "model = dict(backbone=dict(drop_path_rate=0.0))"
    eager = losses(run("eager", "--amp", more=more))
    graphs = counters["stats"]["unique_graphs"]
    compiled = losses(run("compiled", "--compile", "--amp", more=more))
    assert counters["stats"]["unique_graphs"] > graphs
    assert list(compiled.values()) == pytest.approx(list(eager.values()), rel=1e-2)


def test_float16_skips_the_steps_whose_gradients_overflow(run):
    checkpoint = last_checkpoint(run("float16", more=FLOAT16))["optimizer"]
    assert 1 < checkpoint["loss_scaler"]["scale"] < 2.0**26
    (steps,) = {int(state["step"]) for state in checkpoint["state"].values()}
    assert 0 < steps < ITERATIONS


@pytest.mark.parametrize("more", [BFLOAT16, FLOAT16, growing(), IN_MEMORY])
def test_a_stopped_run_goes_on_bit_for_bit(run, more):
    whole = run("whole", "--deterministic", more=more)
    stopped = str(whole / f"iter_{STOPPED}.pth")
    rest = run("rest", "--deterministic", "--resume", stopped, more=more)
    expected = losses(whole)
    assert list(expected) == list(range(1, ITERATIONS + 1))
    assert losses(rest) == {step: expected[step] for step in expected if step > STOPPED}
    one, other = last_checkpoint(whole), last_checkpoint(rest)
    same_weights(one, other)
    assert one["optimizer"].get("loss_scaler") == other["optimizer"].get("loss_scaler")


def test_one_process_of_torchrun_trains_as_one_without(train, own, tmp_path):
    launched = train.of(own(BFLOAT16))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    # The library's own line shows that it connects the processes.
    launched.environment = {"CUDA_VISIBLE_DEVICES": visible, "NCCL_DEBUG": "VERSION"}
    options = ("--deterministic", "--cfg-options", "train_cfg.max_epochs=2")
    launched(tmp_path / "plain", *options)
    output = launched(
        tmp_path / "launched",
        *("--launcher", "pytorch", *options),
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"),
    )
    assert "NCCL version" in output
    expected = losses(tmp_path / "plain")
    assert len(expected) == 12
    assert losses(tmp_path / "launched") == pytest.approx(expected, rel=1e-4)
