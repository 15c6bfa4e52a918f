"""Read a config, complete it, apply the options of the command line, and check it."""

import copy
import difflib
import inspect
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, takewhile
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

import tokenformer_vit
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole
from tokenformer_vit.models.vit import TokenFormerViT
from tokenformer_vit.vision.datasets import class_images
from tokenformer_vit.vision.images import IMAGE_SUFFIXES, images_in, is_hidden

from .engine import REGISTRIES, Config

__all__ = ["check_config", "load_config"]

_INSTALLED = Path(tokenformer_vit.__file__).parent / ".mim/configs"  # as in OpenMMLab's packages
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[2] / "configs"
# Data sets whose classes are folders.
FOLDERS = ("ImageNet", "CustomDataset", "ImagesInMemory", "ClassFolders")
# What mmengine builds where a config names no type.
_UNTYPED = {
    "": "Runner",
    "optim_wrapper": "OptimWrapper",
    "data_preprocessor": "ClsDataPreprocessor",
    **{f"{name}_cfg": f"{name.capitalize()}Loop" for name in ("val", "test")},
    **{f"{name}_dataloader": "torch.utils.data.DataLoader" for name in ("train", "val", "test")},
}
_log = logging.getLogger("tokenformer_vit")


class _Config(Config):
    """mmengine's config; its ``_base_`` may be ``tokenformer_vit::NAME``, a shipped config."""

    @staticmethod
    def _get_cfg_path(cfg_path: str, filename: str) -> tuple[str, str | None]:
        shipped = cfg_path.removeprefix("tokenformer_vit::")
        if shipped != cfg_path:
            return str(CONFIGS / shipped), None
        return Config._get_cfg_path(cfg_path, filename)


# mmengine finds `package::config` only in OpenMMLab's packages, and has no public way to add one:
# its functions call the class by its name. These are the same functions, with our class.
for _name in ("fromfile", "_file2dict"):
    _theirs = getattr(Config, _name)
    _names = {**_theirs.__globals__, "Config": _Config}
    _ours = FunctionType(_theirs.__code__, _names, argdefs=_theirs.__defaults__)
    setattr(_Config, _name, staticmethod(_ours))


def find_config(name: str | Path) -> Path:
    """Find a config: a file, or one that comes with the package, such as ``digits_demo``."""
    path = Path(name)
    if path.is_file() and path.suffix == ".py":  # YAML could run code
        return path
    shipped = CONFIGS / f"{path.stem}.py"
    if str(path.parent) in (".", "configs") and shipped.is_file():
        return shipped
    names = [file.stem for file in CONFIGS.glob("*.py")]
    close = ", ".join(difflib.get_close_matches(path.stem, names)) or f"those in {CONFIGS}"
    raise InputError(f"{path} is no config: give a file *.py, or a shipped config: {close}")


def read_config(path: str | Path) -> Config:
    """Read a config as it is; each class in it, as in mmengine's new style, becomes its name."""
    file = find_config(path)
    try:
        return Config(_Config.fromfile(file).to_dict(), filename=file)
    except SystemExit as error:  # its status may be 0
        raise InputError(f"{path} ends the program: leave exit() out") from error


def name_of(kind: Any) -> str:
    """Return the name of a ``type``: of a class, ``Class``, ``scope.Class``, ``module.Class``."""
    return getattr(kind, "__name__", None) or str(kind).rpartition(".")[2]


def load_config(path: str | Path | Config, *args: Any, **kwargs: Any) -> Config:
    """Return the config of a run on this machine: :func:`resolve` of :func:`load_recipe`."""
    return resolve(load_recipe(path, *args, **kwargs))


