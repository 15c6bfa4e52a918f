# The models of cifar10_stem on Imagenette at 64 px, with 256 tokens: a second data set.
#
# Data:      tokenformer-vit prepare-data imagenette_parquet data/imagenette
#            (images of one size)
# Batch:     128
# Command:   tokenformer-vit train configs/imagenette_stem.py
# Expected:  not run for its 40 epochs; 12 epochs: ablations/TABLES.md
_base_ = "cifar10_stem.py"

model = dict(backbone=dict(img_size=64))
data_preprocessor = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
test_pipeline = _base_.test_pipeline
test_pipeline[1].update(input_size=(3, 64, 64))
train_pipeline = _base_.train_pipeline
train_pipeline[1].update(size=64, padding=8)
train_pipeline[3].update(shape=16, pad_val=[124, 116, 104])
train_pipeline.insert(1, test_pipeline[1])  # once, when an image is read
train_dataloader = dict(
    batch_size=128, dataset=dict(data_root="data/imagenette", pipeline=train_pipeline)
)
val_dataloader = dict(dataset=dict(data_root="data/imagenette", pipeline=test_pipeline))
test_dataloader = val_dataloader
auto_scale_lr = dict(base_batch_size=128)
