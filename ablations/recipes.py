"""Which recipe? The paper's, Muon instead of AdamW, and DeiT III's, for a TokenFormer and a ViT.

*Muon* makes the steps of matrices orthogonal, at the size of AdamW's steps (arXiv:2502.16982);
AdamW updates the rest. *DeiT III* (arXiv:2204.07118) is LAMB, binary cross-entropy on mixed images,
LayerScale, and a random grayscale, solarisation or blur before a change of colours. Crops, drop
path and the length are the config's.
"""

from models import Change, Config, Sizes, base_model, matched_vit, several
from sweep import Question, Variant, main


def muon(cfg: Config, sizes: Sizes) -> None:
    """Use Muon for matrices."""
    cfg["optim_wrapper"]["optimizer"]["type"] = "timm.optim.Muon"


def deit3(cfg: Config, sizes: Sizes) -> None:
    """Use the recipe of DeiT III."""
    lamb = {"type": "timm.optim.Lamb", "betas": (0.9, 0.999), "weight_decay": 0.05}
    cfg["optim_wrapper"]["optimizer"].update(lamb)
    model = cfg["model"]
    model["backbone"]["init_values"] = 1e-4  # LayerScale
    model["head"] |= {
        # The steps of LAMB are in proportion to a matrix: a head of zeros would stay there.
        "init_cfg": {"type": "TruncNormal", "layer": "Linear", "std": 0.02},
        "loss": {"type": "BinaryCrossEntropy"},
    }
    mixes = [{"type": "Mixup", "alpha": 0.8}, {"type": "CutMix", "alpha": 1.0}]
    model["train_cfg"] = {"augments": mixes}
    blur = {"type": "GaussianBlur", "magnitude_range": (0.1, 2.0), "magnitude_std": "inf"}
    choices = [
        {"type": "v2/Grayscale", "num_output_channels": 3},
        {"type": "v2/RandomSolarize", "threshold": 128, "p": 1.0},
        {**blur, "prob": 1.0},
    ]
    side = sizes.outside["img_size"]
    pipeline = [
        {"type": "LoadImage"},
        {"type": "v2/RandomCrop", "size": side, "padding": side // 8},
        {"type": "v2/RandomHorizontalFlip", "p": 0.5},
        {"type": "RandomChoice", "transforms": [[each] for each in choices]},
        {"type": "v2/ColorJitter", "brightness": 0.3, "contrast": 0.3, "saturation": 0.3},
        {"type": "PackLabels"},
    ]
    # Images in memory are only cropped and flipped.
    cfg["train_dataloader"]["dataset"] |= {"type": "CustomDataset", "pipeline": pipeline}


RECIPES = {"adamw": ("AdamW", base_model), "muon": ("Muon", muon), "deit3": ("DeiT III", deit3)}


def variants(family: str, label: str, model: Change) -> list[Variant]:
    """Train a model by every recipe."""
    return [
        Variant(
            f"{family}_{name}",
            f"{label}, {text}",
            several(model, recipe),
            compare=(
                *([f"vit_{name}"] if family != "vit" else ()),
                *([f"{family}_adamw"] if name != "adamw" else ()),
            ),
        )
        for name, (text, recipe) in RECIPES.items()
    ]


MODELS = (("tokenformer", "TokenFormer", base_model), ("vit", "ViT, matched", matched_vit))
VARIANTS = tuple(variant for model in MODELS for variant in variants(*model))
QUESTIONS = (
    Question("recipes", "Recipes", str(__doc__), VARIANTS, same_size=False, diagnose=True),
)

if __name__ == "__main__":
    main(QUESTIONS)
