"""Do 8-bit products cost accuracy?

In the first row, bfloat16 autocast computes all products. In the second, Pattention computes four
of its six products from E4M3 numbers: scores, outputs, and the gradients of weights and inputs
([how](../tokenformer_vit/ops/README.md#8-bit-products)). The gradients of parameter tokens,
attention, patch embedding and head stay in bfloat16.
"""

from tokenformer_vit.experiments import Steps, Variant, arguments, main

QUESTION = Steps(
    name="fp8",
    title="8-bit products",
    text=__doc__,
    variants=(
        Variant("bfloat16", "bfloat16", arguments()),
        Variant("fp8", "E4M3", arguments(backend="fp8"), against=(("bfloat16", "bfloat16"),)),
    ),
)

if __name__ == "__main__":
    main(QUESTION)
