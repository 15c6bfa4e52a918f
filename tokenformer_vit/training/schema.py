"""Type and range of the values in a config.

Only keys in these schemas are checked: optimisers, schedules, data sets and models may have others.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from tokenformer_vit.errors import InputError, first_fault

from .distillation import Distillation
from .labels import check_labels
from .nested import SizeRule
from .parameter_groups import check_start
from .sizes import check_classes, check_sizes

# NumPy takes seeds below 2**32, and each process and each worker adds its number to the seed.
MOST_SEED = 2**32 - 2**20


def _must_be(text: str) -> WrapValidator:
    """Tell which values are allowed, instead of which rule a value broke."""

    def check(value: Any, rules: Callable[[Any], Any]) -> Any:
        try:
            return rules(value)
        except ValidationError as error:
            raise PydanticCustomError(
                "not_allowed", "Input should be {text}", {"text": text}
            ) from error

    return WrapValidator(check)


def _listed(value: Any) -> Any:
    """Read a tuple as a list, and one dict as a list of one, as mmengine does."""
    if isinstance(value, dict):
        return [value]
    return list(value) if isinstance(value, tuple) else value


def _not_empty(value: list[Any]) -> list[Any]:
    if not value:
        raise ValueError("Input should be a list of at least one, or None")
    return value


def _float(value: Any) -> Any:
    """Refuse a whole number where mmpretrain asserts that a value is of type float."""
    return value if isinstance(value, float) else str(value)


Count = Annotated[int, Field(ge=1), _must_be("a whole number of at least 1")]
Whole = Annotated[int, Field(ge=0), _must_be("a whole number of at least 0")]
Workers = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=0)],
    _must_be("a whole number of at least 0, or auto for as many as the cores allow"),
]
Seed = Annotated[int, Field(ge=0, le=MOST_SEED), _must_be(f"a whole number from 0 to {MOST_SEED}")]
# OpenCV starts as many threads as it is told.
Threads = Annotated[int, Field(ge=0, le=1024), _must_be("a whole number from 0 to 1024")]
Interval = Annotated[
    Literal[-1] | Annotated[int, Field(ge=1)],
    _must_be("a whole number of at least 1, or -1 for never"),
]
Positive = Annotated[float, Field(gt=0), _must_be("a finite number above 0")]
NotNegative = Annotated[float, Field(ge=0), _must_be("a finite number of at least 0")]
Share = Annotated[float, Field(ge=0, le=1), _must_be("a number from 0 to 1")]
BelowOne = Annotated[float, Field(ge=0, lt=1), _must_be("a number of at least 0 and below 1")]
Between = Annotated[float, Field(gt=0, lt=1), _must_be("a number above 0 and below 1")]
Factor = Annotated[float, Field(gt=0, le=1), _must_be("a number above 0 and at most 1")]
Smoothing = Annotated[
    float,
    Field(ge=0, lt=1),
    BeforeValidator(_float),
    _must_be("a number with a decimal point, at least 0.0 and below 1.0"),
]
Alpha = Annotated[
    float,
    Field(gt=0),
    BeforeValidator(_float),
    _must_be("a number with a decimal point, above 0.0"),
]
Size = Annotated[
    Annotated[int, Field(ge=1)] | tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    _must_be("a whole number of at least 1, or two of them"),
]
Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    _must_be("two numbers of at least 0 and below 1"),
]
Folders = Annotated[
    str | Annotated[list[str], BeforeValidator(_listed)],
    _must_be("the name of a folder, or a list of names"),
]
Level = Annotated[
    Literal["CRITICAL", "FATAL", "ERROR", "WARNING", "WARN", "INFO", "DEBUG", "NOTSET"] | int,
    _must_be("one of CRITICAL, ERROR, WARNING, INFO, DEBUG, NOTSET"),
]
Pipeline = Annotated[
    Annotated[list[dict[str, Any]], Field(min_length=1)],
    BeforeValidator(_listed),
    _must_be("a list of transforms that ends with PackInputs"),
]
Compile = Annotated[
    bool
    | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    | dict[str, Any],
    _must_be(
        "True, False, a dict of torch.compile's arguments, or one of its modes default, "
        "reduce-overhead, max-autotune and max-autotune-no-cudagraphs"
    ),
]
Counts = Annotated[
    Annotated[int, Field(ge=1)]
    | Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(_listed)],
    _must_be("a whole number of at least 1, or a list of them"),
]


class _Section(BaseModel):
    """A dict of a config. Missing values are not checked."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class _Augment(_Section):
    alpha: Alpha | None = None


class _Augments(_Section):
    augments: (
        Annotated[list[_Augment], AfterValidator(_not_empty), BeforeValidator(_listed)] | None
    ) = None


class _Loss(_Section):
    label_smooth_val: Smoothing = 0.0
    smoothing: BelowOne = 0
    target_threshold: BelowOne | None = None


