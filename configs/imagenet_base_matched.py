# TokenFormer-B†/16 on ImageNet-1K, as many parameters as ViT-B/16: 86,447,848, 17.56 GMACs.
#
# Paper:     82.1 % top-1 (arXiv:2410.23168, Table 4); ViT-B/16 by the same recipe: 82.3 %
# Batch:     4096 = 32 GPUs x 128, or 8 GPUs x 128 with 4 steps of accumulation
# Hardware:  not named in the paper; not run here
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/imagenet_base_matched.py --launcher pytorch --amp \
#                --cfg-options optim_wrapper.accumulative_counts=4
# Expected:  82.1 % in the paper; not run here
_base_ = "imagenet_base.py"

model = dict(backbone=dict(model_name="tokenformer_base_matched"))
