"""The losses by name; each maps (scores, labels) to the mean over the batch."""

import torch.nn.functional as F
from torch import Tensor

from fedcover.registry import Registry

LOSSES: Registry[Tensor] = Registry("loss")
LOSSES.register("cross_entropy")(F.cross_entropy)
LOSSES.register("bce_with_logits")(F.binary_cross_entropy_with_logits)
LOSSES.register("mse")(F.mse_loss)
LOSSES.register("l1")(F.l1_loss)
LOSSES.register("smooth_l1")(F.smooth_l1_loss)
LOSSES.register("nll")(F.nll_loss)
