"""Recipes of ImageNet as they are shipped, for a small model and small images of CIFAR-10."""

import json
import shutil

import pytest
import timm
import torch
from mmengine.config import Config
from safetensors.torch import load_file

from tokenformer_vit.mmpretrain_names import timm_state_dict
from tokenformer_vit.models.checkpoints import COMPUTATION, save_model
from tokenformer_vit.training.config import load_config

from .conftest import Train

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
DECODER = {"decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}
# The rows of a file are in the order of their classes.
TRAIN = {"split": "train", "indices": list(range(0, 50_000, 195))[:256]}
VAL = {"split": "test", "indices": list(range(0, 10_000, 78))[:128]}

pytestmark = pytest.mark.slow


def shrink(cfg: Config) -> None:
    """Change sizes, data and length of a config, and nothing else."""
    cfg.model.backbone.update(SIZES)
    if "num_classes" in cfg.model.head:
        cfg.model.head.update(num_classes=10, in_channels=24)
        cfg.data_preprocessor.num_classes = 10
    if cfg.model.type == "MaskedAutoencoder":
        cfg.model.neck.update(DECODER)
    elif cfg.model.get("neck"):
        cfg.model.neck.input_features = 24
    for name in ("train", "val", "test"):
        loader = cfg[f"{name}_dataloader"]
        pipeline = loader.dataset.pipeline
        for step in pipeline:
            small = {"size": 32, "input_size": (3, 32, 32)}
            step.update({key: value for key, value in small.items() if key in step})
        loader.update(batch_size=32, num_workers=0, persistent_workers=False)
        part = TRAIN if name == "train" else VAL
        data = {"type": "HuggingFaceImages", "data_root": "", **part}
        loader.dataset = {**data, "pipeline": pipeline}
    cfg.train_cfg.update(max_epochs=2, val_interval=1)
    warm_up, cosine = cfg.param_scheduler
    warm_up.end = cosine.begin = 1
    cfg.default_hooks.checkpoint.update(interval=1, max_keep_ckpts=-1)


@pytest.fixture
def run(tmp_path, command, shared_data, arrow_cache):
    pytest.importorskip("datasets")
    data = shared_data("cifar10/plain_text")

    def run(name, *words, folder=None, **changes):
        cfg = load_config(name, changes)
        shrink(cfg)
        cfg.dump(tmp_path / f"{name}.py")
        folder = tmp_path / (folder or name)
        Train(tmp_path / f"{name}.py", data, command)(folder, *words)
        return folder

    return run


def check_resumed_exactly(run, name, **changes):
    """Train a config, resume it after its first epoch, compare; return the first folder."""
    whole = run(name, **changes)
    resumed = run(name, "--resume", str(whole / "epoch_1.pth"), folder="resumed", **changes)
    one, other = (torch.load(each / "epoch_2.pth", weights_only=True) for each in (whole, resumed))
    for part in one.keys() & {"state_dict", "ema_state_dict"}:
        for key, tensor in one[part].items():
            assert torch.equal(tensor, other[part][key]), key
    return whole


@pytest.mark.parametrize(
    ("first", "second"), [("deit3_small", "deit3_base_224"), ("vit5_base", "vit5_base_224")]
)
def test_both_stages_of_deit3(first, second, run):
    whole = check_resumed_exactly(run, first)
    trained = torch.load(whole / "epoch_2.pth", weights_only=True)["state_dict"]
    weights = load_file(whole / "model.safetensors")  # not the average, and of every block
    for name, tensor in timm_state_dict(trained).items():
        assert torch.equal(weights[name], tensor), name
    start = str(whole / "model.safetensors")
    changes = {"model.backbone.checkpoint_path": start, "model.head.init_cfg.checkpoint": start}
    changes["model.backbone.model_name"] = load_config(first).model.backbone.model_name
    tuned = load_file(run(second, **changes) / "model.safetensors")
    for name, tensor in weights.items():  # at a rate of 1e-5, and the head as well
        torch.testing.assert_close(tuned[name], tensor, rtol=0, atol=1e-3)


def test_distillation_by_a_token(run, tmp_path):
    teacher = timm.create_model("test_vit", num_classes=10, img_size=32)
    save_model(teacher, tmp_path / "teacher")
    changes = {"model.distillation.teacher": str(tmp_path / "teacher")}
    whole = check_resumed_exactly(run, "distill_imagenet_small", **changes)
    trained = torch.load(whole / "epoch_2.pth", weights_only=True)["state_dict"]
    assert not any("teacher" in key for key in trained)  # which a resume loads by its path
    record = json.loads((whole / "record.json").read_text())
    assert record["teacher"] == str(tmp_path / "teacher")
    shutil.rmtree(tmp_path / "teacher")  # the exported model does not need it
    weights = timm.create_model(f"local-dir:{whole}", pretrained=True).state_dict()
    assert {"dist_token", "head_dist.weight"} <= weights.keys()
    for key, tensor in timm_state_dict(trained).items():
        assert torch.equal(weights[key], tensor), key


def test_pre_training_then_fine_tuning_and_a_linear_probe(run):
    whole = check_resumed_exactly(run, "mae_base_pretrain")
    weights = load_file(whole / "model.safetensors")
    del weights[COMPUTATION]
    trained = torch.load(whole / "epoch_2.pth", weights_only=True)["state_dict"]
    for key, tensor in weights.items():
        assert torch.equal(trained[f"backbone.model.{key}"], tensor), key
    card = (whole / "README.md").read_text()
    assert "Reconstruction loss" in card
    assert "image-feature-extraction" in card
    start = {"model.backbone.checkpoint_path": str(whole / "model.safetensors")}
    name = "blocks.0.attn.query.key_param_tokens"
    for config, kept in (("mae_base_finetune", False), ("mae_base_linear", True)):
        trained = run(config, **start)
        exported = timm.create_model(f"local-dir:{trained}", pretrained=True)
        assert exported.num_classes == 10
        assert torch.equal(exported.state_dict()[name], weights[name]) is kept
