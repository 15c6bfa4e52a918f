# TokenFormer-L†/16 on ImageNet-1K, as many parameters as ViT-L/16: 304,007,144, 61.55 GMACs.
#
# Paper:     83.0 % top-1 (arXiv:2410.23168, Table 4); ViT-L/16 by the same recipe: 82.6 %
# Batch:     4096 = 32 GPUs x 128, or 8 GPUs x 64 with 8 steps of accumulation
# Hardware:  not named in the paper; not run here
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/imagenet_large_matched.py --launcher pytorch --amp \
#                --batch-size 64 --cfg-options optim_wrapper.accumulative_counts=8
# Expected:  83.0 % in the paper; not run here
_base_ = "imagenet_large.py"

model = dict(backbone=dict(model_name="tokenformer_large_matched"))
