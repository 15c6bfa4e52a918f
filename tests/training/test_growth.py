"""A run grows its model; test_resume.py kills such runs."""

import json
from types import SimpleNamespace

import pytest
import timm
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import load_model
from tokenformer_vit.training.models.growth import GrowthHook
from tokenformer_vit.training.optim import AccumulationEMAHook

from .conftest import SCHEDULE, growing, last_checkpoint, scalars


def test_a_run_grows_and_leaves_the_grown_model(train, own, tmp_path):
    work_dir = tmp_path / "run"
    output = train.of(own(growing(new_lr_scale=2.0)))(work_dir)
    assert "The model grew before iteration 7 (epoch 2)" in output
    record = json.loads((work_dir / "record.json").read_text())
    assert [growth["iteration"] for growth in record["growth"]] == [6, 12]
    model = timm.create_model(f"local-dir:{work_dir}", pretrained=True)
    assert model.blocks[1].attn.query.num_param_tokens == 48
    assert model.blocks[1].attn.proj.num_param_tokens == 32
    assert model.blocks[1].mlp.num_param_tokens == 120
    final = last_checkpoint(work_dir)
    keys = "backbone.model.blocks.0.attn.query.{}key_param_tokens"
    for name, prefix in (("state_dict", ""), ("ema_state_dict", "module.")):
        found = [final[name][prefix + keys.format(part)] for part in ("", "new_")]
        assert sum(map(len, found)) == 48
    # A checkpoint of the run is that of an ordinary model to those who read it.
    from_checkpoint = load_model(None, work_dir / "epoch_3.pth")
    torch.testing.assert_close(from_checkpoint.state_dict(), model.state_dict(), rtol=0, atol=0)
    # What it cost: that of each size for its 48 images of an epoch.
    train, val = scalars(work_dir)
    flops = [record["flops"] for record in val.values()]
    per_epoch = [after - before for before, after in zip([0, *flops], flops, strict=False)]
    assert per_epoch == sorted(set(per_epoch))
    assert record["flops"] == flops[-1] == train[18]["flops"]
    grown = record["growth"][-1]["parameters"]
    assert [train[step]["parameters"] for step in (6, 18)] == [19875, grown]


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


@pytest.mark.parametrize("split", [{}, {"new_lr_scale": 2.0}])  # with new parameters
def test_weights_are_averaged_as_by_mmengine_after_growth(split, scope):
    hook = GrowthHook([{"iteration": 3, "num_ffn_param_tokens": 120}], **split)
    model = timm.create_model("tokenformer_tiny", embed_dim=24, depth=1, num_heads=2)
    kinds = ("ForeachMovingAverage", "ExponentialMovingAverage")
    averages = [AccumulationEMAHook(ema_type=kind, momentum=0.3) for kind in kinds]
    hub = SimpleNamespace(runtime_info={"seed": 0})
    runner = SimpleNamespace(model=model, hooks=averages, message_hub=hub, param_schedulers=None)
    optimizer = torch.optim.AdamW(model.parameters())
    for each in averages:
        each.before_run(runner)
    for step in range(6):
        if step == 3:
            hook._grow(runner, optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        for each in averages:
            each.ema_model.update_parameters(model)
    mine, stock = (each.ema_model.state_dict() for each in averages)
    torch.testing.assert_close(mine, stock)


@pytest.mark.parametrize(
    ("schedule", "how", "message"),
    [
        ([{"epoch": 3, "num_ffn_param_tokens": 120}], {}, "of 18, which leaves 0"),
        (SCHEDULE, {}, "softmax, which gives a zero key"),
    ],
)
def test_growth_that_would_not_come_to_pass_is_said(schedule, how, message):
    sizes = {"embed_dim": 24, "depth": 2, "num_heads": 2}
    model = timm.create_model("tokenformer_tiny", **sizes, theta="softmax")
    length = {"train_dataloader": range(6), "train_loop": None, "max_iters": 18}
    runner = SimpleNamespace(model=model, **length)
    GrowthHook(SCHEDULE, init="random").before_train(runner)
    with pytest.raises(InputError, match=message):
        GrowthHook(schedule, **how).before_train(runner)


@pytest.mark.slow
def test_a_model_that_grows_on_a_frozen_one_contains_it(train, own, tmp_path):
    """The run starts from the end of another, and grows before its first iteration."""
    train(tmp_path / "0")
    how = {"nested": True, "freeze": "old", "train_head": False}
    grows = growing([{"iteration": 0, "num_ffn_param_tokens": 120}], **how)
    start = f"load_from = {str(tmp_path / '0' / 'model.safetensors')!r}"
    train.of(own(grows + start))(tmp_path / "1")
    small, large = (
        timm.create_model(f"local-dir:{tmp_path / stage}", pretrained=True).eval() for stage in "01"
    )
    images = torch.randn(4, 3, 8, 8)
    assert not torch.equal(large(images), small(images))  # the new pairs learn something
    large.set_size(large.sizes[0])
    assert torch.equal(large(images), small(images))
