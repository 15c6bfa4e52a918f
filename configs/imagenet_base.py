# TokenFormer-B/16 on ImageNet-1K, from scratch: 114,759,400 parameters, 23.14 GMACs.
#
# Paper:     82.5 % top-1 (arXiv:2410.23168, Table 4), MAE's supervised recipe, 300 epochs
# Batch:     4096 = 32 GPUs x 128, or 8 GPUs x 128 with 4 steps of accumulation
# Hardware:  not named in the paper; not run here
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/imagenet_base.py --launcher pytorch --amp \
#                --batch-size 128 --cfg-options optim_wrapper.accumulative_counts=4
# Expected:  82.5 % in the paper; not run here
_base_ = ["_base_/tokenformer.py", "_base_/imagenet.py", "_base_/mae_supervised.py"]
