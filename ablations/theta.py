"""Inside a TokenFormer: Θ, τ, eps, LayerNorm, the start of keys, and the division of pairs."""

from models import Change, arguments, base_model, matched_vit, pairs_by_width, several
from sweep import Question, Variant, main

SOFTMAX = """Which Θ? The rows of the paper's Table 4, and a ViT with as many parameters.

The paper's ViT is ViT-B/16 by MAE's recipe. *L2 after GELU* is the authors' language code.
*LayerNorm frozen*: the LayerNorms in the blocks are not trained."""
LAYERNORM = """Does LayerNorm need parameters? The rows of the paper's Table 5.

The paper's LayerNorms have none, because its models grow."""
GELU = "Does the tanh approximation of GELU cost accuracy? The authors have the exact GELU."
TAU = """What should τ be: √P, one, or learned?

P is the number of pairs. With τ = 1 the scores are small, where GELU is nearly linear."""
KEY_SCALE = """Does the scale at which keys are initialised matter?

Under `gelu_l2` the output does not depend on it, but a step turns large keys less."""
EPS = "Does the eps of Θ matter for accuracy? It is relative to the mean square of the scores."
PAIRS = """How should the pairs of a block be divided between attention and the feed-forward layer?

q, k, v and o each get a multiple of the width C, and the feed-forward layer gets the rest. The
paper has C and 4 C, or 3/4 C and 3 C."""


def pattention(**new: float) -> Change:
    """Set arguments of every Pattention layer; others in the config stay."""
    return arguments(pattention_args=new)


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
GELUS = (
    Variant("gelu_l2", "exact (erf)", arguments(theta="gelu_l2")),
    Variant("gelu_tanh_l2", "by tanh", arguments(theta="gelu_tanh_l2"), compare=("gelu_l2",)),
)
TAUS = (
    Variant("one", "1", pattention(tau=1.0), compare=("root",)),
    Variant("root", "√P", base_model),
    Variant("learned", "learned, from √P", pattention(learn_tau=True), compare=("root",)),
)
SCALES = (
    Variant("tenth", "0.1", pattention(key_init_scale=0.1), compare=("one",)),
    Variant("one", "1", base_model),
    Variant("ten", "10", pattention(key_init_scale=10.0), compare=("one",)),
)
EPSILONS = (
    Variant("1e-12", "1e-12", pattention(eps=1e-12), compare=("1e-6",)),
    Variant("1e-6", "1e-6", base_model),
    Variant("1e-2", "1e-2", pattention(eps=1e-2), compare=("1e-6",)),
)
DIVISIONS = (
    Variant("half", "1/2 C each", pairs_by_width(0.5), compare=("one",)),
    Variant("three_quarters", "3/4 C each", pairs_by_width(0.75), compare=("one",)),
    Variant("one", "C each", pairs_by_width(1.0)),
    Variant("five_quarters", "5/4 C each", pairs_by_width(1.25), compare=("one",)),
)
QUESTIONS = tuple(
    Question(name, title, text, variants, diagnose=True)
    for name, title, text, variants in (
        ("softmax", "Θ", SOFTMAX, THETAS),
        ("layernorm", "Parameters of LayerNorm", LAYERNORM, NORMS),
        ("gelu", "GELU, exact or by tanh", GELU, GELUS),
        ("tau", "τ", TAU, TAUS),
        ("key_scale", "Scale of the keys at initialisation", KEY_SCALE, SCALES),
        ("eps", "eps", EPS, EPSILONS),
        ("pairs", "Pairs of attention and feed-forward", PAIRS, DIVISIONS),
    )
)

if __name__ == "__main__":
    main(QUESTIONS)
