"""Training with mmengine and mmpretrain: hooks, loops, checks and export for TokenFormers.

Configs name this package in ``custom_imports``. An import adds its classes to mmpretrain's
registries. It replaces one thing: mmengine's readers of checkpoints, by one that runs no code.
"""

# ruff: noqa: F401

import warnings
from contextlib import redirect_stdout

with warnings.catch_warnings(), redirect_stdout(None):  # the fork prints what it cannot import
    # mmcv comes without compiled operators, and needs none here.
    warnings.filterwarnings("ignore", message="Fail to import ``MultiScaleDeformable")
    from . import checkpoint, distributed, hooks, loop, metrics, optim, reports, runner
    from .data import augment, images, mixing, sampler
    from .models import backbone, distillation, growth, mae, nested
