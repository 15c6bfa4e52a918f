# cifar10_micro_50k, which also learns from a teacher: the model tokenformer_cifar10_micro, whose
# weights are in the package. Choose a better one by model.distillation.teacher=EXPORTED_FOLDER.
#
# Paper:     none; the loss is that of DeiT (arXiv:2012.12877)
# Data:      tokenformer-vit prepare-data cifar10_parquet data/cifar10
#            (download: configs/README.md, "Data")
# Batch:     128
# Hardware:  not run
# Command:   tokenformer-vit train configs/distill_cifar10_micro.py
# Expected:  not run
_base_ = "cifar10_micro_50k.py"

model = dict(
    type="DistilledClassifier",
    distillation=dict(
        teacher="tokenformer_cifar10_micro",
        checkpoint_path="",  # a local file of weights, if teacher is only a name
        labels="soft",
        weight=0.5,
        temperature=2.0,
    ),
)
