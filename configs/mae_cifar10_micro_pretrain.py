# MAE pre-training of the TokenFormer of cifar10_micro on CIFAR-10, with patches of 4 px: an image
# has 64 of them, 16 stay visible. Patches of 8 px would leave 4.
#
# Data:      tokenformer-vit prepare-data cifar10_parquet data/cifar10
# Batch:     128
# Hardware:  one CPU core; not run in full
# Command:   tokenformer-vit train configs/mae_cifar10_micro_pretrain.py
# Expected:  not run
_base_ = "cifar10_micro_50k.py"

model = dict(
    type="MaskedAutoencoder",
    mask_ratio=0.75,
    backbone=dict(patch_size=4),
    neck=dict(
        _delete_=True,
        type="MAEPretrainDecoder",
        decoder_embed_dim=64,
        decoder_depth=1,  # as good as eight for fine-tuning (MAE, Table 1)
        decoder_num_heads=2,
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
)
data_preprocessor = dict(num_classes=None)
test_pipeline = _base_.test_pipeline
test_pipeline[-1].meta_keys = ("sample_idx",)  # it decides the mask of an image
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(_delete_=True, type="ReconstructionError")
test_evaluator = val_evaluator

# A higher rate than MAE's 1.5e-4 x 128 / 256: the run is short.
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={".mask_token": dict(decay_mult=0.0)}))
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = 2
param_scheduler[1].update(eta_min=0.0, begin=2)
train_cfg = dict(max_epochs=40, val_interval=4)
default_hooks = dict(ema=None)
