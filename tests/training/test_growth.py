"""A run grows its model, and a killed run continues as if it had not been killed."""

import json
import time
from itertools import pairwise
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
    assert [train[step]["parameters"] for step in (6, 18)] == [
        19875,
        record["growth"][-1]["parameters"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("kill_at", "how"), [(8, {}), (14, {"new_lr_scale": 3.0})])
def test_a_killed_run_goes_on_exactly(growing, tmp_path, kill_at, how):
    train = growing(**how)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    checkpoints = (
        "--cfg-options",
        "default_hooks.checkpoint.by_epoch=False",
        "default_hooks.checkpoint.interval=3",
        "optim_wrapper.accumulative_counts=4",  # gradients are pending when it grows
    )
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "hook"),
    [
        ({"theta": "softmax"}, {}),
        ({"theta": "softmax"}, {"init": "random", "gate": "fixed", "open_iters": 4}),
        ({"theta": "gelu_l1"}, {"init": "random", "moments": "reset", "freeze": "old"}),
        ({"compile": True}, {}),
        ({}, {"init": "released"}),
        ({"nested": [0.5], "pattention_args": {"learn_tau": True}}, {}),
        ({}, {"nested": True, "freeze": "old"}),
    ],
)
def test_every_way_to_grow(growing, tmp_path, backbone, hook):
    train = growing(more=f"model = dict(backbone={backbone!r})", **hook)
    train(tmp_path / "run")
    model = timm.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True)
    # The size at the start, and the sizes before two growths.
    nested = len(backbone.get("nested", ()))
    assert len(model.sizes) == (1 + nested + 2 if nested or hook.get("nested") else 1)
    gate = model.blocks[0].mlp.gate
    if hook.get("gate"):
        assert (gate == 1).all()
    elif backbone.get("theta") == "softmax":
        assert (gate[96:] != 0).all()


def starting(theta):
    """Return a runner that begins 18 iterations in 3 epochs."""
    model = timm.create_model("tokenformer_tiny", embed_dim=24, depth=2, num_heads=2, theta=theta)
    length = {"train_dataloader": range(6), "train_loop": None, "max_iters": 18}
    return SimpleNamespace(model=model, **length)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([], "needs"),
        ([{"num_ffn_param_tokens": 120}], "needs"),
        ([{"epoch": 1, "embed_dim": 120}], "unexpected keyword argument 'embed_dim'"),
        ([{"epoch": e, "num_ffn_param_tokens": 120} for e in (2, 1)], r"iterations \[12, 6\]"),
        ([{"epoch": 3, "num_ffn_param_tokens": 120}], r"iterations \[18\] of 18, which leaves 0"),
        ([{"epoch": 1, "num_ffn_param_tokens": 90}], "has 96 pairs and cannot grow to 90"),
        ([*SCHEDULE, {"iteration": 15, "num_ffn_param_tokens": 110}], "has 120 pairs .* to 110"),
    ],
)
def test_growth_that_would_not_come_to_pass_is_said(schedule, message):
    with pytest.raises((InputError, TypeError), match=message):
        GrowthHook(schedule).before_train(starting("gelu_l2"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"gate": "fixed"}, "open_iters"),
        ({"open_iters": 5}, "open_iters"),
        ({"gate": "fixed", "open_iters": 7}, "6 iterations after one"),
        ({"init": "zero_keys"}, "unknown init 'zero_keys'"),
        ({"innit": "random"}, "unexpected keyword argument 'innit'"),
        ({"init": "duplicate"}, "cannot grow to 30 by duplicate"),
        ({"moments": "new"}, "keep or reset"),
        ({"freeze": "new"}, "freeze must be 'old'"),
        ({"freeze": "old"}, "a learned gate is one parameter"),
    ],
)
def test_arguments_of_growth_are_checked_at_the_start(how, message):
    with pytest.raises((InputError, TypeError), match=message):
        GrowthHook(SCHEDULE, **how).before_train(starting("softmax"))
    GrowthHook(SCHEDULE, gate="fixed", open_iters=6).before_train(starting("softmax"))


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


@pytest.mark.slow
def test_models_that_grow_on_frozen_ones_contain_them(train, growing, tmp_path):
    """Each run starts from the end of the one before, and grows before its first iteration."""
    train(tmp_path / "0")
    how = {"nested": True, "freeze": "old", "train_head": False}
    old = {"num_ffn_param_tokens": 120, "nested": [{"qkv": 24, "proj": 24, "ffn": 96}]}
    for stage, backbone in enumerate(({}, old)):
        start = str(tmp_path / str(stage) / "model.safetensors")
        more = f"model = {{'backbone': {backbone!r}}}\nload_from = {start!r}"
        schedule = [{"iteration": 0, "num_ffn_param_tokens": 120 + 24 * stage}]
        growing(schedule=schedule, more=more, **how)(tmp_path / str(stage + 1))
    models = [
        timm.create_model(f"local-dir:{tmp_path / str(stage)}", pretrained=True).eval()
        for stage in range(3)
    ]
    images = torch.randn(4, 3, 8, 8)
    assert [len(model.sizes) for model in models] == [1, 2, 3]
    for before, after in pairwise(models):  # the new pairs learn something
        assert not torch.equal(after(images), before(images))
    for size, small in zip(models[2].sizes, models, strict=True):
        models[2].set_size(size)
        assert torch.equal(models[2](images), small(images))
