"""The LSTM of the literature on federated text: it predicts the next character at every position."""

from torch import Tensor, nn

from fedcover.errors import InputError

EMBEDDING = 8
HIDDEN = 256
LAYERS = 2


class LSTM(nn.Module):
    """Two layers of 256 on embeddings of 8 channels: 0.82 million parameters.

    It is the model of Reddi et al., "Adaptive federated optimization" (ICLR 2021), for Shakespeare. Its units are the
    channels of the embedding and the hidden units, the same ones in both layers.

    Args:
        shape: Number of characters of an input, as a tuple of one entry.
        classes: Number of different characters.
        hidden: Hidden units of a layer.
    """

    def __init__(self, shape: tuple[int, ...] = (80,), classes: int = 96, hidden: int = HIDDEN) -> None:
        super().__init__()
        if len(shape) != 1:
            raise InputError(f"lstm needs rows of characters; got {tuple(shape)}; use the data set 'shakespeare'")
        self.embed = nn.Embedding(classes, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, hidden, LAYERS, batch_first=True)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the next character, of shape batch x characters x positions."""
        scores: Tensor = self.fc(self.lstm(self.embed(x))[0])
        return scores.transpose(1, 2)
