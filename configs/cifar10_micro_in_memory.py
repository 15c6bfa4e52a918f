# cifar10_micro with its images in memory, on the GPU if there is one, and augmented by the batch.
#
# Paper:     none
# Data:      as for cifar10_micro
# Batch:     128
# Hardware:  not run in full
# Command:   tokenformer-vit train configs/cifar10_micro_in_memory.py
# Expected:  as cifar10_micro: the same augmentation, with other random numbers
_base_ = "cifar10_micro.py"

train_dataloader = dict(dataset=dict(type="ImagesInMemory"))
val_dataloader = dict(dataset=dict(type="ImagesInMemory"))
test_dataloader = val_dataloader
