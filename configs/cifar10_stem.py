# A convolutional stem and 64 tokens on CIFAR-10 at 32 px, to compare a TokenFormer with a ViT.
# With 64/64/256 pairs, the ViT of the same width, depth and stem has MLPs of ratio 2.
#
# Data:      tokenformer-vit prepare-data cifar10_parquet data/cifar10
# Batch:     512
# Hardware:  one GPU; on one CPU core 460 images a second
# Command:   tokenformer-vit train configs/cifar10_stem.py
# Expected:  not run to the end as it is; AdamW, batch 256, 60 epochs: ablations/TABLES.md
_base_ = "cifar10_micro_50k.py"

model = dict(
    backbone=dict(
        stem="conv",
        patch_size=4,
        class_token=False,
        global_pool="avg",
        embed_dim=128,
        num_heads=4,
        num_qkv_param_tokens=64,
        num_proj_param_tokens=64,
        num_ffn_param_tokens=256,
        drop_path_rate=0.05,
    ),
    head=dict(in_channels=128),
)
optim_wrapper = dict(optimizer=dict(type="timm.optim.Muon", lr=3e-3))
train_pipeline = _base_.train_pipeline
train_pipeline.insert(3, dict(type="Cutout", shape=8, pad_val=[125, 123, 114], prob=1.0))
# All batches are of one size: one compiled version of a block.
train_dataloader = dict(batch_size=512, drop_last=True, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(batch_size=1000)
test_dataloader = val_dataloader
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = param_scheduler[1].begin = 2
param_scheduler[1].pop("eta_min")
param_scheduler[1].eta_min_ratio = 0.05
train_cfg = dict(max_epochs=40, val_interval=2)
auto_scale_lr = dict(base_batch_size=512)
