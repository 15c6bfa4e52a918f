"""Net2Net and stacking: growth of an ordinary Transformer, as a baseline of experiments."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mmengine.registry import HOOKS
from timm.models import VisionTransformer
from torch import nn
from torch.optim import Optimizer

from tokenformer_vit.benchmarking.matched import mlp_ratio
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth.resize import GrownParameter, resize, unwrapped
from tokenformer_vit.models import TokenFormerViT
from tokenformer_vit.training.models.growth import GrowthHook


@HOOKS.register_module()
class Net2NetHook(GrowthHook):
    """Enlarge a Transformer at given times of a run, as a ``GrowthHook`` enlarges a TokenFormer.

    Each entry of the schedule has ``hidden_features`` (Net2Net), or each has ``depth`` (stacking).
    """

    def __init__(self, schedule: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(schedule)

    def grow_model(
        self, model: nn.Module, sizes: dict[str, Any], seed: int, optimizer: Optimizer | None
    ) -> None:
        """Widen the hidden layers of a model, or stack its blocks."""
        if "depth" in sizes:
            stack_blocks(model, **sizes, optimizer=optimizer)
        else:
            widen_mlp(model, **sizes, seed=seed + self.done, optimizer=optimizer)


@torch.no_grad()
def widen_mlp(
    model: nn.Module, hidden_features: int, seed: int = 0, optimizer: Optimizer | None = None
) -> None:
    """Widen hidden layers with copies of random neurons, in place; outputs do not change.

    The outgoing weights of a neuron are divided among it and its copies: Net2WiderNet,
    arXiv:1511.05641, Section 2.2. The model is, or holds, a ViT of timm, GPT-2 or GPT-NeoX.
    """
    generator, changes = torch.Generator().manual_seed(seed), list[GrownParameter]()
    mlps: Any = [each for name, each in model.named_modules() if name.endswith("mlp")]
    for mlp in mlps:
        assert type(mlp).__name__ in ("Mlp", "GPT2MLP", "GPTNeoXMLP"), "a gated one would change"
        # A norm between them would be a third layer with weights, which is an error.
        before, after = [layer for layer in mlp.children() if hasattr(layer, "weight")]
        transposed = hasattr(before, "nf")  # GPT-2 stores weights as (in, out)
        inputs, outputs = (1, 0) if transposed else (0, 1)
        old = before.weight.shape[inputs]
        if hidden_features <= old:
            raise InputError(f"an MLP has {old} hidden features; give more, not {hidden_features}")
        chosen = torch.randint(old, (hidden_features - old,), generator=generator)
        source = torch.cat((torch.arange(old), chosen))  # the old neuron that each one copies
        # Unequal shares, with the sum 1: equal copies would stay equal forever.
        shares = 1 + 0.1 * torch.randn(hidden_features, generator=generator).clamp(-3, 3).double()
        shares /= shares.new_zeros(old).index_add_(0, source, shares)[source]
        source, shares = source.to(before.weight.device), shares.to(after.weight)
        shared = after.weight.index_select(outputs, source) * shares.unsqueeze(1 - outputs)
        changes += [
            GrownParameter(layer, data, [layer])
            for layer, data in (
                (before.weight, before.weight.index_select(inputs, source)),
                (before.bias, before.bias[source]),
                (after.weight, shared),
            )
        ]
        if transposed:
            before.nf = after.nx = hidden_features
        else:
            before.out_features = after.in_features = hidden_features
    resize(changes, unwrapped(optimizer), "keep")
    for module in model.modules():  # what a model is rebuilt from
        if isinstance(module, VisionTransformer):
            ratio = mlp_ratio(hidden_features, module.embed_dim)
            getattr(module, "_model_args", {}).update(mlp_ratio=ratio)
        for name in ("n_inner", "intermediate_size"):
            if hasattr(config := getattr(module, "config", None), name):
                setattr(config, name, hidden_features)


def stack_blocks(model: nn.Module, depth: int, optimizer: Optimizer | None = None) -> None:
    """Append copies of a ViT's blocks, from the first block on, in place; outputs change.

    Gong et al., Efficient Training of BERT by Progressively Stacking, ICML 2019.
    """
    (vit,) = (module for module in model.modules() if isinstance(module, VisionTransformer))
    blocks: Any = vit.blocks
    old, groups = len(blocks), optimizer.param_groups if optimizer is not None else []
    assert depth > old
    assert not isinstance(vit, TokenFormerViT)
    for index in range(old, depth):
        blocks.append(copy.deepcopy(blocks[index % old]))
        pairs = zip(blocks[index % old].parameters(), blocks[index].parameters(), strict=True)
        for like, new in pairs:
            for group in groups:
                # In the same order when a run resumes: PyTorch loads a state by position.
                group["params"] += [new for known in group["params"] if known is like]
    getattr(vit, "_model_args", {}).update(depth=depth)
