# TokenFormer-Ti/16 on ImageNet-1K, from scratch: 7,456,936 parameters, 1.60 GMACs.
#
# Paper:     no model of this size
# Batch:     4096 = 32 GPUs x 128, or 8 GPUs x 512
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/imagenet_tiny.py --launcher pytorch --amp \
#                --batch-size 512
# Expected:  not run
_base_ = "imagenet_base.py"

model = dict(backbone=dict(model_name="tokenformer_tiny"), head=dict(in_channels=192))
