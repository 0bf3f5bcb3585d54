"""HeteroFL's convolutional model."""

from torch import Tensor, nn

from fedcover.errors import InputError

WIDTHS = (64, 128, 256, 512)


class CNN(nn.Module):
    """Four 3 x 3 convolutions of 64 to 512 channels with batch norm and three poolings: 1.6 million parameters.

    The model of Diao et al. (ICLR 2021) for MNIST. Their Scaler is not a layer here but an option of local training.

    Args:
        shape: Shape of one image, at least 8 x 8.
        classes: Number of classes.
    """

    def __init__(self, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < 8:
            raise InputError(f"cnn needs images of at least 8 x 8; got {tuple(shape)}; use the mlp instead")
        layers: list[nn.Module] = []
        inputs = shape[0]
        for width in WIDTHS:
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
            inputs = width
        self.features = nn.Sequential(*layers[:-1])
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        scores: Tensor = self.fc(self.features(x).mean((2, 3)))
        return scores
