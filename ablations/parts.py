"""What the configs of sweeps import: held-out examples, and models beside a TokenFormer."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.models import VisionTransformer, register_model
from timm.models.vision_transformer import vit_base_patch16_224
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import Subset

from tokenformer_vit.layers import Pattention
from tokenformer_vit.models.sizes import find_layers, model_sizes, nest_layers
from tokenformer_vit.models.vit import ConvStem
from tokenformer_vit.training.engine import DATASETS, MODELS, OPTIM_WRAPPERS
from tokenformer_vit.training.models.backbone import TimmClassificationBackbone
from tokenformer_vit.training.optim import LazyOptimWrapper

HELD_OUT = 5000  # examples, but at most a tenth of a training set


def part_of(size: int, held_out: bool) -> list[int]:
    """Return the held-out examples of a training set, always the same ones, or all others."""
    chosen = random.Random(0).sample(range(size), min(HELD_OUT, size // 10))
    return sorted(chosen if held_out else {*range(size)} - {*chosen})


@DATASETS.register_module()
def HeldOutImages(dataset: Mapping[str, Any], held_out: bool) -> Any:
    """Build a data set of images without those that are held out, or with these alone.

    A ``share`` is one of the images that are not held out.
    """
    dataset = dict(dataset)
    share = dataset.pop("share", 1)
    chosen = part_of(len(DATASETS.build({**dataset, "lazy_init": True}).load_data_list()), held_out)
    count = len(chosen) if held_out else max(1, round(share * len(chosen)))
    indices = [chosen[index * len(chosen) // count] for index in range(count)]
    return DATASETS.build({**dataset, "indices": indices})


@DATASETS.register_module()
class HeldOutRows(Subset):
    """The rows of a text without those that are held out, or with these alone."""

    def __init__(self, data_root: str, split: str, held_out: bool) -> None:
        from tokenformer_vit.training.language import TokenDataset

        text = TokenDataset(data_root, split)
        super().__init__(text, part_of(len(text), held_out))
        self.folders, self.metainfo = text.folders, text.metainfo


@register_model
def vit_conv_stem(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Build timm's ViT with the stem of ``stem="conv"``."""
    return vit_base_patch16_224(pretrained, embed_layer=ConvStem, **kwargs)


@MODELS.register_module()
class NestedViT(TimmClassificationBackbone):
    """A ViT with nested hidden neurons and whole attention, as MatFormer (arXiv:2310.07707)."""

    def __init__(self, nested: Sequence[float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.model.blocks:
            mlp = block.mlp
            block.mlp = Pattention.from_mlp(mlp.fc1, mlp.fc2, mlp.act)
        nest_layers(self.model, nested)
        self.model.sizes = model_sizes(self.model)

    def exported(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Name the weights as timm's ViT has them."""
        tokens = {"key_param_tokens": "fc1.weight", "score_bias": "fc1.bias"}
        tokens |= {"value_param_tokens": "fc2.weight", "bias": "fc2.bias"}
        found = {}
        for name, tensor in state_dict.items():
            front, inner, own = name.rpartition(".mlp.")
            if not inner:
                found[name] = tensor
            elif own in tokens:  # there is no τ
                found[front + inner + tokens[own]] = tensor.t() if own[0] == "v" else tensor
        return found


@MODELS.register_module()
class LoRA(TimmClassificationBackbone):
    """Appended linear tokens that start as LoRA (arXiv:2106.09685): random keys, zero values."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for layer in find_layers(self.model).values():
            keys, values = layer.new_key_param_tokens, layer.new_value_param_tokens
            if keys is not None and values is not None:
                torch.nn.init.kaiming_uniform_(keys, a=5**0.5)
                torch.nn.init.zeros_(values)


class Float32Products(TorchFunctionMode):
    """Multiplies bfloat16 matrices in float32, and rounds the result, as bfloat16 units do."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch."""
        how = dict(kwargs or {})
        if function is not torch.addmm or args[0].dtype != torch.bfloat16:
            return function(*args, **how)
        out = how.pop("out")
        return out.copy_(function(*(matrix.float() for matrix in args), **how))


@OPTIM_WRAPPERS.register_module()
class Float32OptimWrapper(LazyOptimWrapper):
    """Trains in float32, with the same Muon, where a processor has no bfloat16 units."""

    def step(self, **kwargs: Any) -> None:
        """Update the parameters."""
        with Float32Products():
            super().step(**kwargs)
