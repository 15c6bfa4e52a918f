# MAE's recipe for training from labels, from scratch (arXiv:2111.06377, Table 11), with the cosine
# floor and warm-up start of mmpretrain's vit-base-p16_32xb128-mae_in1k.
# Parameter tokens are matrices and decay; norms, biases, scales, class and register tokens,
# positions and a learned τ do not.
_base_ = "runtime.py"

optim_wrapper = dict(
    type="LazyOptimWrapper",
    accumulative_counts=1,
    constructor="MergedOptimWrapperConstructor",
    optimizer=dict(
        type="AdamW",
        lr=1e-4 * 4096 / 256,
        weight_decay=0.3,
        eps=1e-8,
        betas=(0.9, 0.95),
        fused=None,
    ),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        flat_decay_mult=0.0,
        custom_keys={
            ".cls_token": dict(decay_mult=0.0),
            ".reg_token": dict(decay_mult=0.0),
            ".pos_embed": dict(decay_mult=0.0),
            ".tau": dict(decay_mult=0.0),  # a learned τ has no dimension: not in flat_decay_mult
        },
    ),
)
# As in mmpretrain's recipe, the cosine is stepped by epoch: 300 epochs end within 2 % of its
# floor; a short run sets convert_to_iter_based=True, as short_supervised.py does.
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=True, end=20, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=1e-5, by_epoch=True, begin=20),
]
train_cfg = dict(type="ResumableEpochLoop", max_epochs=300, val_interval=1)
val_cfg = dict()
test_cfg = dict()

default_hooks = dict(ema=dict(type="AccumulationEMAHook", momentum=1e-4))

# The learning rate above is for this number of images an optimiser step (--auto-scale-lr).
auto_scale_lr = dict(base_batch_size=4096, enable=False)
