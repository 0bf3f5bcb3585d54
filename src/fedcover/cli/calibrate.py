"""``fedcover calibrate``: what pruning saves on this device, and how fast its link is."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedcover._files import check_writable, write_atomically
from fedcover.calibration import Calibration, weight_seconds
from fedcover.calibration import calibrate as measured
from fedcover.calibration.timing import this_device
from fedcover.cli.console import friendly, out, say, show_table
from fedcover.cli.options import ModelOption
from fedcover.data import names, shape_of
from fedcover.deploy import bandwidth as wire
from fedcover.deploy.address import parse_address
from fedcover.errors import InputError
from fedcover.models import IMAGES, usual


@friendly
def calibrate(
    model: ModelOption = "mlp",
    units: Annotated[bool, typer.Option("--units", help="Prune whole units, which are cut out of the model.")] = False,
    keeps: Annotated[str, typer.Option(help="The fractions kept that are timed.")] = "0.25,0.5,0.75,1",
    weights: Annotated[
        bool, typer.Option("--weights", help="What one weight of each layer costs instead, as settings of PruneFL.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Examples in a batch.")] = 10,
    link: Annotated[str, typer.Option(metavar="HOST:PORT", help="Measure the link to a `--serve` there.")] = "",
    serve: Annotated[
        str, typer.Option(metavar="PORT", help="Answer one `--link`, and leave; HOST:PORT hears other machines.")
    ] = "",
    out_file: Annotated[Path | None, typer.Option("--out", help="Write it here, as JSON; --weights as TOML.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How long a training step takes on this device at each keep, and what a link carries.

    Steps are timed as `fedcover run` takes them, on one thread and made-up data. For the link run
    `fedcover calibrate --serve 0.0.0.0:5201` on the server and `fedcover calibrate --link SERVER:5201` on the device.
    PruneFL decides by the seconds of single weights: `fedcover calibrate --weights --out prunefl.toml`, then
    `fedcover run prunefl.toml`.
    """
    if serve:
        if link:
            raise InputError("--serve and --link are the two ends of a link; give one of them")
        _serve(serve)
        return
    if out_file is not None:
        check_writable(out_file)  # before minutes of timing
    fractions = _fractions(keeps)
    if weights:
        if units or link:
            raise InputError("--weights measures single weights and no link; give --units and --link without it")
        _weights(model, [keep for keep in fractions if keep != 1], batch, out_file, as_json)
        return
    rates = wire.measure(*parse_address(link)) if link else None
    found = measured(*usual(model), fractions, batch, units, model, link=rates)
    if out_file is not None:
        write_atomically(out_file, found.to_json())
    if as_json:
        out.print_json(found.to_json())
    else:
        _show(found)
        if out_file is not None:
            out.print(f"written to {out_file}")


def _serve(text: str) -> None:
    host, port = parse_address(text)
    wire.serve(port, host=host, ready=lambda bound: say("link", f"waiting for one peer at {host}:{bound}", "bold"))
    out.print("link measured; the other end has the numbers")


def _weights(model: str, keeps: list[float], batch: int, out_file: Path | None, as_json: bool) -> None:
    seconds, fixed = weight_seconds(*usual(model), keeps, batch)
    lines = [
        f"# Seconds of a training step of {batch} examples that one weight of each layer costs, and the rest of it.",
        f"# {this_device()}",
        f"[model]\nname = {json.dumps(model)}\n",
        f"[data]\nname = {json.dumps(_data_of(model))}\n\n[local]\nbatch_size = {batch}\n",
        f'[policy]\nname = "PruneFL"\nfixed = {fixed:.6g}\n\n[policy.seconds]',
        *(f"{json.dumps(name)} = {value:.6g}" for name, value in seconds.items()),
    ]
    text = "\n".join(lines) + "\n"
    if out_file is not None:
        write_atomically(out_file, text)
    if as_json:
        out.print_json(data={"seconds": seconds, "fixed": fixed})
        return
    out.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    if not any(seconds.values()):
        out.print("# single weights cost nothing here: pruning them saves no time on this device")
    if out_file is not None:
        out.print(f"# written to {out_file}: `fedcover run {out_file}` uses it")


def _data_of(model: str) -> str:
    """The first data set whose inputs are those that a model is timed on."""
    return next(name for name in names() if shape_of(name)[0] == IMAGES[model])


def _fractions(text: str) -> list[float]:
    try:
        return [float(item) for item in text.split(",")]
    except ValueError:
        raise InputError(f"--keeps is '{text}'; give fractions with commas, such as 0.25,0.5,1") from None


def _show(found: Calibration) -> None:
    kind = "whole units cut out" if found.units else "weights masked"
    out.print(f"{found.model}, {kind}, batches of {found.batch}", style="bold")
    out.print(found.device)
    line = found.line
    show_table(
        [
            {"keep": f"{keep:g}", "seconds a step": f"{seconds:.6f}", "fit": f"{line.at(keep):.6f}"}
            for keep, seconds in found.points
        ]
    )
    out.print(
        f"fit: {line.base:.3g} + {line.slope:.3g} keep, off by {line.residual:.2g} s; repeats by {found.spread:.2g} s"
    )
    if found.down is not None and found.up is not None:
        out.print(f"link: {found.down / wire.MEGABYTE:,.2f} MB/s down, {found.up / wire.MEGABYTE:,.2f} MB/s up")
    out.print(found.finding)
