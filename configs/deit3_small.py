# TokenFormer-S/16 by DeiT III's recipe, at 224 px, from scratch: 29,077,480 parameters.
#
# Paper:     none; DeiT III's ViT-S: 81.4 % top-1 (arXiv:2204.07118)
# Batch:     2048 = 8 GPUs x 256
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/deit3_small.py --launcher pytorch --amp
# Expected:  not run
_base_ = "_base_/deit3.py"

model = dict(
    backbone=dict(model_name="tokenformer_small", img_size=224, drop_path_rate=0.05),
    head=dict(in_channels=384),
)
train_pipeline = _base_.train_pipeline
train_pipeline[1].size = 224
test_pipeline = _base_.test_pipeline
test_pipeline[1].input_size = (3, 224, 224)
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(optimizer=dict(lr=4e-3))
param_scheduler = _base_.param_scheduler
param_scheduler[0].start_factor = 1e-6 / 4e-3
