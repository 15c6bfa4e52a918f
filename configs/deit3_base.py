# TokenFormer-B/16 by DeiT III's recipe, first stage at 192 px: 114,737,128 parameters.
#
# Paper:     none; DeiT III's ViT-B (arXiv:2204.07118, its log): 67.2, 73.0, 78.0, 81.8 and 82.8 %
#            top-1 at 192 px after 100, 200, 400, 600 and 800 epochs, then 83.8
# Batch:     2048 = 8 GPUs x 256
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/deit3_base.py --launcher pytorch --amp
# Expected:  not run
_base_ = "_base_/deit3.py"
