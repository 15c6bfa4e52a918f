"""A wrong value in a config is named, with the allowed values, before a run starts."""

import copy
import json
import math
import re
from pathlib import Path

import mmengine
import pytest
import torch
from mmengine.config import Config, DictAction
from mmengine.registry import PARAM_SCHEDULERS

from tokenformer_vit.errors import InputError
from tokenformer_vit.training import secure_files
from tokenformer_vit.training.config import (
    _check_option,
    load_config,
)
from tokenformer_vit.training.evaluation import configure_test
from tokenformer_vit.training.launch import TrainingRunner
from tokenformer_vit.training.schedule import check_schedule
from tokenformer_vit.training.schema import MOST_SEED, check_values

LANGUAGE = Path(__file__).resolve().parents[2] / "configs" / "lm_micro.py"
WHOLE = "a whole number of at least 1"


def refusal(config, options):
    """Return the line that refuses a config with these options."""
    with pytest.raises(InputError) as raised:
        load_config(config, options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture(scope="session")
def plain(config):
    """The small config, read once."""
    return Config.fromfile(config)


def refused(cfg, options):
    """Return the line that refuses the values of a config after these options."""
    cfg = copy.deepcopy(cfg)
    cfg.merge_from_dict(options)
    with pytest.raises(InputError) as raised:
        check_values(cfg.to_dict(), "x.py")
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("optim_wrapper.optimizer.lr", -1, "a finite number above 0"),
        ("optim_wrapper.optimizer.lr", 0, "a finite number above 0"),
        ("optim_wrapper.optimizer.lr", math.nan, "a finite number above 0"),
        ("optim_wrapper.optimizer.lr", math.inf, "a finite number above 0"),
        ("optim_wrapper.optimizer.lr", "1e-3x", "a finite number above 0"),
        ("optim_wrapper.optimizer.lr", None, "a finite number above 0"),
        ("optim_wrapper.optimizer.weight_decay", -0.1, "a finite number of at least 0"),
        ("optim_wrapper.optimizer.betas", (0.9, 1.0), "two numbers of at least 0 and below 1"),
        ("optim_wrapper.optimizer.betas", [0.9], "two numbers"),
        ("optim_wrapper.optimizer.eps", -1e-8, "a finite number above 0"),
        ("optim_wrapper.optimizer", [1], "a dict"),
        ("optim_wrapper.accumulative_counts", 0, WHOLE),
        ("optim_wrapper", 3, "a dict"),
        ("train_dataloader.batch_size", 0, WHOLE),
        ("train_dataloader.batch_size", 8.5, WHOLE),
        ("train_dataloader.batch_size", True, WHOLE),
        ("val_dataloader.num_workers", "x", "a whole number of at least 0"),
        ("train_dataloader.num_workers", -1, "a whole number of at least 0"),
        ("train_dataloader.num_batch_per_epoch", 0, WHOLE),
        ("train_dataloader.pin_memory", "yes", "True or False"),
        ("train_dataloader.dataset", "data", "a dict"),
        ("train_dataloader.dataset.pipeline", (), "a list of transforms that ends with PackInputs"),
        ("train_dataloader", None, "a dict"),
        ("train_dataloader.sampler", None, "a dict"),
        ("train_dataloader.sampler.repeats", 0, WHOLE),
        ("model.backbone.drop_path_uniform", 1, "True or False"),
        ("default_hooks.ema.validated", "no", "True or False"),
        ("val_dataloader", None, "a dict"),
        ("train_cfg.max_epochs", 0, WHOLE),
        ("train_cfg.val_interval", 0, WHOLE),
        ("train_cfg", [], "a dict"),
        ("param_scheduler.0.end", -3, WHOLE),
        ("param_scheduler.1.begin", -1, "a whole number of at least 0"),
        ("param_scheduler.0.start_factor", 0, "a number above 0 and at most 1"),
        ("param_scheduler.1.eta_min", -1e-5, "a finite number of at least 0"),
        ("param_scheduler.1.by_epoch", "no", "True or False"),
        ("default_hooks", None, "a dict"),
        ("default_hooks.ema.momentum", 1.0, "a number above 0 and below 1"),
        ("default_hooks.logger.interval", 0, "a whole number of at least 1, or -1"),
        ("default_hooks.checkpoint.max_keep_ckpts", 0, "a whole number of at least 1, or -1"),
        ("default_hooks.checkpoint.minutes", 0, "a finite number above 0"),
        ("default_hooks.checkpoint.minutes", "30m", "a finite number above 0"),
        ("default_hooks.checkpoint.background", "no", "True or False"),
        ("env_cfg.dist_cfg.timeout", 0, "a finite number above 0"),
        ("env_cfg.dist_cfg", None, "a dict"),
        ("model_wrapper_cfg.compression", "int8", "'bf16' or 'fp16'"),
        ("model_wrapper_cfg.gradient_as_bucket_view", 1, "True or False"),
        ("model_wrapper_cfg.static_graph", "yes", "True or False"),
        ("optim_wrapper.optimizer.fused", "yes", "True or False"),
        ("val_evaluator.collect_device", "cuda", "'cpu' or 'gpu'"),
        ("model.backbone.compile", "fast", "reduce-overhead, max-autotune and max-autotune-no"),
        ("model.head.num_classes", 0, WHOLE),
        ("model.head.loss.label_smooth_val", 1.0, "at least 0.0 and below 1.0"),
        ("model.head.loss.label_smooth_val", 0, "a number with a decimal point"),
        ("model.train_cfg.augments", [], "a list of at least one, or None"),
        ("model.train_cfg.augments.0.alpha", 0.0, "above 0.0"),
        ("model.train_cfg.augments.0.alpha", 1, "a number with a decimal point"),
        ("model.backbone.drop_path_rate", 1.5, "a number of at least 0 and below 1"),
        ("model.backbone.embed_dim", 0, WHOLE),
        ("model.backbone.num_heads", 0, WHOLE),
        ("model.backbone.num_ffn_param_tokens", [0, 8], f"{WHOLE}, or a list of them"),
        ("model.backbone.patch_size", 0, f"{WHOLE}, or two of them"),
        ("model.backbone.img_size", "8", f"{WHOLE}, or two of them"),
        ("model", 1, "a dict"),
        ("data_preprocessor.std", [0.0] * 3, "a finite number above 0"),
        ("randomness.seed", 2**33, f"a whole number from 0 to {MOST_SEED}"),
        ("randomness.seed", -1, "a whole number from 0"),
        ("log_level", "LOUD", "one of CRITICAL, ERROR, WARNING, INFO, DEBUG, NOTSET"),
        ("auto_scale_lr.base_batch_size", 0, WHOLE),
        ("env_cfg.mp_cfg.opencv_num_threads", 100_000, "a whole number from 0 to 1024"),
        ("env_cfg.mp_cfg.mp_start_method", "threads", "'fork', 'spawn' or 'forkserver'"),
        ("val_evaluator.topk", [0, 1], f"{WHOLE}, or a list of them"),
        ("resume", "auto", "True or False"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(plain, key, value, allowed):
    line = refused(plain, {key: value})
    named, _, must = line.removeprefix("x.py: ").partition(", but must be ")
    # Of a list, the message names the first entry that is wrong.
    assert re.match(rf"{re.escape(key)}(\.0)? is ", named)
    assert repr(value[0] if "std" in key else value) in named
    assert allowed in must


def test_numbers_of_an_optimiser_of_timm(plain):
    options = {"optim_wrapper.optimizer.type": "timm.optim.Lamb"}
    betas = {"optim_wrapper.optimizer.betas": (0.9, 1.0)}
    assert "optim_wrapper.optimizer.betas is (0.9, 1.0)" in refused(plain, options | betas)


def test_a_static_graph_does_not_accumulate(plain):
    options = {"model_wrapper_cfg.static_graph": True, "optim_wrapper.accumulative_counts": 3}
    assert "accumulative_counts is 3): set one of the two" in refused(plain, options)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("model.config.num_heads", 0, WHOLE),
        ("model.config.vocab_size", "x", WHOLE),
        ("model.config.rotary_share", 3, "a number above 0 and at most 1"),
        ("model.config", 1, "a dict"),
        ("model.checkpoint", None, "a text"),
        ("train_cfg.max_iters", 0, WHOLE),
        ("val_dataloader.dataset.data_root", 3, "the name of a folder, or a list of names"),
    ],
)
def test_values_of_language_models(key, value, allowed):
    pytest.importorskip("tokenformer_vit.language", exc_type=ImportError)
    line = refused(Config.fromfile(LANGUAGE), {key: value})
    assert line == f"x.py: {key} is {value!r}, but must be {allowed}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data_preprocessor.num_classes": None}, ["num_classes is not set", "num_classes=3"]),
        ({"data_preprocessor.std": [1.0, 2.0]}, ["data_preprocessor.std has 2 values", "3 chann"]),
        ({"model.head.in_channels": 96}, ["in_channels is 96", "width 24", "in_channels=24"]),
        ({"model.backbone.embed_dim": 36}, ["in_channels is 24", "width 36"]),
        (
            {"model.backbone.num_heads": 5},
            ["num_heads must divide dim 24", "got 5"],
        ),
        (
            {"model.backbone.num_ffn_param_tokens": [8, 8, 8]},
            ["num_ffn_param_tokens has 3 numbers for 2 blocks"],
        ),
        ({"model.backbone.theta": "gelu_l3"}, ["theta must be one of softmax", "'gelu_l3'"]),
        ({"model.backbone.model_name": "tokenformer_tny"}, ["tokenformer_tny"]),
        ({"model.head.num_classes": 4}, ["model.head.num_classes is 4", "num_classes is 3"]),
        ({"model.backbone.patch_size": 3}, ["img_size is 8 x 8", "patch size 3 x 3"]),
        ({"model.backbone.img_size": 16}, ["img_size is 16 x 16", "CenterCrop", "8 x 8"]),
        ({"val_evaluator.topk": [7, 9]}, ["val_evaluator.topk is [7, 9]", "3 classes"]),
    ],
)
def test_sizes_that_do_not_agree_are_named(plain, options, said):
    line = refused(plain, options)
    for words in said:
        assert words in line


