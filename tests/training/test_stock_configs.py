"""Configs of mmpretrain train by their path, as they are; so do others of its parts."""

import json
from importlib.util import find_spec
from pathlib import Path

import mmpretrain
import numpy as np
import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from mmpretrain import ImageClassificationInferencer
from PIL import Image

from tokenformer_vit.errors import InputError
from tokenformer_vit.mmpretrain_names import timm_state_dict
from tokenformer_vit.training.checkpoint import load_plain_checkpoint
from tokenformer_vit.training.config import load_config, name_of
from tokenformer_vit.training.runner import TrainingRunner, run_training

STOCK = Path(mmpretrain.__file__).parent / ".mim" / "configs"
# Only what makes a run short: length, schedule, batch and processes.
SHORT = ("train_cfg.max_epochs=1", "param_scheduler=[]", "train_dataloader.num_workers=0")
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """Images of a few of ImageNet's classes, with lists of them as ImageNet's meta/ has."""
    root, rng = tmp_path_factory.mktemp("imagenet"), np.random.default_rng(0)
    (root / "meta").mkdir()
    for split, count in (("train", 4), ("val", 2)):
        (root / split).mkdir()
        for index in range(count):
            pixels = rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / split / f"{index}.JPEG")
        lines = "".join(f"{index}.JPEG {7 * index}\n" for index in range(count))
        (root / "meta" / f"{split}.txt").write_text(lines)
    return root


@pytest.mark.parametrize(
    "name",
    [
        "mobilenet_v2/mobilenet-v2_8xb32_in1k",
        pytest.param("deit/deit-tiny_4xb256_in1k", marks=slow),
        pytest.param("resnet/resnet50_8xb32_in1k", marks=slow),
        pytest.param("swin_transformer/swin-tiny_16xb64_in1k", marks=slow),
        pytest.param("convnext/convnext-tiny_32xb128_in1k", marks=slow),
        pytest.param("vision_transformer/vit-base-p16_32xb128-mae_in1k", marks=slow),
        pytest.param("mae/mae_vit-base-p16_8xb512-amp-coslr-300e_in1k", marks=slow),
    ],
)
def test_a_config_of_mmpretrain_trains_as_it_is(name, imagenet, tmp_path, command):
    words = ["--data-root", imagenet, "--work-dir", tmp_path, "--batch-size", 2]
    words += ["--amp"] if "amp" in name else []  # mmengine's own autocast needs a GPU
    words += ["--cfg-options", *SHORT]
    words += [] if "mae_vit" in name else ["val_dataloader.num_workers=0"]
    done = command("train", STOCK / f"{name}.py", *words)
    assert done.status == 0, done.output
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["iterations"] == 2
    assert "not a model of timm" in record["not_exported"]
    assert (tmp_path / "epoch_1.pth").is_file()
    words.insert(0, "--resume")
    assert "Epoch(train)" not in command("train", STOCK / f"{name}.py", *words).output
    if "mae_vit" in name:
        return
    words = ["--data-root", imagenet, "--cfg-options", "test_dataloader.num_workers=0"]
    done = command("test", STOCK / f"{name}.py", tmp_path / "epoch_1.pth", *words)
    assert done.status == 0, done.output
    measured = json.loads((tmp_path / "test" / "metrics.json").read_text())
    assert measured["metrics"]["accuracy/top1"] == record["accuracy/top1"]


