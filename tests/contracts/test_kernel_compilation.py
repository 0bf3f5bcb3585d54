"""Compile all kernels of a network for a GPU that is not there: Triton's compiler needs none, only its driver does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
DRIVER = """
import torch
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Driver:
    '''An H100 that loads kernels and launches none.'''
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device=None):
        return 0
    def launcher_cls(self, source, metadata):
        return None
    class utils:
        def get_device_properties(device):
            return {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}
        def load_binary(name, kernel, shared, device):
            loaded.append(name)
            return None, None, 32, 0, 1024

class Stream:
    query = lambda self: True

loaded = []
driver.set_active(Driver())
torch.cuda.current_device, torch.cuda.set_device, torch.cuda.current_stream = (lambda: 0), (lambda device: None), Stream

"""
IMAGES = """
import fedcover as fc
from fedcover.engines.vectorized import batched_step, launch, prepared_model
from fedcover.engines.vectorized.batch_table import batch_table
from fedcover.engines.vectorized.channels_last import use_channels_last
from fedcover.engines.vectorized.fusion import fuse_norms, trace_layers
from fedcover.engines.vectorized.layers import Arithmetic, Layers
from fedcover.engines.vectorized.precision import Precision
from fedcover.engines.vectorized.stacks import option_kinds

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.{norm}
        self.down, self.down_norm = nn.Conv2d(32, 32, 3, stride=2, padding=1, bias=False), nn.{norm}
        self.short, self.short_norm = nn.Conv2d(32, 32, 1, stride=2, bias=False), nn.{norm}
        self.out = nn.Linear(32, 3)
    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.out(torch.relu(self.down_norm(self.down(x)) + self.short_norm(self.short(x))).mean((2, 3)))

precision = Precision("{precision}")
def choose(model, example, arithmetic):
    traced = trace_layers(model, example)
    use_channels_last(traced, precision.compute_dtype, precision.numbers)
    assert fuse_norms(traced) == 3
    return Layers(traced, False, channels_last=True, kernels=True)
prepared_model.choose_layers = choose

images, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 3
clients = fc.data.iid((images, labels), clients=2, seed=0)
recipe = fc.LocalSGD(1, 4, weight_decay=0.1, clip=1.0)
federation = fc.Federation(fc.Task(Block()), clients, local=recipe, cohort=2)
jobs = federation.begin_round(federation.start()).jobs
engine = fc.Vectorized("cpu", precision="fp32")
table = batch_table(jobs, engine._indices)
kind = batched_step.StepKind(option_kinds(jobs)[0], False, True, 2, 2)
data = engine._steps.data_of(clients.examples, 16)
arithmetic = Arithmetic(torch.device("cpu"), precision, False)
prepared = prepared_model.prepare_model(federation.task.model, jobs[0], True, arithmetic)
step = batched_step.BatchedStep(prepared, jobs, table, kind, data, arithmetic)
launch.compile_kernels([step.try_kernels])
print(*sorted(set(loaded)), len(loaded))
"""
CHAINS = """
from fedcover.engines.vectorized import launch
from fedcover.engines.vectorized.chain_layers import chain_layers
from fedcover.engines.vectorized.chain_stacks import ChainStacks, ChainTiles, Clients
from fedcover.models import build
from fedcover.params import params_of
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.training.steps.chains import find_layers

shape = {shape}
model = build("{network}", shape, 10, 0)
keyed, stream = with_keyed_dropout(model, torch.zeros(1, *shape))
layers = chain_layers(find_layers(keyed.train(), stream, torch.zeros(1, *shape)))
data = torch.randn(20, *shape).flatten(1), torch.arange(20) % 10
stacks = ChainStacks(layers.linear, data, (4, 2, 10), ChainTiles(), layers.front)
zero = torch.zeros(2, dtype=torch.long)

def steps():
    stacks.start(Clients([params_of(model)], zero, [{}], zero, [0.1, 0.1], [0, 1]))
    stacks.take_steps(2, 0.9)

launch.compile_kernels([steps])
print(*sorted(set(loaded)), len(loaded))
"""
RECURRENT = """
from fedcover.engines.vectorized import launch, recurrent_cells
from fedcover.engines.vectorized.recurrent import use_stacked_recurrence

recurrent_cells.has_kernels = lambda x: True
layers = [nn.LSTM(8, 256), nn.GRU(8, 256)]

def steps():
    for layer in layers:
        use_stacked_recurrence(layer)
        for dtype in (torch.float32, torch.bfloat16):
            layer.to(dtype)(torch.randn(3, 4, 8, dtype=dtype))[0].sum().backward()

