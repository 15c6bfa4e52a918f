# A second stage of growth on ImageNet-1K, as the paper does it: imagenet_base_matched gets the
# pairs of imagenet_base, then trains for 60 epochs with a new warm-up and cosine.
#
# Paper:     none; its language models train a tenth of the tokens a stage (arXiv:2410.23168, 3.3)
# Batch:     4096, as imagenet_base
# Command:   tokenformer-vit grow work_dirs/imagenet_base_matched work_dirs/imagenet_base_grown \
#                --qkv 768 --proj 768 --ffn 3072
#            torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/growth_imagenet_stage.py --launcher pytorch --amp \
#                --batch-size 128 --cfg-options optim_wrapper.accumulative_counts=4
# Expected:  not run
_base_ = "imagenet_base.py"

load_from = "work_dirs/imagenet_base_grown/model.safetensors"
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = param_scheduler[1].begin = 5
train_cfg = dict(max_epochs=60)
