# The TokenFormer of cifar10_micro fine-tuned on Imagenette at 32 px: only 5 % more pairs and a new
# head are trained; all weights from CIFAR-10 stay.
#
# Data:      tokenformer-vit prepare-data imagenette_parquet data/imagenette_small \
#                --limit 3000 --limit-val 1000
# Weights:   tokenformer-vit train configs/cifar10_micro.py
# Batch:     64
# Hardware:  one CPU core; minutes in ablations/TABLES.md
# Command:   tokenformer-vit train configs/tuning_imagenette.py
# Expected:  the figures of ablations/TABLES.md
_base_ = "cifar10_micro.py"

model = dict(
    backbone=dict(
        checkpoint_path="work_dirs/cifar10_micro/model.safetensors",
        growth=dict(
            num_qkv_param_tokens=96 + 5,
            num_proj_param_tokens=96 + 5,
            num_ffn_param_tokens=384 + 20,
            freeze="old",
        ),
    )
)
train_pipeline = _base_.train_pipeline
train_pipeline[1] = dict(
    type="v2/RandomResizedCrop", size=32, scale=(0.5, 1.0), interpolation="bicubic"
)
train_dataloader = dict(
    batch_size=64, dataset=dict(data_root="data/imagenette_small", pipeline=train_pipeline)
)
val_dataloader = dict(dataset=dict(data_root="data/imagenette_small"))
test_dataloader = val_dataloader

optim_wrapper = dict(optimizer=dict(lr=1e-2))
train_cfg = dict(max_epochs=8)
auto_scale_lr = dict(base_batch_size=64)