# Its own parts, and only the backbone of this package.
SIZES = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
CONFIG = f"""
custom_imports = dict(imports=["tokenformer_vit.training"])
default_scope = "mmpretrain"
backbone = dict(type="TimmClassificationBackbone", model_name="tokenformer_tiny", **{SIZES})
model = dict(
    type="ImageClassifier",
    backbone=backbone,
    head=dict(type="LinearClsHead", num_classes=3, in_channels=24),
    data_preprocessor=dict(mean=[127.5] * 3, std=[127.5] * 3, to_rgb=True),
)
pipeline = [dict(type="LoadImageFromFile"), dict(type="Resize", scale=8), dict(type="PackInputs")]
train = dict(type="CustomDataset", data_root="DATA", data_prefix="train", pipeline=pipeline)
loader = dict(batch_size=16, num_workers=0, sampler=dict(type="DefaultSampler", shuffle=False))
train_dataloader = dict(dataset=train, **loader)
val_dataloader = test_dataloader = dict(dataset=dict(train, data_prefix="val"), **loader)
val_evaluator = test_evaluator = dict(type="Accuracy", topk=(1,))
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=1e-3))
param_scheduler = [dict(type="CosineAnnealingLR", by_epoch=True, T_max=2)]
train_cfg = dict(by_epoch=True, max_epochs=2, val_interval=1)
val_cfg = test_cfg = dict()
default_hooks = dict(checkpoint=dict(type="CheckpointHook", save_best="auto"))
"""


@pytest.fixture
def stock(data_root, tmp_path):
    path = tmp_path / "stock.py"
    path.write_text(CONFIG.replace("DATA", str(data_root)))
    return path


def test_mmengines_runner_trains_and_uses_the_backbone(stock, tmp_path):
    cfg = Config.fromfile(stock)
    cfg.work_dir = cfg.experiment_name = str(tmp_path / "run")
    finished = Runner.from_cfg(cfg)
    finished.train()
    top1 = finished.message_hub.get_scalar("val/accuracy/top1").current()
    cfg.load_from = f"{cfg.work_dir}/epoch_2.pth"
    weights = load_plain_checkpoint(cfg.load_from)["state_dict"]
    for name, tensor in finished.model.state_dict().items():
        assert torch.equal(weights[name], tensor)
    cfg.experiment_name = f"{cfg.work_dir} again"  # or runs of one second would share a log
    assert Runner.from_cfg(cfg).test() == {"accuracy/top1": pytest.approx(top1)}
    inferencer = ImageClassificationInferencer(cfg, pretrained=cfg.load_from, device="cpu")
    (result,) = inferencer(np.zeros((8, 8, 3), dtype=np.uint8))
    assert result["pred_class"] in ("bright", "dark", "split")
    # A part of a model of ours starts from its file, which has a log and numbers of NumPy.
    ours = load_config(stock, {"optim_wrapper.optimizer.lr": 0.0}, work_dir=str(tmp_path / "ours"))
    start = {"type": "Pretrained", "checkpoint": cfg.load_from, "prefix": "head."}
    ours.model.head.init_cfg = start
    run_training(ours)
    trained = load_plain_checkpoint(str(tmp_path / "ours" / "epoch_2.pth"))["state_dict"]
    assert torch.equal(trained["head.fc.weight"], weights["head.fc.weight"])


NEW = """
from mmengine.config import read_base
from mmengine.dataset import DefaultSampler
from mmengine.hooks import CheckpointHook
from mmengine.runner import EpochBasedTrainLoop
from mmpretrain.datasets import CustomDataset, PackInputs
from mmpretrain.evaluation import ConfusionMatrix
from mmpretrain.models import ImageClassifier, VisionTransformer
from torch.optim import AdamW
with read_base():
    from .parts import *
arch = dict(embed_dims=24, num_layers=1, num_heads=2, feedforward_channels=48)
backbone = dict(type=VisionTransformer, arch=arch, img_size=8, patch_size=4)
model["backbone"] = backbone
model.update(dict(type=ImageClassifier))
pipeline[-1].update(dict(type=PackInputs))
train_dataloader.update(dict(sampler=dict(type=DefaultSampler), dataset=dict(type=CustomDataset)))
train_dataloader.update(dict(num_batch_per_epoch=2))
optim_wrapper = dict(optimizer=dict(type=AdamW, lr=1e-3))
train_cfg = dict(type=EpochBasedTrainLoop, max_epochs=2)
default_hooks = dict(checkpoint=dict(type=CheckpointHook, interval=1))
test_evaluator = [val_evaluator, dict(type=ConfusionMatrix)]
visualizer = dict(type="UniversalVisualizer", vis_backends=BACKENDS)
"""


