"""Load models from files and save them to files, with their description."""

import errno
import io
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from timm.models import save_for_hf
from torch import Tensor, nn

from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.files import new_folder, write_whole

from .card import CardFacts, vision_card, write_card
from .computation import check_computation
from .description import (
    CARD,
    CONFIG,
    DESCRIPTION,
    WEIGHT_FILES,
    configured_names,
    describe_model,
    find_description,
    plain_counts,
    read_description,
    trained_arguments,
)
from .vit import (
    TokenFormerViT,
    classifier_state_dict,
    fit_state_dict,
    timm_state_dict,
)
from .weights import read_checkpoint, seal_tensors, state_dict_in

_LOCAL = "local-dir:"
# The part of a description that is valid for any model arguments.
_PREPROCESSING = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
_log = logging.getLogger("tokenformer_vit")


def load_model(
    name: str | None,
    checkpoint: Path | None,
    num_classes: int | None = None,
    /,
    *,
    for_images: bool = True,
    **kwargs: Any,
) -> nn.Module:
    """Build a timm model and load its weights strictly.

    Args:
        name: timm model name, or ``local-dir:FOLDER`` for a folder that timm's ``save_for_hf``
            wrote; None if the checkpoint contains a description of its model.
        checkpoint: ``.safetensors`` file, PyTorch checkpoint (of timm or of a training by this
            package), or exported folder; None for the weights in a ``local-dir:`` folder, or for
            random weights.
        num_classes: Number of classes; default: the number of rows of the checkpoint's
            ``head.weight``; 0 for an exported model without a head. It may also be given in
            ``kwargs``.
        for_images: Whether the model will be used on images as it is. Their preprocessing comes
            from the checkpoint's description; without one there is a warning or an error. If False,
            a norm after the pooling is new where the checkpoint has its norm before the pooling.
        **kwargs: Arguments of the model.

    Returns:
        The model, on the CPU, in evaluation mode. Its ``card_facts`` are the data and the recipe in
        a training checkpoint.

    Raises:
        InputError: If the model or the file does not exist, they do not fit together, or a training
            checkpoint of this package has no description of its preprocessing.
    """
    if (given := kwargs.pop("num_classes", None)) is not None:
        if num_classes not in (None, given) or not isinstance(given, int) or given < 0:
            other = "" if num_classes is None else f" and {num_classes}"
            raise InputError(
                f"num_classes must be one whole number of at least 0, but got {given!r}{other}"
            )
        num_classes = given
    if checkpoint is not None and checkpoint.is_dir() and name is None:
        name, checkpoint = f"{_LOCAL}{checkpoint}", None
    if checkpoint is not None and not checkpoint.is_file():
        hint = f"; a folder is given as --model {_LOCAL}FOLDER" if checkpoint.is_dir() else ""
        raise InputError(f"there is no checkpoint file {checkpoint}{hint}")
    if name is not None:
        _check_name(name)
        if name.startswith(_LOCAL) and checkpoint is None:
            checkpoint = weights_in(Path(name.removeprefix(_LOCAL)))

    content = read_checkpoint(checkpoint) if checkpoint else {}
    state_dict = state_dict_in(content, checkpoint) if checkpoint else None
    description = None
    if name is not None and name.startswith(_LOCAL):
        description = read_description(Path(name.removeprefix(_LOCAL)) / CONFIG)
    elif checkpoint is not None:
        description = find_description(checkpoint, content)
    if description is None and state_dict is not None and (for_images or name is None):
        _say_preprocessing(name, checkpoint, state_dict)
    if name is None and description is None:
        said, as_what = f"{checkpoint} does not name its model", ""
        if checkpoint is None:
            said, as_what = "no model was given", " as --checkpoint"
        raise InputError(
            f"{said}: name it with --model, or give an exported folder with config.json{as_what}; "
            f"models of this package are {', '.join(timm.list_models('tokenformer*'))}"
        )
    if num_classes is None and state_dict is not None:
        num_classes = _head_rows(state_dict, checkpoint)
    if num_classes is None and description is not None and description.get("num_classes") == 0:
        num_classes = 0
    if description is not None and state_dict is not None:
        _check_size(name, description, num_classes, kwargs, state_dict, checkpoint)
    model = _build(name, description, num_classes, kwargs)
    if for_images and getattr(model, "global_pool", None) == "":
        raise InputError(
            f"{checkpoint or name} is a model without pooling (global_pool=''): it cannot classify "
            "an image; choose another global_pool, such as 'avg'"
        )
    if state_dict is not None:
        assert checkpoint is not None
        check_computation(model, trained_arguments(checkpoint, content), checkpoint)
        _load(
            model,
            state_dict,
            f"{checkpoint} does not fit {name or 'its own description'}",
            "img_size" in kwargs,
            not for_images,
        )
    own: Any = model
    own.card_facts = CardFacts(**(description or {}).get("card") or {})
    return model.eval()