def load_recipe(
    path: str | Path | Config,
    options: Mapping[str, Any] | None = None,
    data_root: str | None = None,
    work_dir: str | None = None,
    compile: bool = False,
    epochs: int | None = None,
) -> Config:
    """Read a config, complete it, and override parts of it; a copy of it repeats a run anywhere.

    Args:
        path: Python config of either style of mmengine, or the name of a shipped one.
        options: Values by dotted key, of the config or arguments of the ``type`` there.
        data_root: Root of the data, for all three loaders.
        work_dir: Folder of the run; default: the config's, or ``work_dirs/<name of the config>``.
        compile: Compile the blocks, whatever the model is.
        epochs: Length of the run, with which its schedules are scaled.

    Raises:
        InputError: If the file is missing, or an option names an unknown key.
    """
    cfg = path if isinstance(path, Config) else read_config(path)
    complete(cfg)
    cfg.work_dir = work_dir or cfg.get("work_dir") or f"work_dirs/{Path(cfg.filename or '').stem}"
    if compile:
        cfg.compile_blocks = cfg.compile_blocks or True
    if epochs is not None:
        if "max_epochs" not in cfg.train_cfg:
            raise InputError(f"{path} counts iterations: give train_cfg.max_iters, not --epochs")
        before, cfg.train_cfg.max_epochs = cfg.train_cfg.max_epochs, epochs
        if before != epochs:
            _scale_schedule(cfg, epochs, before)
    length = run_length(cfg)
    for key, value in (options or {}).items():
        _check_option(cfg, key)  # one before it may have set the type
        cfg.merge_from_dict({key: copy.deepcopy(value)})
    _fit_schedule(cfg, length)
    if data_root is not None:
        for _, loader in loaders(cfg):
            for dataset in datasets(loader.dataset):
                dataset.data_root = data_root
    return cfg


def complete(cfg: Config) -> None:
    """Set what a config leaves out.

    Nothing that it has is changed, but for stock parts that cannot resume anywhere: mmengine's loop
    by epochs, its sampler and its checkpoint hook become ours.
    """
    ours = read_config(CONFIGS / "_base_" / "runtime.py")
    for name in ("default_scope", "log_level", "resume", "load_from", "compile_blocks"):
        cfg.setdefault(name, ours[name])
    cfg.randomness = {"seed": None, **(cfg.get("randomness") or {})}
    cfg.default_hooks = {**ours.default_hooks, **(cfg.get("default_hooks") or {})}
    if "test_dataloader" not in cfg and cfg.get("val_dataloader"):
        for part in ("dataloader", "evaluator"):
            cfg[f"test_{part}"] = copy.deepcopy(cfg[f"val_{part}"])
    for name in ("val", "test"):
        if cfg.get(f"{name}_dataloader"):
            cfg[f"{name}_cfg"] = cfg.get(f"{name}_cfg") or {}
        else:
            cfg.update({f"{name}_{part}": None for part in ("dataloader", "cfg", "evaluator")})
    for name, loader in loaders(cfg):
        train = name == "train_dataloader"
        for key, value in (("num_batch_per_epoch", None), ("num_workers", 0), ("batch_size", 1)):
            loader.setdefault(key, value)
        if not loader.keys() & {"sampler", "batch_sampler"}:
            loader.sampler = {"type": "DefaultSampler", "shuffle": train}
        sampler: Any = loader.get("sampler") or {}
        if name_of(sampler.get("type")) == "DefaultSampler":
            sampler.type = "ResumableSampler"
            if not train:
                sampler.setdefault("round_up", False)  # no image counts twice in several processes
    checkpoint: Any = cfg.default_hooks.checkpoint or {}
    if name_of(checkpoint.get("type")) == "CheckpointHook":
        checkpoint.type = ours.default_hooks.checkpoint.type
    loop: Any = cfg.get("train_cfg") or {}
    stock = name_of(loop.get("type")) == "EpochBasedTrainLoop"
    if stock or ("type" not in loop and loop.get("by_epoch")):
        loop.pop("by_epoch", None)
        loop.type = "ResumableEpochLoop"


def resolve(cfg: Config) -> Config:
    """Set what depends on this machine, or on several keys, in place; return the config."""
    for name, loader in loaders(cfg):
        for dataset in datasets(loader.dataset):
            if str(dataset.get("ann_file")).endswith((".pkl", ".pickle")):
                raise InputError(f"{dataset.ann_file} could run code: save it as .json")
            if name_of(dataset.type) in FOLDERS:
                dataset.setdefault("extensions", list(IMAGE_SUFFIXES))  # all we read
            if name_of(dataset.type) == "ImagesInMemory":  # on the GPU, if there is one
                collate = {"type": "collate_fetched"}
                loader.update(num_workers=0, pin_memory=False, collate_fn=collate)
        if loader.num_workers == "auto":
            loader.num_workers = data_workers()
        # Workers of validation end with it: those of training already take all cores.
        persistent = name == "train_dataloader" and loader.get("persistent_workers", True)
        loader.persistent_workers = persistent and loader.num_workers > 0
        loader.pin_memory = torch.cuda.is_available() and loader.get("pin_memory", True)
        batches = loader.pop("num_batch_per_epoch")
        if batches is not None:  # mmengine would take the first ones
            loader.sampler.num_samples = batches * loader.batch_size
    return cfg


