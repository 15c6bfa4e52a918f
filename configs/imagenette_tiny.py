# TokenFormer-Ti/8 on Imagenette (ten ImageNet classes) at 128 px, from scratch.
#
# Data:      tokenformer-vit prepare-data imagenette_parquet data/imagenette
# Batch:     128 on one GPU
# Command:   tokenformer-vit train configs/imagenette_tiny.py --amp
# Expected:  not run
_base_ = ["_base_/tokenformer.py", "_base_/folders.py", "_base_/short_supervised.py"]

model = dict(
    backbone=dict(model_name="tokenformer_tiny", img_size=128, patch_size=8),
    head=dict(num_classes=10, in_channels=192),
)
data_preprocessor = dict(num_classes=10)
train_pipeline = _base_.train_pipeline
train_pipeline[1].update(size=128, scale=(0.25, 1.0))
del train_pipeline[4]  # no erasing
test_pipeline = _base_.test_pipeline
test_pipeline[1].update(input_size=(3, 128, 128), crop_pct=1.0)
train_dataloader = dict(
    batch_size=128, dataset=dict(data_root="data/imagenette", pipeline=train_pipeline)
)
val_dataloader = dict(
    batch_size=128, dataset=dict(data_root="data/imagenette", pipeline=test_pipeline)
)
test_dataloader = val_dataloader

train_cfg = dict(max_epochs=100)
auto_scale_lr = dict(base_batch_size=128)
