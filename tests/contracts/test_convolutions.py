"""Convolutions of many clients at once against ``nn.Conv2d`` client by client in double precision.

Without a GPU, torch's convolutions stand in for the kernels, so that the code around them is tested everywhere.
"""

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedcover.engines.vectorized import convolutions
from fedcover.engines.vectorized.convolutions import DirectConv2d, MatmulConv2d, use_stacked_convolutions
from tests.contracts.federations import DEVICES


@convolutions.convolution.register_kernel("cpu")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, how: Sequence[int]) -> Tensor:
    how = tuple(how)
    biases = [None] * len(x) if bias is None else list(bias)
    return torch.stack(
        [F.conv2d(a, w, b, how[:2], how[2:4], how[4:]) for a, w, b in zip(x, weight, biases, strict=True)]
    )


@convolutions.weight_gradient.register_kernel("cpu")
def _(d: Tensor, x: Tensor, kernel: Sequence[int], how: Sequence[int]) -> Tensor:
    shape, how = (d.shape[2], x.shape[2], *kernel), tuple(how)
    gradients = [
        torch.nn.grad.conv2d_weight(a, shape, b, how[:2], how[2:4], how[4:]).flatten(1)
        for a, b in zip(x, d, strict=True)
    ]
    return torch.cat([torch.stack(gradients), d.sum((1, 3, 4)).unsqueeze(-1)], -1)


@convolutions.input_gradient.register_kernel("cpu")
def _(d: Tensor, weight: Tensor, size: Sequence[int], how: Sequence[int]) -> Tensor:
    shape, how = (d.shape[1], weight.shape[2], *size), tuple(how)
    return torch.stack(
        [torch.nn.grad.conv2d_input(shape, w, b, how[:2], how[2:4], how[4:]) for w, b in zip(weight, d, strict=True)]
    )


CASES: dict[str, tuple[nn.Conv2d, tuple[int, int]]] = {
    "LeNet's first": (nn.Conv2d(3, 6, 5), (32, 32)),
    "LeNet's second": (nn.Conv2d(6, 16, 5), (14, 14)),
    "padded": (nn.Conv2d(1, 6, 3, padding=1), (6, 6)),
    "no bias": (nn.Conv2d(2, 3, 4, stride=3, padding=(2, 1), bias=False), (8, 8)),
    "uneven": (nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (9, 11)),
    "many channels": (nn.Conv2d(20, 40, 2, stride=(1, 2), padding=(0, 1), dilation=(2, 1)), (7, 6)),
    "large kernel": (nn.Conv2d(4, 9, 7, stride=2, padding=3), (9, 9)),
    "one entry": (nn.Conv2d(4, 5, 1), (5, 5)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_clients_at_once_agree_with_each_by_itself(case: str, device: str) -> None:
    conv, size = CASES[case]
    clients, batch = 3, 10
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(device)

    theta = {name: draw(clients, *p.shape) for name, p in conv.named_parameters()}
    x = draw(clients, batch, conv.in_channels, *size)
    model = nn.Sequential(copy.deepcopy(conv)).to(device)
    use_stacked_convolutions(model)
    assert type(model[0]) is (MatmulConv2d if case == "one entry" else DirectConv2d)

    d = draw(clients, *conv(x[0].cpu()).shape)

    def loss(theta: dict[str, Tensor], x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        out = functional_call(model[0], theta, (x,))
        return (out * d).sum(), out

    (of_theta, of_x), out = vmap(grad(loss, argnums=(0, 1), has_aux=True))(theta, x, d)
    for i in range(clients):
        single = copy.deepcopy(conv).to(device).double()
        with torch.no_grad():
            for name, p in single.named_parameters():
                p.copy_(theta[name][i])
        image = x[i].double().requires_grad_()
        expected = single(image)
        expected.backward(d[i].double())
        pairs = [(out[i], expected.detach()), (of_x[i], image.grad)]
        pairs += [(of_theta[name][i], p.grad) for name, p in single.named_parameters()]
        for actual, wanted in pairs:
            assert wanted is not None
            assert actual.shape == wanted.shape
            assert float((actual - wanted).norm() / wanted.norm()) < 2e-6


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels do not read constants again")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", ["padded", "uneven"])
def test_patches_are_the_same_along_either_axis_of_lanes(
    case: str, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter runs the kernels, with the axis of lanes of older and of newer compilers."""
    kernels = pytest.importorskip("fedcover.engines.vectorized.convolution_kernels")
    language = pytest.importorskip("triton.language")
    monkeypatch.setattr(kernels, "LANES_RUN_LAST", language.constexpr(last))
    (conv, size), rng = CASES[case], torch.Generator().manual_seed(0)
    how = [*conv.stride, *map(int, conv.padding), *conv.dilation]
    x = torch.randn(2, 3, conv.in_channels, *size, generator=rng)
    weight = torch.randn(2, *conv.weight.shape, generator=rng)
    bias = torch.randn(2, conv.out_channels, generator=rng)
    out = kernels.forward(x, weight, bias, how)
    torch.testing.assert_close(out, convolutions.convolution(x, weight, bias, how), atol=1e-5, rtol=1e-5)
    d, kernel = torch.randn(out.shape, generator=rng), conv.kernel_size
    expected = convolutions.weight_gradient(d, x, kernel, how)
    torch.testing.assert_close(kernels.weight_gradient(d, x, kernel, how), expected, atol=1e-4, rtol=1e-5)


def test_clients_that_share_images() -> None:
    conv = DirectConv2d(nn.Conv2d(2, 3, 3))
    theta = {"weight": torch.randn(4, 3, 2, 3, 3), "bias": torch.randn(4, 3)}
    x = torch.randn(5, 2, 6, 6)
    out = vmap(lambda theta: functional_call(conv, theta, (x,)))(theta)
    for i in range(4):
        torch.testing.assert_close(out[i], F.conv2d(x, theta["weight"][i], theta["bias"][i]))


def test_supported_convolutions_are_replaced() -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.Conv2d(4, 4, 8), nn.Conv2d(4, 4, 3).double(),
    )  # fmt: skip
    use_stacked_convolutions(net)
    assert [type(layer) for layer in net] == [
        DirectConv2d, nn.Conv2d, nn.Conv2d, nn.Conv2d, MatmulConv2d, MatmulConv2d
    ]  # fmt: skip
