# Fine-tuning on CIFAR-10 after mae_cifar10_micro_pretrain.py, with all labels or a share of them.
# From scratch by the same recipe: model.backbone.checkpoint_path=""
# optim_wrapper.paramwise_cfg.layer_decay_rate=1.0
#
# Data:      tokenformer-vit prepare-data cifar10_parquet data/cifar10
# Weights:   work_dirs/mae_cifar10_micro_pretrain, the result of mae_cifar10_micro_pretrain.py
# Batch:     128
# Hardware:  one CPU core; not run in full
# Command:   tokenformer-vit train configs/mae_cifar10_micro_finetune.py \
#                --cfg-options train_dataloader.dataset.share=0.1
# Expected:  the figures of ablations/TABLES.md, after a shorter training
_base_ = "cifar10_micro_50k.py"

model = dict(
    backbone=dict(
        patch_size=4,
        checkpoint_path="work_dirs/mae_cifar10_micro_pretrain/model.safetensors",
        global_pool="avg",  # with a new norm after it
    )
)
train_dataloader = dict(dataset=dict(share=1.0))
optim_wrapper = dict(
    constructor="MergedLayerDecayConstructor",
    optimizer=dict(betas=(0.9, 0.999)),
    paramwise_cfg=dict(layer_decay_rate=0.75),
)
