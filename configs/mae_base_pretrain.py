# MAE pre-training of TokenFormer-B/16 on ImageNet-1K, without labels.
#
# Paper:     none for TokenFormer; the recipe of MAE (arXiv:2111.06377, Table 8), 800 epochs
# Batch:     4096 = 8 GPUs x 512
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/mae_base_pretrain.py --launcher pytorch \
#                --batch-size 512
# Expected:  not run (fine-tuned as by mae_base_finetune.py, mmpretrain's ViT-B has 83.3 % top-1)
_base_ = "imagenet_base.py"

model = dict(
    type="MaskedAutoencoder",
    mask_ratio=0.75,
    backbone=dict(drop_path_rate=0.0),
    neck=dict(
        _delete_=True,
        type="MAEPretrainDecoder",
        decoder_embed_dim=512,
        decoder_depth=8,
        decoder_num_heads=16,
        mlp_ratio=4.0,
        init_cfg=[
            dict(type="Xavier", layer="Linear", distribution="uniform"),
            dict(type="Constant", layer="LayerNorm", val=1.0, bias=0.0),
        ],
    ),
    head=dict(
        _delete_=True,
        type="MAEPretrainHead",
        norm_pix=True,
        loss=dict(type="PixelReconstructionLoss", criterion="L2"),
    ),
    train_cfg=None,
)
data_preprocessor = dict(num_classes=None)
train_pipeline = _base_.train_pipeline
train_pipeline[1].scale = (0.2, 1.0)
del train_pipeline[3:5]  # only crops and flips
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
test_pipeline = _base_.test_pipeline
test_pipeline[-1].meta_keys = ("sample_idx",)  # it decides the mask of an image
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(_delete_=True, type="ReconstructionError")
test_evaluator = val_evaluator

optim_wrapper = dict(
    type="AutocastOptimWrapper",
    optimizer=dict(lr=1.5e-4 * 4096 / 256, weight_decay=0.05),
    paramwise_cfg=dict(custom_keys={".mask_token": dict(decay_mult=0.0)}),
)
param_scheduler = _base_.param_scheduler
param_scheduler[0].update(start_factor=1e-9, end=40)
param_scheduler[1].update(eta_min=0.0, begin=40, convert_to_iter_based=True)
train_cfg = dict(max_epochs=800, val_interval=20)

default_hooks = dict(ema=None)
