"""What the configs of sweeps import: examples held out of a training set, and a ViT with a stem."""

import random
from collections.abc import Mapping
from typing import Any

from timm.models import VisionTransformer, register_model
from timm.models.vision_transformer import vit_base_patch16_224
from torch.utils.data import Subset

from tokenformer_vit.models.vit import ConvStem
from tokenformer_vit.training.engine import DATASETS

HELD_OUT = 5000  # examples, but at most a tenth of a training set


def part_of(size: int, held_out: bool) -> list[int]:
    """Return the held-out examples of a training set, always the same ones, or all others."""
    chosen = random.Random(0).sample(range(size), min(HELD_OUT, size // 10))
    return sorted(chosen if held_out else {*range(size)} - {*chosen})


@DATASETS.register_module()
def HeldOutImages(dataset: Mapping[str, Any], held_out: bool) -> Any:
    """Build a data set of images without those that are held out, or with these alone."""
    size = len(DATASETS.build({**dataset, "lazy_init": True}).load_data_list())
    return DATASETS.build({**dataset, "indices": part_of(size, held_out)})


@DATASETS.register_module()
class HeldOutRows(Subset):
    """The rows of a text without those that are held out, or with these alone."""

    def __init__(self, data_root: str, split: str, held_out: bool) -> None:
        from tokenformer_vit.training.language.data import TokenDataset

        text = TokenDataset(data_root, split)
        super().__init__(text, part_of(len(text), held_out))
        self.folders, self.metainfo = text.folders, text.metainfo


@register_model
def vit_conv_stem(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Build timm's ViT with the stem of ``stem="conv"``."""
    return vit_base_patch16_224(pretrained, embed_layer=ConvStem, **kwargs)
