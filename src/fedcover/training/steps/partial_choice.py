"""The choice between partial steps and steps of the whole model whose gradients are masked.

Partial steps take less memory than masked gradients: gradients and moments are those of the part. Whether they take
less time depends on the device. On a CPU arithmetic takes the time. On a GPU launches do, and a part of a tensor needs
more of them than the whole: its values are written into the tensor, and its gradient is cut.
"""

from torch import Tensor, nn

from fedcover.params import Mask, numbers
from fedcover.training.steps.native.layers import MOST_WEIGHTS
from fedcover.training.steps.stepper import MOST_TENSORS

FEWEST_ENTRIES = 1 << 18
"""On a CPU: the number of trained entries from which smaller products save more time than the further calls take."""
CUT_LAUNCHES = 8
"""On a GPU: the launches that a step has more for each tensor of which a part is trained."""
UNTRAINED_LAUNCHES = 4
"""On a GPU: the launches that a step has less for each tensor of which nothing is trained."""


def pays(model: nn.Module, mask: Mask) -> bool:
    """Return whether partial steps take less time than other fast paths, or about as much and less memory.

    Args:
        model: The model, on the device on which it is trained.
        mask: The client's mask.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if trained and trained[0].device.type == "cuda":
        return pays_on_gpu(mask)
    return _pays_on_cpu(trained, mask)


def _pays_on_cpu(trained: list[nn.Parameter], mask: Mask) -> bool:
    """Return whether partial steps pay on a CPU.

    Models of few tensors are traced, and the C library trains chains of them, in less time than autograd takes to call
    operations. Neither helps models of more tensors or with large convolutions. Of these, small ones gain only if
    whole tensors are not trained, so that the backward pass is shorter.
    """
    convolves = any(tensor.ndim > 2 and tensor.numel() > MOST_WEIGHTS for tensor in trained)
    if len(trained) <= MOST_TENSORS and not convolves:
        return False
    large = sum(tensor.numel() for tensor in trained) >= FEWEST_ENTRIES
    return large or not all(bool(kept.any()) for kept in mask.values())


def pays_on_gpu(mask: Mask) -> bool:
    """Return whether partial steps have fewer launches, or as many.

    With parts of all weights of ResNet-18 they take 1.5 to 2.3 times as long as whole steps, in batches of 10 and 128.
    """
    facts: list[Tensor] = [fact for kept in mask.values() for fact in (kept.any(), kept.all())]
    flags = iter(numbers(facts))  # one transfer from the GPU
    kinds: list[tuple[bool, bool]] = [(next(flags), next(flags)) for _ in mask]
    more = CUT_LAUNCHES * sum(some and not every for some, every in kinds)
    less = UNTRAINED_LAUNCHES * sum(not some for some, _ in kinds)
    return more <= less
