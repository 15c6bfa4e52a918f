# The TokenFormer of cifar10_mini on patches of 8 px: four times as fast, for growth and tuning.
#
# Paper:     has no such run
# Data:      python tools/prepare_data.py CIFAR10_PARQUET_FOLDER data/cifar10_10k \
#                --limit 10000 --limit-val 2000
# Batch:     128
# Hardware:  one CPU core; the minutes are in ablations/TABLES.md
# Command:   python tools/train.py configs/cifar10_micro.py
# Expected:  see ablations/TABLES.md
_base_ = "cifar10_mini.py"

model = dict(backbone=dict(patch_size=8))
train_cfg = dict(max_epochs=9)
