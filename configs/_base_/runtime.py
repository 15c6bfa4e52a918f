# Logging, checkpoints, seeds and processes: the same for every run.
custom_imports = dict(imports=["tokenformer_vit.training"], allow_failed_imports=False)
default_scope = "mmpretrain"

default_hooks = dict(
    guard=dict(type="GuardHook"),
    runtime_info=dict(type="LazyRuntimeInfoHook"),
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=100),
    param_scheduler=dict(type="ParamSchedulerHook"),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    checkpoint=dict(
        type="ExactCheckpointHook", interval=1, by_epoch=True, max_keep_ckpts=3, save_best=None
    ),
    progress=dict(type="ProgressHook"),
    results=dict(type="ResultsHook"),
)

env_cfg = dict(
    cudnn_benchmark=False,
    mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0),
    dist_cfg=dict(backend="nccl", timeout=None),  # seconds; None is PyTorch's
)
# Several processes: arguments of DistributedDataParallel.
model_wrapper_cfg = dict(
    type="MMDistributedDataParallel",
    broadcast_buffers=False,  # they are equal: τ, if it is not learned
    gradient_as_bucket_view=False,
    static_graph=False,
    find_unused_parameters=False,
)
vis_backends = [dict(type="LocalVisBackend")]
visualizer = dict(type="UniversalVisualizer", vis_backends=vis_backends)
log_level = "INFO"
load_from = None
compile_blocks = False  # True, a mode of torch.compile, or a dict of its arguments
resume = False
# Each process augments, mixes and drops on its own; sampling is the same everywhere.
randomness = dict(seed=0, deterministic=False, diff_rank_seed=True)
