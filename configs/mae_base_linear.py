# Linear probe of TokenFormer-B/16 after mae_base_pretrain.py: only a head on the class token.
#
# Paper:     none for TokenFormer; the recipe of MAE (arXiv:2111.06377, Table 10), 90 epochs
# Weights:   work_dirs/mae_base_pretrain, the result of mae_base_pretrain.py
# Batch:     16384 = 8 GPUs x 2048
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/mae_base_linear.py --launcher pytorch --amp \
#                --batch-size 2048
# Expected:  not run (mmpretrain's ViT-B has 65.1 % top-1 after 800 epochs of pre-training)
_base_ = "imagenet_base.py"

model = dict(
    backbone=dict(
        checkpoint_path="work_dirs/mae_base_pretrain/model.safetensors",
        frozen=True,
        drop_path_rate=0.0,
    ),
    # Its features have no scale of their own. The export makes the norm a part of the head.
    neck=dict(_delete_=True, type="ClsBatchNormNeck", input_features=768),
    head=dict(
        init_cfg=dict(type="TruncNormal", layer="Linear", std=0.01, _delete_=True),
        loss=dict(type="CrossEntropyLoss", _delete_=True),
    ),
    train_cfg=None,
)
train_pipeline = _base_.train_pipeline
del train_pipeline[3:5]  # only crops and flips
train_dataloader = dict(drop_last=True, dataset=dict(pipeline=train_pipeline))

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type="LARS", lr=6.4, weight_decay=0.0, momentum=0.9)
)
param_scheduler = _base_.param_scheduler
param_scheduler[0].update(start_factor=1e-4, end=10)
param_scheduler[1].update(eta_min=0.0, begin=10, convert_to_iter_based=True)
train_cfg = dict(max_epochs=90)
default_hooks = dict(ema=None)
auto_scale_lr = dict(base_batch_size=16384)
