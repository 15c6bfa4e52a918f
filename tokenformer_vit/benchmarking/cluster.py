"""What training on many GPUs needs of network, disks and processors, computed from sizes.

Nothing here is measured on a cluster. The formulas::

    sent      = 2 (n - 1) / n · 4 bytes · parameters     ring all-reduce of float32 gradients
    window    = 2/3 · images of a pass / speed           the backward pass, which hides the exchange
    network   = sent / window
    reading   = GPUs · speed · bytes of an image
    cores     = GPUs of a machine · speed / images that a core prepares a second

The rings of an all-reduce cross the border of each machine once: a machine sends over its network as
many bytes as one of its GPUs. Accumulated gradients are exchanged in the last backward pass only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

GRADIENT_BYTES = 4  # of a parameter; half with compression
# Weights, their moving average, and both moments of AdamW, in float32.
CHECKPOINT_BYTES = 16
# Weights, gradients and the buckets in which they are sent, and both moments.
STATE_BYTES = 20
GPUS_OF_A_MACHINE = 8
# ViT-5-B (arXiv:2602.08071; 87 M parameters, bfloat16, compiled) on an H100.
ASSUMED_SPEED = 2669
IMAGE_BYTES = 110_000  # mean of ImageNet-1K's training files


@dataclass(frozen=True)
class Needs:
    """What a training needs on a number of GPUs.

    Attributes:
        gpus: Number of GPUs.
        images: Images of a step for each GPU.
        passes: Backward passes of a step, whose gradients are accumulated.
        window: Seconds of the last backward pass.
        sent: Bytes that each GPU, and each machine, sends in a step.
        network: Bytes a second that a machine must send to hide the exchange.
        reading: Bytes a second that all machines read.
        cores: Processor cores of a machine that decode and augment.
    """

    gpus: int
    images: int
    passes: int
    window: float
    sent: float
    network: float
    reading: float
    cores: float


def needs(
    parameters: int,
    gpus: int,
    speed: float,
    images_per_core: float,
    batch_size: int = 4096,
    most_images: int = 128,
    image_bytes: float = IMAGE_BYTES,
) -> Needs:
    """Compute what a training needs.

    Args:
        parameters: Number of parameters of the model.
        gpus: Number of GPUs, eight in a machine.
        speed: Images a second of one GPU.
        images_per_core: Images a second that a processor core decodes and augments.
        batch_size: Images of a step, on all GPUs together.
        most_images: Images that a GPU takes at once.
        image_bytes: Mean size of a file.
    """
    images = batch_size // gpus
    passes = -(-images // most_images)
    window = 2 / 3 * images / passes / speed
    sent = 2 * (gpus - 1) / gpus * GRADIENT_BYTES * parameters
    return Needs(
        gpus=gpus,
        images=images,
        passes=passes,
        window=window,
        sent=sent,
        network=sent / window,
        reading=gpus * speed * image_bytes,
        cores=min(gpus, GPUS_OF_A_MACHINE) * speed / images_per_core,
    )


def images_per_core(record: Path) -> float:
    """Return the median images a second of one core in training, from a record of loading."""
    content: Mapping[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    (config,) = (
        each for each in content["configs"] if each["config"] == "imagenet_base.py, training"
    )
    return median(config["images_per_s"])
