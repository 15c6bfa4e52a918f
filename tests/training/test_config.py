"""Configs are read, overridden and checked before a run starts."""

import json
import re
from pathlib import Path

import pytest
import torch
from mmpretrain.datasets import CustomDataset
from PIL import Image

from tokenformer_vit.errors import InputError
from tokenformer_vit.training.config import (
    CONFIGS,
    check_config,
    check_folders,
    choose_checkpoint,
    datasets,
    load_config,
    load_recipe,
    read_config,
    write_config,
)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("optim_wrapper.optimizer.lrr", "no 'lrr'; there is lr"),
        ("param_scheduler.2.end", "no '2'; there is 0, 1"),
        ("optim_wrapper.clip_grd.max_norm", "no 'clip_grd'; there is clip_grad"),
        ("model.backbone.init_valeus", "no 'init_valeus'; there is init_values"),
    ],
)
def test_a_misspelt_option_is_refused(config, key, message):
    with pytest.raises(InputError, match=f"--cfg-options {re.escape(key)}: there is {message}"):
        load_config(config, {key: 1})


def test_an_option_may_follow_one_that_sets_its_type(config):
    options = {"model.type": "NestedClassifier", "model.distill": True}
    assert load_config(config, options).model.distill
    with pytest.raises(InputError, match="no 'distill'"):
        load_config(config, dict(reversed(options.items())))


def test_an_option_may_add_what_a_type_takes(config):
    added = ("optim_wrapper.clip_grad.max_norm", "optim_wrapper.optimizer.amsgrad")
    added += ("model.backbone.init_values", "model.backbone.reg_tokens", "model.head.topk")
    added += ("default_hooks.checkpoint.out_dir", "train_dataloader.timeout", "custom_hooks")
    before = read_config(config).to_dict()
    cfg = load_config(config, dict.fromkeys(added, 7))
    for key in added:
        *path, name = key.split(".")
        old, new = before, cfg.to_dict()
        for part in path:
            old, new = old.get(part, {}), new[part]
        assert (name in old, new[name]) == (False, 7)


def boundaries(cfg):
    warm_up, cosine = cfg.param_scheduler
    return warm_up.end, cosine.begin, cosine.get("end")


def test_schedules_are_scaled_with_a_run(changed, caplog):
    """digits_demo has 40 epochs, 3 of them a warm-up; an average over a sixteenth of them."""
    assert boundaries(load_config("digits_demo")) == (3, 3, None)
    cfg = load_config("digits_demo", epochs=20)
    assert (boundaries(cfg), cfg.default_hooks.ema.momentum) == ((1.5, 1.5, None), 4e-2)
    assert all(part.convert_to_iter_based for part in cfg.param_scheduler)
    assert boundaries(load_config("digits_demo", epochs=80)) == (6, 6, None)
    # What fits stays.
    assert boundaries(load_config("digits_demo", {"train_cfg.max_epochs": 4})) == (3, 3, None)
    assert not caplog.text
    assert boundaries(load_config("digits_demo", {"train_cfg.max_epochs": 2})) == (0.15, 0.15, None)
    assert "param_scheduler is scaled: it was for a run of 40, not 2" in caplog.text
    cfg = changed("train_cfg = dict(max_epochs=1)")  # over a base of 3 epochs
    assert boundaries(cfg) == (1 / 3, 1 / 3, None)
    steps = "[dict(type='MultiStepLR', milestones=[30, 60], by_epoch=True)]"
    cfg = changed(f"param_scheduler = {steps}\ntrain_cfg = dict(max_epochs=90)")
    cfg = load_config(cfg.filename, epochs=9)
    assert cfg.param_scheduler[0].milestones == [3, 6]
    # A late end alone is cut, as mmengine does; the rest stays.
    cfg = load_config("digits_demo", {"param_scheduler.1.end": 90})
    assert (boundaries(cfg), cfg.default_hooks.ema.momentum) == ((3, 3, 40), 2e-2)
    late = "[dict(type='CosineAnnealingLR', begin=1, end=9)]"
    cfg = changed(f"param_scheduler = {late}")
    assert cfg.param_scheduler[0].end == 3
    assert "param_scheduler.0 ends with the run, at 3, not 9" in caplog.text
    loop = "train_cfg = dict(_delete_=True, type='ResumableIterLoop', max_iters=9)"
    path = changed(f"param_scheduler = []\n{loop}").filename
    with pytest.raises(InputError, match=r"own\.py counts iterations: give train_cfg\.max_iters"):
        load_config(path, epochs=1)


def test_configs_are_found_and_are_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("digits_demo", "configs/digits_demo.py"):
        assert load_config(name).filename == str(CONFIGS / "digits_demo.py")
    with pytest.raises(InputError, match=r"digits_dem is no config: .*: digits_demo"):
        load_config("digits_dem")
    (tmp_path / "x.yaml").write_text("!!python/object/apply:os.mkdir [executed]\n")
    with pytest.raises(InputError, match=r"x\.yaml is no config: give a file \*\.py"):
        load_config("x.yaml")
    assert not Path("executed").exists()


@pytest.fixture
def changed(own):
    return lambda text: load_config(own(text))


def test_wrapped_data_are_read_through(changed):
    own = "dataset=dict(_delete_=True, type='CustomDataset', data_root='x', pipeline=[])"
    parts = "[dict(type='CustomDataset', data_root='x'), dict(type='ImageNet', data_root='y')]"
    twice = f"dict(_delete_=True, type='RepeatDataset', times=2, {own})"
    both = f"dict(_delete_=True, type='ConcatDataset', datasets={parts})"
    text = f"train_dataloader = dict(dataset={twice})\nval_dataloader = dict(dataset={both})"
    cfg = changed(text)
    check_config(cfg)
    assert [each.data_root for each in datasets(cfg.val_dataloader.dataset)] == ["x", "y"]
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        assert all(".webp" in each.extensions for each in datasets(loader.dataset))
        with pytest.raises(InputError, match="there is no folder x: give `--data-root`"):
            check_folders(cfg, ("train_dataloader", "val_dataloader"))


