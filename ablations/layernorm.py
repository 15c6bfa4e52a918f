"""Does LayerNorm need parameters? The rows of the paper's Table 5.

python ablations/layernorm.py --config configs/cifar10_tiny.py --seeds 3
"""

from tokenformer_vit.experiments.questions import Question, Variant, arguments

QUESTION = Question(
    name="layernorm",
    title="Parameters of LayerNorm",
    text=(
        "The LayerNorms inside blocks with weight and bias, with a bias, or without either, as a "
        "growing model wants them (arXiv:2410.23168, Table 5)."
    ),
    variants=(
        Variant("weight_bias", "weight + bias", arguments(norm="weight+bias"), paper=82.6),
        Variant("bias", "bias", arguments(norm="bias"), paper=82.5),
        Variant("none", "none", arguments(norm="none"), paper=82.5),
    ),
)

if __name__ == "__main__":
    from tokenformer_vit.experiments.sweep import main

    main(QUESTION)
