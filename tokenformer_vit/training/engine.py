"""All that comes from mmengine, mmcv and mmpretrain: a fork or a successor changes this file.

They are the maintained forks ``onedl-mmengine``, ``onedl-mmcv`` and ``onedl-mmpretrain``, or the
originals, which have the same names. An import registers the classes of mmpretrain.
"""

# ruff: noqa: F401

from mmcv.transforms import BaseTransform
from mmengine.config import Config, ConfigDict
from mmengine.dataset import Compose, DefaultSampler, default_collate, force_full_init
from mmengine.device import get_device
from mmengine.dist import (
    all_gather_object,
    all_reduce,
    barrier,
    broadcast_object_list,
    get_comm_device,
    get_rank,
    get_world_size,
    init_dist,
    is_main_process,
    master_only,
)
from mmengine.evaluator import BaseMetric
from mmengine.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, Hook, RuntimeInfoHook
from mmengine.logging import HistoryBuffer, MessageHub, MMLogger
from mmengine.model import (
    BaseModel,
    BaseModule,
    ExponentialMovingAverage,
    PretrainedInit,
    is_model_wrapper,
)
from mmengine.optim import (
    AmpOptimWrapper,
    DefaultOptimWrapperConstructor,
    OptimWrapper,
    ReduceOnPlateauParamScheduler,
)
from mmengine.registry import (
    DATA_SAMPLERS,
    FUNCTIONS,
    HOOKS,
    LOOPS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    WEIGHT_INITIALIZERS,
)
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS as CONSTRUCTORS
from mmengine.runner import (
    CheckpointLoader,
    EpochBasedTrainLoop,
    IterBasedTrainLoop,
    Runner,
    set_random_seed,
)
from mmengine.runner.base_loop import BaseLoop
from mmpretrain import registry
from mmpretrain.datasets import BaseDataset, CustomDataset, PackInputs
from mmpretrain.datasets import transforms as stock
from mmpretrain.engine import LearningRateDecayOptimWrapperConstructor
from mmpretrain.models import (
    MAE,
    ClsBatchNormNeck,
    ClsDataPreprocessor,
    ImageClassifier,
    LabelSmoothLoss,
    LinearClsHead,
    MAEPretrainDecoder,
    MAEPretrainHead,
)
from mmpretrain.models.utils import build_2d_sincos_position_embedding
from mmpretrain.registry import DATASETS, METRICS, MODELS, TRANSFORMS
from mmpretrain.utils import register_all_modules

register_all_modules(init_default_scope=False)
# Each of mmpretrain's registries also finds what is in mmengine's of the same kind.
REGISTRIES = [getattr(registry, name) for name in registry.__all__]