def weights_in_package(name: str | None) -> Path | None:
    """Return the file of the pretrained weights that a model was registered with, if it has one.

    Args:
        name: timm model name, or anything else that ``load_model`` takes.
    """
    if name is None or not timm.is_model_pretrained(name):
        return None
    file = timm.get_pretrained_cfg(name).file  # type: ignore[union-attr]
    return Path(file) if file else None


def save_model(
    model: nn.Module,
    folder: Path,
    label_names: Sequence[str] | None = None,
    data_config: dict[str, Any] | None = None,
    facts: CardFacts | None = None,
) -> None:
    """Write a folder that ``timm.create_model("local-dir:FOLDER", pretrained=True)`` reads.

    Args:
        model: timm model.
        folder: Folder for ``model.safetensors``, with the SHA-256 of its tensors, ``config.json``
            and the model card ``README.md``. A new folder appears complete; in an existing one
            these files are replaced, except a ``README.md`` that was written or edited by hand.
        label_names: Names of the classes, in order; default: the names in the model's
            configuration, if it has one for each class.
        data_config: Preprocessing, in timm's words; default: from the model's configuration.
        facts: Data, training and results for the model card.

    Raises:
        OSError: If the folder cannot be written; existing files stay.
    """
    own: Any = model
    names = label_names or configured_names(model)
    with new_folder(folder) as partial:
        try:
            save_for_hf(
                own,
                str(partial),
                model_config={"label_names": list(names)} if names else None,
                safe_serialization=True,
                data_config=data_config,
                model_args=plain_counts(model),
            )
        except SafetensorError as error:  # a full disk, for example
            raise OSError(errno.EIO, one_line(error)) from error
        seal_tensors(partial / WEIGHT_FILES[0])
        card = vision_card(model, names, data_config, facts or CardFacts())
        write_card(partial, card, folder / CARD)


def save_classifier(model: nn.Module, path: Path) -> None:
    """Write a checkpoint that ``load_from`` and ``init_cfg`` of an mmpretrain classifier read.

    The classifier has a ``TimmClassificationBackbone`` and a ``LinearClsHead``.

    Args:
        model: timm model whose classifier is a linear ``head``.
        path: The file. It also holds the description of the model, as training writes it.

    Raises:
        InputError: If the model has another classifier, or none.
        OSError: If it cannot be written.
    """
    own: Any = model
    if not isinstance(getattr(own, "head", None), nn.Linear):
        raise InputError(
            f"{type(model).__name__} has no linear classifier called 'head': export a TokenFormer "
            "or one of timm's ViTs that was trained to classify"
        )
    names = configured_names(model)
    content = {
        "meta": {"dataset_meta": {"classes": list(names)}} if names else {},
        "state_dict": classifier_state_dict(model.state_dict()),
        DESCRIPTION: describe_model(model, own.num_classes, names, None),
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, buffer.getvalue())


def _check_name(name: str) -> None:
    if name.startswith(_LOCAL):
        config = Path(name.removeprefix(_LOCAL)) / CONFIG
        if not config.is_file():
            raise InputError(f"there is no {config}; {_LOCAL} needs a folder that timm exported")
    elif not timm.is_model(name):
        close = get_close_matches(name, timm.list_models(), n=3) or timm.list_models("tokenformer*")
        raise InputError(f"there is no model {name!r}; did you mean {', '.join(close)}?")


def weights_in(folder: Path) -> Path:
    """Return the file of the weights in an exported folder.

    Raises:
        InputError: If the folder has none.
    """
    for file in WEIGHT_FILES:
        if (folder / file).is_file():
            return folder / file
    raise InputError(f"the folder {folder} has no weights: it needs {' or '.join(WEIGHT_FILES)}")


def _build(
    name: str | None,
    description: Mapping[str, Any] | None,
    num_classes: int | None,
    kwargs: Mapping[str, Any],
) -> nn.Module:
    own = dict(kwargs)
    try:
        if name is not None and (description is None or not name.startswith(_LOCAL)):
            if description is not None:  # the caller decides the shape, the file the preprocessing
                known = description.get("pretrained_cfg") or description
                overlay = {key: known[key] for key in _PREPROCESSING if known.get(key) is not None}
                names = description.get("label_names")
                own["pretrained_cfg_overlay"] = {
                    **overlay,
                    **({"label_names": names} if names else {}),
                }
            return timm.create_model(name, num_classes=num_classes, **own)
        with tempfile.TemporaryDirectory() as folder:  # timm reads a description only from a file
            Path(folder, CONFIG).write_text(json.dumps(description), encoding="utf-8")
            return timm.create_model(f"{_LOCAL}{folder}", num_classes=num_classes, **own)
    except Exception as error:  # foreign arguments may cause any error
        what = name or description["architecture"]  # type: ignore[index]
        raise InputError(
            f"the model {what} cannot be built: {one_line(error)}; correct its arguments"
        ) from error


