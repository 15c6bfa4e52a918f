"""Loops that resume where they were, and mmengine's own in their place."""

import pytest

from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.reports import read_scalars

# The forms of mmpretrain's own configs.
STOCK_LOOP = "train_cfg = dict(_delete_=True, by_epoch=True, max_epochs=3, val_interval=1)\n"
SAMPLER = "train_dataloader = dict(sampler=dict(_delete_=True, type={!r}, shuffle=True{}))\n"


def test_a_run_by_iterations_needs_an_endless_sampler(train, tmp_path, config):
    path = tmp_path / "by_iterations.py"
    loop = "train_cfg = dict(_delete_=True, type='ResumableIterLoop', max_iters=3)"
    path.write_text(f"_base_ = {str(config)!r}\n{loop}\nparam_scheduler = []\n")
    line = train.of(path).fails(tmp_path / "run")
    assert "dict(type='ResumableSampler', endless=True)" in line


def test_a_config_tells_the_sampler_how_short_an_epoch_is(config):
    options = {"train_dataloader.num_batch_per_epoch": 2, "val_dataloader.num_batch_per_epoch": 1}
    cfg = load_config(config, {**options, "train_dataloader.batch_size": 5})
    assert cfg.train_dataloader.sampler.num_samples == 2 * 5
    assert cfg.val_dataloader.sampler.type == "ResumableSampler"
    assert cfg.val_dataloader.sampler.num_samples == 8
    for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
        assert "num_batch_per_epoch" not in cfg[name]  # mmengine would take the first images
    assert "num_samples" not in cfg.test_dataloader.sampler


def scalars(work_dir):
    return read_scalars(sorted(work_dir.glob("*/vis_data/scalars.json")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "own", ["", STOCK_LOOP + SAMPLER.format("DefaultSampler", "")], ids=["ours", "stock"]
)
def test_a_shortened_run_resumes_in_the_middle_of_an_epoch(train, tmp_path, config, own):
    path = tmp_path / "own.py"
    path.write_text(f"_base_ = {str(config)!r}\n{own}")
    batches = "dataloader.num_batch_per_epoch"
    options = ["--cfg-options", f"train_{batches}=3", f"val_{batches}=2"]
    options += [f"default_hooks.checkpoint.{option}" for option in ("by_epoch=False", "interval=4")]
    train = train.of(path)
    train(tmp_path / "whole", *options)
    losses, validations = scalars(tmp_path / "whole")
    assert list(losses) == list(range(1, 10))
    assert list(validations) == [1, 2, 3]
    train(tmp_path / "rest", "--resume", str(tmp_path / "whole" / "iter_4.pth"), *options)
    rest, _ = scalars(tmp_path / "rest")
    assert list(rest) == [5, 6, 7, 8, 9]
    assert all(record["loss"] == losses[step]["loss"] for step, record in rest.items())


def test_mmengines_loop_and_sampler_are_taken_for_ours(config, tmp_path):
    path = tmp_path / "stock.py"
    for own in (STOCK_LOOP, STOCK_LOOP.replace("by_epoch=True", "type='EpochBasedTrainLoop'")):
        path.write_text(f"_base_ = {str(config)!r}\n{own}{SAMPLER.format('DefaultSampler', '')}")
        cfg = load_config(path)
        assert cfg.train_cfg.type == "ResumableEpochLoop"
        assert cfg.train_dataloader.sampler == {"type": "ResumableSampler", "shuffle": True}


def test_mmengines_loop_by_iterations_resumes_where_it_was(train, tmp_path, config):
    path = tmp_path / "own.py"
    loop = "train_cfg = dict(_delete_=True, by_epoch=False, max_iters=5, val_interval=5)"
    sampler = "dict(_delete_=True, type='InfiniteSampler', shuffle=True)"
    images = "dict(pipeline=[dict(type='LoadImage'), dict(type='PackInputs')])"
    data = f"train_dataloader = dict(sampler={sampler}, dataset={images})"
    path.write_text(f"_base_ = {str(config)!r}\n{loop}\n{data}\n")
    by = ("by_epoch=False", "interval=4", "max_keep_ckpts=-1")
    hooks = [*(f"default_hooks.checkpoint.{option}" for option in by), "param_scheduler=[]"]
    train = train.of(path)
    train(tmp_path / "whole", "--cfg-options", *hooks)
    train(tmp_path / "rest", "--resume", tmp_path / "whole" / "iter_4.pth", "--cfg-options", *hooks)
    whole, rest = (scalars(tmp_path / name)[0] for name in ("whole", "rest"))
    assert list(rest) == [5]
    assert rest[5]["loss"] == whole[5]["loss"]
