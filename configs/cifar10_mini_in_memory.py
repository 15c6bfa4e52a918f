# cifar10_mini with its images in memory, on the GPU if there is one, and augmented by the batch.
#
# Paper:     none
# Data:      as for cifar10_mini
# Batch:     128
# Hardware:  not run
# Command:   tokenformer-vit train configs/cifar10_mini_in_memory.py
# Expected:  as cifar10_mini: the same augmentation, with other random numbers
_base_ = "cifar10_mini.py"

train_dataloader = dict(dataset=dict(type="ImagesInMemory"))
val_dataloader = dict(dataset=dict(type="ImagesInMemory"))
test_dataloader = val_dataloader
