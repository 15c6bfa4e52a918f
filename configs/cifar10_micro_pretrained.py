# The training of tokenformer_cifar10_micro, whose weights are in the package.
#
# Data:      tokenformer-vit prepare-data cifar10_parquet data/cifar10
# Batch:     128
# Hardware:  one CPU core, shared with other programs: 52 minutes
# Command:   tokenformer-vit train configs/cifar10_micro_pretrained.py
# Expected:  top-1 69.35 % (configs/results/cifar10_micro_pretrained.json)
_base_ = "cifar10_micro_50k.py"

train_cfg = dict(max_epochs=30, val_interval=10)
# The weights of the package are the average at the end; the test images choose nothing.
default_hooks = dict(ema=dict(momentum=2e-3))
