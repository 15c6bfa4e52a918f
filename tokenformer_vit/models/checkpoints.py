"""Read and write checkpoints: weights, and the ``config.json`` that describes their model.

Reading runs no code, and finds damage by the checksums of a ``.pth``, or by the SHA-256 of exported
weights in ``config.json``. That one only warns, because other tools copy ``config.json``.
"""

import argparse
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from struct import error as StructError
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from timm.models import clean_state_dict
from timm.models._hub import generate_readme, save_config_for_hf  # they have no public names
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.files import new_folder
from tokenformer_vit.layers.arguments import EPS
from tokenformer_vit.layers.pattention import join_state_dict
from tokenformer_vit.mmpretrain_names import classifier_state_dict, timm_state_dict
from tokenformer_vit.records import read_json

from .sizes import check_not_fused

# Files of an exported folder. A training checkpoint has the content of CONFIG under DESCRIPTION.
WEIGHTS, CONFIG, CARD, DESCRIPTION = "model.safetensors", "config.json", "README.md", "timm_config"
# Averaged weights first: timm's keys, then mmengine's, whose `state_dict` is the averaged model.
_STATE_DICTS = ("state_dict_ema", "model_ema", "state_dict", "model")
# Arguments that change what a model computes, but not the names or shapes of its tensors. Not the
# base of rotary positions, which users change to read longer sequences.
_HIDDEN = ("theta", "norm", "qk_norm", "num_heads", "norm_eps", "use_rot_pos_emb", "rotary_share")
_HIDDEN += ("nested", "nested_kinds")
# Tensor of an export with these arguments as JSON: timm's checkpoint_path reads tensors alone.
COMPUTATION = "computation"
# What the readers of PyTorch and safetensors raise on text, cut and otherwise damaged files.
_DAMAGE = (SafetensorError, BadZipFile, UnpicklingError, StructError, EOFError, AssertionError)
_DAMAGE += (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_LICENSE = "apache-2.0 # of the code; check what your data allow, and correct this line"


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read the content of a file; ``{"state_dict": tensors}`` of a ``.safetensors`` file."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"there is no checkpoint file {path}")
    try:
        if path.suffix == ".safetensors":
            content: Any = {"state_dict": load_file(path, device=str(map_location or "cpu"))}
        else:
            if is_zipfile(path) and ZipFile(path).testzip():  # PyTorch does not check
                raise BadZipFile
            # The command line of timm's and DeiT's trainings is a Namespace.
            with torch.serialization.safe_globals([argparse.Namespace]):
                content = torch.load(path, map_location=map_location, weights_only=True)
    except _DAMAGE as error:
        # Not PyTorch's message, which advises to run the code in the file.
        raise InputError(
            f"{path} is damaged, or holds more than tensors and plain values, and loading it could "
            "run code: copy it again, or save only the state dict"
        ) from error
    check_digest(path)
    return content if isinstance(content, dict) else {type(content).__name__: content}


def find_weights(checkpoint: Path) -> Path:
    """Return the file of an exported folder or of a model of this package, or ``checkpoint``."""
    if not checkpoint.exists() and timm.is_model_pretrained(str(checkpoint)):
        file = getattr(timm.get_pretrained_cfg(str(checkpoint)), "file", None)
        return Path(file) if file else checkpoint
    return checkpoint / WEIGHTS if checkpoint.is_dir() else checkpoint


def state_dict_in(content: Mapping[str, Any], path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a model in the content of a file, by timm's names."""
    found = next((content[name] for name in _STATE_DICTS if content.get(name)), content)
    if not found or not all(isinstance(each, Tensor) for each in found.values()):
        names = ", ".join(map(str, list(found)[:5]))
        raise InputError(f"{path} holds no state dict, but {names}: save model.state_dict()")
    found = timm_state_dict(clean_state_dict(dict(found)))
    found.pop(COMPUTATION, None)  # the description has it too
    wrapped = all(name.startswith("model.") for name in found)  # Lightning, TimmClassifier
    return {name.removeprefix("model.") if wrapped else name: t for name, t in found.items()}


def description_of(path: Path, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what a file, with this content, or the ``config.json`` beside it says of its model."""
    config = path.with_name(CONFIG)
    if path.name == WEIGHTS and config.is_file():
        return read_json(config)
    if content is None and path.suffix != ".safetensors" and path.is_file():
        content = read_checkpoint(path, "meta")
    return (content or {}).get(DESCRIPTION) or {}


def check_digest(path: Path) -> None:
    """Warn if exported weights, which could be read, differ from the SHA-256 in ``config.json``."""
    expected = description_of(path, {}).get("sha256")
    if expected is not None and expected != hashlib.sha256(path.read_bytes()).hexdigest():
        logging.getLogger("tokenformer_vit").warning(
            "%s is not the file that %s had a SHA-256 of: another tool wrote one of them, or it is "
            "damaged",
            *(path, path.with_name(CONFIG)),
        )


def computation_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments of a model, or fields of an LMConfig, that tensors do not show."""
    found = {name: arguments[name] for name in (*_HIDDEN, "eps") if name in arguments}
    for name in found.keys() & {"nested", "nested_kinds"}:  # JSON has lists
        found[name] = [*(found[name] or ())]
    if "pattention_args" in arguments:
        found["eps"] = (arguments["pattention_args"] or {}).get("eps", EPS)
    for name, value in found.items():  # a dict by kind may say the same of all kinds
        if isinstance(value, Mapping) and all(each == value["ffn"] for each in value.values()):
            found[name] = value["ffn"]
    return found


def model_computation(model: nn.Module) -> dict[str, Any]:
    """Return :func:`computation_of` the first TokenFormer in a model; empty without one."""
    models: Any = (each for each in model.modules() if hasattr(each, "computation"))
    return next((each.computation() for each in models), {})


def check_computation(model: nn.Module, arguments: Mapping[str, Any], source: Any) -> None:
    """Refuse weights trained with other ``arguments``, such as another Θ or number of heads."""
    trained = computation_of(arguments)
    for name, value in model_computation(model).items():
        if value != trained.get(name, value):
            right = f"{name}={trained[name]!r}"
            way = f"pattention_args=dict({right})" if name == "eps" else right
            raise InputError(
                f"{name} is {value!r}, but the weights in {source} were trained with "
                f"{trained[name]!r}: set {way}"
            )


def check_tensors(model: Any, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Check the arguments that an export's tensors name, before they are loaded into a model."""
    if (saved := state_dict.pop(prefix + COMPUTATION, None)) is not None:
        check_computation(model, json.loads(bytes(saved.tolist())), "the export")


def load_model(
    name: str | None, checkpoint: Path | None, /, *, new_norm: bool = False, **kwargs: Any
) -> nn.Module:
    """Build a timm model on the CPU, in evaluation mode, and load its weights strictly.

    ``name`` is a timm model or ``local-dir:FOLDER``; None if ``checkpoint``, a file or an exported
    folder, describes its model. With ``img_size``, position embeddings are resampled. ``new_norm``
    allows a missing ``fc_norm``, as when an MAE encoder is fine-tuned.
    """
    if name is not None and name.startswith("local-dir:"):
        name, checkpoint = None, checkpoint or Path(name.removeprefix("local-dir:"))
    described, weights, resample = {}, {}, "img_size" in kwargs
    if checkpoint is not None:
        checkpoint = find_weights(checkpoint)
        content = read_checkpoint(checkpoint)
        described = description_of(checkpoint, content)
        weights = state_dict_in(content, checkpoint)
    trained = described.get("model_args") or {}
    if name is None:
        name, kwargs = described.get("architecture"), {**trained, **kwargs}
    if name is None:
        where = checkpoint or "the command"
        raise InputError(f"{where} names no timm model: give its --model, or an exported folder")
    if weights and kwargs.get("num_classes") is None:
        heads = getattr(timm.get_pretrained_cfg(name), "classifier", None) or "head"
        head = heads if isinstance(heads, str) else heads[0]
        kwargs["num_classes"] = len(weights.get(f"{head}.weight", ()))
    overlay = {**(described.get("pretrained_cfg") or {}), "num_classes": kwargs.get("num_classes")}
    overlay["label_names"] = described.get("label_names")
    overlay = {key: each for key, each in overlay.items() if each is not None}
    try:  # timm resamples positions from the grid of `trained`; without it, from a square
        model: Any = timm.create_model(
            name, pretrained_cfg_overlay=overlay, pretrained_model_args=trained, **kwargs
        )
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"the model {name} cannot be built ({one_line(error)}): correct its name or arguments"
        ) from error
    if weights:
        check_computation(model, trained, checkpoint)
        own = model.state_dict()
        if resample and "pos_embed" in own and "pos_embed" in weights:
            # Not all tensors: timm would also resample patches, to a size that nobody has trained.
            names = {"pos_embed", "patch_embed.proj.weight"} & own.keys() & weights.keys()
            chosen = {name: weights[name] for name in names}
            weights["pos_embed"] = checkpoint_filter_fn(chosen, model)["pos_embed"]
        if new_norm and "fc_norm.weight" in own and "norm.weight" in weights:
            weights = {name: each for name, each in weights.items() if not name.startswith("norm.")}
            weights |= {name: own[name] for name in own if name.startswith("fc_norm.")}
        if faults := model_faults(own, weights):
            raise InputError(
                f"{checkpoint} does not fit {name}: {faults}. Give its own --model, --model-kwargs"
            )
        model.load_state_dict(weights)
    return model.eval()


def model_faults(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Name the first differences between the tensors of a model and of a file; "" without any."""
    need, have = ({n: tuple(t.shape) for n, t in each.items()} for each in (wanted, found))
    faults = [
        f"{n} is {have.get(n, 'absent')} in the file and {need.get(n, 'absent')} in the model"
        for n in need | have
        if have.get(n) != need.get(n)
    ]
    return "; ".join(faults[:3]) + (f" and {len(faults) - 3} more" if len(faults) > 3 else "")


def describe_model(
    model: Any,
    num_classes: int,
    label_names: Sequence[str] | None = None,
    data_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of ``config.json``, for a head of ``num_classes``; see save_model."""
    check_not_fused(model)
    with TemporaryDirectory() as folder:  # timm only writes to a file
        file = Path(folder, CONFIG)
        save_config_for_hf(model, str(file), data_config=dict(data_config or {}))
        description = json.loads(file.read_text())
    del description["model_args"]["num_classes"]  # transformers refuses a folder with two
    if names := label_names or description["pretrained_cfg"].get("label_names"):
        description["label_names"] = list(names)
    return {**description, "num_classes": num_classes}


def save_model(
    model: Any,
    folder: Path,
    label_names: Sequence[str] | None = None,
    data_config: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that ``timm.create_model("local-dir:FOLDER", pretrained=True)`` reads.

    Class names and preprocessing, in timm's words, are by default those of the model. ``facts`` are
    sections of the card, such as ``{"Training": {"Epochs": 3}}``. An edited card stays.
    """
    description = describe_model(model, model.num_classes, label_names, data_config)
    card = folder / CARD
    with new_folder(folder) as partial:
        tensors = {n: t.contiguous() for n, t in join_state_dict(model.state_dict()).items()}
        if computation := model_computation(model):
            tensors[COMPUTATION] = torch.tensor([*json.dumps(computation).encode()]).byte()
        save_file(tensors, partial / WEIGHTS, {"format": "pt"})
        description["sha256"] = hashlib.sha256((partial / WEIGHTS).read_bytes()).hexdigest()
        (partial / CONFIG).write_text(json.dumps(description, indent=2), encoding="utf-8")
        # An edited card has a license line of its own.
        if not card.is_file() or _LICENSE in card.read_text(encoding="utf-8", errors="replace"):
            text = _card(model, description, facts or {})
            (partial / CARD).write_text(text, encoding="utf-8", errors="backslashreplace")


def mmpretrain_checkpoint(model: Any) -> dict[str, Any]:
    """Return what ``load_from`` and ``init_cfg`` of an mmpretrain classifier read."""
    if not isinstance(getattr(model, "head", None), nn.Linear):
        raise InputError(f"{type(model).__name__} has no linear head: export a TokenFormer or ViT")
    description = describe_model(model, model.num_classes)
    names = description.get("label_names")
    return {
        "meta": {"dataset_meta": {"classes": names}} if names else {},
        "state_dict": classifier_state_dict(join_state_dict(model.state_dict())),
        DESCRIPTION: description,
    }


def _card(model: Any, description: dict, facts: Mapping[str, Any]) -> str:
    own = "import tokenformer_vit  # registers the model\n" * hasattr(model, "computation")
    mode = "L" if description["pretrained_cfg"]["input_size"][0] == 1 else "RGB"
    usage = f"""```python
import timm
{own}from PIL import Image

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # or "hf-hub:USER/NAME"
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
output = model(transform(Image.open("image.png").convert("{mode}"))[None])
```"""
    count = sum(each.numel() for each in model.parameters())
    about = {"Parameters": f"{count:,}", "Arguments": description["model_args"], **facts}
    task = "image-classification" if model.num_classes else "image-feature-extraction"
    tags = [task, "timm", *(["tokenformer"] if own else [])]
    of_weights = description["pretrained_cfg"].get("license", "apache-2.0")
    license_line = _LICENSE if of_weights == "apache-2.0" else of_weights
    card = {"license": license_line, "details": about, "usage": usage, "tags": tags}
    return generate_readme(card, description["architecture"], task)