def _check_size(
    name: str | None,
    description: Mapping[str, Any],
    num_classes: int | None,
    kwargs: Mapping[str, Any],
    state_dict: Mapping[str, Tensor],
    checkpoint: Path | None,
) -> None:
    """Refuse a description of a model far larger than its weights, before it fills the memory."""
    # A block takes memory even on the meta device, and each block has tensors.
    depth = {**(description.get("model_args") or {}), **kwargs}.get("depth")
    whose, remedy = "its description has", "export the model again"
    if name is not None and not name.startswith(_LOCAL):
        whose = f"{name} has"
        remedy = f"the file describes its own model: leave --model out, or give a file of {name}"
    if isinstance(depth, int) and depth > len(state_dict):
        raise InputError(
            f"{checkpoint} holds {len(state_dict)} tensors, but {whose} {depth} blocks; {remedy}"
        )
    with torch.device("meta"):
        model = _build(name, description, num_classes, kwargs)
    wanted, found = (
        sum(tensor.numel() for tensor in tensors)
        for tensors in (model.parameters(), state_dict.values())
    )
    if wanted > 2 * found + 1_000_000:
        raise InputError(
            f"{checkpoint} holds {found:,} numbers, but {whose} {wanted:,} parameters; {remedy}"
        )


def _head_rows(state_dict: Mapping[str, Tensor], checkpoint: Path | None) -> int | None:
    for name in ("head.weight", "head.fc.weight", "fc.weight", "classifier.weight"):
        if name in state_dict:
            # Some of timm's convolutional models have a convolution here.
            if name.startswith("head.") and state_dict[name].dim() != 2:
                raise InputError(
                    f"{checkpoint}: {name} must be a (classes, width) matrix, but has the shape "
                    f"{tuple(state_dict[name].shape)}; export the model again"
                )
            return len(state_dict[name])
    return None


def _say_preprocessing(
    name: str | None, checkpoint: Path | None, state_dict: Mapping[str, Tensor]
) -> None:
    if any(key.startswith("backbone.") for key in state_dict):
        raise InputError(
            f"{checkpoint} is a training checkpoint without preprocessing and class names: run "
            f"`tokenformer-vit export {checkpoint} FOLDER --config CONFIG` with the config of the "
            "training, and give FOLDER"
        )
    if name is None:
        return  # the caller refuses it
    _log.warning(
        "%s has no preprocessing and no class names; those of %s are used. An exported folder "
        "contains both.",
        checkpoint,
        name,
    )


def _load(
    model: nn.Module, state_dict: dict[str, Tensor], what: str, resample: bool, new_head: bool
) -> None:
    """Load strictly.

    ``resample`` permits position embeddings of another image size. With ``new_head``, a norm after
    the pooling is new if the file has its norm before the pooling, as MAE is fine-tuned.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    # timm's filter would silently resample these two to any size, and the model would predict with
    # untrained weights.
    stem = ["patch_embed.proj.weight"] if resample else ["patch_embed.proj.weight", "pos_embed"]
    faults = []
    for name in stem:
        for shape in (found[key] for key in found if f".{key}".endswith(f".{name}")):
            if name in wanted and shape != wanted[name]:
                faults.append(f"{name} is {shape} in the file and {wanted[name]} in the model")
    if not faults:
        if isinstance(model, TokenFormerViT):
            state_dict = fit_state_dict(state_dict, model)
        elif any(name.startswith("backbone.model.") for name in state_dict):
            state_dict = timm_state_dict(state_dict)
        own = model.state_dict()
        if new_head and "fc_norm.weight" in own and "norm.weight" in state_dict:
            kept = {name: each for name, each in state_dict.items() if not name.startswith("norm.")}
            state_dict = kept | {name: own[name] for name in own if name.startswith("fc_norm.")}
        faults = model_faults(own, state_dict)
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise InputError(
            f"{what}: {'; '.join(faults[:3])}{more}. Give the --model it was trained as, "
            "with its --model-kwargs"
        )
    model.load_state_dict(state_dict)


def model_faults(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """List the differences of two state dicts in names, shapes and kinds of numbers.

    Args:
        wanted: State dict of the model.
        found: State dict of the file.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    faults = [
        f"{name} is {shapes[name]} in the file and {tuple(tensor.shape)} in the model"
        for name, tensor in wanted.items()
        if name in found and shapes[name] != tuple(tensor.shape)
    ]
    faults += [
        f"{name} is {found[name].dtype} in the file and {tensor.dtype} in the model"
        for name, tensor in wanted.items()
        if name in found and found[name].is_floating_point() != tensor.is_floating_point()
    ]
    faults += [
        f"{n} {tuple(t.shape)} is not in the file" for n, t in wanted.items() if n not in found
    ]
    faults += [f"{n} {shapes[n]} is not in the model" for n in found if n not in wanted]
    return faults
