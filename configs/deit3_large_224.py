# The second stage of deit3_large: 20 epochs at 224 px, 404,718,568 parameters.
#
# Paper:     none; DeiT III's ViT-L: 84.9 % top-1 (arXiv:2204.07118)
# Start:     work_dirs/deit3_large/model.safetensors, which deit3_large writes
# Batch:     512 = 8 GPUs x 64
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/deit3_large_224.py --launcher pytorch --amp
# Expected:  not run
_base_ = "_base_/deit3_224.py"

start = "work_dirs/deit3_large/model.safetensors"
model = dict(
    backbone=dict(model_name="tokenformer_large", drop_path_rate=0.45, checkpoint_path=start),
    head=dict(in_channels=1024, init_cfg=dict(checkpoint=start)),
)
