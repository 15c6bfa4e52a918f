# A TokenFormer small enough for a CPU, on 10,000 images of CIFAR-10 at 32 px: for ablations.
#
# Paper:     none
# Data:      tokenformer-vit prepare-data cifar10_parquet data/cifar10_10k \
#                --limit 10000 --limit-val 2000
#            (download: configs/README.md, "Data")
# Batch:     128
# Hardware:  one CPU core; minutes in ablations/TABLES.md
# Command:   tokenformer-vit train configs/cifar10_mini.py
# Expected:  the figures of ablations/TABLES.md
_base_ = "cifar10_tiny.py"

model = dict(
    backbone=dict(embed_dim=96, depth=4, num_heads=3, drop_path_rate=0.0),
    head=dict(in_channels=96),
    train_cfg=None,  # the run is too short for mixed images
)
train_pipeline = [
    dict(type="LoadImage"),
    dict(type="v2/RandomCrop", size=32, padding=4),
    dict(type="v2/RandomHorizontalFlip", p=0.5),
    dict(type="PackLabels"),
]
train_dataloader = dict(
    batch_size=128,
    num_workers=1,
    dataset=dict(data_root="data/cifar10_10k", pipeline=train_pipeline),
)
val_dataloader = dict(num_workers=1, dataset=dict(data_root="data/cifar10_10k"))
test_dataloader = val_dataloader

param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(
        type="CosineAnnealingLR", eta_min=1e-5, by_epoch=True, begin=1, convert_to_iter_based=True
    ),
]
train_cfg = dict(max_epochs=4)
default_hooks = dict(ema=dict(momentum=1e-2), logger=dict(interval=20))
auto_scale_lr = dict(base_batch_size=128)
