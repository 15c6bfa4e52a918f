"""Configs are read, overridden and checked before a run starts."""

import argparse
import re
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmpretrain.datasets import CustomDataset
from PIL import Image

from tokenformer_vit.cli.arguments import add_run_arguments, parse_run_arguments
from tokenformer_vit.errors import InputError
from tokenformer_vit.training.config import (
    CONFIGS,
    check_config,
    check_folders,
    check_schedule,
    choose_checkpoint,
    datasets,
    load_config,
    write_config,
)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("optim_wrapper.optimizer.lrr", "no 'lrr'; there is lr"),
        ("train_dataloder.batch_size", "no 'train_dataloder'; there is train_dataloader"),
        ("param_scheduler.2.end", "no '2'; there is 0, 1"),
        ("load_from.path", "no 'path'"),
    ],
)
def test_a_misspelt_option_is_refused(config, key, message):
    with pytest.raises(InputError, match=f"--cfg-options {re.escape(key)}: there is {message}"):
        load_config(config, {key: 1})


def test_options_reach_into_lists_and_every_loader(config):
    options = {"param_scheduler.1.eta_min": 0.5}
    cfg = load_config(config, options, data_root="d", compile=True)
    assert cfg.model.backbone.compile
    assert cfg.param_scheduler[1].eta_min == 0.5
    for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
        assert {each.data_root for each in datasets(cfg[name].dataset)} == {"d"}
    assert cfg.work_dir == "work_dirs/small"


def test_options_that_cannot_be_read(capsys):
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    for words in (["foo"], ["a=[dict(b=1,c=2)]"]):
        with pytest.raises(SystemExit):
            parse_run_arguments(parser, ["--cfg-options", *words])
        assert "put dicts into a config file" in capsys.readouterr().err


def test_configs_are_found_and_are_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("digits_demo", "digits_demo.py", "configs/digits_demo.py"):
        assert load_config(name).filename == str(CONFIGS / "digits_demo.py")
    with pytest.raises(InputError, match=r"digits_dem is no config: .*: digits_demo"):
        load_config("digits_dem")
    (tmp_path / "x.yaml").write_text("!!python/object/apply:os.mkdir [executed]\n")
    with pytest.raises(InputError, match=r"x\.yaml is no config: give a file \*\.py"):
        load_config("x.yaml")
    assert not Path("executed").exists()
    Path("x.py").write_text("x = undefined")
    with pytest.raises(NameError):  # Python's own
        load_config("x.py")


def changed(config, folder, text):
    path = folder / "own.py"
    path.write_text(f"_base_ = {str(config)!r}\n{text}\n")
    return load_config(path)


def test_wrapped_data_are_read_through(config, tmp_path):
    own = "dataset=dict(_delete_=True, type='CustomDataset', data_root='x', pipeline=[])"
    parts = "[dict(type='CustomDataset', data_root='x'), dict(type='ImageNet', data_root='y')]"
    cfg = changed(
        config,
        tmp_path,
        f"train_dataloader = dict(dataset=dict(_delete_=True, type='RepeatDataset', times=2, {own}"
        f"))\nval_dataloader = dict(dataset=dict(_delete_=True, type='ConcatDataset', "
        f"datasets={parts}))",
    )
    check_config(cfg)
    assert [each.data_root for each in datasets(cfg.val_dataloader.dataset)] == ["x", "y"]
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        assert all(".webp" in each.extensions for each in datasets(loader.dataset))
        with pytest.raises(InputError, match="there is no folder x"):
            check_folders(cfg, ("train_dataloader", "val_dataloader"))