def test_an_entry_of_a_list_of_numbers_is_no_key(config):
    line = refusal(config, {"model.head.in_channels": 24, "data_preprocessor.std.0": 1.0})
    assert "data_preprocessor.std.0" in line
    assert "set a whole list, as in key=[1,5]" in line


def test_sizes_are_those_of_what_training_gets(tmp_path, config):
    path = tmp_path / "own.py"
    path.write_text(
        f"_base_ = {str(config)!r}\n"
        "train_dataloader = dict(dataset=dict(pipeline=[dict(type='LoadImage'),\n"
        "    dict(type='SeededTransforms', transforms=[dict(type='RandomCrop', crop_size=12)]),\n"
        "    dict(type='PackInputs')]))\n"
    )
    assert "RandomCrop of the train_dataloader makes images of 12 x 12" in refusal(path, {})
    own = path.read_text()
    for step in ("dict(type='CenterCrop', crop_size=8)", "dict(type='ResizeEdge', scale=9)"):
        path.write_text(own.replace("dict(type='Pack", f"{step}, dict(type='Pack"))
        load_config(path)  # right, and unknown


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
def test_workers_are_chosen_by_cores_and_processes(
    config, monkeypatch, cores, environment, workers
):
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    cfg = load_config("imagenet_base.py", {"val_dataloader.num_workers": 3})
    assert cfg.train_dataloader.num_workers == workers
    assert cfg.val_dataloader.num_workers == 3
    assert load_config(config).train_dataloader.num_workers == 1  # as the config says


