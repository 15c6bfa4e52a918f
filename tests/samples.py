"""Small data sets and a config that tests of several folders train on and read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
CLASSES = ("bright", "dark", "split")

CONFIG = f"""
_base_ = "{ROOT}/configs/digits_demo.py"
model = dict(
    backbone=dict(embed_dim=24, depth=2, num_heads=2, drop_path_rate=0.2),
    head=dict(num_classes=3, in_channels=24),
    train_cfg=dict(_delete_=True, augments=[dict(type="Mixup", alpha=0.8)]),
)
data_preprocessor = dict(num_classes=3)
train_pipeline = [
    dict(type="LoadImage"),
    dict(type="v2/RandomCrop", size=8, padding=1),
    dict(type="v2/RandomHorizontalFlip", p=0.5),
    dict(type="PackLabels"),
]
train_dataloader = dict(batch_size=8, num_workers=0, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(batch_size=8)
test_dataloader = dict(batch_size=8)
val_evaluator = dict(topk=(1,))
test_evaluator = dict(topk=(1,))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=1e-5, by_epoch=True, begin=1),
]
train_cfg = dict(max_epochs=3, val_interval=1)
default_hooks = dict(logger=dict(interval=1))
log_processor = dict(window_size=1)  # each loss as it is, not a mean over the last ten
"""


class Trap:
    """Leaves a file where it is unpickled by a loader that runs code."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return (self.mark.touch, ())


def write_images(
    folder: Path, size: tuple[int, int], counts: dict[str, int], generator: np.random.Generator
) -> Path:
    """Write so many images of each class, which is told by what is bright in them."""
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = generator.integers(0, 100, (*size, 3), dtype=np.uint8)
            pixels[:, (0, size[1], size[1] // 2)[label % 3] :] += 120
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


def rows_of(
    images: Sequence[bytes],
    labels: Sequence[Any],
    names: Sequence[str] | None = ("ant", "bee", "cat"),
    image: str = "image",
    label: str = "label",
    **more: Any,
) -> Any:
    """Return a data set of Hugging Face's library; without names, labels are as they are."""
    import datasets

    table = {image: [{"bytes": each, "path": None} for each in images], label: labels, **more}
    rows = datasets.Dataset.from_dict(table).cast_column(image, datasets.Image())
    return rows.cast_column(label, datasets.ClassLabel(names=[*names])) if names else rows


def write_parquet(path: Path, images: Sequence[bytes], labels: Sequence[Any], *of: Any, **how: Any):
    """Write a parquet file of several groups of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows_of(images, labels, *of, **how).to_parquet(path, batch_size=4)
