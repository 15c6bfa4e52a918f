# Base of all language runs: a causal language model on rows of tokens that prepare-text wrote.
# The recipe is that of the released models (arXiv:2410.23168, Section 4.2, and their configuration
# files): AdamW, warm-up over 1 % of the steps, a cosine to a tenth, clipping.
_base_ = "runtime.py"

custom_imports = dict(
    imports=["tokenformer_vit.training", "tokenformer_vit.training.language"],
    allow_failed_imports=False,
)

model = dict(
    type="CausalLM",
    architecture="tokenformer",
    config=dict(preset="150m", vocab_size=50_304, context_length=2048),
    checkpoint="",  # folder of a trained model to start from; then config is empty
    growth=dict(),
)

train_dataloader = dict(
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    pin_memory=True,
    collate_fn=dict(type="default_collate"),
    sampler=dict(type="ResumableSampler", shuffle=True, endless=True),
    dataset=dict(type="TokenDataset", data_root="data/text", split="train"),
)
val_dataloader = dict(
    train_dataloader,
    sampler=dict(type="DefaultSampler", shuffle=False, round_up=False),
    dataset=dict(type="TokenDataset", data_root="data/text", split="val"),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="Perplexity")
test_evaluator = val_evaluator

optim_wrapper = dict(
    type="LazyOptimWrapper",
    accumulative_counts=1,
    constructor="MergedOptimWrapperConstructor",
    clip_grad=dict(max_norm=1.0),
    optimizer=dict(
        type="AdamW", lr=6e-4, weight_decay=0.1, eps=1e-8, betas=(0.9, 0.95), fused=None
    ),
    # As in the released code, embeddings and parameter tokens decay; norms and biases do not.
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        flat_decay_mult=0.0,
        bypass_duplicate=True,  # the tied head of the Transformer
        custom_keys={".tau": dict(decay_mult=0.0)},  # a learned τ
    ),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=False, end=1430),
    dict(type="CosineAnnealingLR", eta_min=6e-5, by_epoch=False, begin=1430),
]
train_cfg = dict(type="ResumableIterLoop", max_iters=143_000, val_interval=1000)
val_cfg = dict()
test_cfg = dict()

log_processor = dict(by_epoch=False)
default_hooks = dict(
    guard=dict(type="LanguageGuardHook"),
    logger=dict(log_metric_by_epoch=False),
    checkpoint=dict(by_epoch=False, interval=1000),
    results=dict(type="LanguageResultsHook"),
)
custom_hooks = [dict(type="CostHook")]

# The learning rate above is for this number of sequences an optimiser step (--auto-scale-lr).
auto_scale_lr = dict(base_batch_size=1024, enable=False)
