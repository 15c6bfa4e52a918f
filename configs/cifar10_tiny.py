# TokenFormer-Ti/4 on CIFAR-10 at 32 px, from scratch, in a short schedule.
#
# Data:      tokenformer-vit prepare-data cifar10_parquet data/cifar10
# Batch:     256 on one GPU
# Hardware:  a GPU run of the full set over 50 epochs: not run
# Command:   tokenformer-vit train configs/cifar10_tiny.py --amp
# Expected:  not run (a short run on a slice: configs/results/cifar10_tiny_5000.json)
_base_ = ["_base_/tokenformer.py", "_base_/folders.py", "_base_/short_supervised.py"]

model = dict(
    backbone=dict(model_name="tokenformer_tiny", img_size=32, patch_size=4),
    head=dict(num_classes=10, in_channels=192),
)
data_preprocessor = dict(num_classes=10, mean=[125.3, 123.0, 113.9], std=[63.0, 62.1, 66.7])
train_pipeline = _base_.train_pipeline
train_pipeline[1] = dict(type="v2/RandomCrop", size=32, padding=4)
train_pipeline[3].hparams.pad_val = [125, 123, 114]  # the mean
del train_pipeline[4]  # no erasing
test_pipeline = _base_.test_pipeline
test_pipeline[1].update(input_size=(3, 32, 32), crop_pct=1.0)
train_dataloader = dict(
    batch_size=256, dataset=dict(data_root="data/cifar10", pipeline=train_pipeline)
)
val_dataloader = dict(
    batch_size=256, dataset=dict(data_root="data/cifar10", pipeline=test_pipeline)
)
test_dataloader = val_dataloader

train_cfg = dict(max_epochs=50)
auto_scale_lr = dict(base_batch_size=256)
