"""Find the patches and the images that the pairs of a layer respond to."""

import math
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_input_data_config
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import pattention_layers
from tokenformer_vit.layers import Pattention

from .images import read_images

MOST = 32  # rows or columns of a picture; with more, it would be hard to read


@torch.no_grad()
def token_weights(model: nn.Module, images: Tensor, layer: str) -> Tensor:
    """Compute the weight of each key-value pair of a layer for each patch of some images.

    Returns (B, N, P) weights Θ(X K_Pᵀ) in float32 of the N patches, row by row, without class and
    register tokens; TokenFormer, arXiv:2410.23168, Eq. 4 to 6. The weight of an inactive pair is
    zero. ``images`` are normalised for the model, on its device.
    """
    layer, module = _find_layer(model, layer)
    inputs: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    # Compiled code would leave out the hook.
    with hook, torch.compiler.set_stance("force_eager"):
        how = {"stop_early": True, "intermediates_only": True, "output_fmt": "NLC"}
        block = int(layer.split(".")[1])
        model.forward_intermediates(images, indices=[block], **how)  # type: ignore[operator]
    weights = module.weights(inputs[0][:, model.num_prefix_tokens :])  # type: ignore[misc]
    if not weights.isfinite().all():
        raise InputError(f"weights in {layer} are not finite: use an earlier checkpoint")
    if module.num_used == module.num_param_tokens:
        return weights
    every = weights.new_zeros(*weights.shape[:-1], module.num_param_tokens)
    every[..., slice(module.num_used) if module.active is None else module.active] = weights
    return every


