# MAE's supervised recipe, shortened for small data: a higher rate, less decay, a faster average.
_base_ = "mae_supervised.py"

optim_wrapper = dict(optimizer=dict(lr=1e-3, weight_decay=0.05))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=True, end=5, convert_to_iter_based=True),
    # By iteration: stepped by epoch, a short cosine would end far above its floor.
    dict(
        type="CosineAnnealingLR", eta_min=1e-5, by_epoch=True, begin=5, convert_to_iter_based=True
    ),
]
default_hooks = dict(ema=dict(momentum=2e-3))
