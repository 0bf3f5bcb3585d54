"""Linux is what is supported; elsewhere the package is imported and the serial engine works.

A process without the modules and functions that only POSIX or Linux has, and without a C compiler, stands for such a
system. They are hidden after torch is imported, which has its own ways on each system, and before fedcover is.
"""

import os
import subprocess
import sys
from pathlib import Path

HIDE = """
import multiprocessing, os, signal, sys, warnings
import torch, torch.utils.data, torch.library
for name in ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
for name in (
    "sched_getaffinity", "sched_setaffinity", "fork", "forkpty", "getuid", "geteuid", "getpgid", "killpg", "setsid",
    "sysconf", "getloadavg", "uname", "mkfifo", "fchmod", "statvfs", "nice",
):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGALRM", "setitimer"):
    delattr(signal, name)
multiprocessing.get_all_start_methods = lambda: ["spawn"]
import fedcover as fc

x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()

def federation(**options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    return fc.Federation(fc.Task(net), fc.data.iid((x, y), clients=5), policy=fc.weight_pruning(),
                         budgets=fc.by_slot("147"), cohort=3, **options)
"""


SCRIPT = (
    HIDE
    + """
print(len(federation().run(2, evaluate_on=(x, y))))

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    federation().run(1, out="run")
    history = federation().run(2, out="run", resume=True)
print(len(history), sum(issubclass(one.category, RuntimeWarning) for one in caught))
print(all("run" in str(one.message) for one in caught))

from fedcover.engines.choose import choose_engine
print(choose_engine("auto", workers=2, cohort=10).name)
try:
    fc.Processes(2, shrink=False)
except fc.InputError as error:
    print("serial" in str(error))

warnings.simplefilter("default")
from fedcover.__main__ import main
changes = ("data.name=digits", "data.clients=20", "rounds=1", "engine=serial")
sys.argv = ["fedcover", "run", *(word for change in changes for word in ("--set", change))]
main()
"""
)


def test_the_serial_engine_run_folders_and_the_command_line_work(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    environment = {**os.environ, "CC": "no-such-compiler"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    rounds, resumed, named, engine, refused, *rest = done.stdout.splitlines()
    assert rounds == "2"
    assert (resumed, named) == ("2 2", "True")  # a warning for each opening of the folder, instead of a lock
    assert len((tmp_path / "run" / "history.jsonl").read_text().splitlines()) == 2
    assert (engine, refused) == ("serial", "True")
    assert "accuracy" in "\n".join(rest)