launch.compile_kernels([steps])
print(*sorted(set(loaded)), len(loaded))
"""
ADDITION = """
.version 8.4
.target sm_90a
.address_size 64
.visible .entry addition(.param .u64 result)
{
 .reg .b16 %rs<3>; .reg .b32 %r<5>; .reg .b64 %rd<2>;
 ld.param.b64 %rd1, [result];
 mov.u32 %r1, %tid.x;
 cvt.u16.u32 %rs1, %r1;
 mul.lo.s16 %rs2, %rs1, 7;
 mov.b32 %r2, {%rs2, %rs1};
 mov.b32 %r3, CONSTANT;
 add.s16x2 %r4, %r2, %r3;
 st.global.b32 [%rd1], %r4;
 ret;
}
"""


CORRECTED = "from fedcover.engines.vectorized import chain_stacks" + CHAINS.replace(
    "layers.front)", "layers.front, chain_stacks.Correction(True, 0.5))"
)
SCRIPTS = {
    "norms of batches": IMAGES.replace("{norm}", "BatchNorm2d(32)").replace("{precision}", "bf16"),
    "norms of groups": IMAGES.replace("{norm}", "GroupNorm(4, 32)").replace("{precision}", "tf32"),
    "mlp": CHAINS.replace("{network}", "mlp").replace("{shape}", "(1, 28, 28)"),
    "lenet": CHAINS.replace("{network}", "lenet").replace("{shape}", "(3, 32, 32)"),
    "corrected lenet": CORRECTED.replace("{network}", "lenet").replace("{shape}", "(3, 32, 32)"),
    "recurrent": RECURRENT,
}
FORKS = """
import os, sys
import fedcover, triton.backends.nvidia.compiler
for path in sys.argv[1:]:
    if (child := os.fork()) == 0:
        file = os.open(path + ".out", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1), os.dup2(file, 2)
        exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""
"""Runs scripts in processes of their own, for which torch is imported only once."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the scripts print, by their name; a kernel of several scripts is compiled once."""
    folder = tmp_path_factory.mktemp("kernels")
    paths = {name: folder / f"{name}.py" for name in SCRIPTS}
    for name, script in SCRIPTS.items():
        paths[name].write_text(DRIVER + script)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-W", "ignore", "-c", FORKS, *map(str, paths.values())]
    subprocess.run(command, env=environment, check=True)
    assert not [path for path in folder.rglob("*.ptx") if "add.s16x2" in path.read_text()]
    return {name: path.with_name(f"{path.name}.out").read_text() for name, path in paths.items()}


def kernels_of(text: str) -> tuple[set[str], int]:
    """Return the names of the kernels that a script compiled or loaded, and their number."""
    *names, count = text.split()
    assert count.isdecimal(), text[-2000:]
    return set(names), int(count)


@pytest.mark.parametrize("norm", ["batches", "groups"])
def test_all_kernels_of_a_step_compile_for_a_gpu(norm: str, printed: dict[str, str]) -> None:
    names, count = kernels_of(printed[f"norms of {norm}"])
    wanted = {"forward", "input_gradient", "weight_gradient", "normalise", "norm_part_sums", "norm_gradient"}
    wanted |= {"sgd_step", "sgd_square_sums"}
    wanted |= {"operand_largest", "operand_split"} if norm == "groups" else set()  # tf32, and not bf16
    assert wanted <= names, names
    assert count < 30  # each is compiled once, however many launches there are


@pytest.mark.parametrize(
    ("network", "wanted"),
    [
        ("mlp", {"start", "first_layer", "head"}),
        ("lenet", {"start", "head", "inner_forward", "inner_backward", "forward", "weight_gradient", "input_gradient",
                   "update"}),
    ],
)  # fmt: skip
def test_all_kernels_of_a_chain_compile_for_a_gpu(network: str, wanted: set[str], printed: dict[str, str]) -> None:
    names, count = kernels_of(printed[network])
    assert names == wanted
    assert count < 20


def test_an_assembled_kernel_keeps_the_constants_that_it_adds(tmp_path: Path) -> None:
    """The assembler drops the constant of a packed addition: kernels with other constants would be the same."""
    from triton.backends.nvidia.compiler import get_ptxas

    from fedcover.engines.vectorized.triton_compiler import separate_additions

    assembled = set()
    for constant in (90, 91, 90 << 16):
        path = tmp_path / f"{constant}.ptx"
        path.write_text(separate_additions(ADDITION.replace("CONSTANT", str(constant))))
        output = tmp_path / f"{constant}.cubin"
        subprocess.run([get_ptxas(90).path, "--gpu-name=sm_90a", str(path), "-o", str(output)], check=True)
        assembled.add(output.read_bytes())
    assert len(assembled) == 3


def test_kernels_with_corrections_compile_for_a_gpu(printed: dict[str, str]) -> None:
    names, count = kernels_of(printed["corrected lenet"])
    assert {"head", "inner_backward", "update"} <= names
    assert count < 20


def test_kernels_of_recurrent_layers_compile_for_a_gpu(printed: dict[str, str]) -> None:
    names, count = kernels_of(printed["recurrent"])
    assert names == {"lstm_step", "lstm_gradients", "gru_step", "gru_gradients"}
    assert count == 8  # for each of two precisions, however many time steps there are