def inspect_pairs(
    model: nn.Module,
    paths: Sequence[str | Path],
    layer: str | None = None,
    tokens: Sequence[int] = (),
    top: int = 8,
    exemplars: int = 0,
    batch_size: int = 32,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Find what some pairs of a layer respond to; return a record for JSON and pictures.

    Without ``exemplars``, the record maps the weights of each pair over at most :data:`MOST`
    images. Otherwise it has, of any number of images, so many with the largest weights of each
    pair, and memory holds the weights of one batch. The layer is by default the feed-forward layer
    of the middle block. The pairs are ``tokens``; without any, the ``top`` pairs with the largest
    weights in maps, or the most selective ones for exemplars.
    """
    layer, module = _find_layer(model, layer)
    tokens, last = list(dict.fromkeys(tokens)), module.num_param_tokens - 1
    if wrong := [token for token in tokens if not 0 <= token <= last]:
        raise InputError(f"{layer} has no pair {wrong[0]}; give numbers from 0 to {last}")
    if max(number := (len(tokens) or top, exemplars)) > MOST:
        raise InputError(f"cannot draw {max(number)} pairs or exemplars; give at most {MOST}")
    if not exemplars and len(paths) > MOST:
        shown = f"maps show at most {MOST} images, not {len(paths)}"
        raise InputError(f"{shown}: give fewer, or show the exemplars of all (--exemplars 9)")
    own: Any = model.to(device)
    grid = own.patch_embed.dynamic_feat_size(resolve_input_data_config(own)["input_size"][1:])
    record: dict[str, Any] = {"layer": layer, "theta": module.theta, "images": [], "skipped": []}
    record["num_param_tokens"] = module.num_param_tokens
    record |= {"grid": list(grid), "patch_size": list(own.patch_embed.patch_size)}
    stream = _stream(model, paths, batch_size, device, record)
    if not exemplars:
        return {**record, "tokens": _maps(stream, grid, tokens, top)}
    found = _exemplars(stream, module, record, tokens, top, exemplars)
    return {**record, "images": len(record["images"]), "tokens": found}


def _find_layer(model: nn.Module, name: str | None) -> tuple[str, Pattention]:
    layers = pattention_layers(model)
    if name is None:
        # Early blocks see little more than colours and edges. In the last block, patches do not
        # affect a head that reads the class token.
        name = f"blocks.{len(model.blocks) // 2}.mlp"  # type: ignore[arg-type]
    if name not in layers:
        few = ", ".join(get_close_matches(name, layers) or list(layers)[-5:])
        raise InputError(f"the model has no Pattention layer {name!r}; choose one, such as {few}")
    return name, layers[name]


def _stream(
    model: nn.Module, paths: Sequence[Any], batch_size: int, device: Any, record: dict[str, Any]
) -> Iterator[Tensor]:
    """Yield the (B, N, P) weights of each batch; write into the record what was read."""
    unique = list(dict.fromkeys(paths))
    for batch in read_images(unique, resolve_input_data_config(model), batch_size):
        for path, image in batch:
            if isinstance(image, Exception):
                print(f"skipped: {image}", file=sys.stderr)
            record["skipped" if isinstance(image, Exception) else "images"].append(str(path))
        readable = [image for _, image in batch if isinstance(image, Tensor)]
        if readable:
            yield token_weights(model, torch.stack(readable).to(device), record["layer"])
    if not record["images"]:
        raise InputError("none of the images could be read; the lines above say why")


def _maps(stream: Iterator[Tensor], grid: Any, tokens: Sequence[int], top: int) -> list[Any]:
    """Return for each pair all weights of each image, and the largest (``peaks``)."""
    weights = torch.cat([each.cpu() for each in stream])  # (B, N, P)
    peaks = weights.amax(dim=1)  # (B, P)
    maps = weights.unflatten(1, grid)  # (B, rows, columns, P)
    return [
        {"token": token, "peaks": _plain(peaks[:, token]), "weights": _plain(maps[..., token])}
        for token in tokens or _largest(peaks.amax(dim=0), top)
    ]


def _exemplars(
    stream: Iterator[Tensor],
    module: Pattention,
    record: dict[str, Any],
    tokens: Sequence[int],
    top: int,
    number: int,
) -> list[dict[str, Any]]:
    """Return for each pair the images with the largest weights, and the patch [row, column].

    The ``selectivity`` of a pair is the mean weight of its exemplars, divided by its mean |weight|.
    Only the half of the pairs with the largest mean |weight| · ‖value‖, which add most to the
    output, are candidates; the most selective candidates are chosen. Selectivity alone would choose
    pairs that do almost nothing. The other measure alone would choose pairs that respond to
    everything, and their exemplars would show nothing. Kurtosis would depend on single outliers;
    selectivity depends on every image that is shown.
    """
    files, grid = record["images"], record["grid"]  # files: of the batches so far
    total = torch.zeros(module.num_param_tokens, dtype=torch.float64)
    # The best images of every pair so far: largest weight, number and patch, each (<=K, P).
    peaks = torch.empty(0, module.num_param_tokens)
    images = patches = torch.empty(0, module.num_param_tokens, dtype=torch.long)
    for weights in stream:
        total += torch.linalg.vector_norm(weights, ord=1, dim=(0, 1)).cpu()
        new, at = (part.cpu() for part in weights.max(dim=1))  # (B, P)
        numbers = torch.arange(len(files) - len(new), len(files))
        peaks, order = torch.cat([peaks, new]).topk(min(number, len(files)), dim=0)
        images = torch.cat([images, numbers[:, None].expand_as(new)]).gather(0, order)
        patches = torch.cat([patches, at]).gather(0, order)
        del weights  # before the next batch is computed
    mean = total / (len(files) * math.prod(grid))
    norms = module.value_param_tokens.detach().double().norm(dim=1).cpu()  # (P,)
    selectivity = peaks.mean(dim=0) / mean.clamp_min(torch.finfo(torch.float32).tiny)
    strong = _largest(mean * norms, max(top, module.num_param_tokens // 2))
    entries = []
    for token in tokens or [strong[i] for i in _largest(selectivity[strong], top)]:
        best = (_plain(each[:, token]) for each in (peaks, images, patches))
        exemplars = [
            {"file": files[image], "weight": weight, "patch": list(divmod(patch, grid[1]))}
            for weight, image, patch in zip(*best, strict=True)
        ]
        measures = {"mean_abs_weight": mean, "value_norm": norms, "selectivity": selectivity}
        numbers = {name: _plain(measure[token]) for name, measure in measures.items()}
        entries.append({"token": token, **numbers, "exemplars": exemplars})
    return entries


def _largest(measure: Tensor, number: int) -> list[int]:
    return measure.topk(min(number, len(measure))).indices.tolist()


def _plain(numbers: Tensor) -> Any:
    return (numbers.double().round(decimals=6) if numbers.is_floating_point() else numbers).tolist()
