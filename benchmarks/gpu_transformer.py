"""The zoo's transformer on one GPU: client-steps per second of a plain loop over clients and of the vectorized engine.

PYTHONPATH=src python -m benchmarks.gpu_transformer

Four layers, a stream of 256 channels, eight heads, 128 characters, batch 10; 50 full models. See ``gpu_text.py``.
"""

from benchmarks.gpu_text import TextBenchmark, run
from fedcover.models import Transformer

CHARACTERS = 64


def transformer(quick: bool) -> Transformer:
    """Return the network."""
    if quick:
        return Transformer((16,), CHARACTERS, width=32, head=16, layers=2)
    return Transformer((128,), CHARACTERS, width=256, head=32, layers=4)


TRANSFORMER = TextBenchmark(
    "gpu_transformer",
    "a transformer of four layers and width 256",
    transformer,
    length=(128, 16),
    characters=CHARACTERS,
    batch=10,
    models=50,
)

if __name__ == "__main__":
    run(TRANSFORMER, __doc__)
