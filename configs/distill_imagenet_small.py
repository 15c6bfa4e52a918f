# imagenet_small with a distillation token, which learns from DeiT's teacher, a RegNetY-16GF of 84 M
# parameters. timm downloads its weights. Any classifier of timm for the same classes can be the
# teacher.
#
# Paper:     none; DeiT-S has 79.8 % from labels and 81.2 % from hard labels of this teacher, with
#            DeiT's recipe (arXiv:2012.12877)
# Batch:     4096 = 8 GPUs x 256 with 2 steps of accumulation
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/distill_imagenet_small.py --launcher pytorch --amp \
#                --batch-size 256 --cfg-options optim_wrapper.accumulative_counts=2
# Expected:  not run
_base_ = "imagenet_small.py"

model = dict(
    type="DistilledClassifier",
    backbone=dict(model_name="tokenformer_small_distilled"),
    head=dict(type="DistilledHead"),
    distillation=dict(
        teacher="regnety_160.deit_in1k",
        checkpoint_path="",  # a local file of weights, if teacher is only a name
        labels="hard",
        weight=0.5,
        temperature=1.0,  # for soft labels
    ),
)
