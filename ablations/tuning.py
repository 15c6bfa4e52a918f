"""What to train of a model that others' data taught? Appended pairs against LoRA and the rest.

python ablations/growth.py --config configs/cifar10_micro.py --variants large vit
python ablations/tuning.py --config configs/tuning_imagenette.py --seeds 3
"""

from pathlib import Path
from typing import Any

from tokenformer_vit.errors import InputError
from tokenformer_vit.experiments.questions import (
    Backbone,
    Change,
    Outside,
    Question,
    Shape,
    Variant,
    arguments,
    matched_vit,
)

RANKS = {"small": 4, "large": 16}
FULL_LR = 1e-3  # the config's rate is meant for few parameters


def pairs_like_lora(shape: Shape, rank: int) -> int:
    """Count the pairs that a block gets for as many parameters as LoRA of a rank has in a ViT.

    LoRA has ``rank * (C_in + C_out)`` for each of the four linear layers of a block of the matched
    ViT (C to 3C, C to C, C to hidden and back), a pair 2C.
    """
    width = shape.embed_dim
    hidden = shape.num_param_tokens - 2 * width
    return round(rank * (8 * width + 2 * hidden) / (2 * width))


def appended(rank: int) -> Change:
    """Append as many parameters as LoRA of a rank has, to each layer by its size."""

    def change(backbone: Backbone, shape: Shape) -> Backbone:
        share = pairs_like_lora(shape, rank) / shape.num_param_tokens
        sizes = (shape.num_qkv_param_tokens, shape.num_proj_param_tokens)
        qkv, proj = (size + round(share * size) for size in sizes)
        ffn = shape.num_param_tokens + pairs_like_lora(shape, rank) - 3 * qkv - proj
        return {
            **backbone,
            "growth": {
                **(backbone.get("growth") or {}),
                "num_qkv_param_tokens": qkv,
                "num_proj_param_tokens": proj,
                "num_ffn_param_tokens": ffn,
                "freeze": "old",
            },
        }

    return change


def vit(backbone: Backbone, shape: Shape, **new: Any) -> Backbone:
    """Take the matched ViT, of the same sweep and seed as the weights of the TokenFormer."""
    weights = Path(backbone["checkpoint_path"])
    variant, _, seed = weights.parent.name.rpartition("_")
    if variant != "large":
        raise InputError(
            f"the weights of the ViT are looked for beside those of the TokenFormer, in vit_seed0 "
            f"beside large_seed0 or so, but these are in {weights.parent}; name the folders so, or "
            "leave the ViT out by --variants"
        )
    matched = {
        **matched_vit(backbone, shape),
        "checkpoint_path": str(weights.parent.parent / f"vit_{seed}" / weights.name),
        "growth": None,
    }
    return {**matched, **new}


def vit_probe(backbone: Backbone, shape: Shape) -> Backbone:
    """Freeze the ViT."""
    return vit(backbone, shape, frozen=True)


def lora(rank: int) -> Change:
    """Put LoRA on every linear layer of the ViT."""
    return lambda backbone, shape: {
        "type": "LoRABackbone",
        "module": vit(backbone, shape),
        "alpha": rank,
        "rank": rank,
        "targets": [{"type": name} for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")],
    }


def rate(lr: float) -> Outside:
    """Train at another rate than the config's."""
    return lambda shape, epochs: {"optim_wrapper": {"optimizer": {"lr": lr}}}


QUESTION = Question(
    name="tuning",
    title="Tuning",
    text=(
        "A TokenFormer and a ViT with as many parameters, trained on CIFAR-10 alike, are tuned to "
        "other images: by their head alone (a linear probe), with pairs appended to every layer "
        "and trained beside the head (all else is frozen; zero keys, so that tuning starts from "
        "the model as it was), by LoRA on every linear layer (arXiv:2106.09685; a TokenFormer has "
        "none), and as a whole. Pairs and LoRA have as many parameters. One pre-trained model of "
        "each kind serves all seeds, which are those of the order and augmentation of the images, "
        "of new pairs and of LoRA; how good each is for these images, its probe tells. Images are "
        "few and small, so that this compares methods and says nothing of what they can reach."
    ),
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
    from tokenformer_vit.experiments.sweep import main

    main(QUESTION)