def test_other_optimisers_schedules_data_and_models_stay_free(tmp_path, config):
    path = tmp_path / "own.py"
    path.write_text(
        f"_base_ = {str(config)!r}\n"
        "model = dict(backbone=dict(_delete_=True, type='ResNet', depth=18, out_indices=(3,)),\n"
        "    neck=dict(_delete_=True, type='GlobalAveragePooling'), head=dict(in_channels=512),\n"
        "    train_cfg=dict(_delete_=True, augments=dict(type='Mixup', alpha=0.8), probs=0.5))\n"
        "optim_wrapper = dict(type='AmpOptimWrapper', loss_scale='dynamic',\n"
        "    clip_grad=dict(max_norm=5.0, norm_type=float('inf')),\n"
        "    optimizer=dict(_delete_=True, type='Adafactor', lr=None, eps=(None, 1e-3)))\n"
        "param_scheduler = dict(_delete_=True, type='MultiStepLR', milestones=[1, 2], gamma=0.1)\n"
        "train_dataloader = dict(dataset=dict(type='RepeatDataset', times=2, dataset=dict()))\n"
        "custom_hooks = [dict(type='EarlyStoppingHook', monitor='accuracy/top1', patience=3)]\n"
        "default_hooks = dict(timer=None, checkpoint=dict(interval=-1))\n"
        "log_level = 20\nmy_own_key = dict(lr='anything')\n"
    )
    cfg = load_config(path)
    check_schedule(cfg)
    assert cfg.my_own_key.lr == "anything"


