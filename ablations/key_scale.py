"""Does the scale at which keys are initialised matter?

Under `gelu_l2` the output of a layer does not depend on the scale of its keys, but a training step
turns large keys less. The scale is relative to the default, which gives scores of unit variance.
The paper reports no comparison.
"""

from tokenformer_vit.experiments import Steps, Variant, arguments, main, pattention_args

QUESTION = Steps(
    name="key_scale",
    title="Scale of the keys at initialisation",
    text=__doc__,
    variants=(
        Variant("tenth", "0.1", pattention_args(key_init_scale=0.1)),
        Variant("one", "1", arguments()),
        Variant("ten", "10", pattention_args(key_init_scale=10.0)),
    ),
)

if __name__ == "__main__":
    main(QUESTION)
