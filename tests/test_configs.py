"""Every config builds what it says; configs of the paper have every number of its recipe."""

import copy
import functools
import re
from pathlib import Path

import pytest
import torch
from mmengine.dataset import Compose
from mmengine.optim import build_optim_wrapper
from mmengine.registry import HOOKS
from mmpretrain.registry import DATASETS, METRICS, MODELS, TRANSFORMS
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN as IMAGENET_MEAN
from timm.data import IMAGENET_DEFAULT_STD as IMAGENET_STD

from tokenformer_vit.training.config import load_config

pytestmark = pytest.mark.usefixtures("scope")
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
ALL_NAMES = sorted(path.stem for path in CONFIGS.glob("*.py"))
LANGUAGE = [name for name in ALL_NAMES if name.startswith("lm_")]
NAMES = [name for name in ALL_NAMES if name not in LANGUAGE]
CLASSIFIERS = [name for name in NAMES if not name.endswith("_pretrain")]
# Name: backbone, depth x width, epochs, drop path, parameters.
PAPER = {
    "imagenet_base": ("tokenformer_base", 12, 768, 300, 0.1, 114_759_400),
    "imagenet_base_matched": ("tokenformer_base_matched", 12, 768, 300, 0.1, 86_447_848),
    "imagenet_large": ("tokenformer_large", 24, 1024, 200, 0.2, 404_670_440),
    "imagenet_large_matched": ("tokenformer_large_matched", 24, 1024, 200, 0.2, 304_007_144),
}
PEAK, FLOOR = 1.6e-3, 1e-5
# Name: backbone, side in pixels, drop path, highest rate, parameters.
DEIT3 = {
    "deit3_small": ("tokenformer_small", 224, 0.05, 4e-3, 29_077_480),
    "deit3_base": ("tokenformer_base", 192, 0.2, 3e-3, 114_737_128),
    "deit3_large": ("tokenformer_large", 192, 0.45, 3e-3, 404_665_320),
    "deit3_base_224": ("tokenformer_base", 224, 0.2, 1e-5, 114_777_064),
    "deit3_large_224": ("tokenformer_large", 224, 0.45, 1e-5, 404_718_568),
    "vit5_base": ("tokenformer_base_rope_reg4", 192, 0.2, 3e-3, 114_739_432),
    "vit5_base_224": ("tokenformer_base_rope_reg4", 224, 0.25, 1e-5, 114_779_368),
}


read = functools.cache(load_config)


def load(name):
    return copy.deepcopy(read(name))


def build_model(cfg):
    """Build the classifier as a runner does, without memory for its weights.

    A config that starts from the weights of another run is built with random weights.
    """
    model = copy.deepcopy(cfg.model)
    model.backbone.pop("checkpoint_path")
    with torch.device("cpu" if "growth" in model.backbone else "meta"):  # it looks at the weights
        return MODELS.build({"data_preprocessor": cfg.data_preprocessor, **model})


def decays_of(model, cfg):
    """Return the weight decay of each parameter."""
    groups = build_optim_wrapper(model, cfg.optim_wrapper).optimizer.param_groups
    return {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}


def header(name):
    """Read the fields of a config's header; a field may continue over indented lines."""
    lines = []
    for line in (CONFIGS / f"{name}.py").read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    fields = re.findall(r"^(\w+):((?: .*\n?)(?:  .*\n?)*)", "\n".join(lines), re.MULTILINE)
    return {key: " ".join(value.replace("\\\n", " ").split()) for key, value in fields}


@pytest.mark.parametrize("name", ALL_NAMES)
def test_header_is_the_record_of_the_experiment(name):
    if name in LANGUAGE:
        pytest.importorskip("transformers", reason="language models need the extra [language]")
    fields = header(name)
    assert set(fields) >= {"Batch", "Command", "Expected"}
    assert "Hardware" in fields or fields["Expected"].startswith("not run")
    assert all(fields.values())
    command = fields["Command"]
    assert f"tokenformer-vit train configs/{name}.py" in command
    # The batch of the command, and every product of the Batch line, is what the rate is meant for.
    cfg = load(name)
    options = dict(re.findall(r"(?:--)?([\w.-]+)[ =](\d+)", command))
    images = int(options.get("batch-size", cfg.train_dataloader.batch_size))
    images *= int(options.get("nproc_per_node", 1))
    images *= int(options.get("optim_wrapper.accumulative_counts", 1))
    assert images == cfg.auto_scale_lr.base_batch_size
    assert re.match(rf"{images}\b", fields["Batch"])
    for gpus, batch, steps in re.findall(
        r"(\d+) GPUs x (\d+)(?: with (\d+) steps)?", fields["Batch"]
    ):
        assert int(gpus) * int(batch) * int(steps or 1) == images


