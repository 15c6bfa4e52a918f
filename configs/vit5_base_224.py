# The second stage of vit5_base: 20 epochs at 224 px, 114,779,368 parameters.
#
# Paper:     none; ViT-5's ViT-B: 84.2 % top-1 (arXiv:2602.08071)
# Start:     work_dirs/vit5_base/model.safetensors, which vit5_base writes
# Batch:     512 = 8 GPUs x 64
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/vit5_base_224.py --launcher pytorch --amp
# Expected:  not run
_base_ = "_base_/deit3_224.py"

start = "work_dirs/vit5_base/model.safetensors"
model = dict(
    backbone=dict(
        model_name="tokenformer_base_rope_reg4",
        norm="rms",
        drop_path_rate=0.25,
        checkpoint_path=start,
    ),
    head=dict(init_cfg=dict(checkpoint=start)),
)
