"""Inside a TokenFormer: Θ and LayerNorm, as in the paper's Tables 4 and 5."""

from models import arguments, matched_vit, several
from sweep import Question, Variant, main

SOFTMAX = """Which Θ? The rows of the paper's Table 4, and a ViT with as many parameters.

The paper's ViT is ViT-B/16 by MAE's recipe. *L2 after GELU* is the authors' language code.
*LayerNorm frozen*: the LayerNorms in the blocks are not trained."""
LAYERNORM = """Does LayerNorm need parameters? The rows of the paper's Table 5.

The paper's LayerNorms have none, because its models grow."""

VITS = ("vit", "vit_frozen_norms")
OTHERS = (*VITS, "gelu_l2")
FROZEN = several(matched_vit, arguments(frozen_norms=True))
THETAS = (
    Variant("softmax", "exp + L1", arguments(theta="softmax"), compare=OTHERS, paper=79.6),
    Variant("gelu_l1", "GELU + L1", arguments(theta="gelu_l1"), compare=OTHERS, paper=81.7),
    Variant("gelu_l2", "GELU + L2", arguments(theta="gelu_l2"), compare=VITS, paper=82.5),
    Variant("gelu_l2_post", "L2 after GELU", arguments(theta="gelu_l2_post"), compare=OTHERS),
    Variant("vit", "ViT, matched", matched_vit, paper=82.3),
    Variant("vit_frozen_norms", "ViT, LayerNorm frozen", FROZEN),
)
NORMS = (
    Variant("weight_bias", "weight+bias", arguments(norm="weight+bias"), paper=82.6),
    Variant("bias", "bias", arguments(norm="bias"), compare=("weight_bias",), paper=82.5),
    Variant("none", "none", arguments(norm="none"), compare=("weight_bias",), paper=82.5),
)
QUESTIONS = (
    Question("softmax", "Θ", SOFTMAX, THETAS, diagnose=True),
    Question("layernorm", "Parameters of LayerNorm", LAYERNORM, NORMS, diagnose=True),
)

if __name__ == "__main__":
    main(QUESTIONS)