README = (CONFIGS / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", re.findall(r"```python\n(_base_.*?)```", README, re.DOTALL))
def test_configs_of_the_readme_load_and_build(text, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(text)
    cfg = load_config(path)
    model = build_model(cfg)
    assert model.backbone.model.num_features == model.head.in_channels


def test_the_readme_names_every_config():
    assert set(re.findall(r"`(\w+)\.py`", README)) == set(ALL_NAMES)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_model_optimiser_and_hooks_are_built(name):
    cfg = load(name)
    model = build_model(cfg)
    backbone = model.backbone.model
    assert backbone.num_features == model.head.in_channels
    assert model.head.num_classes == cfg.data_preprocessor.num_classes
    title = (CONFIGS / f"{name}.py").read_text().splitlines()[0]
    number = re.search(r"([\d,]+) parameters|parameters as [^:]+: ([\d,]+)", title)
    assert number or not name.startswith("imagenet_")
    if number:
        stated = int((number[1] or number[2]).replace(",", ""))
        assert sum(parameter.numel() for parameter in model.parameters()) == stated
    decays = decays_of(model, cfg)
    # timm's rule, which the model states by itself.
    kept = {f"backbone.model.{parameter}" for parameter in backbone.no_weight_decay()}
    expected = cfg.optim_wrapper.optimizer.weight_decay
    for key, parameter in model.named_parameters():
        decays_not = parameter.ndim == 1 or key in kept
        if parameter.requires_grad:  # else the optimiser leaves it alone anyway
            assert decays[parameter] == (0 if decays_not else expected), key
    for hook in filter(None, cfg.default_hooks.values()):
        HOOKS.build(hook)
    for evaluator in (cfg.val_evaluator, cfg.test_evaluator):
        assert max(METRICS.build(evaluator).topk) <= model.head.num_classes


@pytest.mark.parametrize("name", NAMES)
def test_pipelines_build_and_make_images_of_the_models_size(name, tmp_path):
    cfg = load(name)
    size = cfg.model.backbone.img_size
    Image.new("RGB", (size, size)).save(tmp_path / "x.png")
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        assert DATASETS.get(loader.dataset.type) is not None
        pipeline = Compose([TRANSFORMS.build(step) for step in loader.dataset.pipeline])
        sample = pipeline({"img_path": tmp_path / "x.png", "gt_label": 1, "sample_idx": 0})
        assert sample["inputs"].shape == (3, size, size)
        assert sample["inputs"].dtype == torch.uint8
        label = sample["data_samples"]  # in training without the DataSample around it
        assert (label if loader is cfg.train_dataloader else label.gt_label) == 1
    assert cfg.test_dataloader.dataset.pipeline[1].type == "EvalTransform"  # timm's; its own test


def test_tuning_trains_new_pairs_and_a_head():
    tuned = build_model(load("tuning_imagenette"))
    trained = {name: p.numel() for name, p in tuned.named_parameters() if p.requires_grad}
    # Keys and values, 8 in each of q, k, v and o; 10 classes.
    assert sum(trained.values()) == 12 * 4 * 8 * 2 * 384 + 3850
    assert all("new_" in name or name.startswith("head.") for name in trained)
    assert sum(p.numel() for p in tuned.backbone.parameters() if not p.requires_grad) == 28_627_200


# The parts of MAE's supervised recipe, and of its augmentation, value by value.
RANDAUGMENT = {
    "type": "FastRandAugment",
    "policies": "timm_increasing",
    "num_policies": 2,
    "total_level": 10,
    "magnitude_level": 9,
    "magnitude_std": 0.5,
    "hparams": {"pad_val": [124, 116, 104], "interpolation": "bicubic"},  # the mean, in RGB
}
MIXING = [{"type": "Mixup", "alpha": 0.8}, {"type": "CutMix", "alpha": 1.0}]
SMOOTHED = {"type": "LabelSmoothLoss", "label_smooth_val": 0.1, "mode": "original"}
FLIP = {"type": "v2/RandomHorizontalFlip", "p": 0.5}


def evaluation(side, crop_pct):
    """The pipeline of validation and test in an ImageNet recipe."""
    how = {"crop_pct": crop_pct, "interpolation": "bicubic", "crop_mode": "center"}
    return [
        {"type": "LoadImage"},
        {"type": "EvalTransform", "input_size": (3, side, side), **how},
        {"type": "PackInputs", "meta_keys": ()},
    ]


def check_data(cfg, training, side, crop_pct):
    mean, std = ([255 * value for value in each] for each in (IMAGENET_MEAN, IMAGENET_STD))
    cfg.data_preprocessor.pop("batch_augments")  # which the model added
    assert cfg.data_preprocessor == {
        "type": "LabelPreprocessor",
        "num_classes": 1000,
        "mean": pytest.approx(mean),
        "std": pytest.approx(std),
    }
    assert cfg.model.train_cfg.augments == MIXING
    data = {"type": "ImageNet", "data_root": "data/imagenet"}
    pipeline = [{"type": "LoadImage"}, *training, {"type": "PackLabels"}]
    train, val, test = (cfg[f"{name}_dataloader"].dataset for name in ("train", "val", "test"))
    for each in (train, val, test):
        each.pop("extensions", None)
    assert train == {**data, "split": "train", "pipeline": pipeline}
    assert val == test == {**data, "split": "val", "pipeline": evaluation(side, crop_pct)}


@pytest.mark.parametrize("name", PAPER)
def test_recipe_of_the_paper(name):
    cfg = load(name)
    model_name, depth, width, epochs, drop_path, parameters = PAPER[name]
    backbone = cfg.model.backbone
    assert (backbone.model_name, backbone.drop_path_rate) == (model_name, drop_path)
    assert (backbone.theta, backbone.norm, backbone.checkpoint_path) == ("gelu_l2", "none", "")
    model = build_model(cfg)
    vit = model.backbone.model
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert (len(vit.blocks), vit.embed_dim, vit.global_pool) == (depth, width, "token")
    assert (vit.patch_embed.img_size, vit.patch_embed.patch_size) == ((224, 224), (16, 16))
    assert vit.blocks[-1].drop_path1.drop_prob == pytest.approx(drop_path)
    assert cfg.model.head.init_cfg == {"type": "Constant", "layer": "Linear", "val": 0.0}
    assert cfg.model.head.loss == SMOOTHED

    assert cfg.train_cfg.max_epochs == epochs
    assert cfg.auto_scale_lr == {"base_batch_size": 4096, "enable": False}
    assert (cfg.optim_wrapper.type, "clip_grad" in cfg.optim_wrapper) == ("LazyOptimWrapper", False)
    assert cfg.optim_wrapper.optimizer == {
        "type": "AdamW",
        "lr": pytest.approx(PEAK, rel=1e-12),
        "weight_decay": 0.3,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "fused": None,
    }
    warmup, cosine = cfg.param_scheduler
    steps = {"by_epoch": True, "end": 20, "convert_to_iter_based": True}
    assert warmup == {"type": "LinearLR", "start_factor": 1e-3, **steps}
    assert cosine == {"type": "CosineAnnealingLR", "eta_min": FLOOR, "by_epoch": True, "begin": 20}
    assert cfg.default_hooks.ema == {"type": "AccumulationEMAHook", "momentum": 1e-4}
    assert "custom_hooks" not in cfg
    # torchvision's share of the area is from 0.08 to 1, its aspect ratio from 3/4 to 4/3.
    crop = {"type": "v2/RandomResizedCrop", "size": 224, "interpolation": "bicubic"}
    erasing = {
        "type": "RandomErasing",
        "erase_prob": 0.25,
        "mode": "rand",
        "min_area_ratio": 0.02,
        "max_area_ratio": 1 / 3,
        "fill_color": cfg.data_preprocessor.mean,
        "fill_std": cfg.data_preprocessor.std,
    }
    check_data(cfg, [crop, FLIP, RANDAUGMENT, erasing], 224, 0.875)


@pytest.mark.parametrize("name", DEIT3)
def test_recipe_of_deit3(name):
    cfg, second = load(name), name.endswith("_224")
    model_name, side, drop_path, peak, parameters = DEIT3[name]
    model = build_model(cfg)
    vit = model.backbone.model
    assert (cfg.model.backbone.model_name, cfg.model.backbone.init_values) == (model_name, 1e-4)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert (vit.patch_embed.img_size, vit.patch_embed.patch_size) == ((side, side), (16, 16))
    assert vit.pos_embed.shape[1] == (side // 16) ** 2  # none for the class token
    assert vit.global_pool == "token"
    for block in vit.blocks:
        assert block.drop_path1.drop_prob == block.drop_path2.drop_prob == drop_path
        assert block.ls1.gamma.shape == block.ls2.gamma.shape == (vit.embed_dim,)
    assert not {key for key in cfg.model.backbone if "drop_rate" in key}

    common = {"lr": peak, "betas": (0.9, 0.999), "eps": 1e-8}
    assert cfg.optim_wrapper.optimizer == (
        {"type": "AdamW", "weight_decay": 0.1, "fused": None, **common}
        if second
        else {"type": "timm.optim.Lamb", "weight_decay": 0.05, "max_grad_norm": 1.0, **common}
    )
    assert "clip_grad" not in cfg.optim_wrapper
    assert cfg.auto_scale_lr == {"base_batch_size": 512 if second else 2048, "enable": False}
    warmup, cosine = cfg.param_scheduler
    assert (warmup.type, warmup.end, warmup.by_epoch) == ("LinearLR", 5, True)
    assert warmup.start_factor * peak == pytest.approx(1e-6, rel=1e-12)
    assert cosine == {"type": "CosineAnnealingLR", "eta_min": FLOOR, "by_epoch": True, "begin": 5}
    assert cfg.train_cfg.max_epochs == (20 if second else 800)
    momentum = pytest.approx(1 - 0.99996, rel=1e-9)
    average = {"type": "AccumulationEMAHook", "momentum": momentum, "validated": False}
    assert cfg.default_hooks.ema == average
    assert cfg.train_dataloader.sampler.repeats == (1 if second else 3)
    assert cfg.train_dataloader.drop_last

    crop = {"type": "v2/RandomResizedCrop", "size": side, "scale": (0.08, 1)}
    crop["interpolation"] = "bicubic"
    head = cfg.model.head
    if second:
        start = f"work_dirs/{name.removesuffix('_224')}/model.safetensors"
        assert cfg.model.backbone.checkpoint_path == head.init_cfg.checkpoint == start
        assert (head.loss, head.init_cfg.prefix) == (SMOOTHED, "head.")
        colours = [RANDAUGMENT]
    else:
        loss = {"type": "BinaryCrossEntropy", "smoothing": 0.0, "target_threshold": 0.0}
        init = {"type": "TruncNormal", "layer": "Linear", "std": 0.02}
        assert (head.loss, head.init_cfg) == (loss, init)
        blur = {"magnitude_range": (0.1, 2.0), "magnitude_std": "inf", "prob": 1.0}
        choice = [
            [{"type": "v2/Grayscale", "num_output_channels": 3}],
            [{"type": "v2/RandomSolarize", "threshold": 128, "p": 1.0}],
            [{"type": "GaussianBlur", **blur}],
        ]
        jitter = {"brightness": 0.3, "contrast": 0.3, "saturation": 0.3}
        colours = [
            {"type": "RandomChoice", "transforms": choice},
            {"type": "v2/ColorJitter", **jitter},
        ]
    check_data(cfg, [crop, FLIP, *colours], side, 1.0)


def test_a_learned_tau_does_not_decay():
    cfg = load("imagenet_tiny")
    cfg.model.backbone.merge({"pattention_args": {"learn_tau": True, "key_init_std": 0.5}})
    model = build_model(cfg)
    decays = decays_of(model, cfg)
    taus = [decays[p] for name, p in model.named_parameters() if name.endswith(".tau")]
    assert taus == [0] * 5 * 12
