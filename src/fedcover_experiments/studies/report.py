"""The report on a study: every policy compared with the study's base, paired by seed, as tables and as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from fedcover._files import write_atomically
from fedcover.errors import InputError
from fedcover.report.format import mean_and_deviation, p_value, signed
from fedcover.report.statistics import Difference, holm, paired
from fedcover_experiments.markdown import markdown_table
from fedcover_experiments.measures import late_accuracy
from fedcover_experiments.results import Results, load_all
from fedcover_experiments.runner import Experiment
from fedcover_experiments.studies.registry import STUDIES, Study

LEVEL = 0.05
HOW = (
    "Accuracy is the mean over the last ten rounds, ± one standard deviation over seeds. Differences are paired by "
    "seed. A policy counts as better or worse in a setting if p < 0.05 after Holm's correction over the settings of "
    "that count. Bold cells in the tables of single settings have p < 0.05 after Holm's correction over that table."
)
DIVERGED = (
    "A run has diverged if its loss is not finite at the end. If all of its clients have diverged, it is given the "
    "accuracy of guessing from then on."
)
Table = list[dict[str, str]]


@dataclass(frozen=True)
class Cell:
    """One policy at one budget: its accuracy over the last rounds by seed, and the gain over the base."""

    experiment: Experiment
    accuracies: tuple[float, ...]
    gamma_min: int
    noise: float
    diverged: int
    """The number of runs that have diverged."""
    gain: Difference | None
    p: float = 1.0
    """After Holm's correction over the comparisons on the same data."""


def load_study(name: str, path: Path) -> Results:
    """Return the results of a study; raise InputError if the file has none."""
    command = f"fedcover study {name}"
    results = load_all([path], command)
    if not data_titles(STUDIES[name], results):
        raise InputError(f"{path} has no runs of the study '{name}'; produce them with `{command}`")
    return results


def cells(study: Study, results: Results, data_title: str) -> list[Cell]:
    """Return the cells of one data set and split, such as MNIST IID, in the study's order, without missing runs."""
    row = []
    for experiment in study.experiments():
        outcomes = results.of(experiment)
        if experiment.data_title != data_title or not outcomes:
            continue
        ours = {outcome.seed: late_accuracy(outcome) for outcome in outcomes}
        base = {o.seed: late_accuracy(o) for o in results.of(_base_of(study, experiment))}
        seeds = sorted(ours.keys() & base.keys()) if experiment.policy != study.base else []
        gain = paired([ours[seed] for seed in seeds], [base[seed] for seed in seeds]) if len(seeds) > 1 else None
        gamma_min, noise = min(o.gamma_min for o in outcomes), fmean(o.pruning_noise for o in outcomes)
        diverged = sum(o.diverged is not None for o in outcomes)
        row.append(Cell(experiment, tuple(ours.values()), gamma_min, noise, diverged, gain))
    corrected = iter(holm([cell.gain.p for cell in row if cell.gain]))
    return [replace(cell, p=next(corrected)) if cell.gain else cell for cell in row]


def _base_of(study: Study, experiment: Experiment) -> Experiment:
    """Return the base with the same code or, if policies are compared across codes, the base on the same data."""
    if not study.across_codes:
        return replace(experiment, policy=study.base)
    bases = (e for e in study.experiments() if e.policy == study.base)
    return next(e for e in bases if e.data_title == experiment.data_title)


def data_titles(study: Study, results: Results) -> list[str]:
    """Return the data sets and splits for which there are results."""
    return list(dict.fromkeys(e.data_title for e in study.experiments() if results.of(e)))


def study_tables(study: Study, results: Results) -> dict[str, Table]:
    """Return all tables of a report by heading: counts, then one table per data set and split."""
    tables = {f"Settings {part}": tally(study, results, part) for part in study.parts}
    tables |= {title: rows(study, results, title) for title in data_titles(study, results)}
    return {heading: table for heading, table in tables.items() if table}  # one seed: there is nothing to count


def rows(study: Study, results: Results, data_title: str) -> Table:
    """Return the table of one data set and split, without empty columns; significant gains are bold."""
    full = [_row(study, results, cell) for cell in cells(study, results, data_title)]
    used = [head for head in full[0] if any(row[head] for row in full)] if full else []
    return [{head: row[head] for head in used} for row in full]


