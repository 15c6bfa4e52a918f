"""Why does a TokenFormer learn faster at first than a ViT with as many weights?

The authors' initialisation, Θ without its norm, and ViTs with what a TokenFormer has and they lack:
a start that keeps the variance of tokens, and queries, keys, values and outputs that are not
linear, each from an MLP with as many hidden neurons as the TokenFormer has pairs there.
"""

from typing import Any

from models import PAIRS, Change, Config, Sizes, arguments, base_model, matched_vit, several
from sweep import Question, Variant, main


def vit(mlps: bool = False, **new: Any) -> Change:
    """Use the matched ViT, perhaps with MLPs of the sizes of the TokenFormer's layers."""

    def sized(cfg: Config, sizes: Sizes) -> None:
        conv = cfg["model"]["backbone"]["model_name"] == "vit_conv_stem"
        stem = {"stem": "conv"} if conv else {}
        arguments(model_name="vit_probe", **new, **stem)(cfg, sizes)
        attention, _, ffn = (sizes.counts[name] for name in PAIRS)
        if mlps:
            arguments(projections=attention, hidden_features=ffn)(cfg, sizes)

    return several(matched_vit, sized)


OURS = ("tokenformer",)
VARIANTS = (
    Variant("vit", "ViT", matched_vit, compare=OURS),
    Variant("vit_variance", "ViT, variance kept", vit(unit_variance=True), compare=("vit", *OURS)),
    Variant("vit_mlps", "ViT, MLPs as q, k, v, o", vit(mlps=True), compare=("vit", *OURS)),
    Variant(
        "vit_mlps_variance",
        "ViT, MLPs, variance kept",
        vit(mlps=True, unit_variance=True),
        compare=("vit", *OURS),
    ),
    Variant("tokenformer", "TokenFormer", base_model),
    Variant(
        "released",
        "TokenFormer, the authors' start",
        arguments(pattention_args={"init": "released"}),
        compare=OURS,
    ),
    Variant("gelu", "TokenFormer, GELU alone", arguments(theta="gelu"), compare=OURS),
)
QUESTIONS = (Question("early", "The first epochs", str(__doc__), VARIANTS, diagnose=True),)

if __name__ == "__main__":
    main(QUESTIONS)
