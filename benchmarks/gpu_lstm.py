"""The zoo's LSTM on one GPU: client-steps per second of a plain loop over clients and of the vectorized engine.

PYTHONPATH=src python -m benchmarks.gpu_lstm

The network of FedOpt for Shakespeare: two layers of 256, 80 characters, batch 4; 100 full models. The loop uses torch's
own layer, which calls cuDNN. See ``gpu_text.py``.
"""

from benchmarks.gpu_text import TextBenchmark, run
from fedcover.models import LSTM

CHARACTERS = 96


def lstm(quick: bool) -> LSTM:
    """Return the network."""
    return LSTM((8,), CHARACTERS, hidden=16) if quick else LSTM((80,), CHARACTERS)


LSTM_ON_TEXT = TextBenchmark(
    "gpu_lstm",
    "an LSTM of two layers of 256",
    lstm,
    length=(80, 8),
    characters=CHARACTERS,
    batch=4,
    models=100,
)

if __name__ == "__main__":
    run(LSTM_ON_TEXT, __doc__)
