"""The arguments of a model that its weights do not show.

They change what the model computes, but neither the names nor the shapes of its tensors. So weights
that were trained with other values load without a fault; the description of the weights tells.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import EPS

# Arguments of image and language models. Not the base of rotary positions, which users change to
# read longer sequences.
_ARGUMENTS = (
    "theta",
    "norm",
    "qk_norm",
    "num_heads",
    "norm_eps",
    "use_rot_pos_emb",
    "rotary_share",
)


def computation_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a model's arguments that its tensors do not show, as far as they are given.

    Args:
        arguments: Arguments of a TokenFormerViT, fields of an LMConfig, or a result of this
            function.
    """
    found = {name: arguments[name] for name in (*_ARGUMENTS, "eps") if name in arguments}
    if "pattention_args" in arguments:
        found["eps"] = (arguments["pattention_args"] or {}).get("eps", EPS)
    return found


def model_computation(model: nn.Module) -> dict[str, Any]:
    """Return :func:`computation_of` the first TokenFormer in a model; empty without one."""
    for module in model.modules():
        if hasattr(module, "computation"):
            return module.computation()  # type: ignore[operator]
    return {}


def check_computation(model: nn.Module, arguments: Mapping[str, Any], source: Any) -> None:
    """Check that a model computes what its weights were trained for.

    Args:
        model: Model that will load the weights; one without Pattention passes.
        arguments: Arguments in the description of the weights, as for :func:`computation_of`;
            empty if there is no description.
        source: File, folder or hub name of the weights, for the message.

    Raises:
        InputError: If Θ or another argument differs.
    """
    used, trained = model_computation(model), computation_of(arguments)
    for name, value in used.items():
        if value != trained.get(name, value):
            right = f"{name}={trained[name]!r}"
            way = f"pattention_args=dict({right})" if name == "eps" else right
            raise InputError(
                f"{name} is {value!r}, but the weights in {source} were trained with "
                f"{trained[name]!r}: set {way}"
            )
