"""TokenFormer vision transformers; importing the package registers its models with timm."""

import os

# OpenMP's threads spin while they wait, which takes the CPU from data loading workers, and more
# time than a small training itself. PyTorch reads this variable when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from . import models as models

__version__ = "0.1.0"
