"""A run grows its model, and a killed run continues as if it had not been killed."""

import json
import time
from types import SimpleNamespace

import pytest
import timm
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.training.models.growth import GrowthHook
from tokenformer_vit.training.reports import read_scalars

SCHEDULE = [
    {"epoch": 1, "num_qkv_param_tokens": [30, 36], "num_ffn_param_tokens": 120},
    {"epoch": 2, "num_qkv_param_tokens": 48, "num_proj_param_tokens": 32},
]


def write_config(config, folder, schedule=SCHEDULE, more="", **hook):
    path = folder / "growing.py"
    hooks = [{"type": "CostHook"}, {"type": "GrowthHook", "schedule": schedule, **hook}]
    path.write_text(f"_base_ = {str(config)!r}\ncustom_hooks = {hooks!r}\n{more}\n")
    return path


@pytest.fixture
def growing(train, config, tmp_path):
    """Return the command `train` with a config that grows."""
    return lambda **kwargs: train.of(write_config(config, tmp_path, **kwargs))


def losses(work_dir):
    train, val = read_scalars(sorted(work_dir.glob("*/vis_data/scalars.json")))
    return {step: record["loss"] for step, record in train.items()}, val


def checkpoint(work_dir):
    return torch.load((work_dir / "last_checkpoint").read_text(), weights_only=True)


def test_a_run_grows_and_leaves_the_grown_model(growing, tmp_path):
    work_dir = tmp_path / "run"
    output = growing(new_lr_scale=2.0)(work_dir)
    assert "The model grew before iteration 7 (epoch 2)" in output
    record = json.loads((work_dir / "record.json").read_text())
    assert [growth["iteration"] for growth in record["growth"]] == [6, 12]
    model = timm.create_model(f"local-dir:{work_dir}", pretrained=True)
    assert model.blocks[1].attn.query.num_param_tokens == 48
    assert model.blocks[1].attn.proj.num_param_tokens == 32
    assert model.blocks[1].mlp.num_param_tokens == 120
    final = checkpoint(work_dir)
    keys = "backbone.model.blocks.0.attn.query.key_param_tokens"  # of all pairs, though split
    assert final["state_dict"][keys].shape == (48, 24)
    assert final["ema_state_dict"][f"module.{keys}"].shape == (48, 24)
    # What it cost: that of each size for its 48 images of an epoch.
    train, val = read_scalars(work_dir.glob("*/vis_data/scalars.json"))
    flops = [record["flops"] for record in val.values()]
    per_epoch = [after - before for before, after in zip([0, *flops], flops, strict=False)]
    assert per_epoch == sorted(set(per_epoch))
    assert record["flops"] == flops[-1] == train[18]["flops"]
    grown = record["growth"][-1]["parameters"]
    assert [train[step]["parameters"] for step in (6, 18)] == [19875, grown]


