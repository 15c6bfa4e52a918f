# TokenFormer-S/16 on ImageNet-1K, from scratch: 29,068,648 parameters, 5.99 GMACs.
#
# Paper:     no model of this size
# Batch:     4096 = 32 GPUs x 128, or 8 GPUs x 256 with 2 steps of accumulation
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/imagenet_small.py --launcher pytorch --amp \
#                --batch-size 256 --cfg-options optim_wrapper.accumulative_counts=2
# Expected:  not run
_base_ = "imagenet_base.py"

model = dict(backbone=dict(model_name="tokenformer_small"), head=dict(in_channels=384))
