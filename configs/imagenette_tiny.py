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
    dict(
        type="SeededTransforms",
        transforms=[
            dict(
                type="RandomResizedCrop",
                scale=128,
                crop_ratio_range=(0.25, 1.0),
                backend="pillow",
                interpolation="bicubic",
            ),
            dict(type="RandomFlip", prob=0.5, direction="horizontal"),
            dict(
                type="RandAugment",
                policies="timm_increasing",
                num_policies=2,
                total_level=10,
                magnitude_level=9,
                magnitude_std=0.5,
                hparams=dict(pad_val=[104, 116, 124], interpolation="bicubic"),
            ),
        ],
    ),
    dict(type="PackLabels"),
]
test_pipeline = [
    dict(type="LoadImage"),
    dict(type="ResizeEdge", scale=128, edge="short", backend="pillow", interpolation="bicubic"),
    dict(type="CenterCrop", crop_size=128),
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
