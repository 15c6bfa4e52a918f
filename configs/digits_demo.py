# A small TokenFormer on scikit-learn's 1,797 handwritten digits, 8 px: the demonstration.
#
# Data:      tokenformer-vit prepare-data --digits data/digits
# Batch:     64 on a CPU
# Hardware:  2 CPU cores
# Command:   tokenformer-vit train configs/digits_demo.py   (or `make demo`, which does it all)
# Expected:  at least 97 % top-1 on the 20 % held out
_base_ = ["_base_/tokenformer.py", "_base_/folders.py", "_base_/short_supervised.py"]

model = dict(
    backbone=dict(
        model_name="tokenformer_tiny",
        img_size=8,
        patch_size=4,
        embed_dim=96,
        depth=4,
        num_heads=3,
        drop_path_rate=0.0,
    ),
    head=dict(num_classes=10, in_channels=96),
    train_cfg=dict(augments=[dict(type="Mixup", alpha=0.2)]),
)
data_preprocessor = dict(num_classes=10, mean=[78.0] * 3, std=[96.0] * 3)
train_pipeline = _base_.train_pipeline
train_pipeline[1:-1] = [dict(type="Rotate", angle=10.0, prob=0.5)]
test_pipeline = _base_.test_pipeline
test_pipeline[1].update(input_size=(3, 8, 8), crop_pct=1.0)
train_dataloader = dict(
    batch_size=64, num_workers=1, dataset=dict(data_root="data/digits", pipeline=train_pipeline)
)
val_dataloader = dict(
    batch_size=360,
    num_workers=0,
    # Decoding the images again took half of a validation.
    dataset=dict(type="ImagesInMemory", data_root="data/digits", pipeline=test_pipeline),
)
test_dataloader = val_dataloader

param_scheduler = _base_.param_scheduler
param_scheduler[0].end = param_scheduler[1].begin = 3
train_cfg = dict(max_epochs=40, val_interval=2)
default_hooks = dict(ema=dict(momentum=2e-2), logger=dict(interval=22))
auto_scale_lr = dict(base_batch_size=64)
