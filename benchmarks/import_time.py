"""How long ``import fedcover`` takes beside ``import torch``, which is most of it.

python -m benchmarks.import_time [--repeats 15]: fresh processes, the two imports in turn. Wall-clock time suffers from
other work on the machine; CPU time hardly does.
"""

import argparse
import json
import statistics
import subprocess
import sys

from benchmarks import machine
from benchmarks.output import add_out, result_path, write_result

MODULES = ("torch", "fedcover")
SCRIPT = """
import json, time
wall, cpu = time.perf_counter(), time.process_time()
import {module}
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""


def import_seconds(module: str) -> tuple[float, float]:
    """Return wall-clock and CPU seconds of an import in a fresh process, without the interpreter's own start."""
    command = [sys.executable, "-c", SCRIPT.format(module=module)]
    wall, cpu = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return wall, cpu


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.import_time", description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="processes for each module")
    add_out(parser, "import-time.json")
    args = parser.parse_args()
    import_seconds("fedcover")  # fills the file cache and writes bytecode; it imports torch as well
    times: dict[str, list[tuple[float, float]]] = {module: [] for module in MODULES}
    for _ in range(args.repeats):
        for module in MODULES:
            times[module].append(import_seconds(module))
    result = {
        "command": f"python -m benchmarks.import_time --repeats {args.repeats}",
        "machine": machine.facts(),
        "load": machine.load(),
    }
    for place, clock in enumerate(("wall", "cpu")):
        torch, fedcover = (statistics.median(spent[place] for spent in times[module]) for module in MODULES)
        result[clock] = {"torch": round(torch, 3), "fedcover": round(fedcover, 3), "ratio": round(fedcover / torch, 3)}
    print(json.dumps(result, indent=1))
    write_result(result_path(parser, args, "import-time.json"), result)


if __name__ == "__main__":
    main()
