# Adapters of a pretrained ViT-S/14, converted, on a tenth of Imagenette at 98 px: eight more linear
# tokens in each of q, k, v and o, and a new head, are trained; all old weights stay.
#
# Data:      tokenformer-vit prepare-data imagenette_parquet data/imagenette
# Weights:   python tools/pretrained_vit.py vit_small.safetensors
#            tokenformer-vit convert vit_small.safetensors work_dirs/converted \
#                --model vit_small_patch14_dinov2 --model-kwargs img_size=98
# Batch:     64
# Hardware:  one CPU core; minutes in ablations/TABLES.md
# Command:   tokenformer-vit train configs/tuning_imagenette.py
# Expected:  88.2 % top-1 (3 seeds; ablations/TABLES.md)
_base_ = "imagenette_stem.py"

model = dict(
    backbone=dict(
        _delete_=True,
        type="TimmClassificationBackbone",
        model_name="tokenformer_vit",
        checkpoint_path="work_dirs/converted/model.safetensors",
        img_size=98,
        patch_size=14,
        embed_dim=384,
        num_heads=6,
        theta=dict(qkv="linear", proj="linear", ffn="gelu"),
        pattention_args=dict(bias=True),
        norm="weight+bias",
        init_values=1.0,
        growth=dict(
            num_qkv_param_tokens=384 + 8,
            num_proj_param_tokens=384 + 8,
            freeze="old",
        ),
    ),
    head=dict(in_channels=384),
)
test_pipeline = _base_.test_pipeline
test_pipeline[1].update(input_size=(3, 98, 98))
train_pipeline = _base_.train_pipeline
train_pipeline[1] = test_pipeline[1]
train_pipeline[2].update(size=98, padding=12)
train_pipeline[4].update(shape=24)
train_dataloader = dict(batch_size=64, dataset=dict(share=0.1, pipeline=train_pipeline))
val_dataloader = dict(batch_size=100, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(optimizer=dict(type="AdamW", lr=3e-3))
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = param_scheduler[1].begin = 1
train_cfg = dict(max_epochs=8, val_interval=8)
default_hooks = dict(ema=dict(momentum=0.05))
auto_scale_lr = dict(base_batch_size=64)
