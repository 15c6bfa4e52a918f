"""What does growth cost in its first steps, and what makes it cheaper?

A language model with half of the config's pairs is trained to its end. It gets all pairs after the
first iteration of a stage, which lasts a fifth of the iterations and has its own warm-up and
schedule, as in the paper (arXiv:2410.23168, Section 3.3). *Not grown* trains on in the same
schedule: what it loses at first is the cost of the warm-up, not of growth.

*New pairs, × 3* and *× 10* train only the new pairs with a larger learning rate. *Noise* is added
to the old pairs, relative to the root mean square of a layer's keys and values. The authors advise
noise for a new cosine schedule on the same data, without naming a size, and find that zero keys and
random pairs end with about the same loss
([their answer](https://github.com/Haiyang-W/TokenFormer/issues/11)).
"""

from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from tokenformer_vit.experiments import (
    LANGUAGE,
    FirstSteps,
    Outside,
    Shape,
    Variant,
    arguments,
    main,
)
from tokenformer_vit.experiments.language_models import share
from tokenformer_vit.growth import pattention_layers
from tokenformer_vit.training.distributed import unwrap

STEPS = 50  # between two validations; each takes about as long as 40 training steps
AGAINST = (("not grown", "same"), ("zero keys", "zero_key"))


@HOOKS.register_module()
class NoiseHook(Hook):
    """Add noise to all pairs just before they grow."""

    priority = "HIGHEST"  # as GrowthHook, which comes after it in the config

    def __init__(self, noise: float) -> None:
        self.noise = noise

    @torch.no_grad()
    def before_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        """Add it before the second iteration."""
        if runner.iter == 1:
            generator = torch.Generator().manual_seed(runner.seed or 0)
            for layer in pattention_layers(unwrap(runner.model)).values():
                for tokens in (layer.key_param_tokens, layer.value_param_tokens):
                    drawn = torch.randn(tokens.shape, generator=generator).to(tokens)
                    tokens += self.noise * tokens.square().mean().sqrt() * drawn


def stage(noise: float = 0.0, **growth: Any) -> Outside:
    """Train on for a fifth of the iterations; with arguments of GrowthHook, grow to all pairs."""

    def outside(shape: Shape, length: int) -> dict[str, Any]:
        schedule = [{"iteration": 1, **shape.pairs(1)}]
        hooks = [{"type": "GrowthHook", "schedule": schedule, **growth}] if growth else []
        if noise:
            hooks.insert(0, {"type": "ablations.growth_start.NoiseHook", "noise": noise})
        return {
            "custom_hooks": hooks,
            "train_cfg": {"max_iters": length // 5, "val_interval": min(STEPS, length // 20)},
            "default_hooks": {"logger": {"interval": STEPS // 10}},
        }

    return outside


def grown(name: str, label: str, **growth: Any) -> Variant:
    """Grow to all pairs in this way."""
    against = AGAINST[: 1 if name == "zero_key" else 2]
    outside = stage(**growth)
    return Variant(
        name, label, arguments(), outside=outside, grown=True, start="small", against=against
    )


QUESTION = FirstSteps(
    name="growth_start",
    title="Language: the first steps after growth",
    text=__doc__,
    variants=(
        Variant("small", "half of the pairs", share(1 / 2)),
        Variant("same", "not grown", arguments(), outside=stage(), start="small"),
        grown("zero_key", "zero keys", init="zero_key"),
        grown("zero_key_lr3", "zero keys, new pairs × 3", init="zero_key", new_lr_scale=3.0),
        grown("zero_key_lr10", "zero keys, new pairs × 10", init="zero_key", new_lr_scale=10.0),
        grown("zero_key_noise1", "zero keys, noise 1 %", init="zero_key", noise=0.01),
        grown("zero_key_noise10", "zero keys, noise 10 %", init="zero_key", noise=0.1),
        grown("duplicate", "duplicates", init="duplicate"),
        grown("random", "random, τ kept", init="random"),
    ),
    field=LANGUAGE,
    after=tuple(STEPS * n for n in (1, 2, 3, 4)),
)

if __name__ == "__main__":
    main(QUESTION)
