# imagenet_base at four sizes in one model, 114,759,400 parameters: a quarter to all of its pairs.
# It is trained by the sandwich rule; every size learns the labels.
#
# Paper:     none; the rule is that of slimmable networks (arXiv:1903.05134)
# Batch:     4096 = 8 GPUs x 64 with 8 steps of accumulation; a step holds three sizes in memory
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/imagenet_base_nested.py --launcher pytorch --amp \
#                --batch-size 64 --cfg-options optim_wrapper.accumulative_counts=8
# Expected:  not run; 1.9 times the training FLOPs of imagenet_base
_base_ = "imagenet_base.py"

model = dict(type="NestedClassifier", backbone=dict(nested=(0.25, 0.5, 0.75)))
custom_hooks = [dict(type="CostHook")]
