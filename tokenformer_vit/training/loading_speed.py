"""Measure how fast one process prepares the images of configs, without a model.

The configs are measured in turn, round after round, without workers and with one thread::

    python -m tokenformer_vit.training.loading_speed CONFIG CONFIG --data-root DATA --out RECORD

The record holds what every record holds, the number of ``images`` in each of ``n`` rounds, and a
list ``configs``. An entry of this list has ``seconds_to_open``, for what is read only once,
``images_per_s`` of every round, and ``ratio_p20``, ``ratio_p50`` and ``ratio_p80`` of its speed,
divided by the speed of the first config in the same round. On a CPU, time is processor time.

``--timm`` compares a config of ImageNet with timm's transforms for the same recipe, in training and
in validation; all read the images in ``val/``. An entry then names what it is ``compared_with``.
timm's transforms return normalized floats; the config returns bytes, a quarter as much, and the
model normalizes them on its device. ``bytes`` is timm's transform of validation without that step.
``--enlarge`` makes large images from small ones.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import cv2
import torch
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from timm.data import ImageDataset, create_transform
from torch.utils.data import DataLoader
from tqdm import tqdm

from tokenformer_vit.benchmarking.measures import percentiles
from tokenformer_vit.command_line import run_tool, whole_number
from tokenformer_vit.records import TRAINING_PACKAGES, environment, write_record
from tokenformer_vit.vision.images import find_images, read_image

from .config import check_data_folders, load_config
from .transforms import seeded_transforms

# The transforms of configs/_base_/imagenet.py in timm's words.
_TIMM = {
    "timm, training": {
        "is_training": True,
        "auto_augment": "rand-m9-mstd0.5-inc1",
        "re_prob": 0.25,
        "re_mode": "pixel",
    },
    "timm, validation": {"crop_pct": 224 / 256},
    "timm, validation, bytes": {"crop_pct": 224 / 256, "normalize": False},
}


def _describe(root: Path, enlarged_to: int | None, quality: int) -> dict[str, Any]:
    """Return the mean size of the files in ``root/val``, and where they are from."""
    sizes = [path.stat().st_size for path in find_images([root / "val"])]
    enlarged = f"enlarged to a shorter side of {enlarged_to} pixels, JPEG of quality {quality}"
    return {
        "files": enlarged if enlarged_to else "as they are",
        "bytes_per_file": round(sum(sizes) / len(sizes)),
    }


class _Images:
    """The images of a data loader, epoch after epoch.

    Attributes:
        seconds_to_open: Time that opening the data set took.
        failures: Images for which a transform of timm raised an error.
    """

    failures = 0

    def __init__(self, loader: Any, seconds_to_open: float) -> None:
        self.loader, self.seconds_to_open = loader, seconds_to_open
        self._numbers = self._read()

    @classmethod
    def of_config(cls, cfg: Any, name: str) -> "_Images":
        check_data_folders(cfg, (name,))
        start = time.perf_counter()
        loader: Any = Runner.build_dataloader(cfg[name], seed=0)
        return cls(loader, time.perf_counter() - start)

    @classmethod
    def of_timm(cls, name: str, folder: Path, batch_size: int) -> "_Images":
        transform: Any = create_transform(224, interpolation="bicubic", **_TIMM[name])

        def repeated(image: Any) -> Any:
            try:
                return transform(image)
            except ValueError:  # of Pillow 13, if timm posterizes to 0 bits
                images.failures += 1
                return repeated(image)  # draws anew

        start = time.perf_counter()
        dataset = ImageDataset(str(folder), transform=repeated)
        loader = DataLoader(dataset, batch_size, shuffle="training" in name)
        images = cls(loader, time.perf_counter() - start)
        return images

    def _read(self) -> Iterator[int]:
        """Read batch after batch, and yield the number of images in each."""
        for epoch in count():
            if hasattr(self.loader.sampler, "set_epoch"):
                self.loader.sampler.set_epoch(epoch)
            for transform in seeded_transforms(self.loader.dataset):
                transform.set_epoch(0, epoch)
            for batch in self.loader:
                yield len(batch["inputs"] if isinstance(batch, dict) else batch[0])

    def rate(self, images: int) -> float:
        """Return how many images a second the next ``images`` of them take, or a few more."""
        start, done = _seconds(), 0
        while done < images:
            done += next(self._numbers)
        return done / (_seconds() - start)


def _seconds() -> float:
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _enlarge(root: Path, into: Path, side: int, quality: int) -> None:
    """Write JPEG copies of the images in ``root/val``, with a shorter side of ``side`` pixels."""
    for path in tqdm(find_images([root / "val"]), desc="enlarging", unit="image", disable=None):
        image = read_image(path)
        scale = side / min(image.size)
        target = (into / path.relative_to(root)).with_suffix(".jpg")
        target.parent.mkdir(parents=True, exist_ok=True)
        size = round(image.width * scale), round(image.height * scale)
        image.resize(size).save(target, quality=quality)  # bicubic


def _against_timm(config: str, root: Path) -> Iterator[tuple[str, str, _Images]]:
    """Open what ``--timm`` compares: names, what each is compared with, and images."""
    options: dict[str, Any] = {"train_dataloader.dataset.split": "val"}
    for name in ("train_dataloader", "val_dataloader"):
        options[f"{name}.num_workers"] = 0
    cfg = load_config(config, options, str(root))
    for name in _TIMM:
        reference = name.removesuffix(", bytes")
        yield name, reference, _Images.of_timm(name, root / "val", cfg.train_dataloader.batch_size)
    for name, use in (("train_dataloader", "training"), ("val_dataloader", "validation")):
        yield f"{Path(config).name}, {use}", f"timm, {use}", _Images.of_config(cfg, name)


def _plain(configs: Sequence[str], root: str | None) -> Iterator[tuple[str, str, _Images]]:
    for config in configs:
        cfg = load_config(config, {"train_dataloader.num_workers": 0}, root)
        yield Path(config).name, Path(configs[0]).name, _Images.of_config(cfg, "train_dataloader")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="the first is compared with")
    parser.add_argument("--data-root", help="folder that holds train/, or val/ with --timm")
    parser.add_argument("--timm", action="store_true", help="compare one config with timm")
    parser.add_argument(
        "--enlarge", type=whole_number(1), metavar="PIXELS", help="shorter side, with --timm"
    )
    parser.add_argument(
        "--quality", type=whole_number(1), default=95, help="of enlarged JPEG; default: %(default)s"
    )
    parser.add_argument("--images", type=whole_number(1), default=2048, help="of each round")
    parser.add_argument("--rounds", type=whole_number(1), default=11, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("work_dirs/loading.json"), help="record")
    args = parser.parse_args(argv)
    if args.timm and not (args.data_root and len(args.configs) == 1):
        parser.error("--timm takes one config and --data-root")
    if args.enlarge and not args.timm:
        parser.error("--enlarge needs --timm")
    torch.set_num_threads(1)
    cv2.setNumThreads(0)  # as the configs do
    with ExitStack() as stack:
        stack.enter_context(DefaultScope.overwrite_default_scope("mmpretrain"))
        root, facts = args.data_root, {}
        if args.timm:
            if args.enlarge:
                enlarged = stack.enter_context(tempfile.TemporaryDirectory())
                _enlarge(Path(root), Path(enlarged), args.enlarge, args.quality)
                root = enlarged
            facts = _describe(Path(root), args.enlarge, args.quality)
            opened = list(_against_timm(args.configs[0], Path(root)))
        else:
            opened = list(_plain(args.configs, root))
        names = [name for name, _, _ in opened]
        for _, _, images in opened:
            images.rate(1)  # what a first batch does once is not measured
            images.failures = 0
        rates = [
            [images.rate(args.images) for _, _, images in opened]
            for _ in tqdm(range(args.rounds), unit="round", disable=None)
        ]
    entries = []
    for index, (name, reference, images) in enumerate(opened):
        compared = names.index(reference)
        quantiles = percentiles([each[index] / each[compared] for each in rates])
        entry: dict[str, Any] = {"config": name}
        if args.timm:
            entry |= {"compared_with": reference, "failures": images.failures}
        entry |= {
            "seconds_to_open": round(images.seconds_to_open, 1),
            "images_per_s": [round(each[index]) for each in rates],
        }
        ratios = zip(("ratio_p20", "ratio_p50", "ratio_p80"), quantiles, strict=True)
        entry |= {key: round(quantile, 2) for key, quantile in ratios}
        entries.append(entry)
        median = percentiles(entry["images_per_s"])[1]
        print(f"{name}: {median:,.0f} images/s, {entry['ratio_p50']} x {reference}")
    words = ["python", "-m", "tokenformer_vit.training.loading_speed", *sys.argv[1:]]
    record = {
        "command": shlex.join(words),
        **environment((*TRAINING_PACKAGES, "PIL")),
        "threads": 1,
        **facts,
        "images": args.images,
        "n": args.rounds,
        "configs": entries,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_record(args.out, record)


if __name__ == "__main__":
    run_tool(main)
