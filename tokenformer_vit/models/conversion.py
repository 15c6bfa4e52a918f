"""What conversions of Transformers share: write a block, and compare the outputs of two models."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention

# Of the relative error in float32: rounding gives 1e-6, and an eps or scale set by hand 1e-2.
LIMIT = 1e-4


def unseen(model: nn.Module) -> Iterator[str]:
    """Say which modules do something besides their class: by a hook, or a forward of their own."""
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:  # there is no public question
            yield f"{name or 'it'} has a forward hook"
        if "forward" in vars(module):
            yield f"{name or 'it'} has a forward of its own"


def readable(model: nn.Module) -> Any:
    """Return a copy to read, in evaluation mode, in float32 where precision would be lost."""
    copied = copy.deepcopy(model).eval()
    return copied.float() if next(model.parameters()).dtype.itemsize < 4 else copied


def write_blocks(
    source: nn.Module, targets: Any, parts: Sequence[Sequence[Any]], batches: Iterable[Tensor]
) -> None:
    """Give TokenFormer blocks the layers of the blocks of a Transformer.

    ``parts`` has for each block the linear layer to q, k and v, the output projection, and the
    arguments of ``Pattention.from_mlp``. ``batches`` order the pairs of linear tokens, if any.
    """
    of: dict[nn.Module, Any] = {}  # sums of z zᵀ (C_in, C_in) over the inputs z of a layer

    def add(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        rows = inputs[0].flatten(0, -2).double()
        of[layer] = of.get(layer, 0) + rows.t() @ rows

    with ExitStack() as stack:
        for layer in (layer for each in parts for layer in each[:2]):
            stack.enter_context(layer.register_forward_pre_hook(add))
        for batch in batches.split(32) if isinstance(batches, Tensor) else batches:
            like = next(source.parameters())
            source(batch.to(like) if batch.is_floating_point() else batch.to(like.device))
    blocks = zip(tqdm(parts, "converting", disable=None), targets, strict=True)
    for (qkv, proj, *mlp), target in blocks:
        for number, name in enumerate(("query", "key", "value")):
            rows = slice(number * proj.in_features, (number + 1) * proj.in_features)
            layer = Pattention.from_linear(qkv, of.get(qkv), rows, kind="qkv")
            target.attn.set_submodule(name, layer)
        target.attn.proj = Pattention.from_linear(proj, of.get(proj), kind="proj")
        target.mlp = Pattention.from_mlp(*mlp, kind="ffn")


def noise_images(vit: Any, number: int) -> Tensor:
    """Draw images of noise, always the same, of the size and on the device of a model's."""
    size = (number, vit.in_chans, *vit.patch_embed.img_size)
    images = torch.randn(size, generator=torch.Generator().manual_seed(0))
    return images.to(next(vit.parameters()))


@torch.inference_mode()
def relative_errors(model: Any, source: Any, batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the relative error of each row of outputs, and whether its largest one is the same."""
    errors, same = [], []
    for batch in batches:
        outputs = [getattr(out := each(batch), "logits", out).double() for each in (model, source)]
        same.append((outputs[0].argmax(dim=-1) == outputs[1].argmax(dim=-1)).flatten())
        if outputs[0].shape[-1] > 1:  # what is common to a row of logits changes nothing
            outputs = [each - each.mean(dim=-1, keepdim=True) for each in outputs]
        size = outputs[1].norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)  # of a new head
        errors.append(((outputs[0] - outputs[1]).norm(dim=-1) / size).flatten())
    return torch.cat(errors), torch.cat(same)


def check_equal(model: Any, source: Any, batch: Tensor) -> None:
    """Refuse a conversion with other outputs or features than its source, for any reason."""

    def features(each: Any) -> Callable[[Tensor], Tensor]:  # a new head may hide them
        if hasattr(each, "forward_features"):
            return each.forward_features
        return lambda tokens: each.base_model(tokens).last_hidden_state

    found = [
        relative_errors(*pair, [batch])[0]
        for pair in ((model, source), (features(model), features(source)))
    ]
    error = torch.cat(found).max().item()
    if not error <= LIMIT:  # nor NaN
        raise InputError(
            f"the outputs on noise differ by {error:.1e}, more than {LIMIT:g}: a module computes "
            "something else than its type and arguments say (a number set by hand?), or outputs "
            "are not finite"
        )


def compare_outputs(model: Any, source: Any, batches: Iterable[Tensor], what: str) -> str:
    """Compare the outputs of two models; print what was found, and return it for a card."""
    error, same = relative_errors(model, source, batches)
    if not error.isfinite().all():
        raise InputError("the outputs are not finite: give weights of a training that converged")
    found = f"relative error {error.max():.1e} at most, {error.mean():.1e} on average, in float32, "
    found += f"and {same.double().mean():.2%} with the same top-1 class, of {len(error)} {what}"
    old, new = (sum(p.numel() for p in each.parameters()) for each in (source, model))
    print(f"Parameters: {old:,} -> {new:,}\nOutputs: {found}")
    return found
