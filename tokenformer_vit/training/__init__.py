"""Training with mmengine and mmpretrain: hooks, loops, checks and export for TokenFormers.

Configs name this package in ``custom_imports``. An import adds its classes to mmpretrain's
registries and replaces nothing.
"""

import warnings

from tokenformer_vit.errors import InputError

try:
    with warnings.catch_warnings():
        # mmcv-lite has no compiled operators, and needs none here.
        warnings.filterwarnings("ignore", message="Fail to import ``MultiScaleDeformable")
        import mmpretrain.datasets
        import mmpretrain.engine
        import mmpretrain.evaluation
        import mmpretrain.models
        import mmpretrain.visualization  # noqa: F401
except ImportError as error:
    if "libGL" not in str(error):
        raise
    raise InputError(
        "OpenCV, which mmcv needs, finds no libGL on this machine: `apt-get install libgl1`, or "
        "`pip install --force-reinstall --no-deps opencv-python-headless`"
    ) from error
except TypeError as error:
    # mmpretrain 1.2.0 builds classes over None where transformers and pycocotools are installed.
    raise InputError(
        "mmpretrain cannot be imported while transformers and pycocotools are both installed; "
        "`pip uninstall pycocotools` (TokenFormer needs neither)"
    ) from error

from .checkpoint import ExactCheckpointHook
from .data.augment import EvalTransform, FastRandAugment
from .data.images import HuggingFaceImages, ImagesInMemory, LoadImage, PackLabels
from .data.mixing import BinaryCrossEntropy, LabelHead, LabelPreprocessor
from .data.sampler import ResumableSampler, Seeded
from .distributed import CompressingDataParallel
from .hooks import GuardHook, LazyRuntimeInfoHook, ProgressHook
from .loop import ResumableEpochLoop, ResumableIterLoop
from .metrics import AccuracyAndLoss, ReconstructionError
from .models.backbone import TimmClassificationBackbone
from .models.distillation import DistilledClassifier, DistilledHead
from .models.growth import CostHook, GrowthHook
from .models.mae import MaskedAutoencoder
from .models.nested import NestedClassifier
from .optim import (
    AccumulationEMAHook,
    AutocastOptimWrapper,
    ForeachMovingAverage,
    LazyOptimWrapper,
    MergedLayerDecayConstructor,
    MergedOptimWrapperConstructor,
)
from .reports import ResultsHook
from .runner import TrainingRunner
from .storage import PlainPretrained, load_plain_checkpoint

__all__ = [
    "AccumulationEMAHook",
    "AccuracyAndLoss",
    "AutocastOptimWrapper",
    "BinaryCrossEntropy",
    "CompressingDataParallel",
    "CostHook",
    "DistilledClassifier",
    "DistilledHead",
    "EvalTransform",
    "ExactCheckpointHook",
    "FastRandAugment",
    "ForeachMovingAverage",
    "GrowthHook",
    "GuardHook",
    "HuggingFaceImages",
    "ImagesInMemory",
    "LabelHead",
    "LabelPreprocessor",
    "LazyOptimWrapper",
    "LazyRuntimeInfoHook",
    "LoadImage",
    "MaskedAutoencoder",
    "MergedLayerDecayConstructor",
    "MergedOptimWrapperConstructor",
    "NestedClassifier",
    "PackLabels",
    "PlainPretrained",
    "ProgressHook",
    "ReconstructionError",
    "ResultsHook",
    "ResumableEpochLoop",
    "ResumableIterLoop",
    "ResumableSampler",
    "Seeded",
    "TimmClassificationBackbone",
    "TrainingRunner",
    "load_plain_checkpoint",
]