def _row(study: Study, results: Results, cell: Cell) -> dict[str, str]:
    gain = ""
    if cell.gain:
        gain = f"{signed(cell.gain.mean)} [{signed(cell.gain.low)}, {signed(cell.gain.high)}]"
        gain = f"**{gain}**" if cell.p < LEVEL else gain
    budgets, policy = {"budgets": study.budgets[cell.experiment.code]}, {"policy": cell.experiment.policy}
    return {
        **(policy | budgets if study.across_codes else budgets | policy),
        "Γmin": f"{cell.gamma_min}",
        "mean δ²": f"{cell.noise:.3f}",
        "accuracy, %": mean_and_deviation(cell.accuracies),
        "diverged": f"{cell.diverged} of {len(cell.accuracies)}" if cell.diverged else "",
        f"gain over {study.base} [95 %]": gain,
        "p (Holm)": p_value(cell.p, 4) if cell.gain else "",
        **(_costs(results, cell.experiment) if study.across_codes else {}),
    }


def _costs(results: Results, experiment: Experiment) -> dict[str, str]:
    """Return what a policy leaves uncovered, its cost per client and round, and the seconds of a round."""
    outcomes = results.of(experiment)
    uncovered, macs, local = ([getattr(o, key) for o in outcomes] for key in ("uncovered", "macs", "local_accuracy"))
    down, up = (fmean(getattr(o, key) for o in outcomes) for key in ("bytes_down", "bytes_up"))
    seconds = [
        entry["round_seconds"]
        for entry in results.provenance
        if entry.get("policy") == experiment.policy
        and list(entry["data"]) == [experiment.data]
        and "round_seconds" in entry
    ]
    return {
        "local, %": f"{100 * fmean(local):.2f}" if None not in local else "",
        "uncovered": f"{fmean(uncovered):.1%}" if None not in uncovered else "",
        "MACs": f"{fmean(macs):.2f}" if None not in macs else "",
        "MB down": f"{down / 1e6:.2f}",
        "MB up": f"{up / 1e6:.2f}",
        "s per round": f"{fmean(seconds):.3f}" if seconds else "",
    }


def tally(study: Study, results: Results, part: str) -> Table:
    """Return in how many settings of a part each policy is significantly better or worse than the two bases.

    Each count is one claim, and Holm's correction is over its settings. Settings in which both policies chose the same
    masks do not count.
    """
    counts: dict[str, dict[str, str]] = {}
    heads = {base: f"compared with {base}" for base in (study.base, study.second_base)}
    for base, head in heads.items():
        for policy, gains in _gains_by_policy(replace(study, base=base), results, study.parts[part]).items():
            if policy == study.base:
                continue  # compared with the second base it would be the same comparison again
            corrected = holm([gain.p for gain in gains])
            significant = [gain.mean for gain, p in zip(gains, corrected, strict=True) if p < LEVEL]
            better, worse = sum(mean > 0 for mean in significant), sum(mean < 0 for mean in significant)
            counts.setdefault(policy, {})[head] = f"{better} better, {worse} worse of {len(gains)}"
    return [
        {"policy": policy, **{head: texts.get(head, "") for head in heads.values()}} for policy, texts in counts.items()
    ]


def _gains_by_policy(study: Study, results: Results, codes: Sequence[str]) -> dict[str, list[Difference]]:
    gains: dict[str, list[Difference]] = {}
    for title in data_titles(study, results):
        for cell in cells(study, results, title):
            if cell.gain and cell.experiment.code in codes and (cell.gain.low, cell.gain.high) != (0, 0):
                gains.setdefault(cell.experiment.policy, []).append(cell.gain)
    return gains


def as_markdown(name: str, results: Results) -> str:
    """Return the report on a study as Markdown; its figure is a file beside it."""
    study = STUDIES[name]
    caption = "Accuracies" if study.across_codes else f"Gains over {study.base}"
    sentences = study.findings(results) if study.findings else []
    how = f"{HOW} {DIVERGED}" if any(outcome.diverged for outcome in results.outcomes.values()) else HOW
    parts = [f"# {study.question}", f"![{caption}]({name}.svg)", *("- " + text for text in sentences), how]
    for heading, table in study_tables(study, results).items():
        parts += [f"## {heading}", markdown_table(table)]
    commands = [f"`{entry['command']}` in {entry['seconds']} s on {entry['device']}" for entry in results.provenance]
    if len(commands) == 1:
        parts.append(f"Produced by {commands[0]}.")
    else:
        parts += ["Produced by", "\n".join(f"- {command}" for command in commands)]
    return "\n\n".join(parts) + "\n"


def write_study_report(name: str, results: Results, folder: Path) -> list[Path]:
    """Write the report on a study and its figure into a folder; return the paths."""
    from fedcover.report.svg import file_bytes
    from fedcover_experiments.studies.figures import study_figure

    draw = STUDIES[name].figure
    figure = draw(results) if draw else study_figure(STUDIES[name], results)
    return [
        write_atomically(folder / f"{name}.md", as_markdown(name, results).encode()),
        *(write_atomically(folder / f"{name}.{kind}", file_bytes(figure, kind)) for kind in ("svg", "png")),
    ]
