"""HeteroFL's convolutional network."""

from torch import Tensor, nn

from fedcover.errors import InputError

WIDTHS = (64, 128, 256, 512)


class CNN(nn.Module):
    """Four 3 x 3 convolutions of 64 to 512 channels with batch norm, halved three times: 1.6 million parameters.

    The network of Diao et al. (ICLR 2021) for MNIST; its Scaler is not a layer but a rule of local training.
    """

    def __init__(self, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < 8:
            raise InputError(f"cnn needs images of at least 8 x 8; these are {tuple(shape)}: use the mlp instead")
        layers: list[nn.Module] = []
        inputs = shape[0]
        for width in WIDTHS:
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
            inputs = width
        self.features = nn.Sequential(*layers[:-1])
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores for a batch of images."""
        scores: Tensor = self.fc(self.features(x).mean((2, 3)))
        return scores