def test_a_model_of_a_hub_is_left_to_timm(plain):
    cfg = copy.deepcopy(plain)
    cfg.model.backbone.model_name = "hf-hub:timm/vit_tiny_patch16_224"
    check_values(cfg.to_dict(), "x.py")


def test_a_config_without_a_length_or_a_part_is_refused(tmp_path, config):
    path = tmp_path / "own.py"
    path.write_text(f"_base_ = {str(config)!r}\ntrain_cfg = dict(_delete_=True, by_epoch=True)\n")
    assert "train_cfg needs max_epochs or max_iters" in refusal(path, {})
    path.write_text(f"_base_ = {str(config)!r}\nval_dataloader = dict(_delete_=True)\n")
    assert "val_dataloader.dataset is missing" in refusal(path, {})


def test_optional_keys_may_be_absent(config, tmp_path):
    cfg = load_config(config, {"val_evaluator.topk": 1}, work_dir=str(tmp_path))
    assert cfg.val_evaluator.topk == (1,)
    del cfg.optim_wrapper["accumulative_counts"]
    runner = TrainingRunner.from_cfg(cfg)
    runner.optim_wrapper = runner.build_optim_wrapper(cfg.optim_wrapper)
    before = runner.optim_wrapper.get_lr()
    runner.scale_lr(runner.optim_wrapper, {})
    assert runner.optim_wrapper.get_lr() == before
    batch = cfg.train_dataloader.batch_size
    runner.scale_lr(runner.optim_wrapper, {"enable": True, "base_batch_size": batch})
    assert runner.optim_wrapper.get_lr() == before


def test_the_seed_of_the_command_line_is_checked(train, tmp_path):
    line = train.fails(tmp_path, "--seed", str(2**33))
    assert f"randomness.seed is {2**33}, but must be a whole number from 0 to {MOST_SEED}" in line
    assert not list(tmp_path.iterdir())  # before anything started


@pytest.mark.slow
def test_the_largest_seed_trains(train, tmp_path):
    train(tmp_path, "--seed", str(MOST_SEED), "--cfg-options", "train_cfg.max_epochs=2")
    assert json.loads((tmp_path / "record.json").read_text())["seed"] == MOST_SEED


YAML = "!!python/object/apply:os.mkdir [{mark}]\n"


@pytest.mark.parametrize("name", ["x.yaml", "x.yml", "x.json", "x"])
@pytest.mark.parametrize("inherits", [False, True])
def test_configs_are_python_and_no_other_file_runs_code(tmp_path, name, inherits):
    mark, other = tmp_path / "executed", tmp_path / name
    (tmp_path / "base.yaml").write_text(YAML.format(mark=mark))
    other.write_text('{"_base_": "base.yaml"}' if "json" in name else YAML.format(mark=mark))
    first = other
    if inherits:
        (tmp_path / "middle.py").write_text(f"_base_ = [{name!r}]\n")
        first = tmp_path / "first.py"
        first.write_text("_base_ = 'middle.py'\n")
    line = refusal(first, {})
    assert f"{other} is not a Python config: write it as a .py file" in line
    assert not mark.exists()


