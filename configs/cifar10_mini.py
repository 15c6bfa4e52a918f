# A TokenFormer small enough for a CPU, on 10,000 images of CIFAR-10 at 32 px: for ablations.
#
# Data:      tokenformer-vit prepare-data cifar10_parquet data/cifar10_10k \
#                --limit 10000 --limit-val 2000
# Batch:     128
# Hardware:  one CPU core; minutes in ablations/TABLES.md
# Command:   tokenformer-vit train configs/cifar10_mini.py
# Expected:  its rows of ablations/results.csv
_base_ = "cifar10_tiny.py"

model = dict(
    backbone=dict(embed_dim=96, depth=4, num_heads=3, drop_path_rate=0.0),
    head=dict(in_channels=96),
    train_cfg=None,  # the run is too short for mixed images
)
train_pipeline = _base_.train_pipeline
del train_pipeline[3]  # only crops and flips
train_dataloader = dict(
    batch_size=128,
    num_workers=1,
    dataset=dict(data_root="data/cifar10_10k", pipeline=train_pipeline),
)
val_dataloader = dict(num_workers=1, dataset=dict(data_root="data/cifar10_10k"))
test_dataloader = val_dataloader

param_scheduler = _base_.param_scheduler
param_scheduler[0].end = param_scheduler[1].begin = 1
train_cfg = dict(max_epochs=4)
default_hooks = dict(ema=dict(momentum=1e-2), logger=dict(interval=20))
auto_scale_lr = dict(base_batch_size=128)
