"""Inside a TokenFormer: Θ, τ, eps, LayerNorm, the start of keys, and the division of pairs."""

from models import (
    arguments,
    attention_share,
    base_model,
    matched_vit,
    pattention_args,
    several,
)
from sweep import Question, Variant, main

SOFTMAX = """Which Θ? The rows of the paper's Table 4, and a ViT with as many parameters.

`gelu_l2_post` is the GELU before the norm, as in the authors' language code. The ViT is timm's; the
paper's figure for it is ViT-B/16 by MAE's recipe. Its LayerNorms have weight and bias. In
*LayerNorm frozen*, those of the blocks stay at 1 and 0: they compute what the TokenFormers' do."""
LAYERNORM = """Does LayerNorm need parameters? The rows of the paper's Table 5.

The paper's LayerNorms have none, because its models grow."""
GELU = """Does the tanh approximation of GELU cost accuracy? The authors have the exact GELU."""
TAU = """What should τ be: √P, one, or learned?

With τ = 1 the scores that reach the GELU are small, where it is nearly linear. A learned τ is one
number per layer and starts from √P, the root of the number of pairs."""
KEY_SCALE = """Does the scale at which keys are initialised matter?

Under `gelu_l2` the output of a layer does not depend on it, but a step turns large keys less. The
default gives scores of unit variance."""
EPS = """Does the eps of Θ matter for accuracy? It is relative to the mean square of the scores."""
PAIRS = """How should the pairs of a block be divided between attention and the feed-forward layer?

q, k, v and o each get pairs in proportion to the width C, and the feed-forward layer gets the rest.
The paper has C and 4 C, or 3/4 C and 3 C."""

VITS = ("vit", "vit_frozen_norms")


def theta(name: str, label: str, paper: float | None = None) -> Variant:
    """Use another Θ."""
    compare = VITS if name == "gelu_l2" else (*VITS, "gelu_l2")
    return Variant(name, label, arguments(theta=name), compare=compare, paper=paper)


def norm(name: str, label: str, paper: float, *compare: str) -> Variant:
    """Use other LayerNorms in the blocks."""
    return Variant(name, label, arguments(norm=label), compare=compare, paper=paper)


def question(name: str, title: str, text: str, *variants: Variant) -> Question:
    """Return a question whose layers are measured."""
    return Question(name, title, text, variants, diagnose=True)


QUESTIONS = (
    question(
        "softmax",
        "Θ",
        SOFTMAX,
        theta("softmax", "exp + L1", 79.6),
        theta("gelu_l1", "GELU + L1", 81.7),
        theta("gelu_l2", "GELU + L2", 82.5),
        theta("gelu_l2_post", "L2 after GELU"),
        Variant("vit", "ViT, matched", matched_vit, paper=82.3),
        Variant(
            "vit_frozen_norms",
            "ViT, LayerNorm frozen",
            several(matched_vit, arguments(frozen_norms=True)),
        ),
    ),
    question(
        "layernorm",
        "Parameters of LayerNorm",
        LAYERNORM,
        norm("weight_bias", "weight+bias", 82.6),
        norm("bias", "bias", 82.5, "weight_bias"),
        norm("none", "none", 82.5, "weight_bias"),
    ),
    question(
        "gelu",
        "GELU, exact or by tanh",
        GELU,
        Variant("gelu_l2", "exact (erf)", arguments(theta="gelu_l2")),
        Variant("gelu_tanh_l2", "by tanh", arguments(theta="gelu_tanh_l2"), compare=("gelu_l2",)),
    ),
    question(
        "tau",
        "τ",
        TAU,
        Variant("one", "1", pattention_args(tau=1.0), compare=("root",)),
        Variant("root", "√P", base_model),
        Variant("learned", "learned, from √P", pattention_args(learn_tau=True), compare=("root",)),
    ),
    question(
        "key_scale",
        "Scale of the keys at initialisation",
        KEY_SCALE,
        Variant("tenth", "0.1", pattention_args(key_init_scale=0.1), compare=("one",)),
        Variant("one", "1", base_model),
        Variant("ten", "10", pattention_args(key_init_scale=10.0), compare=("one",)),
    ),
    question(
        "eps",
        "eps",
        EPS,
        Variant("1e-12", "1e-12", pattention_args(eps=1e-12), compare=("1e-6",)),
        Variant("1e-6", "1e-6", base_model),
        Variant("1e-2", "1e-2", pattention_args(eps=1e-2), compare=("1e-6",)),
    ),
    question(
        "pairs",
        "Pairs of attention and feed-forward",
        PAIRS,
        Variant("half", "1/2 C each", attention_share(0.5), compare=("one",)),
        Variant("three_quarters", "3/4 C each", attention_share(0.75), compare=("one",)),
        Variant("one", "C each", attention_share(1.0)),
        Variant("five_quarters", "5/4 C each", attention_share(1.25), compare=("one",)),
    ),
)

if __name__ == "__main__":
    main(QUESTIONS)
