# cifar10_micro on all 50,000 images, in memory, compiled and in bfloat16: for long ablations.
#
# Data:      tokenformer-vit prepare-data cifar10_parquet data/cifar10
# Batch:     128
# Hardware:  one CPU core; minutes in ablations/TABLES.md
# Command:   tokenformer-vit train configs/cifar10_micro_50k.py
# Expected:  the figures of ablations/TABLES.md
_base_ = "cifar10_micro.py"

compile_blocks = True
optim_wrapper = dict(type="AutocastOptimWrapper")
train_dataloader = dict(dataset=dict(type="ImagesInMemory", data_root="data/cifar10"))
val_dataloader = dict(dataset=dict(type="ImagesInMemory", data_root="data/cifar10"))
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=8, val_interval=2)
default_hooks = dict(logger=dict(interval=100))
