# The adapters of tuning_imagenette on 1,000 images of CIFAR-10 at 70 px: a second data set.
#
# Data:      tokenformer-vit prepare-data cifar10_parquet data/cifar10
# Weights:   as in tuning_imagenette.py
# Batch:     64
# Hardware:  one CPU core; minutes in ablations/TABLES.md
# Command:   tokenformer-vit train configs/tuning_cifar10.py
# Expected:  75.8 % top-1 (3 seeds, float32; ablations/TABLES.md)
_base_ = "tuning_imagenette.py"

model = dict(backbone=dict(img_size=70))
test_pipeline = _base_.test_pipeline
test_pipeline[1].update(input_size=(3, 70, 70))
train_pipeline = _base_.train_pipeline
train_pipeline[1] = test_pipeline[1]
train_pipeline[2].update(size=70, padding=9)
train_pipeline[4].update(shape=17)
train_dataloader = dict(dataset=dict(data_root="data/cifar10", share=0.02, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(data_root="data/cifar10", pipeline=test_pipeline))
test_dataloader = val_dataloader