def test_a_config_of_classes_trains_resumes_and_tests(stock, tmp_path, command, monkeypatch):
    """mmengine's present style; the config that a run writes has their names."""
    stock.rename(tmp_path / "parts.py")
    kinds = ["Local", "Tensorboard"] if find_spec("tensorboard") else ["Local"]
    backends = [{"type": f"{kind}VisBackend"} for kind in kinds]
    path, run = tmp_path / "new.py", tmp_path / "run"
    path.write_text(NEW.replace("BACKENDS", repr(backends)))
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block: compiled.append(block))
    monkeypatch.setattr(torch, "compile", None)  # mmengine's own, of the whole step
    words = ("--work-dir", run, "--compile")
    for more in ((), ("--resume", run / "epoch_1.pth")):
        done = command("train", path, *words, *more)
        assert done.status == 0, done.output
        assert "differs" not in done.output
    assert "exact_resume" in torch.load(run / "epoch_2.pth", weights_only=True)
    assert [type(block).__name__ for block in compiled] == ["TransformerEncoderLayer"] * 2
    for written in (path, run / "new.py"):
        cfg = load_config(written)
        kinds = cfg.train_cfg.type, cfg.train_dataloader.sampler.type
        assert kinds == ("ResumableEpochLoop", "ResumableSampler")
        assert cfg.default_hooks.checkpoint.type == "ExactCheckpointHook"
        assert name_of(cfg.optim_wrapper.optimizer.type) == "AdamW"
        assert cfg.train_dataloader.sampler.num_samples == 32
    done = command("test", run)
    assert done.status == 0, done.output
    metrics = json.loads((run / "test" / "metrics.json").read_text())["metrics"]
    assert np.sum(metrics["confusion_matrix/result"]) == 48
    assert {"accuracy/top1", "cross_entropy"} < metrics.keys()


def test_a_rate_without_a_batch_size_is_not_scaled(stock, command):
    refused = command("train", stock, "--auto-scale-lr")
    assert "no auto_scale_lr.base_batch_size" in refused.err


@pytest.mark.parametrize("saved", ["weights", "checkpoint", "another head"])
def test_a_run_starts_from_a_checkpoint_of_timm(saved, own, data_root, tmp_path):
    """mmengine would only warn that no name fits, and train from scratch."""
    classes = 7 if saved == "another head" else 3
    weights = timm.create_model("tokenformer_tiny", **SIZES, num_classes=classes).state_dict()
    content = {"state_dict": weights, "arch": "tokenformer_tiny", "epoch": 3, "optimizer": {}}
    torch.save(content if saved == "checkpoint" else weights, tmp_path / "timm.pth")
    hook = {"type": "GrowthHook", "schedule": [{"epoch": 1, "num_ffn_param_tokens": 128}]}
    text = f"load_from = {str(tmp_path / 'timm.pth')!r}\ncustom_hooks = [{hook!r}]"
    path = own(f"{text}\ndefault_hooks = dict(ema=None)")
    cfg = load_config(path, data_root=str(data_root), work_dir=str(tmp_path))
    cfg.experiment_name = str(tmp_path)
    runner = TrainingRunner.from_cfg(cfg)
    before = {name: each.shape for name, each in runner.model.state_dict().items()}
    if saved == "another head":
        with pytest.raises(InputError, match=r"head\.fc\.weight is \(7, 24\) in the file"):
            runner.load_or_resume()
    else:
        runner.load_or_resume()
        loaded = timm_state_dict(runner.model.state_dict())
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[name], each) for name, each in weights.items())
    assert {name: each.shape for name, each in runner.model.state_dict().items()} == before
