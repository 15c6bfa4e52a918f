"""A first config for a folder of images: its classes, image size, model and recipe."""

import ast
import random
import statistics
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import timm
from mmengine.config import Config
from timm.data import resolve_input_data_config

from tokenformer_vit.command_line import printable
from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.files import locked_folder, make_folder, write_whole
from tokenformer_vit.models.checkpoints import WEIGHTS, describe_model, load_model
from tokenformer_vit.vision.images import class_folders, read_image, say_left_out, scan_images

from .backbone import check_classifier
from .config import CONFIGS, choose_checkpoint, load_config

HELD_OUT = 0.2  # of each class
_SAMPLE = 100  # images that are opened to see their size
_FEW = 10_000  # training images; with fewer, the model is as small as that of digits_demo
_SMALL = {"embed_dim": 96, "depth": 4, "num_heads": 3}
# The average of the weights reaches over one of so many parts of a run, as in digits_demo.
_AVERAGES = 16
_FINE_TUNING_LR = 1e-4
_PROBE_LR = 1e-2  # as in tuning_imagenette, which trains a head and a few pairs
# Names of the parts of a data set, in lower case: folders with such names are no classes.
_PARTS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}
# What the text of a config without code consists of; the only call is dict().
_PLAIN = (
    *(ast.Module, ast.Assign, ast.Call, ast.keyword, ast.Name, ast.expr_context),
    *(ast.Dict, ast.List, ast.Tuple, ast.Constant, ast.UnaryOp, ast.USub),
)


class Start(NamedTuple):
    """The model of a first run.

    Args:
        model: Name of a timm model, TokenFormer or ViT; None for a small TokenFormer, or for the
            model that ``checkpoint`` describes.
        checkpoint: File or exported folder with the first weights.
        freeze: Train only the head.
    """

    model: str | None = None
    checkpoint: Path | None = None
    freeze: bool = False


class _Images(NamedTuple):
    """The images of each class.

    Args:
        root: Folder with ``train/`` and ``val/``, or with the class folders.
        train: Training images by class, as paths within ``train/``, or within ``root``.
        val: Validation images by class, in the same form.
        listed: There is no ``val/``: two files have to list the images of each split.
    """

    root: Path
    train: dict[str, list[str]]
    val: dict[str, list[str]]
    listed: bool


def configure_folder(
    folder: str | Path, work_dir: str | Path, start: Start, resume: str | None, say: bool = True
) -> Path:
    """Write a complete config that trains on a folder of images.

    Args:
        folder: Folder with ``train/<class>/*`` and ``val/<class>/*``, or with ``<class>/*``. In the
            second case a fifth of each class is held out, the same images every time. The images
            stay in place; ``train.txt`` and ``val.txt`` in ``work_dir`` list them.
        work_dir: Folder for the config, whose name is that of ``folder``.
        start: Model and first weights.
        resume: Value of ``--resume``. A run that is resumed already has its config; ``start`` must
            be what it was, or empty.
        say: Print what was chosen.

    Returns:
        The path of the config.

    Raises:
        InputError: If ``work_dir`` already holds a run or is among the class folders, a resumed run
            started otherwise, there are fewer than two classes, a class has too few images, ``val``
            lacks a class, an image cannot be read, the model cannot be built, or the config would
            run code.
        OSError: If a folder cannot be read or a file cannot be written.
    """
    folder, work_dir = Path(folder).resolve(), Path(work_dir)
    path = work_dir / f"{folder.name}.py"
    if resume is not None and path.is_file():
        _check_same_start(path, start)
        return path
    choose_checkpoint(Config({"work_dir": str(work_dir)}), None)  # refuses to replace a run
    divided = (folder / "train").is_dir()
    for classes in (folder / "train", folder / "val") if divided else (folder,):
        if work_dir.resolve().is_relative_to(classes.resolve()):
            raise InputError(
                f"--work-dir {work_dir} is in {classes}, where each folder is a class: choose one "
                "outside"
            )
    images = _find_images(folder)
    count = sum(map(len, images.train.values()))
    size = _typical_size(images)
    recipe = "digits_demo" if size <= 16 else "cifar10_tiny" if size <= 48 else "imagenette_tiny"
    cfg = Config.fromfile(CONFIGS / f"{recipe}.py")
    for key in ("train_pipeline", "test_pipeline", "vis_backends"):
        cfg.pop(key)  # these are copies; editing them would change nothing
    model = _set_model(cfg, start, size, count, len(images.train))
    _set_pipelines(cfg)
    make_folder(work_dir, "--work-dir")
    # A run that has no checkpoint yet must keep its config.
    with locked_folder(work_dir) if say else nullcontext():
        _set_data(cfg, images, work_dir)
        _set_schedule(cfg, start, count)
        write_whole(path, _text_without_code(cfg).encode())
    if say:
        unused = [each.name for each in class_folders(folder, Counter()) if divided]
        unused = [printable(name) for name in unused if name not in ("train", "val")]
        if unused:
            print(f"{folder}: only train/ and val/ are read, not {', '.join(unused)}")
        print(
            f"{path}: the recipe of {recipe} for {model}. "
            "Edit a copy for the next run: tokenformer-vit train COPY"
        )
    return path


