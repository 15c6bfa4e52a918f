"""Net2Net and stacking: growth of an ordinary Transformer, as a baseline of experiments."""

import copy
from typing import Any, TypeVar

import torch
from mmengine.registry import HOOKS
from timm.layers import Mlp
from timm.models import VisionTransformer
from torch import nn
from torch.optim import Optimizer

from tokenformer_vit.benchmarking.matched import mlp_ratio
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth.resize import Change, resize, unwrapped
from tokenformer_vit.training.models.growth import GrowthHook

# How much the shares of a neuron's copies in its outgoing weights differ. Equal copies would stay
# equal forever.
_SPREAD = 0.1
# Of a ViT, a GPT-2 and a GPT-NeoX, by the attribute with the blocks: names of the layers before and
# after a hidden layer, their size attributes, and the hidden dimension of their weights.
_FORMS = {
    "blocks": ("fc1", "fc2", "out_features", "in_features", 0, 1),
    "h": ("c_fc", "c_proj", "nf", "nx", 1, 0),  # GPT-2 stores weights as (in, out)
    "layers": ("dense_h_to_4h", "dense_4h_to_h", "out_features", "in_features", 0, 1),
}
_CONFIG_KEYS = {"h": "n_inner", "layers": "intermediate_size"}

Model = TypeVar("Model", bound=nn.Module)


@HOOKS.register_module()
class Net2NetHook(GrowthHook):
    """Enlarge a Transformer at given times of a run, as a ``GrowthHook`` enlarges a TokenFormer.

    Each entry of the schedule has ``hidden_features`` (Net2Net), or each has ``depth`` (stacking).
    """

    def check_growths(self, model: nn.Module) -> None:
        """Check nothing: these are not pairs."""

    def grow_model(
        self, model: nn.Module, sizes: dict[str, Any], seed: int, optimizer: Optimizer | None
    ) -> None:
        """Widen the hidden layers of a model, or stack its blocks."""
        common: dict[str, Any] = {
            "optimizer": optimizer,
            "moments": self.how.get("moments", "keep"),
        }
        if "depth" in sizes:
            stack_blocks(model, **sizes, **common)
        else:
            widen_mlp(model, **sizes, seed=seed + self.done, **common)


@torch.no_grad()
def widen_mlp(
    model: Model,
    hidden_features: int,
    *,
    seed: int = 0,
    optimizer: Optimizer | None = None,
    moments: str = "keep",
) -> Model:
    """Widen hidden layers with copies of random neurons, in place; outputs do not change.

    The outgoing weights of a neuron are divided among it and its copies, in unequal shares, to let
    them diverge: Net2WiderNet, arXiv:1511.05641, Section 2.2. The model is, or holds, a timm
    ``VisionTransformer`` with ordinary blocks, or GPT-2 or GPT-NeoX of transformers.
    """
    form, transformer = _find_transformer(model)
    mlps = [block.mlp for block in getattr(transformer, form)]
    generator = torch.Generator().manual_seed(seed)
    changes = [change for mlp in mlps for change in _widen(mlp, form, hidden_features, generator)]
    resize(changes, optimizer, moments)
    before, after, out_size, in_size, *_ = _FORMS[form]
    for mlp in mlps:
        setattr(getattr(mlp, before), out_size, hidden_features)
        setattr(getattr(mlp, after), in_size, hidden_features)
    if form in _CONFIG_KEYS:
        setattr(transformer.config, _CONFIG_KEYS[form], hidden_features)
    else:
        ratio = mlp_ratio(hidden_features, transformer.embed_dim)
        getattr(transformer, "_model_args", {}).update(mlp_ratio=ratio)
    return model


def _widen(mlp: Any, form: str, hidden: int, generator: torch.Generator) -> list[Change]:
    *names, size, _, inputs, outputs = _FORMS[form]
    if form == "blocks" and not (type(mlp) is Mlp and isinstance(mlp.norm, nn.Identity)):
        raise InputError(f"the MLP is {type(mlp).__name__}, perhaps with a norm; give timm's Mlp")
    before, after = (getattr(mlp, name) for name in names)
    old = getattr(before, size)
    if hidden <= old:
        raise InputError(f"an MLP has {old} hidden features; give more than that, not {hidden}")
    drawn: Any = {"generator": generator, "device": "cpu"}
    chosen = torch.randint(old, (hidden - old,), **drawn)
    # Which old neuron each new one copies.
    source = torch.cat((torch.arange(old, device="cpu"), chosen))
    shares = 1 + _SPREAD * torch.randn(hidden, **drawn).clamp(-3, 3).double()
    # The shares of a neuron sum to 1.
    shares /= shares.new_zeros(old).index_add_(0, source, shares)[source]
    source, shares = source.to(before.weight.device), shares.to(after.weight)
    shared = after.weight.index_select(outputs, source) * shares.unsqueeze(1 - outputs)
    changes: list[Change] = [
        (before.weight, before.weight.index_select(inputs, source), [before.weight]),
        (after.weight, shared, [after.weight]),
    ]
    if before.bias is not None:
        changes.append((before.bias, before.bias[source], [before.bias]))
    return changes


def stack_blocks(
    model: Model, depth: int, *, optimizer: Optimizer | None = None, moments: str = "keep"
) -> Model:
    """Append copies of a ViT's blocks, from the first block on, in place; outputs change.

    Gong et al., Efficient Training of BERT by Progressively Stacking, ICML 2019.
    """
    vit = _find_vit(model)
    blocks: Any = vit.blocks
    old, copies = len(blocks), {}
    if depth <= old:
        raise InputError(f"the model has {old} blocks; give more than that, not {depth}")
    for parameter in blocks.parameters() if optimizer is not None and moments == "reset" else ():
        unwrapped(optimizer).state.pop(parameter, None)
    for index in range(old, depth):
        blocks.append(copy.deepcopy(blocks[index % old]))
        copies |= zip(blocks[index].parameters(), blocks[index % old].parameters(), strict=True)
    getattr(vit, "_model_args", {}).update(depth=depth)
    places = {parameter: place for place, parameter in enumerate(model.parameters())}
    for group in unwrapped(optimizer).param_groups if optimizer is not None else ():
        known = {*group["params"]}
        group["params"] += [parameter for parameter, like in copies.items() if like in known]
        # PyTorch loads a state by position.
        group["params"].sort(key=lambda parameter: places.get(parameter, -1))
        group.pop("param_names", None)
    return model


def _find_vit(model: nn.Module) -> VisionTransformer:
    for module in model.modules():
        if type(module) is VisionTransformer:
            return module
    raise InputError(
        f"{type(model).__name__} has no timm VisionTransformer with ordinary blocks; a TokenFormer "
        "grows in its pairs, by tokenformer_vit.growth.grow(), and not in depth"
    )


def _find_transformer(model: nn.Module) -> tuple[str, Any]:
    """Find the module with the blocks of a ViT, a GPT-2 or a GPT-NeoX."""
    for module in model.modules():
        for form, key in _CONFIG_KEYS.items():
            # Recognised by its attributes, because transformers may not be installed.
            if hasattr(module, form) and hasattr(getattr(module, "config", None), key):
                return form, module
    return "blocks", _find_vit(model)