def test_yaml_that_mmengine_reads_runs_no_code(tmp_path):
    secure_files()
    mark, path = tmp_path / "executed", tmp_path / "x.yaml"
    path.write_text("numbers: [1, 2]\n")
    assert mmengine.load(str(path)) == {"numbers": [1, 2]}
    path.write_text(YAML.format(mark=mark))
    with pytest.raises(Exception, match="could not determine a constructor"):
        mmengine.load(str(path))
    assert not mark.exists()


def test_the_batch_size_of_the_command_line_is_of_one_loader(config):
    names = ("train_dataloader", "val_dataloader", "test_dataloader")
    for batched in ("train_dataloader", "test_dataloader"):
        cfg = load_config(config, batch_size=3, batched=batched)
        assert [cfg[name].batch_size for name in names] == [
            3 if name == batched else 8 for name in names
        ]


@pytest.mark.parametrize(
    ("epochs", "warmup"), [(1, 1), (1, 5), (2, 5), (3, 5), (5, 5), (7, 7), (6, 5)]
)
@pytest.mark.parametrize("ends", [True, False])
def test_following_the_advice_for_a_short_run_works(epochs, warmup, ends):
    end = {"end": 9} if ends else {}
    schedule = [
        {"type": "LinearLR", "start_factor": 1e-3, "by_epoch": True, "end": warmup},
        {"type": "CosineAnnealingLR", "eta_min": 1e-5, "by_epoch": True, "begin": warmup, **end},
    ]
    cfg = Config({"train_cfg": {"max_epochs": epochs}, "param_scheduler": schedule})
    if epochs <= warmup or ends:
        with pytest.raises(InputError) as raised:
            check_schedule(cfg)
        advice = re.search(r"`--cfg-options (.*)`", str(raised.value))[1]
        options = dict(pair.split("=") for pair in advice.split())
        for key, value in options.items():
            _check_option(cfg, key)
            options[key] = DictAction._parse_iterable(value)
        cfg.merge_from_dict(options)
    check_schedule(cfg)
    # The rates, by iteration: up to the full one, and down to the floor.
    length, rates = 10, []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers = [
        PARAM_SCHEDULERS.get(part.pop("type")).build_iter_from_epoch(
            optimizer, epoch_length=length, **{"end": epochs, **part}
        )
        for part in cfg.param_scheduler
    ]
    for _ in range(epochs * length):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert max(rates) == pytest.approx(1)
    assert rates[-1] < 0.05


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("[dict(type='LinearLR', begin=2, end=2)]", "has end=2, but it begins at 2"),
        ("[dict(type='StepLR', step_size=1, end=9)]", "param_scheduler.0.end=3"),
        (
            "[dict(type='ConstantLR', begin=n, end=n + 1) for n in range(5)]",
            "param_scheduler=[]",
        ),
    ],
)
def test_schedules_that_do_not_fit(tmp_path, config, schedule, message):
    path = tmp_path / "own.py"
    path.write_text(f"_base_ = {str(config)!r}\nparam_scheduler = {schedule}\n")
    with pytest.raises(InputError, match=re.escape(message)):
        check_schedule(load_config(path))
    check_schedule(load_config(path, {"param_scheduler": []}))


def test_a_schedule_by_epochs_of_a_run_by_iterations_is_refused(tmp_path, config):
    path = tmp_path / "own.py"
    path.write_text(
        f"_base_ = {str(config)!r}\n"
        "train_cfg = dict(_delete_=True, type='ResumableIterLoop', max_iters=100)\n"
        "param_scheduler = [dict(type='CosineAnnealingLR', eta_min=0.0, by_epoch=True)]\n"
    )
    with pytest.raises(InputError, match=r"param_scheduler\.0 counts epochs, but the run counts i"):
        check_schedule(load_config(path))
    check_schedule(load_config(path, {"param_scheduler.0.by_epoch": False}))


def test_a_model_without_a_head_is_no_classifier(config, tmp_path):
    cfg = load_config(config, {"model.head": None})
    with pytest.raises(InputError, match="tokenformer-vit evaluate-lm"):
        configure_test(cfg, tmp_path / "x.pth", tmp_path / "out")
