# The second stage of deit3_base: 20 epochs at 224 px, 114,777,064 parameters.
#
# Paper:     none; DeiT III's ViT-B: 83.8 % top-1 (arXiv:2204.07118)
# Start:     work_dirs/deit3_base/model.safetensors, which deit3_base writes
# Batch:     512 = 8 GPUs x 64
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/deit3_base_224.py --launcher pytorch --amp
# Expected:  not run
_base_ = "_base_/deit3_224.py"

start = "work_dirs/deit3_base/model.safetensors"
model = dict(backbone=dict(checkpoint_path=start), head=dict(init_cfg=dict(checkpoint=start)))
