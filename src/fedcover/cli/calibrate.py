"""``fedcover calibrate``: what pruning saves on this device, and the bandwidth of its link."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedcover._files import check_writable, write_atomically
from fedcover.calibration import Calibration, weight_seconds
from fedcover.calibration import calibrate as time_steps
from fedcover.calibration.timing import this_device
from fedcover.cli.console import friendly, out, say, show_table
from fedcover.cli.options import JsonOption, ModelOption
from fedcover.config.task_and_data import model_and_example
from fedcover.data import names, shape_of
from fedcover.deploy import bandwidth
from fedcover.deploy.address import parse_address
from fedcover.errors import InputError
from fedcover.models import INPUT_SHAPES
from fedcover.report.format import megabytes

KEEPS = "0.25,0.5,0.75,1"

app = typer.Typer(
    no_args_is_help=True,
    help="Measure what pruning saves on this device, and the bandwidth of its link.\n\n"
    "Budgets in seconds need `fedcover calibrate steps --out device.json`, and for transfer times "
    "`fedcover calibrate link SERVER:5201 --out device.json`.",
)

KeepsOption = Annotated[str, typer.Option(help="The fractions of the model to time.")]
BatchOption = Annotated[int, typer.Option(help="Examples per batch.")]


@app.command("steps")
@friendly
def steps(
    model: ModelOption = "mlp",
    whole_units: Annotated[
        bool, typer.Option("--whole-units", help="Prune whole units, which are cut out of the model.")
    ] = False,
    complement: Annotated[
        bool, typer.Option("--complement", help="Let clients see the whole model, and train the fraction of it.")
    ] = False,
    keeps: KeepsOption = KEEPS,
    batch: BatchOption = 10,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the calibration here, as JSON.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time a training step on this device at each fraction of the model.

    Steps are timed as `fedcover run` takes them, on one thread and random data.
    """
    if out_file is not None:
        check_writable(out_file)  # before minutes of timing
    calibration = time_steps(
        *model_and_example(model), _fractions(keeps), batch, whole_units, model, complement=complement
    )
    _deliver(calibration, out_file, as_json)


@app.command("weights")
@friendly
def weights(
    model: ModelOption = "mlp",
    keeps: KeepsOption = KEEPS,
    batch: BatchOption = 10,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the settings here, as TOML.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the seconds that one weight of each layer costs, as settings of PruneFL.

    PruneFL decides by these: `fedcover calibrate weights --out prunefl.toml`, then `fedcover run prunefl.toml`.
    """
    if out_file is not None:
        check_writable(out_file)
    fractions = [keep for keep in _fractions(keeps) if keep != 1]
    seconds, fixed = weight_seconds(*model_and_example(model), fractions, batch)
    text = _prunefl_settings(model, batch, seconds, fixed)
    if out_file is not None:
        write_atomically(out_file, text)
    if as_json:
        out.print_json(data={"seconds": seconds, "fixed": fixed})
        return
    out.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    if not any(seconds.values()):
        out.print("# single weights cost nothing here: pruning them saves no time on this device")
    if out_file is not None:
        out.print(f"# written to {out_file}; `fedcover run {out_file}` uses it")


@app.command("link")
@friendly
def link(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where `fedcover calibrate serve` is running.")],
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Add the rates to this file of `fedcover calibrate steps`.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the bandwidth between this device and a server.

    Run `fedcover calibrate serve 0.0.0.0:5201` on the server first, then `fedcover calibrate link SERVER:5201` here.
    """
    calibration = Calibration.load(out_file) if out_file is not None else None
    down, up = bandwidth.measure(*parse_address(server))
    if calibration is not None:
        _deliver(replace(calibration, down=down, up=up), out_file, as_json)
    elif as_json:
        out.print_json(data={"down": down, "up": up})
    else:
        out.print(_link_line(down, up))


@app.command("serve")
@friendly
def serve(
    address: Annotated[str, typer.Argument(metavar="[HOST:]PORT", help="Where to listen; by default on loopback.")],
) -> None:
    """Answer one `fedcover calibrate link`, then exit.

    Only this machine can connect unless a host is given: `fedcover calibrate serve 0.0.0.0:5201`.
    """
    host, port = parse_address(address)

    def announce(bound: int) -> None:
        say("link", f"waiting for one device at {host}:{bound}", "bold")

    bandwidth.serve(port, host=host, ready=announce)
    out.print("link measured; the device has the results")


def _deliver(calibration: Calibration, out_file: Path | None, as_json: bool) -> None:
    """Write and show a calibration."""
    if out_file is not None:
        write_atomically(out_file, calibration.to_json())
    if as_json:
        out.print_json(calibration.to_json())
        return
    _show(calibration)
    if out_file is not None:
        out.print(f"written to {out_file}")


def _prunefl_settings(model: str, batch: int, seconds: dict[str, float], fixed: float) -> str:
    """Return the settings of a run of PruneFL with these costs, as TOML."""
    lines = [
        f"# Seconds of a training step of {batch} examples: per weight of each layer, and the fixed rest.",
        f"# {this_device()}",
        f"[model]\nname = {json.dumps(model)}\n",
        f"{_data_set_for(model)}[local]\nbatch_size = {batch}\n",
        f'[policy]\nname = "PruneFL"\nfixed = {fixed:.6g}\n\n[policy.seconds]',
        *(f"{json.dumps(name)} = {value:.6g}" for name, value in seconds.items()),
    ]
    return "\n".join(lines) + "\n"


def _data_set_for(model: str) -> str:
    """Return settings with the first data set whose inputs have the shape on which a model is timed; "" for an own."""
    if model not in INPUT_SHAPES:
        return ""
    name = next(name for name in names() if shape_of(name)[0] == INPUT_SHAPES[model])
    return f"[data]\nname = {json.dumps(name)}\n\n"


def _fractions(text: str) -> list[float]:
    try:
        return [float(item) for item in text.split(",")]
    except ValueError:
        raise InputError(f"--keeps must be fractions with commas, such as 0.25,0.5,1; got '{text}'") from None


def _show(calibration: Calibration) -> None:
    kind = "whole units cut out" if calibration.units else "weights masked"
    if calibration.complement:
        kind = f"a share of the {'units' if calibration.units else 'weights'} trained, the whole model seen"
    out.print(f"{calibration.model}, {kind}, batches of {calibration.batch}", style="bold")
    out.print(calibration.device)
    line = calibration.line
    show_table(
        [
            {"keep": f"{keep:g}", "seconds per step": f"{seconds:.6f}", "fit": f"{line.at(keep):.6f}"}
            for keep, seconds in calibration.points
        ]
    )
    out.print(
        f"fit: {line.base:.3g} + {line.slope:.3g} keep; residual {line.residual:.2g} s (root mean square), spread of"
        f" repeats {calibration.spread:.2g} s"
    )
    if calibration.down is not None and calibration.up is not None:
        out.print(_link_line(calibration.down, calibration.up))
    out.print(calibration.finding)


def _link_line(down: float, up: float) -> str:
    return f"link: {megabytes(down)} MB/s down, {megabytes(up)} MB/s up"
