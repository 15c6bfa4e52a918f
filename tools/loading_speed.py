"""Compare how fast one thread prepares images by configs/imagenet_base.py and by timm's transforms.

python tools/loading_speed.py DATA: an image of each class in DATA/val, its shorter side made 375
pixels, goes through both. timm's transforms also normalise; here the model does, on its device.
"""

import itertools
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import cv2
import torch
from mmengine.registry import DATASETS, DefaultScope
from PIL import Image
from timm.data import ImageDataset, create_transform

from tokenformer_vit.training.config import load_config

TRAINING: Any = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25, "re_mode": "pixel"}


def tensors_of(dataset):
    """Yield image tensors without end."""
    for place, index in enumerate(itertools.cycle(range(len(dataset)))):
        try:
            sample = dataset[(place, index) if type(dataset).__name__ == "Seeded" else index]
        except ValueError:  # timm's RandAugment may posterise to 0 bits, which Pillow refuses
            continue
        yield sample["inputs"] if isinstance(sample, dict) else sample[0]


def rate(tensors, batch=128):
    """Return images per second of processor time."""
    begin = time.process_time()
    torch.stack(list(itertools.islice(tensors, batch)))
    return batch / (time.process_time() - begin)


torch.set_num_threads(1)
cv2.setNumThreads(0)
with tempfile.TemporaryDirectory() as root, DefaultScope.overwrite_default_scope("mmpretrain"):
    for folder in Path(sys.argv[1], "val").iterdir():
        image = Image.open(next(folder.iterdir())).convert("RGB")
        size = [round(length * 375 / min(image.size)) for length in image.size]
        Path(root, "val", folder.name).mkdir(parents=True)
        image.resize(size).save(Path(root, "val", folder.name, "image.jpeg"), quality=95)
    cfg = load_config("configs/imagenet_base.py", {"train_dataloader.dataset.split": "val"}, root)
    for use, recipe in (("train", TRAINING), ("val", dict[str, Any](crop_pct=0.875))):
        transform = create_transform(224, use == "train", interpolation="bicubic", **recipe)
        own = DATASETS.build(cfg[f"{use}_dataloader"].dataset)
        pair = tensors_of(own), tensors_of(ImageDataset(f"{root}/val", transform=transform))
        speeds = [[rate(each) for each in pair] for _ in range(22)][1:]  # the first opens files
        ratios = [ours / timms for ours, timms in speeds]
        low, *_, high = quantiles(ratios, n=5, method="inclusive")
        print(f"{use}: {median(ratios):.2f} x timm (p20 {low:.2f}, p80 {high:.2f}), images/s:")
        print([round(median(each)) for each in zip(*speeds, strict=True)])