def loaders(cfg: Config) -> Iterator[tuple[str, Any]]:
    """Yield names and configs of the loaders that a config has."""
    for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
        if cfg.get(name):
            yield name, cfg[name]


def datasets(dataset: Any) -> Iterator[Any]:
    """Yield the configs of the data sets inside wrappers, such as ConcatDataset."""
    inner = dataset.get("datasets") or dataset.get("dataset")
    if inner is None:
        yield dataset
    for each in listed(inner):
        yield from datasets(each)


def place_of(dataset: Any) -> tuple[str, str]:
    """Return root and prefix of the images of a data set."""
    part = dataset.get("split") or dataset.get("data_prefix") or ""
    return dataset.get("data_root") or "", part if isinstance(part, str) else part["img_path"]


def listed(value: Any) -> list[Any]:
    """Return a list; a config may have one dict or number instead of a list, or None."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def set_autocast(cfg: Config) -> None:
    """Let a run train and validate under bfloat16 autocast."""
    cfg.optim_wrapper.type = "AutocastOptimWrapper"
    for key in ("loss_scale", "dtype"):  # of mmengine's AmpOptimWrapper
        cfg.optim_wrapper.pop(key, None)
    if cfg.val_cfg is not None:
        cfg.val_cfg.fp16 = True  # mmengine's name for autocast


def set_precision(optim_wrapper: Any) -> None:
    """Let this process use TF32 on GPUs, and validate in the 16 bits of a type of optimisation."""
    torch.set_float32_matmul_precision("high")
    if name_of(optim_wrapper) == "AutocastOptimWrapper":
        torch.set_autocast_dtype("cuda", torch.bfloat16)  # by default it is float16


def data_workers() -> int:
    """Return the workers of a loader: this machine's cores, shared by its processes; at most 16."""
    cores: Any = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        cores = len(os.sched_getaffinity(0))
    numbers = {name: int(text) for name, text in os.environ.items() if text.isdecimal()}
    counts = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
    processes = max(numbers.get(name, 1) for name in counts)  # on this machine
    share = numbers.get("SLURM_CPUS_PER_TASK") or max(1, cores // processes)
    # 16 prepare 5,000 photographs a second, more than a GPU takes; each needs memory.
    return min(share, cores, 16)


def _check_option(cfg: Config, key: str) -> None:
    """Refuse a dotted key that is neither in a config nor an argument of the ``type`` there."""
    node, place = cfg.to_dict(), ""
    for part in key.split("."):
        if isinstance(node, list | tuple):
            node = {str(index): each for index, each in enumerate(node)}
        known = {str(name) for name in node} if isinstance(node, dict) else set()
        if part not in known:
            kind = node.get("type") or _UNTYPED.get(place) if isinstance(node, dict) else None
            arguments = _arguments(kind) if kind else set()
            if part in arguments:
                return
            close = difflib.get_close_matches(part, known | arguments, cutoff=0.5)
            there = ", ".join(close or sorted(known))
            raise InputError(f"--cfg-options {key}: there is no {part!r}; there is {there}")
        node, place = node[part], part


def _arguments(kind: Any) -> set[str]:
    """Return the arguments of a registered class, and of its bases, which ``**kwargs`` reach."""
    found: list[Any] = []
    if name_of(kind) == "TimmClassificationBackbone":
        found.append(TokenFormerViT)
    for registry in REGISTRIES:
        with suppress(RuntimeError):  # mmengine's, for an unknown name
            found.append(registry.get(kind))
    classes = [each for one in found if inspect.isclass(one) for each in inspect.getmro(one)]
    return {name for each in classes for name in inspect.signature(each.__init__).parameters}


def run_length(cfg: Config) -> int:
    """Return the epochs of a run, or its iterations if it counts these; 0 without a training."""
    loop: Any = cfg.get("train_cfg") or {}
    return loop.get("max_epochs") or loop.get("max_iters") or 0


def _scale_schedule(cfg: Config, length: int, before: int) -> None:
    """Scale all times of the schedules, and the reach of the averaged weights, with a run."""
    for part in listed(cfg.get("param_scheduler")):
        for key in part.keys() & {"begin", "end", "T_max"}:
            part[key] = part[key] * length / before
            if part.get("by_epoch", True) and not part[key].is_integer():
                part.convert_to_iter_based = True
            else:
                part[key] = max(round(part[key]), int(key != "begin"))
        for key in part.keys() & {"step_size", "milestones", "periods", "total_steps"}:
            times = [max(1, round(time * length / before)) for time in listed(part[key])]
            part[key] = times if isinstance(part[key], list | tuple) else times[0]
    average: Any = cfg.default_hooks.get("ema") or {}
    if "momentum" in average:
        average.momentum = min(0.5, average.momentum * before / length)


def _outside(cfg: Config) -> list[tuple[int, Any]]:
    """Return the schedules, with their numbers, that do not begin and end within the run."""
    length, by_epoch = run_length(cfg), "max_epochs" in (cfg.get("train_cfg") or {})
    return [
        (number, part)
        for number, part in enumerate(listed(cfg.get("param_scheduler")))
        if part.get("by_epoch", True) == by_epoch
        and not part.get("begin", 0) < part.get("end", length) <= length
    ]


def _fit_schedule(cfg: Config, before: int) -> None:
    """Fit the schedules to the length of the run: one that ends later ends with the run.

    Where one would not begin, all are scaled, if they were for a run of length ``before``, or, as
    they are, for that of a config from which this one inherits.
    """
    length = run_length(cfg)
    late = [part for _, part in _outside(cfg) if part.get("begin", 0) >= length]
    if late and before == length and cfg.filename:
        for name in _Config._get_base_files(cfg.filename):
            base = read_config(_Config._get_cfg_path(name, cfg.filename)[0])
            if base.get("param_scheduler") == cfg.param_scheduler:
                before = run_length(base) or before
    if late and before != length:
        _scale_schedule(cfg, length, before)
        _log.warning(f"param_scheduler is scaled: it was for a run of {before}, not {length}")
    for index, part in _outside(cfg):
        if part.get("begin", 0) < length < part.get("end", 0):
            _log.warning(f"param_scheduler.{index} ends with the run, at {length}, not {part.end}")
            part.end = length


def check_config(cfg: Config) -> None:
    """Check what would give wrong numbers, or fail hours later, without a word.

    Raises:
        InputError: If two parts of the config do not fit each other.
    """
    prepares = cfg.model.get("data_preprocessor") or cfg.get("data_preprocessor") or {}
    pipeline = next(datasets(cfg.train_dataloader.dataset)).get("pipeline") or [{}]
    first, last = (name_of(pipeline[place].get("type")) for place in (0, -1))
    if first == "LoadImage" and prepares.get("to_rgb"):
        raise InputError("LoadImage gives RGB: set data_preprocessor.to_rgb=False")
    mixes = (cfg.model.get("train_cfg") or {}).get("augments")
    if mixes and last == "PackLabels" and name_of(prepares.get("type")) != "LabelPreprocessor":
        raise InputError("only a LabelPreprocessor mixes labels of PackLabels; use PackInputs")
    if cfg.train_dataloader.get("sampler", {}) is None:
        raise InputError("train_dataloader.sampler=None does not shuffle: set a ResumableSampler")
    nested = name_of(cfg.model.type) == "NestedClassifier" or cfg.model.get("sandwich")
    if nested and cfg.get("activation_checkpointing"):
        # The backward pass would compute blocks again at another size.
        raise InputError("a nested model needs activation_checkpointing=None")
    limit = "max_iters" if "max_iters" in (cfg.get("train_cfg") or {}) else "max_epochs"
    for index, part in enumerate(listed(cfg.get("param_scheduler"))):
        by_epoch = part.get("by_epoch", True) and not part.get("convert_to_iter_based")
        if limit == "max_iters" and by_epoch:
            raise InputError(f"param_scheduler.{index} counts epochs: set by_epoch=False")
    for index, part in _outside(cfg):
        raise InputError(
            f"param_scheduler.{index} begins at {part.get('begin', 0)}, but train_cfg.{limit} is "
            f"{run_length(cfg)}: also set its begin and end, or param_scheduler=[]"
        )


def check_folders(cfg: Config, names: Sequence[str]) -> None:
    """Refuse folders of images that are not there, and broken links: mmpretrain skips both.

    Files that are no images are counted on stderr.
    """
    found = [each for name in names if cfg.get(name) for each in datasets(cfg[name].dataset)]
    parts = [each for each in found if name_of(each.type) in FOLDERS and not each.get("ann_file")]
    places = ((*place_of(each), each.get("with_label", True)) for each in parts)
    for root, part, labels in dict.fromkeys(places):
        folder = Path(root, part)
        if Path(root, "meta", f"{part}.txt").is_file():
            continue  # ImageNet's list of images
        if not folder.is_dir():
            raise InputError(
                f"there is no folder {folder}: give `--data-root` a folder that holds train/ and "
                "val/ with a folder for each class (`tokenformer-vit prepare-data` makes one)"
            )
        images = chain(*class_images(folder).values()) if labels else images_in(folder)
        for place in dict.fromkeys(map(os.path.dirname, images)):
            for link in os.scandir(place):  # which tells links without a look at each file
                image = link.name.lower().endswith(IMAGE_SUFFIXES)
                if image and link.is_symlink() and not os.path.exists(link.path):
                    raise InputError(f"{link.path} is a broken link: replace or delete it")
        hidden = [each.name for each in folder.iterdir() if each.is_dir() and is_hidden(each.name)]
        if labels and hidden:
            raise InputError(f"mmpretrain takes folders of {folder} for classes: move {hidden}")


def write_config(recipe: Config, replace: bool = False) -> None:
    """Write a recipe into its work directory: a copy of the file repeats the run.

    A file that was read there stays, unless it is to be replaced and says something else.
    """
    source = Path(recipe.filename)
    path = Path(recipe.work_dir, source.name)
    if path.exists() and path.samefile(source):
        written = load_recipe(path, work_dir=recipe.work_dir)
        if not replace or written.to_dict() == recipe.to_dict():
            return
    lines = source.read_text(encoding="utf-8").splitlines()
    title = [f"{line}\n" for line in takewhile(lambda line: line.startswith("#"), lines)]
    content = Config(recipe.to_dict())
    content.pop("work_dir")
    # mmengine would replace {{...}} in a text.
    text = content.pretty_text.replace("{{", r"{\x7b")
    write_whole(path, "".join([*title, text]).encode())


def drop_start(model: Any) -> None:
    """Drop the weights from which a model starts: a checkpoint has all, and they may be gone."""
    backbone = model.get("backbone") or {}
    parts = (model, backbone, backbone.get("module"), model.get("neck"), model.get("head"))
    for part in filter(None, parts):  # LoRA wraps a backbone
        for start in ("checkpoint_path", "pretrained"):
            part.pop(start, None)
        if any("Pretrained" in str(each.get("type")) for each in listed(part.get("init_cfg"))):
            part.pop("init_cfg")


def choose_checkpoint(cfg: Config, resume: str | None) -> None:
    """Set what ``--resume`` resumes from, ``auto`` or a file, and protect other runs."""
    work_dir = Path(cfg.work_dir)
    hook: Any = (cfg.get("default_hooks") or {}).get("checkpoint") or {}
    folder = Path(hook.out_dir, work_dir.name) if hook.get("out_dir") else work_dir
    pointer = work_dir / "last_checkpoint"
    # The checkpoint of the best epoch has only weights.
    written = [path for path in folder.glob("*.pth") if not path.name.startswith("best_")]
    has_run = bool(written) or pointer.is_file()
    if folder != work_dir and written and not pointer.is_file() and resume in (None, "auto"):
        raise InputError(f"{folder} has the checkpoints of another run: rename --work-dir")
    if resume is None and has_run:
        raise InputError(f"{work_dir} already holds a run: add --resume, or another --work-dir")
    if resume is None or (resume == "auto" and not has_run):
        return
    path = Path(resume)
    if has_run:
        # Killed before the first pointer was written: a file with its final name is complete.
        newest = max(written, key=lambda path: path.stat().st_mtime, default=folder)
        last = Path(pointer.read_text().strip()) if pointer.is_file() else newest
        places = [folder, work_dir, last.parent]  # the folder may have moved
        if resume == "auto":
            found = (place / last.name for place in places if (place / last.name).is_file())
            path = next(found, last)
        elif path.resolve().parent not in [place.resolve() for place in places]:
            raise InputError(
                f"{path} is not in {work_dir}, which already holds a run: choose another --work-dir"
            )
    if not path.is_file():
        raise InputError(f"there is no checkpoint {path}: give --resume a file that is there")
    cfg.resume, cfg.load_from = True, str(path)
