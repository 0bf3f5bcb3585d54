"""``fedcover audit``: the coverage and costs of masks, before anything is trained."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from fedcover.audit import Audit, RoundsAudit, audit_code, audit_rounds
from fedcover.cli.console import friendly, out, settings_line, show_table
from fedcover.cli.options import JsonOption, ModelOption
from fedcover.config.choices import COMPLEMENT, POLICY, Typed
from fedcover.config.schema import read_config
from fedcover.errors import InputError
from fedcover.report.format import percent_down
from fedcover.training.complements import Complement

ROUNDS = 100

app = typer.Typer(
    no_args_is_help=True,
    help="Audit masks before training: a code in one round (`code`), or a policy over many rounds (`rounds`).",
)

PolicyOption = Annotated[str, typer.Option("--policy", help="One of `fedcover list policies`, or FILE.py:NAME.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the policy, such as policy.kappa=2.", metavar="KEY=VALUE"),
]
CodeSetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting of the policy or of the complement, such as policy.kappa=2 or complement.name=frozen.",
        metavar="KEY=VALUE",
    ),
]
SeedOption = Annotated[int, typer.Option(help="Seed of the initial model and of the policy's draws.")]


@app.command("code")
@friendly
def code(
    code: Annotated[str, typer.Argument(help="One digit per client, or items such as 4x1,3x0.75,3x1010.")],
    policy: PolicyOption = "WP",
    model: ModelOption = "mlp",
    set_: CodeSetOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show what a code means in one round: Γmin, coverage of each quarter, regions, costs and expected δ².

    Digits 1 to 7 keep these quarters of the ranked items, S1 the largest: 1 all, 2 S1 S3 S4, 3 S1 S2 S4,
    4 S1 S2 S3, 5 S1 S4, 6 S1 S3, 7 S1 S2. In a list with commas an item may be a digit, a pattern of any
    number of bands (11011000), or a fraction (0.4); 6x0.75 repeats an item.
    """
    outside = [change for change in set_ or [] if change.strip().startswith(f"{COMPLEMENT.key}.")]
    others = [change for change in set_ or [] if change not in outside]
    audit = audit_code(code, policy, model, seed, _policy_settings(others), _complement(outside))
    if as_json:
        out.print_json(json.dumps(audit.as_dict()))
    else:
        _show_code(audit)


@app.command("rounds")
@friendly
def rounds(
    budgets: Annotated[str, typer.Option(help="What each client can keep: 4x0.25, or a code.")],
    policy: PolicyOption = "WP",
    model: ModelOption = "mlp",
    rounds: Annotated[int, typer.Option(help="Rounds to plan.")] = ROUNDS,
    window: Annotated[
        int | None, typer.Option(help="Consecutive rounds over which Γ is counted; default: all.")
    ] = None,
    times: Annotated[int, typer.Option(help="How often every weight should be covered.")] = 1,
    set_: SetOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show which weights and units a policy covers over many rounds, without training.

    Example: `fedcover audit rounds --policy fedrolex --model lenet --budgets 10x0.25 --rounds 1200`.
    """
    audit = audit_rounds(policy, model, budgets, rounds, window, times, seed, _policy_settings(set_ or []))
    if as_json:
        out.print_json(json.dumps(audit.as_dict()))
    else:
        _show_rounds(audit)


def _policy_settings(changes: Sequence[str]) -> dict[str, Typed]:
    """Return the policy's settings by name, as typed text."""
    settings = {}
    for change in changes:
        key, equals, text = change.partition("=")
        section, _, name = key.strip().partition(".")
        if not equals or section != POLICY.key or name in ("", "name"):
            raise InputError(
                f"--set takes a setting of the policy, such as --set policy.kappa=2; got '{change}';"
                f" see `fedcover list policies`, and name the policy with --policy"
            )
        settings[name] = Typed(text)
    return settings


def _complement(changes: Sequence[str]) -> Complement | None:
    """Return the complement that settings describe; None if there are none."""
    complement: Complement = read_config(None, changes).complement.choice.build()
    return complement if changes else None


def _title(text: str, settings: Mapping[str, Any]) -> None:
    out.print(f"{text}, with {settings_line(settings)}" if settings else text, style="bold")


def _show_rounds(a: RoundsAudit) -> None:
    _title(f"{a.policy} on {a.model}, {a.clients} clients in each of {a.rounds} rounds", a.settings)
    least, most = min(a.gamma_rounds), max(a.gamma_rounds)
    inside = f"of any {a.window} consecutive rounds {a.gamma_window}   " if a.window < a.rounds else ""
    out.print(f"Γmin of a round {least}{f' to {most}' if most > least else ''}   {inside}of all rounds {a.gamma_total}")
    weights, units = percent_down(a.weights_covered), percent_down(a.units_covered)
    out.print(f"covered at least once: {weights} of the weights, {units} of the units")
    often = "once" if a.times == 1 else f"{a.times} times"
    reached = f"by round {a.rounds_to_cover}" if a.rounds_to_cover else f"not within {a.rounds} rounds"
    out.print(f"every weight covered {often} or more: {reached}")
    out.print(f"worst layer {a.worst_layer}")
    if a.reads_theta:
        out.print("The masks depend on theta, so these numbers hold only for the initial theta.")
    out.print()
    show_table(
        [
            {"layer": x.name, "entries": f"{x.entries:,}", "covered": percent_down(x.weights_covered), "Γ": x.gamma}
            for x in a.layers
        ]
    )


def _show_code(a: Audit) -> None:
    bands = "  ".join(f"S{i} {times}" for i, times in enumerate(a.coverage, start=1))
    holds = "holds: every parameter is trained by a client" if a.condition_holds else "FAILS: see coverage 0 below"
    _title(f"{a.policy} {a.code} on {a.model}, {a.clients} clients", a.settings)
    if a.complement:
        out.print(f"outside their masks clients see the model: complement {a.complement}")
    out.print(f"Γmin {a.gamma_min}   the paper's condition Γmin ≥ 1 {holds}")
    out.print(f"coverage  {bands}{'   ' if bands else ''}uncovered {a.uncovered:.2%}")
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
                "pattern": p.name,
                "clients": len(p.slots),
                "parameters": f"{p.parameters:,}",
                "MACs": f"{p.macs:,.0f}",
                "bytes down": f"{p.bytes_down:,}",
                "bytes up": f"{p.bytes_up:,}",
                "MFLOPs a step": f"{p.flops_of_step / 1e6:.2f}",
                "δ²": f"{p.pruning_noise:.4f}",
            }
            for p in a.patterns
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
                "slots": " ".join(map(str, r.slots)) or "none",
            }
            for i, r in enumerate(a.regions, start=1)
        ]
    )
