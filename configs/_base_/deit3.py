# DeiT III's recipe from scratch on ImageNet-1K (arXiv:2204.07118; facebookresearch/deit,
# README_revenge.md), first stage: 800 epochs, at 192 px for base and large models.
#
# As its code has it: the loss is the mean over classes, class tokens have no position, the last
# incomplete batch of an epoch is left out, and the model itself is validated and exported, not the
# average beside it. It steps the warm-up by epoch and begins the cosine at the first epoch; here
# the warm-up is stepped by iteration, and the cosine begins after it. From then on the rates differ
# by at most 0.6 % of the highest.
_base_ = ["tokenformer.py", "imagenet.py", "mae_supervised.py"]

model = dict(
    backbone=dict(
        img_size=192,
        no_embed_class=True,
        init_values=1e-4,  # LayerScale
        drop_path_rate=0.2,
        drop_path_uniform=True,
    ),
    head=dict(
        init_cfg=dict(_delete_=True, type="TruncNormal", layer="Linear", std=0.02),
        loss=dict(_delete_=True, type="BinaryCrossEntropy", smoothing=0.0, target_threshold=0.0),
    ),
)

# 3-Augment: one of grayscale, solarisation and blur, then colours.
train_pipeline = [
    dict(type="LoadImage"),
    dict(type="v2/RandomResizedCrop", size=192, scale=(0.08, 1.0), interpolation="bicubic"),
    dict(type="v2/RandomHorizontalFlip", p=0.5),
    dict(
        type="RandomChoice",
        transforms=[
            [dict(type="v2/Grayscale", num_output_channels=3)],
            [dict(type="v2/RandomSolarize", threshold=128, p=1.0)],
            # "inf": a uniform radius
            [dict(type="GaussianBlur", magnitude_range=(0.1, 2.0), magnitude_std="inf", prob=1.0)],
        ],
    ),
    dict(type="v2/ColorJitter", brightness=0.3, contrast=0.3, saturation=0.3),
    dict(type="PackLabels"),
]
test_pipeline = _base_.test_pipeline
test_pipeline[1].update(input_size=(3, 192, 192), crop_pct=1.0)
train_dataloader = dict(
    batch_size=256, drop_last=True, sampler=dict(repeats=3), dataset=dict(pipeline=train_pipeline)
)
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(
    # As apex's FusedLAMB, timm's clips the norm of all gradients.
    optimizer=dict(
        _delete_=True,
        type="timm.optim.Lamb",
        lr=3e-3,
        weight_decay=0.05,
        betas=(0.9, 0.999),
        eps=1e-8,
        max_grad_norm=1.0,
    )
)
param_scheduler = _base_.param_scheduler
param_scheduler[0].update(start_factor=1e-6 / 3e-3, end=5)
param_scheduler[1].begin = 5
train_cfg = dict(max_epochs=800)
default_hooks = dict(ema=dict(momentum=4e-5, validated=False))

# DeiT III has the same rate with other batches: do not add --auto-scale-lr.
auto_scale_lr = dict(base_batch_size=2048)
