"""A config of mmpretrain's own parts, which takes only the backbone from this package."""

import numpy as np
import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from mmpretrain import ImageClassificationInferencer

from tokenformer_vit.mmpretrain_names import timm_state_dict
from tokenformer_vit.training.runner import TrainingRunner

PIPELINE = [
    {"type": "LoadImageFromFile"},
    {"type": "Resize", "scale": 8},
    {"type": "PackInputs"},
]


def stock_config(data_root, work_dir, **changes):
    def loader(split):
        return {
            "batch_size": 16,
            "num_workers": 0,
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "dataset": {
                "type": "CustomDataset",
                "data_root": str(data_root),
                "data_prefix": split,
                "pipeline": PIPELINE,
            },
        }

    model = {
        "type": "ImageClassifier",
        "backbone": {
            "type": "TimmClassificationBackbone",
            "model_name": "tokenformer_tiny",
            "img_size": 8,
            "patch_size": 4,
            "embed_dim": 24,
            "depth": 1,
            "num_heads": 2,
        },
        "head": {"type": "LinearClsHead", "num_classes": 3, "in_channels": 24},
        "data_preprocessor": {"mean": [127.5] * 3, "std": [127.5] * 3, "to_rgb": True},
    }
    settings = {
        "custom_imports": {"imports": ["tokenformer_vit.training"]},
        "default_scope": "mmpretrain",
        "model": model,
        "train_dataloader": loader("train"),
        "val_dataloader": loader("val"),
        "test_dataloader": loader("val"),
        "val_evaluator": {"type": "Accuracy", "topk": (1,)},
        "test_evaluator": {"type": "Accuracy", "topk": (1,)},
        "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-3}},
        "train_cfg": {"by_epoch": True, "max_epochs": 2, "val_interval": 1},
        "val_cfg": {},
        "test_cfg": {},
        "default_hooks": {"checkpoint": {"type": "CheckpointHook", "save_best": "auto"}},
        "log_level": "ERROR",
        "work_dir": str(work_dir),
        "experiment_name": str(work_dir),  # runs of one second would share a log
    }
    return Config({**settings, **changes})


@pytest.fixture(scope="module")
def finished(data_root, tmp_path_factory):
    work_dir = tmp_path_factory.mktemp("stock")
    runner = Runner.from_cfg(stock_config(data_root, work_dir))
    runner.train()
    return runner


def test_a_checkpoint_of_the_stock_hook_is_used(finished, data_root, tmp_path):
    last = f"{finished.work_dir}/epoch_2.pth"
    config = stock_config(data_root, tmp_path, load_from=last)
    top1 = finished.message_hub.get_scalar("val/accuracy/top1").current()
    assert Runner.from_cfg(config).test() == {"accuracy/top1": pytest.approx(top1)}
    inferencer = ImageClassificationInferencer(config, pretrained=last, device="cpu")
    (result,) = inferencer(np.zeros((8, 8, 3), dtype=np.uint8))
    assert result["pred_class"] in ("bright", "dark", "split")


@pytest.mark.parametrize("saved", ["weights", "checkpoint"])
def test_a_run_starts_from_a_checkpoint_of_timm(saved, data_root, tmp_path):
    """mmengine would only warn that no name fits, and train from scratch."""
    config = stock_config(data_root, tmp_path, load_from=str(tmp_path / "timm.pth"))
    arguments = {key: value for key, value in config.model.backbone.items() if key != "type"}
    model = timm.create_model(**arguments, num_classes=3)
    weights = model.state_dict()
    content = {"state_dict": weights, "arch": "tokenformer_tiny", "epoch": 3, "optimizer": {}}
    torch.save(weights if saved == "weights" else content, tmp_path / "timm.pth")
    runner = TrainingRunner.from_cfg(config)
    runner.load_or_resume()
    loaded = timm_state_dict(runner.model.state_dict())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], each) for name, each in weights.items())


def test_the_commands_take_a_config_of_stock_parts(data_root, tmp_path, command):
    """It has no ``resume``, no ``visualizer`` and none of our hooks; these are added."""
    config = tmp_path / "own.py"
    stock_config(
        data_root,
        tmp_path,
        param_scheduler=[{"type": "CosineAnnealingLR", "by_epoch": True, "T_max": 2}],
        randomness={"seed": 0},
    ).dump(config)
    folder = tmp_path / "run"
    refused = command("train", str(config), "--auto-scale-lr")
    assert "no auto_scale_lr.base_batch_size" in refused.err
    done = command("train", str(config), "--work-dir", str(folder))
    assert done.status == 0, done.output
    files = "model.safetensors, config.json, curves.png, record.json, checkpoints"
    assert f"Done. In {folder}: {files}" in done.output
    words = (str(config), str(folder / "epoch_2.pth"), "--out", str(tmp_path / "tested"))
    assert command("test", *words).status == 0


def test_weights_with_another_head_do_not_let_a_model_grow(data_root, tmp_path):
    schedule = [{"epoch": 1, "num_ffn_param_tokens": 128}]
    config = stock_config(
        data_root,
        tmp_path,
        load_from=str(tmp_path / "timm.pth"),
        custom_hooks=[{"type": "GrowthHook", "schedule": schedule}],
    )
    arguments = {key: value for key, value in config.model.backbone.items() if key != "type"}
    torch.save(timm.create_model(**arguments, num_classes=7).state_dict(), tmp_path / "timm.pth")
    runner = TrainingRunner.from_cfg(config)
    before = {name: each.shape for name, each in runner.model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.fc\.weight"):
        runner.load_or_resume()
    assert {name: each.shape for name, each in runner.model.state_dict().items()} == before
