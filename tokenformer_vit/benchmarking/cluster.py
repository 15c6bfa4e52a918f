"""What training on many GPUs needs of network, disks and processors, computed from sizes.

Nothing here is measured on a cluster. The formulas::

    sent      = 2 (n - 1) / n · 4 bytes · parameters     ring all-reduce of float32 gradients
    window    = 2/3 · images of a pass / speed           the backward pass, which hides the exchange
    network   = sent / window
    reading   = GPUs · speed · bytes of an image
    cores     = GPUs of a machine · speed / images that a core prepares a second

The ring of an all-reduce leaves each machine once: a machine sends over its network as many bytes
as one of its GPUs. Accumulated gradients are exchanged in the last backward pass only.
"""

from dataclasses import dataclass
from typing import ClassVar

# Bytes of a parameter, in float32.
GRADIENT_BYTES = 4  # half with compression
CHECKPOINT_BYTES = 16  # weights, their moving average, and both moments of AdamW
STATE_BYTES = 20  # weights, gradients, the buckets in which they are sent, and both moments

GPUS_OF_A_MACHINE = 8
MOST_IMAGES = 128  # that a GPU takes at once
# Images a second of an H100: ViT-5-B (arXiv:2602.08071), 87 M parameters, bfloat16, compiled.
ASSUMED_SPEED = 2669
IMAGE_BYTES = 110_000  # mean of ImageNet-1K's training files
# Median of results/loading_imagenet_quality_98_cpu.json, whose files have 92 kB.
IMAGES_PER_CORE = 359


@dataclass(frozen=True)
class Needs:
    """What a training needs on a number of GPUs.

    Args:
        gpus: Number of GPUs, eight in a machine.
        parameters: Number of parameters of the model.
        speed: Images a second of one GPU.
        batch_size: Images of an optimiser step, on all GPUs together.
    """

    HEADINGS: ClassVar = (
        *("GPUs", "images a step", "of each GPU", "backward, ms", "sent, GB"),
        *("network, GB/s", "compressed", "disks, GB/s", "cores"),
    )

    gpus: int
    parameters: int
    speed: float = ASSUMED_SPEED
    batch_size: int = 4096

    @property
    def images(self) -> float:
        """Images of a step for each GPU."""
        return self.batch_size / self.gpus

    @property
    def passes(self) -> int:
        """Backward passes of a step, whose gradients are accumulated."""
        return int(-(-self.images // MOST_IMAGES))

    @property
    def window(self) -> float:
        """Seconds of the last backward pass."""
        return 2 / 3 * self.images / self.passes / self.speed

    @property
    def sent(self) -> float:
        """Bytes that each GPU, and each machine, sends in a step."""
        return 2 * (self.gpus - 1) / self.gpus * GRADIENT_BYTES * self.parameters

    @property
    def network(self) -> float:
        """Bytes a second that a machine must send to hide the exchange."""
        return self.sent / self.window

    @property
    def reading(self) -> float:
        """Bytes a second that all machines read."""
        return self.gpus * self.speed * IMAGE_BYTES

    @property
    def cores(self) -> float:
        """Cores of a machine that decode and augment."""
        return min(self.gpus, GPUS_OF_A_MACHINE) * self.speed / IMAGES_PER_CORE

    def cells(self) -> list[str]:
        """Return the row of a table under ``HEADINGS``."""
        passes = f" in {self.passes}" if self.passes > 1 else ""
        return [
            f"{self.gpus}",
            f"{self.batch_size:,}",
            f"{self.images:g}{passes}",
            f"{self.window * 1e3:.0f}",
            f"{self.sent / 1e9:.2f}",
            *(f"{rate / 1e9:.0f}" for rate in (self.network, self.network / 2)),
            f"{self.reading / 1e9:.1f}",
            f"{self.cores:.0f}",
        ]
