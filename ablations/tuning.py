"""What to train of a model that was trained on other data? Appended pairs, LoRA, and the rest.

A TokenFormer and a ViT with as many parameters were trained on CIFAR-10 in the same way. They are
tuned to other images in four ways: the head alone (a linear probe); the head and pairs appended to
every layer, with all else frozen and with zero keys, which keep the model as it was at first; LoRA
on every linear layer of the ViT (arXiv:2106.09685; a TokenFormer has no linear layers); and the
whole model. Pairs and LoRA have as many parameters. All seeds share one trained model of each kind.
They differ in the order and augmentation of the images, in the new pairs and in LoRA. The probe
shows how well each trained model suits these images. Images are few and small: this compares
methods, and does not show how good they can get.
"""

from pathlib import Path
from typing import Any

from tokenformer_vit.errors import InputError
from tokenformer_vit.experiments import (
    ModelChange,
    Outside,
    Part,
    Shape,
    Tuning,
    Variant,
    arguments,
    main,
    to_matched_vit,
)

RANKS = {"small": 4, "large": 16}
FULL_LR = 1e-3  # the config's learning rate is for few parameters


def pairs_like_lora(shape: Shape, rank: int) -> int:
    """Count the pairs of a block with as many parameters as LoRA has in a block of the ViT.

    LoRA has ``rank * (C_in + C_out)`` for each of the four linear layers of a block of the matched
    ViT (C to 3C, C to C, C to hidden and back). A pair has 2C.
    """
    hidden = shape.hidden(1)["hidden_features"]
    return round(rank * (8 * shape.embed_dim + 2 * hidden) / (2 * shape.embed_dim))


def appended(rank: int) -> ModelChange:
    """Append pairs to each layer by its size, with as many parameters as LoRA of a rank has."""

    def change(backbone: Part, shape: Shape) -> Part:
        new = pairs_like_lora(shape, rank)
        share = new / shape.num_param_tokens
        sizes = (shape.num_qkv_param_tokens, shape.num_proj_param_tokens)
        qkv, proj = (size + round(share * size) for size in sizes)
        growth = {
            "num_qkv_param_tokens": qkv,
            "num_proj_param_tokens": proj,
            "num_ffn_param_tokens": shape.num_param_tokens + new - 3 * qkv - proj,
            "freeze": "old",
        }
        return {**backbone, "growth": {**(backbone.get("growth") or {}), **growth}}

    return change


def vit(backbone: Part, shape: Shape, **new: Any) -> Part:
    """Use the matched ViT of the same sweep and seed as the TokenFormer's weights."""
    weights = Path(backbone["checkpoint_path"])
    variant, _, seed = weights.parent.name.rpartition("_")
    if variant != "large":
        raise InputError(
            "the weights of the TokenFormer must be in large_seedN, next to vit_seedN for the ViT, "
            f"but they are in {weights.parent}; rename the folders, or leave the ViT out of "
            "--variants"
        )
    return {
        **to_matched_vit(backbone, shape),
        "checkpoint_path": str(weights.parent.parent / f"vit_{seed}" / weights.name),
        "growth": None,
        **new,
    }


def vit_probe(backbone: Part, shape: Shape) -> Part:
    """Freeze the ViT."""
    return vit(backbone, shape, frozen=True)


def lora(rank: int) -> ModelChange:
    """Put LoRA on every linear layer of the ViT."""
    return lambda backbone, shape: {
        "type": "LoRABackbone",
        "module": vit(backbone, shape),
        "alpha": rank,
        "rank": rank,
        "targets": [{"type": name} for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")],
    }


def rate(lr: float) -> Outside:
    """Train with another learning rate than the config's."""
    return lambda shape, epochs: {"optim_wrapper": {"optimizer": {"lr": lr}}}


QUESTION = Tuning(
    name="tuning",
    title="Tuning",
    text=__doc__,
    variants=(
        Variant("probe", "head alone", arguments(frozen=True, growth=None)),
        Variant("tokens_small", "appended pairs, few", appended(RANKS["small"])),
        Variant("tokens_large", "appended pairs, more", appended(RANKS["large"])),
        Variant("full", "the whole model", arguments(growth=None), outside=rate(FULL_LR)),
        Variant(
            "scratch",
            "the whole model, from scratch",
            arguments(growth=None, checkpoint_path=""),
            outside=rate(FULL_LR),
        ),
        Variant("vit_probe", "ViT, head alone", vit_probe, reference=True),
        Variant("lora_small", "ViT, LoRA, few", lora(RANKS["small"]), reference=True),
        Variant("lora_large", "ViT, LoRA, more", lora(RANKS["large"]), reference=True),
        Variant("vit_full", "ViT, the whole model", vit, outside=rate(FULL_LR), reference=True),
    ),
    pretraining=(
        "python ablations/growth.py --config configs/cifar10_micro.py --variants large vit"
    ),
)

if __name__ == "__main__":
    main(QUESTION)