def _check_same_start(path: Path, start: Start) -> None:
    """Refuse to resume a run with another start than that in its config."""
    backbone = load_config(path).model.backbone
    given = {
        "model_name": start.model,
        "checkpoint_path": start.checkpoint and str(_weight_file(start.checkpoint)),
        "frozen": start.freeze or None,
    }
    if any(value not in (None, backbone.get(key)) for key, value in given.items()):
        raise InputError(
            f"--resume continues the run of {path}, which began with another --model, --checkpoint "
            "or --freeze: leave these options out"
        )


def _weight_file(checkpoint: Path) -> Path:
    """Return the absolute path of a checkpoint, or of the weights in an exported folder."""
    return (checkpoint / WEIGHTS if checkpoint.is_dir() else checkpoint).resolve()


def _text_without_code(cfg: Config) -> str:
    """Return the text of a config that holds values alone.

    mmengine writes the keys of dicts without escaping them, and replaces ``{{...}}`` when it reads
    the text. The arguments in a checkpoint and the names of folders may be anything.

    Raises:
        InputError: If reading the text would run code.
    """
    refusal = InputError(
        "a config cannot hold the model arguments in the checkpoint, or the name of a folder, "
        "because reading it would run them as code: use a checkpoint from people you trust, and "
        "names without '{{'"
    )
    try:
        text = cfg.pretty_text
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError) as error:
        raise refusal from error
    called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    if "{{" in text or called - {"dict"} or not all(isinstance(node, _PLAIN) for node in nodes):
        raise refusal
    return text


def _find_images(folder: Path) -> _Images:
    root = folder / "train" if (folder / "train").is_dir() else folder
    train = _scan(root)
    if (folder / "val").is_dir() and root != folder:
        val = _scan(folder / "val")
        if train.keys() != val.keys():
            missing = sorted(train.keys() ^ val.keys())
            raise InputError(
                f"{root} and {folder / 'val'} must have the same class folders, but only one of "
                f"them has {', '.join(missing[:5])}"
            )
        return _Images(folder, train, val, listed=False)
    held_out: dict[str, list[str]] = {}
    generator = random.Random(0)
    for name, files in train.items():
        if len(files) < 2:
            raise InputError(
                f"{root / name} has one image, but validation also needs one of each class: add "
                "images, or make val/ next to train/"
            )
        held_out[name] = sorted(generator.sample(files, max(1, round(HELD_OUT * len(files)))))
        for file in files:
            line = "".join(file.encode(errors="replace").decode().strip().splitlines())
            if line != file:  # mmengine reads a line of UTF-8, without spaces at its ends
                raise InputError(
                    f"{file!r} in {root} cannot be listed in a UTF-8 file: rename it, in UTF-8, "
                    "without line breaks, and without a space at either end"
                )
    rest = {name: sorted(set(files) - set(held_out[name])) for name, files in train.items()}
    return _Images(root, rest, held_out, listed=True)


def _scan(root: Path) -> dict[str, list[str]]:
    """List the images of each class as paths within ``root``."""
    left_out: Counter[str] = Counter()
    found = {
        each.name: [str(Path(e.path).relative_to(root)) for e in scan_images(each, left_out)]
        for each in class_folders(root, left_out)
    }
    say_left_out(left_out, root)
    if {name.lower() for name in found} <= _PARTS and found:
        raise InputError(
            f"{root} has the folders {', '.join(found)}, which look like parts of a data set and "
            "not like classes: name them train and val"
        )
    if len(found) < 2:
        raise InputError(
            f"{root} has {len(found)} class folder{'s' * (len(found) != 1)}, but a classifier "
            "needs at least 2: put the images of each class into a separate folder, such as "
            "cat/1.jpg and dog/1.jpg"
        )
    for name, files in found.items():
        if not files:
            raise InputError(f"{root / name} has no image; add some, or remove the folder")
    return found


def _typical_size(images: _Images) -> int:
    """Return the median of the shorter sides of some training images."""
    folder = images.root if images.listed else images.root / "train"
    files = [folder / file for files in images.train.values() for file in files]
    chosen = random.Random(0).sample(files, min(_SAMPLE, len(files)))
    return int(statistics.median(min(read_image(file).size) for file in chosen))


