"""Peak memory of a run on a data set that stays on disk, and its speed against data in memory.

python -m benchmarks.lazy_data [--gigabytes 5]: writes a file of random images (3 x 32 x 32 floats) to a temporary
folder, and trains one round of 100 clients on all of it, through a torch ``Dataset`` that reads one image at a time.
The peak is that of the process's resident memory. Speed is compared on a part that also fits into memory.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import fedcover as fc
from benchmarks import machine
from benchmarks.output import add_out, result_path, write_result
from fedcover.models import LeNet

SHAPE = (3, 32, 32)
BYTES = 4 * 3 * 32 * 32


class Images(Dataset[tuple[Tensor, int]]):
    """Images in one file, read one at a time."""

    def __init__(self, path: Path, count: int) -> None:
        self._path, self._count = path, count
        self.targets = (np.arange(count) % 10).tolist()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with self._path.open("rb") as file:
            file.seek(index * BYTES)
            pixels = np.frombuffer(file.read(BYTES), dtype=np.float32)
        return torch.from_numpy(pixels.reshape(SHAPE).copy()), self.targets[index]


def write(path: Path, count: int) -> None:
    """Write random images, a part at a time."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for start in range(0, count, 4096):
            file.write(rng.standard_normal((min(4096, count - start), *SHAPE), dtype=np.float32).tobytes())


def peak_memory() -> float:
    """Return the largest resident memory of this process so far, in gigabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def federation(data: object, clients: int) -> fc.Federation:
    """Return a federation of LeNet whose rounds visit every client."""
    torch.manual_seed(0)
    model = LeNet(SHAPE, 10)
    recipe = fc.LocalSGD(epochs=1, batch_size=32, lr=0.01)
    return fc.Federation(fc.Task(model), fc.data.iid(data, clients), local=recipe, cohort=clients)


def seconds_of_round(playing: fc.Federation, rounds: int = 3) -> float:
    """Return the seconds of the fastest round."""
    state, times = playing.start(), []
    for _ in range(rounds):
        start = time.perf_counter()
        state, _ = playing.play_round(state)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lazy_data", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=5.0, help="size of the data set")
    parser.add_argument("--part", type=int, default=6400, help="images of the comparison with data in memory")
    add_out(parser, "lazy-data.json")
    args = parser.parse_args()
    count = int(args.gigabytes * 1e9 / BYTES)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images"
        write(path, count)
        before = peak_memory()
        start = time.perf_counter()
        federation(Images(path, count), clients=100).run(1)
        whole, peak = time.perf_counter() - start, peak_memory()
        part = Images(path, args.part)
        lazy = seconds_of_round(federation(part, clients=10))
        inputs = torch.stack([part[index][0] for index in range(len(part))])
        eager = seconds_of_round(federation((inputs, torch.tensor(part.targets)), clients=10))
    result = {
        "command": f"python -m benchmarks.lazy_data --gigabytes {args.gigabytes:g} --part {args.part}",
        "machine": machine.facts(),
        "load": machine.load(),
        "gigabytes": round(count * BYTES / 1e9, 2),
        "images": count,
        "peak_gb_before": round(before, 3),
        "peak_gb": round(peak, 3),
        "seconds_of_all": round(whole, 1),
        "seconds_lazy": round(lazy, 3),
        "seconds_in_memory": round(eager, 3),
        "lazy_to_in_memory": round(lazy / eager, 3),
    }
    print(json.dumps(result, indent=1))
    write_result(result_path(parser, args, "lazy-data.json"), result)


if __name__ == "__main__":
    main()
