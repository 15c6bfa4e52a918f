# TokenFormer-L/16 by DeiT III's recipe, first stage at 192 px: 404,665,320 parameters.
#
# Paper:     none; DeiT III's ViT-L: 84.9 % top-1 after both stages (arXiv:2204.07118)
# Batch:     2048 = 32 GPUs x 64, or 8 GPUs x 64 with 4 steps of accumulation
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/deit3_large.py --launcher pytorch --amp \
#                --cfg-options optim_wrapper.accumulative_counts=4
# Expected:  not run
_base_ = "_base_/deit3.py"

model = dict(
    backbone=dict(model_name="tokenformer_large", drop_path_rate=0.45),
    head=dict(in_channels=1024),
)
train_dataloader = dict(batch_size=64)
