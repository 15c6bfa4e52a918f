# TokenFormer-Ti/8 on Imagenette (ten ImageNet classes) at 128 px, from scratch.
#
# Paper:     none
# Data:      tokenformer-vit prepare-data imagenette_parquet data/imagenette
#            (download: configs/README.md, "Data")
# Batch:     128 on one GPU
# Hardware:  not run
# Command:   tokenformer-vit train configs/imagenette_tiny.py --amp
# Expected:  not run
_base_ = ["_base_/tokenformer.py", "_base_/folders.py", "_base_/short_supervised.py"]

model = dict(
    backbone=dict(model_name="tokenformer_tiny", img_size=128, patch_size=8),
    head=dict(num_classes=10, in_channels=192),
)
data_preprocessor = dict(num_classes=10)
train_pipeline = [
    dict(type="LoadImage"),
    dict(type="v2/RandomResizedCrop", size=128, scale=(0.25, 1.0), interpolation="bicubic"),
    dict(type="v2/RandomHorizontalFlip", p=0.5),
    dict(
        type="FastRandAugment",
        policies="timm_increasing",
        num_policies=2,
        total_level=10,
        magnitude_level=9,
        magnitude_std=0.5,
        hparams=dict(pad_val=[124, 116, 104], interpolation="bicubic"),
    ),
    dict(type="PackLabels"),
]
test_pipeline = [
    dict(type="LoadImage"),
    dict(
        type="EvalTransform",
        input_size=(3, 128, 128),
        crop_pct=1.0,
        interpolation="bicubic",
        crop_mode="center",
    ),
    dict(type="PackInputs"),
]
train_dataloader = dict(
    batch_size=128, dataset=dict(data_root="data/imagenette", pipeline=train_pipeline)
)
val_dataloader = dict(
    batch_size=128, dataset=dict(data_root="data/imagenette", pipeline=test_pipeline)
)
test_dataloader = val_dataloader

train_cfg = dict(max_epochs=100)
auto_scale_lr = dict(base_batch_size=128)
