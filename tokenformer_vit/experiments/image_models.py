"""Image classifiers of ablations: how to build them, and how variants change them."""

import copy
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

from tokenformer_vit.benchmarking.costs import training_flops
from tokenformer_vit.benchmarking.matched import matched_hidden, mlp_ratio
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import TokenFormerViT

from .fields import Field, Measure, mean_flops
from .run import name_probes
from .variants import ModelChange, Part, Shape


class ImageField(Field):
    """Image classifiers, measured by top-1 accuracy."""

    measure = Measure("top1", "top-1", "%", r"accuracy/([\w.]+)")
    path = ("model", "backbone")
    weights_key = "checkpoint_path"
    seed_key = "stem_seed"
    unit = "epoch"
    limit = "max_epochs"
    begun = rb'"epoch": (\d+)'
    examples = "images"
    counts_flops = False
    transformer = "ViT"

    def continued(self, part: Part) -> Part:
        """Return the part as it is: it has the sizes of the earlier run."""
        return part

    def start_from(self, cfg: Part, folder: str) -> None:
        """Load the weights of the whole classifier, with its head."""
        cfg["load_from"] = f"{folder}/model.safetensors"

    def sized(self, part: Part, sizes: Mapping[str, int]) -> Part:
        """Set pairs, blocks or hidden neurons; see :meth:`Field.sized`."""
        new: dict[str, Any] = dict(sizes)
        if hidden := new.pop("hidden_features", None):
            new["mlp_ratio"] = mlp_ratio(hidden, part["embed_dim"])
        return {**part, **new}

    def flops(self, cfg: Mapping[str, Any]) -> int:
        """Count the training FLOPs of the backbone or of an MAE; see :meth:`Field.flops`."""
        model: Any = self.build(cfg)
        if getattr(model, "sandwich", False):
            return mean_flops(model)
        if hasattr(model, "training_flops"):  # it is more than its backbone
            return model.training_flops()
        return training_flops(model.backbone.model)

    def num_examples(self, cfg: Mapping[str, Any]) -> int:
        """Count the training images, without reading them."""
        from mmengine.registry import DefaultScope
        from mmpretrain.registry import DATASETS

        dataset = {**cfg["train_dataloader"]["dataset"], "pipeline": []}
        with DefaultScope.overwrite_default_scope("mmpretrain"):
            if dataset["type"] == "ImagesInMemory":
                return len(DATASETS.build({**dataset, "lazy_init": True}).load_data_list())
            return len(DATASETS.build(dataset))

    def random_loss(self, model: nn.Module, batch_size: int, device: torch.device) -> Tensor:
        """Return the loss of random images."""
        from mmpretrain.structures import DataSample

        classifier: Any = model
        vit = classifier.backbone.model
        size = vit.in_chans, *vit.patch_embed.img_size
        images = torch.rand(batch_size, *size, device=device)
        samples = [DataSample().set_gt_label(0).to(device) for _ in images]
        return classifier.loss(images, samples)["loss"]

    def check_data(self, cfg: Mapping[str, Any]) -> None:
        """Check that the images of a config can be read; see :class:`Field`."""
        from mmengine.config import Config

        from tokenformer_vit.training.config import check_folders

        check_folders(Config(dict(cfg)), ("train_dataloader", "val_dataloader"))

    def build(self, cfg: Mapping[str, Any]) -> nn.Module:
        """Build the classifier of a config; see :class:`Field`."""
        from mmengine.registry import DefaultScope
        from mmpretrain.registry import MODELS

        model = copy.deepcopy({**cfg["model"], "train_cfg": None})  # mixup logs a line
        backbone = timm_part(model["backbone"])
        backbone.update(compile=False)
        backbone.pop(self.seed_key, None)
        name_probes({"model": model})
        preprocessor = copy.deepcopy(cfg["data_preprocessor"])
        logging.disable(logging.INFO)  # LoRA logs a line for each layer
        try:
            with (
                torch.device("cpu" if backbone.get("checkpoint_path") else "meta"),
                DefaultScope.overwrite_default_scope("mmpretrain"),
            ):
                return MODELS.build({"data_preprocessor": preprocessor, **model})
        finally:
            logging.disable(logging.NOTSET)

    def shape_of(self, cfg: Mapping[str, Any]) -> tuple[Shape, int]:
        """Return sizes and parameter count of a TokenFormer; see :meth:`Field.shape_of`."""
        model: Any = self.build(cfg)
        vit = getattr(model.backbone, "model", None)
        if not isinstance(vit, TokenFormerViT):
            raise InputError(
                f"the backbone of the config is {type(vit or model.backbone).__name__}, but an "
                "ablation needs a TokenFormer; choose another --config"
            )
        patches: Any = vit.patch_embed
        outside = {"img_size": patches.img_size[0], "patch_size": patches.patch_size[0]}
        shape = Shape.of(vit.blocks, vit.embed_dim, outside)
        return shape, sum(parameter.numel() for parameter in model.parameters())


IMAGES = ImageField()


def timm_part(backbone: Mapping[str, Any]) -> Any:
    """Return the config of the timm model, which LoRA wraps in its own."""
    return backbone["module"] if backbone["type"] == "LoRABackbone" else backbone


def pattention_args(**new: Any) -> ModelChange:
    """Set arguments of every Pattention layer; other arguments in the config stay."""
    return lambda backbone, shape: {
        **backbone,
        "pattention_args": {**(backbone.get("pattention_args") or {}), **new},
    }


def share_of_pairs(share: float) -> ModelChange:
    """Keep a share of all pairs."""
    return lambda backbone, shape: {**backbone, **shape.pairs(share)}


def attention_share(pairs_per_channel: float) -> ModelChange:
    """Give q, k, v and o a number of pairs per channel, and the rest to the feed-forward layer.

    Every split has as many parameters and FLOPs as the config's model.
    """

    def change(backbone: Part, shape: Shape) -> Part:
        pairs = round(pairs_per_channel * shape.embed_dim)
        left = shape.num_param_tokens - 4 * pairs
        if left < 1:
            raise InputError(
                f"{pairs} pairs for each of q, k, v and o leave no pair of "
                f"{shape.num_param_tokens} for feed-forward; leave this variant out of --variants"
            )
        if pairs == shape.num_qkv_param_tokens == shape.num_proj_param_tokens:
            return backbone  # the config's own model, written as in the config
        return {
            **backbone,
            "num_qkv_param_tokens": pairs,
            "num_proj_param_tokens": pairs,
            "num_ffn_param_tokens": left,
        }

    return change


def with_frozen_norms(change: ModelChange) -> ModelChange:
    """Freeze weight and bias of the blocks' LayerNorms, after another change."""
    return lambda backbone, shape: {**change(backbone, shape), "frozen_norms": True}


def to_matched_vit(backbone: Part, shape: Shape) -> Part:
    """Replace the TokenFormer by timm's ViT of its width and depth with as many weights."""
    hidden = matched_hidden(shape.embed_dim, shape.num_param_tokens, "give --variants without vit")
    ours, timms = (
        inspect.signature(model).parameters.keys() for model in (TokenFormerViT, VisionTransformer)
    )
    return {
        **{key: value for key, value in backbone.items() if key not in ours - timms},
        "model_name": "deit_base_distilled_patch16_224"
        if backbone["model_name"].endswith("_distilled")
        else "vit_base_patch16_224",
        **shape.outside,
        "embed_dim": shape.embed_dim,
        "depth": shape.depth,
        "num_heads": shape.num_heads,
        "mlp_ratio": mlp_ratio(hidden, shape.embed_dim),
    }