@pytest.mark.parametrize(
    ("cores", "environment", "workers"),
    [
        (6, {}, 6),
        (200, {}, 16),
        (96, {"LOCAL_WORLD_SIZE": "8"}, 12),
        (4, {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 1),
        (32, {"SLURM_NTASKS_PER_NODE": "4"}, 8),
        (32, {"SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "10"}, 10),
    ],
)
def test_workers_are_one_a_core(config, monkeypatch, cores, environment, workers):
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    cfg = load_config("imagenet_base.py", {"test_dataloader.num_workers": 3})
    loaders = [cfg[f"{name}_dataloader"] for name in ("train", "val", "test")]
    assert [each.num_workers for each in loaders] == [workers, workers, 3]
    # Workers of validation do not stay beside those of training.
    assert [each.persistent_workers for each in loaders] == [True, False, False]
    assert load_config(config).train_dataloader.num_workers == 1  # as the config says


def test_the_sampler_shortens_an_epoch(config):
    names = ("train_dataloader", "val_dataloader")
    cfg = load_config(config, {f"{name}.num_batch_per_epoch": 2 for name in names})
    for name in names:
        assert cfg[name].sampler.type == "ResumableSampler"
        assert cfg[name].sampler.num_samples == 16
        assert "num_batch_per_epoch" not in cfg[name]


def test_a_config_of_mmpretrain_gets_our_hooks_loop_and_sampler(tmp_path):
    path = tmp_path / "stock.py"
    path.write_text(
        "model = dict(type='ImageClassifier', head=dict(num_classes=3))\n"
        "train_dataloader = dict(batch_size=4, num_workers=0, dataset=dict(type='CustomDataset',"
        " data_root=''), sampler=dict(type='DefaultSampler', shuffle=True))\n"
        "optim_wrapper = dict(type='AmpOptimWrapper', optimizer=dict(type='SGD', lr=0.1))\n"
        "train_cfg = dict(by_epoch=True, max_epochs=3)\n"
        "default_hooks = dict(checkpoint=dict(type='CheckpointHook', interval=2), progress=None)\n"
    )
    cfg = load_config(path, {"randomness.seed": 3})
    check_config(cfg)
    runtime = Config.fromfile(CONFIGS / "_base_" / "runtime.py")
    assert cfg.default_hooks.keys() == runtime.default_hooks.keys()
    assert cfg.default_hooks.checkpoint.type == runtime.default_hooks.checkpoint.type
    assert (cfg.default_hooks.checkpoint.interval, cfg.default_hooks.progress) == (2, None)
    assert cfg.train_cfg == {"type": "ResumableEpochLoop", "max_epochs": 3}
    assert cfg.train_dataloader.sampler == {"type": "ResumableSampler", "shuffle": True}
    assert [cfg[f"val_{part}"] for part in ("dataloader", "cfg", "evaluator")] == [None] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data_preprocessor = dict(to_rgb=True)", "RGB: set data_preprocessor.to_rgb=False"),
        ("train_dataloader = dict(sampler=None)", "does not shuffle"),
        (
            "optim_wrapper = dict(accumulative_counts=2)\n"
            "model_wrapper_cfg = dict(static_graph=True)",
            "static_graph=False",
        ),
        (
            "model = dict(sandwich=True)\nactivation_checkpointing = ['blocks']",
            "activation_checkpointing=None",
        ),
        ("train_cfg = dict(max_epochs=1)", r"scheduler\.1 is from 1 to 2, but .*max_epochs is 1"),
        ("param_scheduler = [dict(type='StepLR', step_size=1, end=9)]", "from 0 to 9"),
        ("param_scheduler = [dict(type='LinearLR', begin=2, end=2)]", "from 2 to 2"),
        (
            "train_cfg = dict(_delete_=True, type='ResumableIterLoop', max_iters=100)",
            r"param_scheduler\.1 counts epochs: set by_epoch=False",
        ),
        (
            "param_scheduler = [dict(type='ReduceOnPlateauLR', monitor='loss')]",
            r"param_scheduler\.0\.monitor is 'loss', but validation measures .*accuracy/top1",
        ),
        (
            "custom_hooks = [dict(type='EarlyStoppingHook', monitor='accuracy')]",
            r"custom_hooks\.0\.monitor is 'accuracy', but",
        ),
        ("default_hooks = dict(checkpoint=dict(save_best='top1'))", "save_best is 'top1', but"),
    ],
)
def test_parts_that_do_not_fit_are_refused(config, tmp_path, text, message):
    with pytest.raises(InputError, match=message) as raised:
        check_config(changed(config, tmp_path, text))
    assert "\n" not in str(raised.value)


def test_what_fits_passes(config, tmp_path):
    check_config(changed(config, tmp_path, "param_scheduler = []\ntrain_cfg = dict(max_epochs=1)"))
    check_schedule(load_config(config, {"param_scheduler": []}))
    best = "save_best='accuracy/top1_at_0.5'"  # of a nested model
    check_config(changed(config, tmp_path, f"default_hooks = dict(checkpoint=dict({best}))"))


def test_lamb_does_not_move_a_head_at_zero(config, tmp_path):
    lamb = "optim_wrapper = dict(optimizer=dict(_delete_=True, type='timm.optim.Lamb', lr=1e-3))"
    with pytest.warns(UserWarning, match="Lamb hardly moves a head that starts at 0"):
        check_config(changed(config, tmp_path, lamb))


def test_autocast_is_that_of_training_and_validation(train, tmp_path, monkeypatch):
    seen = set()

    def forward(module, inputs, output):
        if isinstance(module, torch.nn.Conv2d):
            seen.add((module.training, output.dtype))

    handle = torch.nn.modules.module.register_module_forward_hook(forward)
    try:
        train(tmp_path, "--amp", "--cfg-options", "train_cfg.max_epochs=2")
    finally:
        handle.remove()
    assert seen == {(True, torch.bfloat16), (False, torch.bfloat16)}


def test_a_config_of_your_own_in_its_work_directory_is_not_replaced(config, tmp_path):
    cfg = changed(config, tmp_path, "work_dir = 'x'")
    before = Path(cfg.filename).read_bytes()
    cfg.work_dir = str(tmp_path)
    write_config(cfg)
    assert Path(cfg.filename).read_bytes() == before
    cfg.work_dir = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    write_config(cfg)
    copy = load_config(tmp_path / "run" / "own.py")
    assert copy.model == cfg.model
    assert copy.work_dir == "work_dirs/own"  # a run of its own


def test_pickled_annotations_are_not_read(config, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        f"_base_ = {str(config)!r}\ntest_dataloader = dict(dataset=dict(ann_file='x.pkl'))\n"
    )
    with pytest.raises(InputError, match=r"x\.pkl could run code"):
        load_config(path)


def test_a_run_is_resumed_and_not_overwritten(config, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    cfg = load_config(config, work_dir=str(run))
    choose_checkpoint(cfg, None)
    choose_checkpoint(cfg, "auto")  # there is none
    assert not cfg.resume
    for folder in (run, other):
        folder.mkdir()
        (folder / "epoch_1.pth").touch()
    with pytest.raises(InputError, match="already holds a run: add --resume"):
        choose_checkpoint(cfg, None)
    choose_checkpoint(cfg, "auto")  # killed before the pointer was written
    assert cfg.load_from == str(run / "epoch_1.pth")
    (run / "last_checkpoint").write_text("/elsewhere/epoch_1.pth")  # the folder was moved
    for resume in ("auto", str(run / "epoch_1.pth")):
        choose_checkpoint(cfg, resume)
        assert (cfg.resume, cfg.load_from) == (True, str(run / "epoch_1.pth"))
    with pytest.raises(InputError, match=r"there is no checkpoint .*nope\.pth"):
        choose_checkpoint(cfg, str(run / "nope.pth"))
    with pytest.raises(InputError, match=r"other/epoch_1\.pth is not in .*run, which already hol"):
        choose_checkpoint(cfg, str(other / "epoch_1.pth"))


def test_images_are_not_lost_without_a_word(config, tmp_path, capsys):
    ant = tmp_path / "train" / "ant"
    ant.mkdir(parents=True)
    for name in ("1.webp", "2.GIF"):
        Image.new("RGB", (4, 4)).save(ant / name)
    for name in ("3.heic", "4.heic", "5.txt"):
        (ant / name).touch()
    cfg = load_config(config, data_root=str(tmp_path))
    check_folders(cfg, ("train_dataloader",))
    assert f"left out: 2 .heic, 1 .txt in {tmp_path / 'train'}" in capsys.readouterr().err
    dataset = cfg.train_dataloader.dataset
    found = CustomDataset(str(tmp_path), "train", extensions=dataset.extensions)
    assert len(found) == 2
    (ant / "6.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"ant/6\.png is a broken link: replace or delete it"):
        check_folders(cfg, ("train_dataloader",))
    with pytest.raises(InputError, match=r"there is no folder .*/val: give `--data-root`"):
        check_folders(cfg, ("val_dataloader",))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed", "9"], "already holds a run"),
        (["--resume", "--cfg-options", "default_hooks.ema=None"], "averages its weights"),
    ],
)
def test_a_refused_run_leaves_the_config_of_the_first(train, trained, words, said):
    written = trained.work_dir / trained.config.name
    before = written.read_bytes()
    assert said in train.fails(trained.work_dir, *words)
    assert written.read_bytes() == before
