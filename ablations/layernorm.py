"""Does LayerNorm need parameters? The rows of the paper's Table 5.

The LayerNorms inside blocks have weight and bias, a bias, or neither. The paper uses neither,
because its models grow (arXiv:2410.23168, Table 5).
"""

from tokenformer_vit.experiments import Steps, Variant, arguments, main

AGAINST = (("weight + bias", "weight_bias"),)

QUESTION = Steps(
    name="layernorm",
    title="Parameters of LayerNorm",
    text=__doc__,
    variants=(
        Variant("weight_bias", "weight + bias", arguments(norm="weight+bias"), paper=82.6),
        Variant("bias", "bias", arguments(norm="bias"), paper=82.5, against=AGAINST),
        Variant("none", "none", arguments(norm="none"), paper=82.5, against=AGAINST),
    ),
)

if __name__ == "__main__":
    main(QUESTION)
