"""What should τ be: √P, one, or learned?

Θ multiplies by τ, the root of the number of pairs P. With τ = 1 the scores that reach the GELU are
small, where it is nearly linear. The outputs of a layer also start smaller, because the values are
drawn for τ = √P. A learned τ is one number per layer and starts from √P. The paper reports no
comparison.
"""

from tokenformer_vit.experiments import Steps, Variant, arguments, main, pattention_args

QUESTION = Steps(
    name="tau",
    title="τ",
    text=__doc__,
    variants=(
        Variant("one", "1", pattention_args(tau=1.0)),
        Variant("root", "√P", arguments()),
        Variant("learned", "learned, from √P", pattention_args(learn_tau=True)),
    ),
)

if __name__ == "__main__":
    main(QUESTION)
