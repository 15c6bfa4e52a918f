"""Which patches, and which images, the pairs of a layer fire for, in numbers."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import pattention_layers
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models import TokenFormerViT
from tokenformer_vit.models.description import data_config
from tokenformer_vit.vision.images import read_images, say_skipped

MOST = 32  # rows or columns of a picture that can still be looked at


def _find_layer(model: nn.Module, name: str | None) -> tuple[str, Pattention]:
    if not isinstance(model, TokenFormerViT):
        raise InputError(f"{type(model).__name__} is no TokenFormer: it has no parameter tokens")
    layers = pattention_layers(model)
    if name is None:
        # Early blocks see little but colours and edges; in the last, nothing that happens to
        # patches reaches a head that reads the class token.
        name = f"blocks.{len(model.blocks) // 2}.mlp"  # type: ignore[arg-type]
    if name not in layers:
        close = get_close_matches(name, layers, n=5) or list(layers)[-5:]
        raise InputError(
            f"there is no layer {name!r} of parameter tokens in the model's "
            f"{len(model.blocks)} blocks; choose one "  # type: ignore[arg-type]
            f"such as {', '.join(close)}"
        )
    return name, layers[name]


@torch.no_grad()
def token_weights(model: nn.Module, images: Tensor, layer: str) -> Tensor:
    """Compute how strongly each patch of some images reads each key-value pair of a layer.

    Args:
        model: :class:`~tokenformer_vit.models.TokenFormerViT` in evaluation mode.
        images: (B, 3, H, W), normalised as the model expects, on its device.
        layer: Name of a Pattention layer; see :func:`~tokenformer_vit.growth.pattention_layers`.

    Returns:
        (B, N, P) weights Θ(X K_Pᵀ) in float32, of the N patches, row by row, without class and
        register tokens. Pairs that take no part in the layer have the weight zero.

    Raises:
        InputError: If the model is no TokenFormer or has no such layer, or weights are not finite.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 4 to 6.
    """
    layer, module = _find_layer(model, layer)
    inputs: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    try:
        model.forward_intermediates(  # type: ignore[operator]
            images,
            indices=[int(layer.split(".")[1])],
            stop_early=True,
            intermediates_only=True,
            output_fmt="NLC",
        )
    finally:
        hook.remove()
    weights = module.weights(inputs[0][:, model.num_prefix_tokens :])  # type: ignore[misc]
    if not weights.isfinite().all():
        raise InputError(
            f"weights in {layer} are not finite; the checkpoint is of a training that diverged"
        )
    if module.active is None:
        return weights
    every = weights.new_zeros(*weights.shape[:-1], module.num_param_tokens)
    every[..., module.active] = weights
    return every


def map_tokens(
    model: nn.Module,
    paths: Sequence[Path],
    layer: str | None = None,
    tokens: Sequence[int] | None = None,
    top: int = 8,
    batch_size: int = 32,
    device: torch.device | str = "cpu",
    skipped: Callable[[Path, Exception], object] = say_skipped,
) -> dict[str, Any]:
    """Map where in a few images some pairs of a layer fire.

    Args:
        model: As for :func:`token_weights`; it is moved to ``device``.
        paths: Image files, at most :data:`MOST`.
        layer: Name of the layer; default: the feed-forward layer of the middle block.
        tokens: Numbers of the pairs; default: those with the largest weights on these images.
        top: How many pairs, if they are not named.
        batch_size: Images in a forward pass.
        device: Where to compute.
        skipped: Told of each image that cannot be read, and why.

    Returns:
        What :func:`draw_maps` shows, ready for JSON: ``layer``, ``theta``, ``num_param_tokens``,
        ``grid`` [rows, columns] and ``patch_size`` [height, width] in pixels, ``images`` (files
        that were read), ``chosen_by``, and ``tokens``, for each pair its number ``token``, its
        ``value_norm``, and of every image the largest weight (``peaks``) and all of them
        (``weights``, row by row), to six decimals.

    Raises:
        InputError: If there is no such layer or pair, too much to draw, or no readable image.
    """
    if len(paths) > MOST:
        raise InputError(
            f"{len(paths)} images are more than the {MOST} rows of maps that can be drawn: give "
            "fewer, or ask for the exemplars of a data set (--exemplars 9)"
        )
    layer, module = _find_layer(model, layer)
    tokens = _check_tokens(tokens, top, layer, module)
    files, parts = [], []
    with closing(_stream(model, paths, layer, batch_size, device, skipped)) as batches:
        for names, weights in batches:
            files += names
            parts.append(weights.cpu())
    weights = torch.cat(parts)  # (B, N, P)
    peaks = weights.amax(dim=1)  # (B, P)
    chosen = tokens or _largest(peaks.amax(dim=0), top)
    norms = _value_norms(module)
    header = _header(model, layer, module)
    return {
        **header,
        "images": [str(file) for file in files],
        "chosen_by": "number" if tokens else "largest weight on these images",
        "tokens": [
            {
                "token": token,
                "value_norm": _plain(norms[token]),
                "peaks": _plain(peaks[:, token]),
                "weights": _plain(weights[:, :, token].unflatten(1, header["grid"])),
            }
            for token in chosen
        ],
    }


def find_exemplars(
    model: nn.Module,
    paths: Sequence[Path],
    layer: str | None = None,
    number: int = 9,
    tokens: Sequence[int] | None = None,
    top: int = 8,
    batch_size: int = 32,
    device: torch.device | str = "cpu",
    skipped: Callable[[Path, Exception], object] = say_skipped,
) -> dict[str, Any]:
    """Find the images of a data set that excite some pairs of a layer most.

    Args:
        model: As for :func:`token_weights`; it is moved to ``device``.
        paths: Image files, as many as you like: memory holds the weights of one batch.
        layer: As for :func:`map_tokens`.
        number: Images for each pair, at most :data:`MOST`.
        tokens: Numbers of the pairs; default: the most selective ones, see Note.
        top: How many pairs, if they are not named.
        batch_size: Images in a forward pass.
        device: Where to compute.
        skipped: Told of each image that cannot be read, and why.

    Returns:
        What :func:`draw_exemplars` shows, ready for JSON: ``layer``, ``theta``,
        ``num_param_tokens``, ``grid`` and ``patch_size`` as for :func:`map_tokens`, ``images``
        (how many were read), ``chosen_by``, and ``tokens``, for each pair its number ``token``,
        ``value_norm``, ``mean_abs_weight`` over all patches, ``selectivity``, and ``exemplars``,
        strongest first: ``file``, its largest ``weight``, and the ``patch`` [row, column] there.

    Raises:
        InputError: If there is no such layer or pair, too much to draw, or no readable image.

    Note:
        ``selectivity`` is the mean of a pair's exemplary weights over its mean |weight|. Pairs are
        chosen by it among the half with the largest mean |weight| · ‖value‖, which is how much a
        pair adds to the output: by selectivity alone one would see pairs that do next to nothing,
        by the other measure alone pairs that fire everywhere, whose exemplars say nothing. A
        kurtosis would hang on a single outlier; here every image that is shown counts.
    """
    layer, module = _find_layer(model, layer)
    tokens = _check_tokens(tokens, top, layer, module)
    if not 1 <= number <= MOST:
        raise InputError(f"{number} exemplars of a pair cannot be drawn; ask for 1 to {MOST}")
    files: list[Path] = []
    total = torch.zeros(module.num_param_tokens, dtype=torch.float64)
    # The best images so far of every pair: their largest weight, number and patch, each (<=K, P).
    peaks = torch.empty(0, module.num_param_tokens)
    images = patches = torch.empty(0, module.num_param_tokens, dtype=torch.long)
    with closing(_stream(model, paths, layer, batch_size, device, skipped)) as batches:
        for names, weights in batches:
            total += torch.linalg.vector_norm(weights, ord=1, dim=(0, 1)).cpu()
            new, at = (part.cpu() for part in weights.max(dim=1))  # (B, P)
            numbers = torch.arange(len(files), len(files) + len(names))
            files += names
            peaks, order = torch.cat([peaks, new]).topk(min(number, len(files)), dim=0)
            images = torch.cat([images, numbers[:, None].expand_as(new)]).gather(0, order)
            patches = torch.cat([patches, at]).gather(0, order)
            del weights  # before the next come
    header = _header(model, layer, module)
    mean = total / (len(files) * math.prod(header["grid"]))
    norms = _value_norms(module)
    selectivity = peaks.mean(dim=0) / mean.clamp_min(torch.finfo(torch.float32).tiny)
    strong = _largest(mean * norms, max(top, module.num_param_tokens // 2))
    chosen = tokens or [strong[i] for i in _largest(selectivity[strong], top)]
    return {
        **header,
        "images": len(files),
        "chosen_by": "number" if tokens else "selectivity",
        "tokens": [
            {
                "token": token,
                "value_norm": _plain(norms[token]),
                "mean_abs_weight": _plain(mean[token]),
                "selectivity": _plain(selectivity[token]),
                "exemplars": [
                    {
                        "file": str(files[image]),
                        "weight": weight,
                        "patch": list(divmod(patch, header["grid"][1])),
                    }
                    for image, weight, patch in zip(
                        images[:, token].tolist(),
                        _plain(peaks[:, token]),
                        patches[:, token].tolist(),
                        strict=True,
                    )
                ],
            }
            for token in chosen
        ],
    }


def _check_tokens(
    tokens: Sequence[int] | None, top: int, layer: str, module: Pattention
) -> list[int]:
    """Return the pairs that were named, each once; none if they are to be chosen."""
    tokens = list(dict.fromkeys(tokens or ()))
    for token in tokens:
        if not 0 <= token < module.num_param_tokens:
            raise InputError(
                f"there is no pair {token} in {layer}, whose {module.num_param_tokens} pairs are "
                f"0 to {module.num_param_tokens - 1}"
            )
    if not 1 <= (asked := len(tokens) or top) <= MOST:
        raise InputError(f"{asked} pairs cannot be drawn at a time; ask for 1 to {MOST}")
    return tokens


def _stream(
    model: nn.Module,
    paths: Sequence[Path],
    layer: str,
    batch_size: int,
    device: torch.device | str,
    skipped: Callable[[Path, Exception], object],
) -> Generator[tuple[list[Path], Tensor], None, None]:
    """Yield the readable paths of each batch and their (B, N, P) weights."""
    config, model, found = data_config(model), model.to(device), False
    with closing(read_images(list(dict.fromkeys(paths)), config, batch_size)) as batches:
        for batch in batches:
            for path, image in batch:
                if isinstance(image, Exception):
                    skipped(path, image)
            readable = {path: image for path, image in batch if isinstance(image, Tensor)}
            if readable:
                found = True
                images = torch.stack(list(readable.values())).to(device)
                yield list(readable), token_weights(model, images, layer)
    if not found:
        raise InputError("none of the images could be read")


def _header(model: Any, layer: str, module: Pattention) -> dict[str, Any]:
    size = data_config(model)["input_size"][1:]
    return {
        "layer": layer,
        "theta": module.theta,
        "num_param_tokens": module.num_param_tokens,
        "grid": list(model.patch_embed.dynamic_feat_size(size)),
        "patch_size": list(model.patch_embed.patch_size),
    }


def _value_norms(module: Pattention) -> Tensor:
    return module.value_param_tokens.detach().double().norm(dim=1).cpu()  # (P,)


def _largest(measure: Tensor, number: int) -> list[int]:
    return measure.topk(min(number, len(measure))).indices.tolist()


def _plain(numbers: Tensor) -> Any:
    return numbers.double().round(decimals=6).tolist()
