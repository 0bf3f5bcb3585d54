"""``fedcover audit``: what a code means before anything is trained."""

import json
from typing import Annotated

import typer

from fedcover.audit import Audit, audit_code
from fedcover.cli.console import friendly, out, show_table


@friendly
def audit(
    code: Annotated[str, typer.Argument(help="One digit for each client, or items such as 4x1,3x0.75,3x1010.")],
    technique: Annotated[str, typer.Option(help="WP, NP, FS, PT or full.")] = "WP",
    model: Annotated[str, typer.Option(help="mlp, lenet or resnet18.")] = "mlp",
    seed: Annotated[int, typer.Option(help="Decides the initial model that the noise is measured on.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a code means: Γmin, coverage of each quarter, regions, costs and expected δ².

    Digits 1 to 7 keep these quarters of the ranked items, S1 the largest: 1 all, 2 S1 S3 S4, 3 S1 S2 S4,
    4 S1 S2 S3, 5 S1 S4, 6 S1 S3, 7 S1 S2. With commas an item may be a digit, a pattern of any number of
    bands (11011000), or a fraction (0.4), and 6x0.75 repeats it.
    """
    found = audit_code(code, technique, model, seed)
    if as_json:
        out.print_json(json.dumps(found.as_dict()))
        return
    _show(found)


def _show(a: Audit) -> None:
    bands = "  ".join(f"S{i} {times}" for i, times in enumerate(a.coverage, start=1))
    holds = "holds: every parameter is trained by someone" if a.condition_holds else "FAILS: see coverage 0 below"
    out.print(f"{a.technique} {a.code} on {a.model}, {a.clients} clients", style="bold")
    out.print(f"Γmin {a.gamma_min}   the paper's condition Γmin ≥ 1 {holds}")
    out.print(f"coverage  {bands}   uncovered {a.uncovered:.2%}")
    out.print(
        f"average   {a.parameters:,.0f} parameters ({a.parameters_ratio:.3f})   {a.macs:,.0f} MACs ({a.macs_ratio:.3f})"
        f"   {a.bytes:,.0f} B down, {a.bytes_up:,.0f} B up ({a.bytes_ratio:.3f})"
    )
    out.print(
        f"expected δ² at initialisation: mean {a.expected_pruning_noise:.4f}, max {a.expected_pruning_noise_max:.4f}\n"
    )
    show_table(
        [
            {
                "policy": p.name,
                "clients": len(p.slots),
                "parameters": f"{p.parameters:,}",
                "MACs": f"{p.macs:,.0f}",
                "bytes down": f"{p.bytes_down:,}",
                "bytes up": f"{p.bytes_up:,}",
                "MFLOPs a step": f"{p.flops_of_step / 1e6:.2f}",
                "δ²": f"{p.pruning_noise:.4f}",
            }
            for p in a.policies
        ]
    )
    out.print()
    show_table(
        [
            {
                "region": i,
                "held by": r.coverage,
                "entries": f"{r.size:,}",
                "share": f"{r.share:.2%}",
                "slots": " ".join(map(str, r.slots)) or "nobody",
            }
            for i, r in enumerate(a.regions, start=1)
        ]
    )
