"""Convolutions as matrix products, for many clients at once.

A convolution whose weights differ from client to client is a grouped convolution to the libraries,
which run it group by group. Unfolded into patches it is one batched product.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class MatmulConv2d(nn.Module):
    """The same function as an ``nn.Conv2d`` without groups, with the same parameters, by unfolding."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        padding = [int(side) for side in conv.padding]
        self.sizes = list(zip(conv.kernel_size, conv.stride, padding, conv.dilation, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """The convolution of a batch of images."""
        kernel, stride, padding, dilation = zip(*self.sizes, strict=True)
        patches = F.unfold(x, kernel, dilation, padding, stride)
        out = self.weight.flatten(1) @ patches
        if self.bias is not None:
            out = out + self.bias.unsqueeze(1)
        sides = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1 for n, (k, s, p, d) in zip(x.shape[-2:], self.sizes, strict=True)
        ]
        found: Tensor = out.unflatten(-1, sides)
        return found


def use_matrix_products(model: nn.Module) -> None:
    """Replace the convolutions of a scratch model, in place, where they can be."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Conv2d) or type(child) is not nn.Conv2d:
                continue
            if child.groups == 1 and child.padding_mode == "zeros" and not isinstance(child.padding, str):
                setattr(parent, name, MatmulConv2d(child))
