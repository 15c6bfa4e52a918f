# Fine-tuning of TokenFormer-B/16 after mae_base_pretrain.py, with all labels of ImageNet-1K.
#
# Paper:     none for TokenFormer; the recipe of MAE (arXiv:2111.06377, Table 9), 100 epochs
# Weights:   work_dirs/mae_base_pretrain, the result of mae_base_pretrain.py
# Batch:     1024 = 8 GPUs x 128
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/mae_base_finetune.py --launcher pytorch --amp \
#                --batch-size 128
# Expected:  not run (mmpretrain's ViT-B has 83.3 % top-1 after 800 epochs of pre-training)
_base_ = "imagenet_base.py"

model = dict(
    backbone=dict(
        checkpoint_path="work_dirs/mae_base_pretrain/model.safetensors",
        global_pool="avg",  # with a new norm after it
    ),
    head=dict(init_cfg=dict(type="TruncNormal", layer="Linear", std=2e-5, _delete_=True)),
)
optim_wrapper = dict(
    constructor="MergedLayerDecayConstructor",
    optimizer=dict(lr=2e-3, weight_decay=0.05, betas=(0.9, 0.999)),
    paramwise_cfg=dict(layer_decay_rate=0.65),
)
param_scheduler = _base_.param_scheduler
param_scheduler[0].update(start_factor=1e-4, end=5)
param_scheduler[1].update(eta_min=1e-6, begin=5, convert_to_iter_based=True)
train_cfg = dict(max_epochs=100)
default_hooks = dict(ema=None)
auto_scale_lr = dict(base_batch_size=1024)
