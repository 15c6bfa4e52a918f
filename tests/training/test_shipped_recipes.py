"""Recipes of ImageNet as they are shipped, for a small model and small images of CIFAR-10."""

import json

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
    data = shared_data("cifar10/plain_text")

    def run(name, *words, folder=None, **changes):
        cfg = load_config(name, changes)
        shrink(cfg)
        cfg.dump(tmp_path / f"{name}.py")
        folder = tmp_path / (folder or name)
        Train(tmp_path / f"{name}.py", data, command)(folder, *words)
        return folder

    return run


# Recipes, and those that start from their models.
RECIPES = {
    "deit3_small": ["deit3_base_224"],
    "vit5_base": ["vit5_base_224"],
    "distill_imagenet_small": [],
    "mae_base_pretrain": ["mae_base_finetune", "mae_base_linear"],
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_resumes_exactly_and_is_tuned(name, run, tmp_path):
    changes = {}
    if "distill" in name:
        teacher = timm.create_model("test_vit", num_classes=10, img_size=32)
        save_model(teacher, tmp_path / "teacher")
        changes = {"model.distillation.teacher": str(tmp_path / "teacher")}
    whole = run(name, **changes)
    resumed = run(name, "--resume", str(whole / "epoch_1.pth"), folder="resumed", **changes)
    one, other = (torch.load(each / "epoch_2.pth", weights_only=True) for each in (whole, resumed))
    for part in one.keys() & {"state_dict", "ema_state_dict"}:
        for key, tensor in one[part].items():
            assert torch.equal(tensor, other[part][key]), key
    # The export is the model of the last step, not an average, and no decoder or teacher.
    weights, trained = load_file(whole / "model.safetensors"), timm_state_dict(one["state_dict"])
    weights.pop(COMPUTATION, None)
    for key, tensor in weights.items():
        assert torch.equal(trained[key], tensor), key
    if "distill" in name:
        assert {"dist_token", "head_dist.weight"} <= weights.keys() == trained.keys()
        record = json.loads((whole / "record.json").read_text())
        assert record["teacher"] == str(tmp_path / "teacher")
    if "mae" in name:
        card = (whole / "README.md").read_text()
        assert "Reconstruction loss" in card
        assert "image-feature-extraction" in card
    for tuned in RECIPES[name]:
        start = dict.fromkeys(["model.backbone.checkpoint_path"], str(whole / "model.safetensors"))
        if "mae" not in name:
            start["model.head.init_cfg.checkpoint"] = str(whole / "model.safetensors")
            start["model.backbone.model_name"] = load_config(name).model.backbone.model_name
        model = timm.create_model(f"local-dir:{run(tuned, **start)}", pretrained=True)
        assert model.num_classes == 10
        key = "blocks.0.attn.query.key_param_tokens"
        gap = (model.state_dict()[key] - weights[key]).abs().max()
        assert gap < 0.1 if tuned != "mae_base_linear" else gap == 0
