# TokenFormer-B/16 on ImageNet-1K with growth during the run, in one schedule of 300 epochs: a
# quarter of the pairs of imagenet_base up to epoch 100, half up to epoch 200, then all.
#
# Paper:     none; it grows language models only (arXiv:2410.23168, Section 3.3)
# Batch:     4096, as imagenet_base
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/growth_imagenet_base.py --launcher pytorch --amp \
#                --batch-size 128 --cfg-options optim_wrapper.accumulative_counts=4
# Expected:  not run; 60 % of the training FLOPs of imagenet_base
_base_ = "imagenet_base.py"

model = dict(
    backbone=dict(num_qkv_param_tokens=192, num_proj_param_tokens=192, num_ffn_param_tokens=768)
)
schedule = [
    dict(epoch=100, num_qkv_param_tokens=384, num_proj_param_tokens=384, num_ffn_param_tokens=1536),
    dict(epoch=200, num_qkv_param_tokens=768, num_proj_param_tokens=768, num_ffn_param_tokens=3072),
]
custom_hooks = [dict(type="CostHook"), dict(type="GrowthHook", schedule=schedule, init="zero_key")]
