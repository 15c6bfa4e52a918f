"""Compare the outputs of two models that shall compute the same."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tokenformer_vit.errors import InputError

# Of the relative error in float32: rounding gives 1e-6, and an eps or scale set by hand 1e-2.
LIMIT = 1e-4


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
    """Refuse a conversion with other outputs than its source, whatever the reason is."""
    error = relative_errors(model, source, [batch])[0].max().item()
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