def _set_model(cfg: Config, start: Start, size: int, count: int, classes: int) -> str:
    """Put the model and its image size into a config, and return them in words."""
    backbone = cfg.model.backbone
    if start.freeze and start.checkpoint is None:
        raise InputError("--freeze trains only the head: give the other weights with --checkpoint")
    if start.checkpoint is not None:
        model: Any = load_model(start.model, start.checkpoint, for_images=False)
        described = describe_model(model, classes, None, None)
        images = resolve_input_data_config(model)
        size, crop_pct = images["input_size"][-1], images["crop_pct"]
        new = {
            "model_name": described["architecture"],
            **described["model_args"],
            "checkpoint_path": str(_weight_file(start.checkpoint)),
            "frozen": start.freeze,
        }
        for key in ("mean", "std"):
            cfg.data_preprocessor[key] = [255 * value for value in images[key]]
        cfg.val_dataloader.dataset.pipeline[1].interpolation = images["interpolation"]
        text = f"{'the head of ' if start.freeze else ''}{start.checkpoint}"
    else:
        patch = backbone.patch_size
        side = 128 if size >= 96 else 64 if size > 48 else 32 if size > 16 else size
        size, crop_pct = max(2 * patch, side // patch * patch), 1.0
        name = start.model or backbone.model_name
        own = ("theta", "norm") if name.startswith("tokenformer") else ()
        new = {
            "model_name": name,
            "img_size": size,
            "patch_size": patch,
            **{key: backbone[key] for key in (*own, "drop_path_rate")},
            **(_SMALL if start.model is None and count < _FEW else {}),
        }
        given = {key: value for key, value in new.items() if key != "model_name"}
        model = _build(name, classes, given)
        text = f"{name} ({sum(weight.numel() for weight in model.parameters()):,} parameters)"
    kept = ("type", "checkpoint_path", "frozen", "compile", "backend")
    options = {key: backbone[key] for key in kept}
    cfg.model.backbone = {**options, "stem_seed": None, **new}
    cfg.model.head.merge({"num_classes": classes, "in_channels": model.num_features})
    cfg.data_preprocessor.num_classes = classes
    cfg.val_dataloader.dataset.pipeline[1].update(input_size=(3, size, size), crop_pct=crop_pct)
    return f"{text} and {size} x {size} pixels"


def _build(name: str, classes: int, given: dict[str, Any]) -> Any:
    """Build a model with first weights, if it is of a kind that this package trains."""
    try:
        model = load_model(name, None, classes, for_images=False, **given)
    except InputError as error:
        if not timm.is_model(name):
            raise
        # Most of timm's other models have no img_size or no patch_size.
        raise InputError(
            f"--model {name} cannot be trained here: choose a TokenFormer or one of timm's ViTs, "
            f"such as vit_tiny_patch16_224 ({one_line(error.__cause__ or error)})"
        ) from error
    check_classifier(model, f"--model {name}")
    return model


def _set_pipelines(cfg: Config) -> None:
    """Give the training pipeline the image size and the resizing of the validation pipeline."""
    pipeline = cfg.train_dataloader.dataset.pipeline
    evaluation = cfg.val_dataloader.dataset.pipeline[1]
    first, side = pipeline[1], evaluation.input_size[-1]
    if first.type == "v2/RandomResizedCrop":
        first.size, first.interpolation = side, evaluation.interpolation
        return
    if first.type == "v2/RandomCrop":
        first.size = side
    # The recipes without RandomResizedCrop are for images of one size.
    pipeline[1:1] = [{**evaluation, "crop_pct": 1.0}]


def _set_data(cfg: Config, images: _Images, work_dir: Path) -> None:
    classes = list(images.train)
    for split, files in (("train", images.train), ("val", images.val)):
        dataset = cfg[f"{split}_dataloader"].dataset
        dataset.data_root = str(images.root)
        if images.listed:
            listed = work_dir.resolve() / f"{split}.txt"
            lines = [
                f"{file} {label}\n" for label, name in enumerate(classes) for file in files[name]
            ]
            write_whole(listed, "".join(lines).encode("utf-8", "surrogateescape"))
            dataset.merge(
                {"data_prefix": "", "ann_file": str(listed), "metainfo": {"classes": classes}}
            )
    cfg.test_dataloader = cfg.val_dataloader


def _set_schedule(cfg: Config, start: Start, count: int) -> None:
    """Fit batch size, learning rate and averaging to the number of training images."""
    batch = cfg.train_dataloader.batch_size
    while batch > 8 and count < 20 * batch:
        batch //= 2
    steps = -(-count // batch)
    cfg.train_dataloader.batch_size = cfg.auto_scale_lr.base_batch_size = batch
    cfg.default_hooks.logger.interval = min(steps, 100)
    momentum = min(0.5, _AVERAGES / (steps * cfg.train_cfg.max_epochs))
    cfg.default_hooks.ema.momentum = float(f"{momentum:.1g}")
    if start.checkpoint is not None:
        cfg.optim_wrapper.optimizer.lr = _PROBE_LR if start.freeze else _FINE_TUNING_LR
