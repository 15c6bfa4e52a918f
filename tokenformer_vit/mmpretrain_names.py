"""Names of tensors in timm's models, and in mmpretrain's classifiers around them."""

from collections.abc import Mapping

from torch import Tensor

from tokenformer_vit.layers.pattention import join_state_dict

# How names begin in an mmpretrain classifier, and in timm.
_BACKBONE = "backbone.model."
_PARTS = {"head.fc_dist.": "head_dist.", "head.fc.": "head.", _BACKBONE: ""}


def timm_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of an mmpretrain classifier around a timm model; others keep their names.

    The batch norm of a linear probe goes into the head, and an MAE's decoder is left out. Pairs
    that were trained apart are joined.
    """
    state_dict = join_state_dict(state_dict)
    if not any(name.startswith(_BACKBONE) for name in state_dict):
        return state_dict
    renamed = {
        new + name.removeprefix(old): tensor
        for name, tensor in state_dict.items()
        for old, new in _PARTS.items()
        if name.startswith(old)
    }
    if "neck.bn.running_var" in state_dict:
        scale = (state_dict["neck.bn.running_var"] + 1e-6).rsqrt()  # the neck's own eps
        scale = scale * state_dict.get("neck.bn.weight", 1)
        shift = state_dict.get("neck.bn.bias", 0) - state_dict["neck.bn.running_mean"] * scale
        renamed["head.bias"] = renamed["head.bias"] + renamed["head.weight"] @ shift
        renamed["head.weight"] = renamed["head.weight"] * scale
    return renamed


def classifier_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a timm model to the names in an mmpretrain classifier around it."""
    renamed = {}
    for name, tensor in state_dict.items():
        old, new = next(each for each in _PARTS.items() if name.startswith(each[1]))
        renamed[old + name.removeprefix(new)] = tensor
    return renamed