@pytest.mark.parametrize(
    ("cores", "environment", "workers"),
    [
        (200, {}, 16),
        (96, {"LOCAL_WORLD_SIZE": "8"}, 12),
        (4, {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 1),
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data_preprocessor = dict(to_rgb=True)", "RGB: set data_preprocessor.to_rgb=False"),
        ("data_preprocessor = dict(type='ClsDataPreprocessor')", "only a LabelPreprocessor mixes"),
        ("train_dataloader = dict(sampler=None)", "does not shuffle"),
        ("model = dict(sandwich=True)\nactivation_checkpointing = ['blocks']", "activation_ch"),
        (
            "param_scheduler = [dict(type='CosineAnnealingLR', begin=3)]",
            r"param_scheduler\.0 begins at 3, but train_cfg\.max_epochs is 3",
        ),
        (
            "train_cfg = dict(_delete_=True, type='ResumableIterLoop', max_iters=100)",
            r"param_scheduler\.1 counts epochs: set by_epoch=False",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(changed, text, message):
    check_config(changed("param_scheduler = []\ntrain_cfg = dict(max_epochs=1)"))
    with pytest.raises(InputError, match=message):
        check_config(changed(text))


def test_autocast_is_that_of_training_validation_and_test(train, tmp_path, monkeypatch, command):
    seen, forward = set(), torch.nn.Conv2d.forward

    def observed(module, x):
        output = forward(module, x)
        seen.add((module.training, output.dtype))
        return output

    monkeypatch.setattr(torch.nn.Conv2d, "forward", observed)
    options = ("--cfg-options", "train_cfg.max_epochs=1")
    train(tmp_path, "--amp", *options)
    assert seen == {(True, torch.bfloat16), (False, torch.bfloat16)}
    # Its start is not looked for again.
    train(tmp_path, "--amp", "--resume", *options, f"model.backbone.checkpoint_path={tmp_path}/x")
    record = json.loads((tmp_path / "record.json").read_text())
    seen.clear()
    for source in ([tmp_path], [train.arguments[0], tmp_path / "epoch_1.pth"]):
        done = command("test", *source, "--data-root", train.arguments[2])
        assert done.status == 0, done.output
        measured = json.loads((tmp_path / "test" / "metrics.json").read_text())
        assert measured["precision"] == "bfloat16 autocast"
        assert measured["metrics"]["cross_entropy"] == pytest.approx(
            record["cross_entropy"], abs=1e-3
        )
    assert seen == {(False, torch.bfloat16)}


def test_a_config_of_your_own_in_its_work_directory_is_not_replaced(changed, tmp_path):
    cfg = load_recipe(changed("# title\nwork_dir = 'x'\nlog_level = '{{x}}'").filename)
    before = Path(cfg.filename).read_bytes()
    cfg.work_dir = str(tmp_path)
    for replace in (False, True):  # it says the same
        write_config(cfg, replace)
        assert Path(cfg.filename).read_bytes() == before
    cfg.work_dir = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    write_config(cfg)
    copy = load_config(tmp_path / "run" / "own.py")
    assert copy.work_dir == "work_dirs/own"  # a run of its own
    assert (copy.log_level, copy.param_scheduler) == ("{{x}}", cfg.param_scheduler)


def test_pickled_annotations_are_not_read(changed):
    with pytest.raises(InputError, match=r"x\.pkl could run code"):
        changed("test_dataloader = dict(dataset=dict(ann_file='x.pkl'))")


def test_a_run_is_resumed_and_not_overwritten(config, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    cfg = load_config(config, work_dir=str(run))
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


def test_checkpoints_on_another_disk_are_resumed(config, tmp_path):
    folder, run = tmp_path / "disk" / "run", tmp_path / "run"
    for each in (folder, run):
        each.mkdir(parents=True)
    (folder / "epoch_1.pth").touch()
    (run / "last_checkpoint").write_text(str(folder / "epoch_1.pth"))
    for disk in ({}, {"default_hooks.checkpoint.out_dir": str(tmp_path / "disk")}):
        for resume in ("auto", str(folder / "epoch_1.pth")):
            cfg = load_config(config, disk, work_dir=str(run))
            choose_checkpoint(cfg, resume)
            assert cfg.load_from == str(folder / "epoch_1.pth")
    cfg = load_config(config, disk, work_dir=str(tmp_path / "other" / "run"))
    with pytest.raises(InputError, match=r"disk/run has the checkpoints of another run: rename"):
        choose_checkpoint(cfg, "auto")


def test_images_are_not_lost_without_a_word(config, tmp_path):
    ant = tmp_path / "train" / "ant"
    ant.mkdir(parents=True)
    for name in ("1.webp", "2.GIF"):
        Image.new("RGB", (4, 4)).save(ant / name)
    cfg = load_config(config, data_root=str(tmp_path))
    check_folders(cfg, ("train_dataloader",))
    dataset = cfg.train_dataloader.dataset
    found = CustomDataset(str(tmp_path), "train", extensions=dataset.extensions)
    assert len(found) == 2
    (ant / "6.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"ant/6\.png is a broken link: replace or delete it"):
        check_folders(cfg, ("train_dataloader",))