class _Head(_Section):
    num_classes: Count = 1
    in_channels: Count = 1
    loss: _Loss | None = None


class _Preprocessor(_Section):
    num_classes: Count | None = None
    mean: Annotated[list[float], BeforeValidator(_listed)] | None = None
    std: Annotated[list[Positive], BeforeValidator(_listed)] | None = None
    to_rgb: bool = False


class _Backbone(_Section):
    drop_path_rate: BelowOne = 0
    drop_path_uniform: bool = False
    drop_rate: BelowOne = 0


class _TimmBackbone(_Backbone):
    model_name: str
    pretrained: bool = False
    checkpoint_path: str = ""
    compile: Compile = False
    frozen: bool = False
    frozen_norms: bool = False
    nested_tau: Literal["scaled", "kept"] = "scaled"
    stem_seed: Seed | None = None
    growth: dict[str, Any] | None = None
    img_size: Size = 1
    patch_size: Size = 1
    embed_dim: Count = 1
    depth: Count = 1
    num_heads: Count = 1
    mlp_ratio: Positive = 1
    num_qkv_param_tokens: Counts | None = None
    num_proj_param_tokens: Counts | None = None
    num_ffn_param_tokens: Counts | None = None
    pos_drop_rate: BelowOne = 0
    proj_drop_rate: BelowOne = 0
    attn_drop_rate: BelowOne = 0
    patch_drop_rate: BelowOne = 0


class _Model(_Section):
    size_rule: SizeRule | None = None
    distillation: Distillation | None = None
    mask_ratio: Between = 0.75
    backbone: _Backbone | None = None
    head: _Head | None = None
    data_preprocessor: _Preprocessor | None = None
    train_cfg: _Augments | None = None


class _LanguageConfig(_Section):
    vocab_size: Count = 1
    context_length: Count = 1
    embed_dim: Count = 1
    depth: Count = 1
    num_heads: Count = 1
    hidden_features: Count | None = None
    num_qkv_param_tokens: Counts | None = None
    num_proj_param_tokens: Counts | None = None
    num_ffn_param_tokens: Counts | None = None
    rotary_share: Factor = 1
    rotary_base: Positive = 1
    tie_embeddings: bool = True


class _LanguageModel(_Section):
    config: _LanguageConfig = _LanguageConfig()
    checkpoint: str = ""
    growth: dict[str, Any] | None = None
    masks: dict[str, Any] | None = None
    frozen_stem: bool = False
    compile: Compile = False


class _Dataset(_Section):
    data_root: Folders | None = None
    pipeline: Pipeline = [{}]
    share: Factor = 1
    share_seed: Seed = 0


class _Loader(_Section):
    dataset: _Dataset
    batch_size: Count = 1
    num_workers: Workers = 0
    num_batch_per_epoch: Count | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    drop_last: bool = False
    prefetch_factor: Count | None = None
    timeout: NotNegative = 0


class _Sampler(_Section):
    repeats: Count = 1


class _TrainLoader(_Loader):
    sampler: _Sampler = _Sampler()  # None would train in the order of the files


class _TestLoader(_Loader):
    sampler: dict[str, Any] | None = None


class _Clipping(_Section):
    max_norm: Positive = 1
    clip_value: Positive = 1


class _Optimizer(_Section):
    lr: Positive | None = None
    weight_decay: NotNegative = 0
    foreach: bool | None = None
    fused: bool | None = None


class _Adam(_Section):
    lr: Positive = 1
    betas: Betas = (0, 0)
    eps: Positive = 1


class _OptimWrapper(_Section):
    optimizer: _Optimizer | None = None
    accumulative_counts: Count = 1
    clip_grad: _Clipping | None = None


class _Scheduler(_Section):
    by_epoch: bool = True
    convert_to_iter_based: bool = False
    begin: Whole = 0
    end: Count = 1
    start_factor: Factor = 1
    end_factor: Share = 1
    eta_min: NotNegative | None = None
    T_max: Count | None = None


class _TrainLoop(_Section):
    max_epochs: Count = 1
    max_iters: Count = 1
    val_begin: Count = 1
    val_interval: Count = 1


class _Hook(_Section):
    background: bool = True
    by_epoch: bool = True
    interval: Interval = 1
    minutes: Positive | None = None
    max_keep_ckpts: Interval = 1
    momentum: Between = 0.5
    validated: bool = True


class _Evaluator(_Section):
    collect_device: Literal["cpu", "gpu"] = "cpu"
    topk: Counts = 1


class _Randomness(_Section):
    seed: Seed | None = None
    deterministic: bool = False
    diff_rank_seed: bool = False


class _ScaleLR(_Section):
    base_batch_size: Count = 1
    enable: bool = False


class _Processes(_Section):
    mp_start_method: Literal["fork", "spawn", "forkserver"] = "fork"
    opencv_num_threads: Threads = 0


