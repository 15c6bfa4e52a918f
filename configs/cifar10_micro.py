# cifar10_mini with patches of 8 px, four times as fast: for ablations of growth and tuning.
#
# Data:      tokenformer-vit prepare-data cifar10_parquet data/cifar10_10k \
#                --limit 10000 --limit-val 2000
# Batch:     128
# Hardware:  one CPU core; minutes in ablations/TABLES.md
# Command:   tokenformer-vit train configs/cifar10_micro.py
# Expected:  the figures of ablations/TABLES.md
_base_ = "cifar10_mini.py"

model = dict(backbone=dict(patch_size=8))
train_cfg = dict(max_epochs=9)
