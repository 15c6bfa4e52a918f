"""Read a config, apply the options of the command line, and check both."""

import argparse
import copy
import difflib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config, DictAction
from mmengine.utils import import_modules_from_strings
from mmpretrain.registry import DATASETS

from tokenformer_vit.command_line import whole_number
from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.files import make_folder, write_whole
from tokenformer_vit.vision.images import (
    HIDDEN,
    IMAGE_SUFFIXES,
    class_folders,
    say_left_out,
    scan_images,
)

from .in_memory import IN_MEMORY
from .mmengine_internals import base_files
from .schema import check_values
from .shipped import find_config, shipped_bases

# What custom_imports named in configs of early versions.
_FORMER_NAME = "tokenformer_vit.integrations"
# Environment variables with the number of processes on this machine.
_PROCESSES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
# Sixteen cores prepare 5,000 photographs a second, more than a GPU takes; each worker needs memory.
_MOST_WORKERS = 16
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")
_KEYS = (
    *("model", *LOADERS, "val_evaluator", "test_evaluator", "optim_wrapper", "param_scheduler"),
    *("train_cfg", "randomness"),
)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that training and testing share."""
    parser.add_argument(
        "--data-root", help="folder that holds train/ and val/, parquet files or tokens"
    )
    parser.add_argument(
        "--batch-size",
        type=whole_number(1),
        help="images, or sequences of tokens, per process and iteration of training or, in "
        "`tokenformer-vit test`, of the test; validation keeps the batch size of its config",
    )
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action=DictAction,
        metavar="KEY=VALUE",
        help="override keys that the config has, such as train_cfg.max_epochs=100",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile each block with torch.compile: faster after a first minute",
    )
    parser.add_argument("--launcher", choices=("none", "pytorch", "slurm", "mpi"), default="none")
    # torch.distributed.launch passes it; torchrun sets the variable instead.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def parse_run_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Parse a command line that has the options of :func:`add_run_arguments`."""
    try:
        args = parser.parse_args(argv)
    except ValueError:  # DictAction splits at "=" and trusts that there is one
        parser.error("--cfg-options must be KEY=VALUE")
    except (AssertionError, RecursionError):  # from brackets that DictAction cannot read
        parser.error(
            "--cfg-options takes numbers, words and lists of them; put dicts into a config file"
        )
    if args.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
    return args


def load_config(
    path: str | Path,
    options: Mapping[str, Any] | None = None,
    data_root: str | None = None,
    batch_size: int | None = None,
    work_dir: str | None = None,
    compile: bool = False,
    batched: str = "train_dataloader",
) -> Config:
    """Read a config file, override parts of it, and check the values.

    Args:
        path: Python config with classic ``_base_`` inheritance, or the name of a shipped one.
        options: Values by dotted key, as from ``--cfg-options``; every key must exist.
        data_root: Root of the data, for all three loaders.
        batch_size: Images or sequences per process and iteration, for the loader ``batched``.
        work_dir: Folder of the run; default: the config's, or ``work_dirs/<name of the config>``.
        compile: Compile the blocks, whatever the config says.
        batched: Loader that ``batch_size`` is for; the others keep the config's batch size.

    Raises:
        InputError: If the file is missing or is not a Python config, an option names an unknown
            key, or a value is not allowed.
    """
    cfg = _read(find_config(path))
    missing = [key for key in _KEYS if key not in cfg]
    if missing:
        raise InputError(
            f"{path} is not a training config: it has no {', '.join(missing)}; start from a copy "
            "of one in configs/"
        )
    for key, value in {"resume": False, "load_from": None}.items():  # as in mmengine's Runner
        cfg.setdefault(key, value)
    for key in options or {}:
        _check_option(cfg, key)
    try:
        cfg.merge_from_dict(dict(options or {}))
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"--cfg-options {' '.join(options or {})}: {path} cannot take this value ({error}); "
            "set a whole list, as in key=[1,5]"
        ) from error
    check_values(cfg.to_dict(), str(path))
    for name in ("val_evaluator", "test_evaluator"):
        if isinstance(cfg[name], dict) and "topk" in cfg[name] and cfg.model.get("head"):
            if "num_classes" not in cfg.model.head:
                raise InputError(
                    f"{path}: {name}.topk is {cfg[name].topk}, but model.head has no num_classes: "
                    f"give a MaskedAutoencoder {name}=dict(_delete_=True, "
                    "type='ReconstructionError')"
                )
            topk = [cfg[name].topk] if isinstance(cfg[name].topk, int) else cfg[name].topk
            cfg[name].topk = tuple(k for k in topk if k <= cfg.model.head.num_classes)
    if compile:
        compiled = cfg.model.get("backbone", cfg.model)
        if compiled.type not in ("TimmClassificationBackbone", "CausalLM"):
            raise InputError(
                f"--compile needs a TimmClassificationBackbone or a CausalLM, but {path} has "
                f"{compiled.type}: leave it out"
            )
        compiled.compile = compiled.get("compile") or True
    cfg.work_dir = work_dir or cfg.get("work_dir") or f"work_dirs/{Path(path).stem}"
    _make_resumable(cfg)
    if batch_size is not None:
        cfg[batched].batch_size = batch_size
    for name in LOADERS:
        loader = cfg[name]
        if data_root is not None:
            loader.dataset.data_root = data_root
        if loader.dataset.get("type") in IN_MEMORY:
            loader.update(num_workers=0, pin_memory=False, collate_fn={"type": "collate_fetched"})
        if loader.get("num_workers") == "auto":
            loader.num_workers = data_workers()
        # PyTorch refuses to keep workers where there are none, and warns of pinning without a GPU.
        loader.persistent_workers = (
            loader.get("persistent_workers", True) and loader.setdefault("num_workers", 0) > 0
        )
        loader.pin_memory = loader.get("pin_memory", True) and torch.cuda.is_available()
        _shorten(loader, name)
    return cfg