@pytest.mark.slow
@pytest.mark.parametrize(("kill_at", "how"), [(8, {}), (14, {"new_lr_scale": 3.0})])
def test_a_killed_run_goes_on_exactly(growing, tmp_path, kill_at, how):
    train = growing(**how)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    checkpoints = ("--cfg-options", "default_hooks.checkpoint.by_epoch=False")
    checkpoints += ("default_hooks.checkpoint.interval=3",)
    checkpoints += ("optim_wrapper.accumulative_counts=4",)  # gradients are pending at a growth
    train(whole, *checkpoints)
    process = train.start(killed, *checkpoints)
    deadline = time.monotonic() + 200
    while max(losses(killed)[0], default=0) < kill_at:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert max(losses(killed)[0]) < 18
    train(killed, "--resume", *checkpoints)
    assert losses(killed)[0] == losses(whole)[0]
    one, other = checkpoint(whole), checkpoint(killed)
    for part in ("state_dict", "ema_state_dict"):
        for name, tensor in one[part].items():
            assert torch.equal(tensor, other[part][name]), name
    spent = [each["message_hub"]["runtime_info"]["flops"] for each in (one, other)]
    assert spent[0] == spent[1]
    assert (whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_several_processes_grow_alike(growing, tmp_path):
    train = growing(
        schedule=[{"iteration": 5, "num_ffn_param_tokens": 160}],
        more="model = dict(train_cfg=None, backbone=dict(drop_path_rate=0.0))",
    )
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    train(tmp_path / "one", "--batch-size", "8")
    train(tmp_path / "two", "--batch-size", "4", "--launcher", "pytorch", launcher=launcher)
    one, two = (losses(tmp_path / name)[0] for name in ("one", "two"))
    assert len(one) == len(two) == 18
    torch.testing.assert_close(
        torch.tensor(list(two.values())), torch.tensor(list(one.values())), rtol=2e-5, atol=2e-6
    )


def starting(theta):
    """Return a runner that begins 18 iterations in 3 epochs."""
    model = timm.create_model("tokenformer_tiny", embed_dim=24, depth=2, num_heads=2, theta=theta)
    length = {"train_dataloader": range(6), "train_loop": None, "max_iters": 18}
    return SimpleNamespace(model=model, **length)


def test_new_pairs_warm_up():
    hook = GrowthHook([{"iteration": 3, "num_ffn_param_tokens": 20}], new_warmup_iters=3)
    model = timm.create_model("tokenformer_tiny", embed_dim=24, depth=1, num_heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    hook.grow_model(model, {"num_ffn_param_tokens": 120}, 0, optimizer)
    hook.done = 1
    assert [len(group["params"]) for group in optimizer.param_groups][1:] == [2]
    runner = SimpleNamespace(model=model, optim_wrapper=SimpleNamespace(optimizer=optimizer))
    rates = []
    for runner.iter in range(3, 8):
        hook.before_train_iter(runner)
        rates.append([group["lr"] for group in optimizer.param_groups])
        hook.after_train_iter(runner)
        assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0]
    assert rates == [[1, 0.25], [1, 0.5], [1, 0.75], [1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("schedule", "how", "message"),
    [
        ([{"num_ffn_param_tokens": 120}], {}, "needs"),
        ([{"epoch": 1, "embed_dim": 120}], {}, "unexpected keyword argument 'embed_dim'"),
        (
            [{"epoch": 3, "num_ffn_param_tokens": 120}],
            {},
            "of 18, which leaves 0",
        ),
        ([*SCHEDULE, {"iteration": 15, "num_ffn_param_tokens": 110}], {}, "has 120 pairs"),
        (SCHEDULE, {"gate": "fixed"}, "open_iters"),
        (SCHEDULE, {"gate": "fixed", "open_iters": 7}, "6 iterations after one"),
        (SCHEDULE, {"moments": "new"}, "keep or reset"),
        (SCHEDULE, {"freeze": "old"}, "a learned gate is one parameter"),
    ],
)
def test_growth_that_would_not_come_to_pass_is_said(schedule, how, message):
    runner = starting("softmax")
    GrowthHook(SCHEDULE, gate="fixed", open_iters=6).before_train(runner)
    with pytest.raises((InputError, TypeError), match=message):
        GrowthHook(schedule, **how).before_train(runner)


@pytest.mark.slow
def test_fixed_gates_open(growing, tmp_path):
    train = growing(more="model = dict(backbone=dict(theta='softmax'))", gate="fixed", open_iters=4)
    train(tmp_path / "gates")
    model = timm.create_model(f"local-dir:{tmp_path / 'gates'}", pretrained=True)
    assert (model.blocks[0].mlp.gate == 1).all()


@pytest.mark.slow
def test_a_model_that_grows_on_a_frozen_one_contains_it(train, growing, tmp_path):
    """The run starts from the end of another, and grows before its first iteration."""
    train(tmp_path / "0")
    how = {"nested": True, "freeze": "old", "train_head": False}
    more = f"load_from = {str(tmp_path / '0' / 'model.safetensors')!r}"
    growing(schedule=[{"iteration": 0, "num_ffn_param_tokens": 120}], more=more, **how)(
        tmp_path / "1"
    )
    small, large = (
        timm.create_model(f"local-dir:{tmp_path / stage}", pretrained=True).eval() for stage in "01"
    )
    images = torch.randn(4, 3, 8, 8)
    assert not torch.equal(large(images), small(images))  # the new pairs learn something
    large.set_size(large.sizes[0])
    assert torch.equal(large(images), small(images))