class _Connection(_Section):
    timeout: Positive | None = None


class _DataParallel(_Section):
    compression: Literal["bf16", "fp16"] | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False


class _Environment(_Section):
    cudnn_benchmark: bool = False
    mp_cfg: _Processes = _Processes()
    dist_cfg: _Connection = _Connection()


class _LogProcessor(_Section):
    window_size: Count = 1
    by_epoch: bool = True


class _Run(_Section):
    model: _Model
    data_preprocessor: _Preprocessor | None = None
    train_dataloader: _TrainLoader
    val_dataloader: _TestLoader
    test_dataloader: _TestLoader
    val_evaluator: Annotated[list[_Evaluator], BeforeValidator(_listed)]
    test_evaluator: Annotated[list[_Evaluator], BeforeValidator(_listed)]
    optim_wrapper: _OptimWrapper
    param_scheduler: Annotated[list[_Scheduler], BeforeValidator(_listed)] | None
    train_cfg: _TrainLoop
    val_cfg: dict[str, Any] | None = None
    test_cfg: dict[str, Any] | None = None
    default_hooks: dict[str, _Hook | None] = {}
    custom_hooks: Annotated[list[_Hook], BeforeValidator(_listed)] | None = None
    auto_scale_lr: _ScaleLR | None = None
    randomness: _Randomness
    env_cfg: _Environment = _Environment()
    model_wrapper_cfg: _DataParallel | None = None
    log_processor: _LogProcessor = _LogProcessor()
    log_level: Level = "INFO"
    load_from: str | None = None
    resume: bool = False
    work_dir: str | None = None


_ADAMS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Lamb", "Muon")


def check_values(cfg: Mapping[str, Any], path: str) -> None:
    """Check the values of a config before a run starts.

    Args:
        cfg: The config, with all options merged.
        path: File of the config, for messages.

    Raises:
        InputError: If a value has a wrong type or is out of its range, or two sizes do not agree;
            the message gives the key, the value and the allowed values.
    """
    _check(_Run, cfg, path)
    loop, optimizer = cfg["train_cfg"], cfg["optim_wrapper"].get("optimizer") or {}
    if not loop.keys() & {"max_epochs", "max_iters"}:
        raise InputError(f"{path}: train_cfg needs max_epochs or max_iters, the length of the run")
    if str(optimizer.get("type")).rpartition(".")[2] in _ADAMS:  # timm's have their module
        _check(_Adam, optimizer, path, "optim_wrapper.optimizer")
    counts = cfg["optim_wrapper"].get("accumulative_counts", 1)
    if (cfg.get("model_wrapper_cfg") or {}).get("static_graph") and counts > 1:
        raise InputError(
            f"{path}: model_wrapper_cfg.static_graph is True, but PyTorch cannot accumulate "
            f"gradients in a static graph (optim_wrapper.accumulative_counts is {counts}): set one "
            "of the two to False or 1"
        )
    for name, key in (("DistilledClassifier", "distillation"), ("NestedClassifier", "size_rule")):
        own = cfg["model"].get("type")
        if (own == name) != (key in cfg["model"]) and own != "CausalLM":
            raise InputError(
                f"{path}: model.type is {own}, and model.{key} is {cfg['model'].get(key)}: a "
                f"{name} needs {key}, and other models cannot have it; set both or none"
            )
    if cfg["model"].get("size_rule") and (modules := cfg.get("activation_checkpointing")):
        raise InputError(
            f"{path}: activation_checkpointing is {modules}, but with model.size_rule the backward "
            "pass would compute these modules again at another size: remove one of the two"
        )
    if cfg["model"].get("type") == "CausalLM":
        _check(_LanguageModel, cfg["model"], path, "model")
    check_classes(cfg, path)
    check_labels(cfg, path)
    check_start(cfg, path)
    backbone, key = cfg["model"].get("backbone") or {}, "model.backbone"
    if backbone.get("type") == "LoRABackbone":
        backbone, key = backbone.get("module") or {}, "model.backbone.module"
    if backbone.get("type") == "TimmClassificationBackbone":
        _check(_TimmBackbone, backbone, path, key)
        check_sizes(cfg, backbone, key, path)


def _check(schema: type[_Section], values: Mapping[str, Any], path: str, above: str = "") -> None:
    """Check the values of a dict under the key ``above`` of a config."""
    try:
        schema.model_validate(values)
    except ValidationError as error:
        key: list[str] = [above] if above else []
        node: Any = values
        for part in error.errors(include_url=False)[0]["loc"]:
            if isinstance(part, int) and isinstance(node, Mapping):
                continue  # it was read as a list of one
            key.append(str(part))
            node = node.get(part) if isinstance(node, Mapping) else node[part]
        raise InputError(f"{path}: {first_fault(error, '.'.join(key))}") from error