def data_workers() -> int:
    """Return how many workers a data loader gets for ``num_workers="auto"``.

    They are the cores that this process may use, shared with the other processes on this machine
    that torchrun or MPI started; at least one, at most 16. Slurm may give each process cores of its
    own.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS and Windows
        cores = os.cpu_count() or 1
    numbers = {name: text for name, text in os.environ.items() if text.isdecimal()}
    if own := int(numbers.get("SLURM_CPUS_PER_TASK", 0)):
        return max(1, min(own, cores, _MOST_WORKERS))
    processes = [int(numbers.get(name, 1)) for name in _PROCESSES]
    return max(1, min(cores // max(1, *processes), _MOST_WORKERS))


def _read(path: Path) -> Config:
    """Read a config in Python, and refuse one in another language."""
    try:
        _check_is_python(path)
        with shipped_bases():
            cfg = Config.fromfile(path, import_custom_modules=False)
        imports = cfg.get("custom_imports") or {}
        if _FORMER_NAME in str(imports.get("imports")):
            raise InputError(
                f"{path} imports {_FORMER_NAME}, which is now called tokenformer_vit.training: "
                "change the name in its custom_imports"
            )
        import_modules_from_strings(**imports)
        return cfg
    except InputError:
        raise
    except Exception as error:  # a config is Python: it may fail in any way
        raise InputError(
            f"{path} cannot be read as a config ({type(error).__name__}: {one_line(error)}): "
            "correct the file"
        ) from error


def _check_is_python(path: Path) -> None:
    """Refuse a config in another language, or one that inherits from such a file."""
    if path.suffix != ".py":
        raise InputError(
            f"{path} is not a Python config: write it as a .py file, like the files in configs/"
        )
    for base in base_files(str(path)):
        inherited = path.parent / base
        if "::" in base:  # from a package; this package has only Python configs
            inherited = Path(base.rpartition("::")[2])
        if inherited.is_file() or inherited.suffix != ".py":
            _check_is_python(inherited)


def _make_resumable(cfg: Config) -> None:
    """Let our loop and sampler take the place of mmengine's, of which they are extensions.

    They train in the same way, and can also resume in the middle of an epoch.
    """
    loop: Any = cfg.train_cfg
    sampler: Any = cfg.train_dataloader.get("sampler") or {}
    if loop.get("type") == "EpochBasedTrainLoop" or ("type" not in loop and loop.get("by_epoch")):
        loop.pop("by_epoch", None)
        loop.type = "ResumableEpochLoop"
    if sampler.get("type") == "DefaultSampler":
        sampler.type = "ResumableSampler"


def _shorten(loader: Any, name: str) -> None:
    """Let the sampler choose the images of a shortened epoch; mmengine takes the first."""
    batches = loader.pop("num_batch_per_epoch", None)
    if batches is None:
        return
    sampler: Any = loader.get("sampler") or {}
    kind = sampler.get("type")
    if kind not in ("DefaultSampler", "ResumableSampler", "EndlessSampler"):
        raise InputError(
            f"{name}.num_batch_per_epoch is {batches}, but {kind} does not support it: use "
            "ResumableSampler, or num_batch_per_epoch=None"
        )
    if kind == "DefaultSampler":
        sampler.type = "ResumableSampler"  # which does the same
    sampler.num_samples = batches * loader.get("batch_size", 1)


def set_batch_size(loader: Any, batch_size: int) -> None:
    """Change the batch size of a loader whose config is complete; the number of batches stays."""
    sampler: Any = loader.get("sampler") or {}
    if sampler.get("num_samples"):
        sampler.num_samples = sampler.num_samples // loader.batch_size * batch_size
    loader.batch_size = batch_size


def _check_option(cfg: Config, key: str) -> None:
    """Refuse a dotted key that the config does not have; mmengine adds it silently."""
    node: Any = cfg
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if isinstance(node, list | tuple):
            node = dict(zip(map(str, range(len(node))), node, strict=True))
        known = list(node) if isinstance(node, dict | Config) else []
        if part not in known:
            where = ".".join(parts[:depth]) or "the config"
            close = difflib.get_close_matches(part, known, n=3, cutoff=0.5) or sorted(known)
            raise InputError(
                f"--cfg-options {key}: {where} has no {part!r}"
                + (f"; it has {', '.join(close)}" if close else "")
                + ". Add a new key in your own config file"
            )
        node = node[part]


def check_data_folders(cfg: Config, loaders: tuple[str, ...] = LOADERS) -> None:
    """Check the data of a config, and allow all image suffixes in folders.

    mmpretrain looks for fewer suffixes than our other readers, and skips broken links. Files that
    are not images are counted on stderr. Data sets of this package without folders check their
    files by ``check_files``.

    Args:
        cfg: The config; ``extensions`` of its data sets is set where the config does not set it.
        loaders: Names of the loaders to check.

    Raises:
        InputError: If a folder is missing, its number of class folders is not the head's number of
            classes, there is a hidden folder, or an image, in a folder or in an ``ann_file``, is a
            broken link or not a regular file. Also if a data set's own files are missing.
        OSError: If a folder cannot be read; ``filename`` names it.
    """
    said = set()
    for name in loaders:
        dataset = cfg[name].dataset
        kinds = ("ImageNet", "CustomDataset", "ImagesInMemory")
        if dataset.type not in kinds:
            kind: Any = DATASETS.get(dataset.type) if isinstance(dataset.type, str) else None
            if hasattr(kind, "check_files"):
                kind.check_files(**{key: dataset[key] for key in dataset if key != "type"})
            continue  # another data set checks its own files when it is built
        if dataset.get("ann_file"):
            _check_listed_images(dataset)
            continue
        if "extensions" not in dataset:
            dataset.extensions = list(IMAGE_SUFFIXES)
        root = Path(dataset.data_root)
        split = dataset.get("split") or dataset.data_prefix
        if (root / "meta" / f"{split}.txt").is_file():
            continue  # annotated data keep their images in one folder
        folder = root / split
        if not folder.is_dir():
            raise InputError(
                f"there is no folder {folder}: give `--data-root` a folder that holds train/ and "
                "val/ with a folder for each class (`tokenformer-vit prepare-data` makes one)"
            )
        if not dataset.get("with_label", True):
            continue  # for a pre-training without labels; mmpretrain lists the images
        left_out: Counter[str] = Counter()
        folders = class_folders(folder, left_out)
        classes, expected = len(folders), cfg.model.head.get("num_classes", len(folders))
        if classes != expected:
            raise InputError(
                f"{folder} holds {classes} class folder{'s' * (classes != 1)}, but the head has "
                f"{expected} class{'es' * (expected != 1)}: set "
                f"`--cfg-options model.head.num_classes={classes} "
                f"data_preprocessor.num_classes={classes}`, or give another data root"
            )
        suffixes = [suffix.lower() for suffix in dataset.extensions]
        for each in folders:
            for entry in scan_images(each, left_out, suffixes):
                if not entry.is_file():
                    raise InputError(
                        f"{entry.path} is a broken link or not a regular file; replace or delete it"
                    )
        if left_out[HIDDEN]:
            raise InputError(
                f"{folder} holds hidden folders, such as Jupyter's .ipynb_checkpoints, and "
                "mmpretrain would read their images: move them elsewhere, or delete them"
            )
        if folder not in said:
            say_left_out(left_out, folder)
        said.add(folder)


def _check_listed_images(dataset: Any) -> None:
    """Check the images that an ``ann_file`` lists, one ``path label`` a line."""
    root = dataset.get("data_root") or ""
    prefix = dataset.get("data_prefix") or dataset.get("split") or ""
    listed = Path(root, dataset.ann_file)
    folder = Path(root, prefix if isinstance(prefix, str) else prefix.get("img_path", ""))
    if not listed.is_file():
        return  # mmpretrain names it

    @cache
    def files_in(place: str) -> set[str]:
        """List the files of a folder once: a look at each image would take long on a network."""
        with suppress(OSError), os.scandir(place) as entries:
            return {entry.name for entry in entries if entry.is_file()}
        return set()

    with listed.open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in filter(None, map(str.strip, lines)):
            image = line.rsplit(" ", 1)[0] if dataset.get("with_label", True) else line
            place, name = os.path.split(os.path.join(folder, image))
            if name not in files_in(place):
                raise InputError(
                    f"{os.path.join(place, name)} is missing, a broken link or not a regular file: "
                    f"restore it, or remove it from {listed}"
                )


def make_work_dir(cfg: Config) -> Path:
    """Make the folder of a run.

    Raises:
        InputError: If the folder cannot be made or written to.
    """
    work_dir = Path(cfg.work_dir)
    make_folder(work_dir, "--work-dir")
    return work_dir


def write_config(cfg: Config, replace: bool) -> None:
    """Write the config of a run into its work directory; a copy of the file starts a new run.

    Args:
        cfg: The config, as it is before a checkpoint is chosen.
        replace: Whether to replace the file that the config was read from, if it lies there.

    Raises:
        OSError: If the file cannot be written.
    """
    source, work_dir = Path(cfg.filename), Path(cfg.work_dir)
    if not replace and source.parent.samefile(work_dir):
        return
    written = copy.deepcopy(cfg)
    written.pop("work_dir")  # a copy gets its own
    for name in LOADERS:
        written[name].setdefault("num_batch_per_epoch", None)  # the option must exist again
    write_whole(work_dir / source.name, written.pretty_text.encode())


def choose_checkpoint(cfg: Config, resume: str | None) -> None:
    """Choose the checkpoint that a run starts from, and protect other runs.

    Args:
        cfg: The config; its ``resume`` and ``load_from`` are set.
        resume: ``None`` for a new run, ``auto`` to continue from the last checkpoint of the work
            directory, if any, or the file of a checkpoint.

    Raises:
        InputError: If the checkpoint does not exist, a new run would overwrite another, the run
            to resume is in another folder, or the config itself says to resume a run.
    """
    work_dir = Path(cfg.work_dir)
    pointer = work_dir / "last_checkpoint"
    # Newest first. The checkpoint of the best epoch has only weights: no run can resume from it.
    written = [path for path in work_dir.glob("*.pth") if not path.name.startswith("best_")]
    written.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    named = None if resume in (None, "auto") else Path(resume)
    if named is not None and not named.is_file():
        raise _no_checkpoint(named)
    if (resume is None or named) and (pointer.is_file() or written):
        if named is None:
            raise InputError(
                f"{cfg.work_dir} already holds a run: add --resume to continue it, or choose "
                "another --work-dir"
            )
        if named.resolve().parent != work_dir.resolve():
            raise InputError(
                f"{named} is not in {cfg.work_dir}, which already holds a run: give --resume "
                "without a file to continue that run, or choose another --work-dir"
            )
    nothing_there = resume == "auto" and not pointer.is_file() and not written
    own = Path(cfg.filename or "").parent
    if nothing_there and (own / pointer.name).is_file():
        raise InputError(
            f"{cfg.work_dir} has no run to resume, but {cfg.filename} is the config of the run in "
            f"{own}: add --work-dir {own}"
        )
    if resume is None or nothing_there:
        if cfg.get("resume"):  # as mmengine writes it into the config of a resumed run
            raise InputError(
                f"{cfg.filename}: resume is True and load_from is {cfg.get('load_from')}, but only "
                "--resume resumes a run: set resume=False and load_from=None for a new run"
            )
        return
    if resume == "auto":
        text = pointer.read_text(errors="replace") if pointer.is_file() else ""
        # By name, because the folder may have been moved.
        last = work_dir / Path(text.strip()).name
        if not last.is_file() and written:
            named = f"names {last.name!r}, which is not there" if text.strip() else "is missing"
            raise InputError(
                f"{cfg.work_dir}: last_checkpoint {named}; there are "
                f"{', '.join(path.name for path in written[:3])}: give one of them, as in --resume "
                f"{written[0]}"
            )
        resume = str(last)
    if not Path(resume).is_file():
        raise _no_checkpoint(Path(resume))
    cfg.resume, cfg.load_from = True, resume


def _no_checkpoint(path: Path) -> InputError:
    if path.is_dir():
        return InputError(
            f"--resume {path} is a folder: give a *.pth file in it, or --resume without a file and "
            f"--work-dir {path}"
        )
    return InputError(f"there is no checkpoint {path} to resume from; give an existing file")
