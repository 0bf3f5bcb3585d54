"""The report on the paper as a list of parts, which ``page`` writes as HTML and as Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fedcover.paper.arithmetic import audit_rows
from fedcover.paper.claims import MEASURES, Comparison, claims, convergence
from fedcover.paper.compare import accuracy_rows, cost_rows, departure_rows, plain_rows, signed
from fedcover.paper.experiments import PRETRAINED, UNCOVERED, title
from fedcover.paper.figures import drawings
from fedcover.paper.published import tables
from fedcover.paper.results import Results
from fedcover.report.cells import duration
from fedcover.report.figures import Drawing

TITLE = "On the Convergence of Heterogeneous Federated Learning with Arbitrary Adaptive Online Model Pruning"


@dataclass(frozen=True)
class Heading:
    """The title of a section."""

    text: str


@dataclass(frozen=True)
class Words:
    """A paragraph; ``kind`` is verdict, about or notice."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Rows:
    """A table: its label, its rows, cells that are marked, columns of prose, and whether it is folded away."""

    label: str
    rows: Sequence[Mapping[str, str]]
    marks: Mapping[tuple[int, str], str] = field(default_factory=dict)
    prose: Sequence[str] = ()
    folded: bool = False


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, what the runs say of it, and the comparisons behind that."""

    title: str
    says: str
    verdict: str
    finding: str
    behind: Rows | None = None


@dataclass(frozen=True)
class Pictures:
    """Figures in a grid."""

    drawings: Sequence[Drawing]


Part = Heading | Words | Rows | Verdict | Pictures


def document(results: Results) -> list[Part]:
    """The whole report, in reading order."""
    return [
        *_opening(results),
        *_claims(results),
        *_tables(results),
        *_departures(results),
        *_audit(),
        Heading("Figures"),
        Pictures(drawings(results)),
        *_making(results),
    ]


def _opening(results: Results) -> Iterator[Part]:
    runs = [run for run in results.outcomes if "+" not in run.experiment.technique]
    seeds = sorted({len(results.of(run.experiment)) for run in runs})
    many = " to ".join(f"{count}" for count in dict.fromkeys((seeds[0], seeds[-1]))) if seeds else "no"
    yield Words(
        "The paper's experiments run again by Algorithm 1 as it is written, beside the published numbers: "
        f"{len(runs):,} runs of {results.rounds} rounds, {many} seeds a row.",
        "verdict",
    )
    copies = {name: text for made in results.made for name, text in made["data"].items()}
    for name, text in copies.items():
        if not text.startswith("official"):
            yield Words(
                f"{name.upper().replace('CIFAR', 'CIFAR-')} here is not the official file set: {text}.", "notice"
            )
    yield Words(
        "Ours are means ± standard deviations over seeds of the accuracy after the last round, in percent; differences "
        "are ours less published. Runs of one seed share the first model, the split and the cohorts."
    )


def _claims(results: Results) -> Iterator[Part]:
    whole, tested = convergence(results), claims(results)
    if not whole:
        return
    yield Heading("What the paper claims, and what the runs say")
    yield Words(
        "Paired t-tests over seeds, with Holm's correction within each claim; loss and accuracy are means over the "
        "last ten rounds. “No difference found” is not to say that there is none."
    )
    yield Verdict(whole.title, whole.says, whole.verdict, whole.finding)
    for claim in tested:
        rows = [_comparison(c) for c in claim.comparisons]
        marks = {(n, "verdict"): "bad" for n, row in enumerate(rows) if row["verdict"] == "the opposite"}
        behind = Rows(f"{len(rows)} comparisons", rows, marks, prose=("verdict",), folded=True)
        yield Verdict(claim.title, claim.says, claim.verdict, claim.finding, behind)


def _comparison(c: Comparison) -> dict[str, str]:
    digits = MEASURES[c.measure][1]
    assert c.found is not None
    return {
        "first": f"{c.first.technique} {c.first.code}",
        "second": f"{c.second.technique} {c.second.code}",
        "data": f"{c.first.data} {c.first.split}",
        "measure": c.measure,
        "of the first": f"{c.means[0]:.{digits}f}",
        "of the second": f"{c.means[1]:.{digits}f}",
        "difference": signed(c.found.mean, digits),
        "95 % interval": f"{signed(c.found.low, digits)} to {signed(c.found.high, digits)}",
        "p": "< 0.0001" if c.p < 0.0001 else f"{c.p:.4f}",
        "verdict": c.verdict,
    }


def _tables(results: Results) -> Iterator[Part]:
    for table in tables().values():
        yield Heading(f"{table.source}: {table.title}" if table.source != "appendix" else f"Appendix: {table.title}")
        yield Rows(f"{table.key}: accuracy", accuracy_rows(table, results))
        rows, marks = cost_rows(table)
        yield Rows(
            f"{table.key}: coverage and costs; printed cells that do not add up are marked", rows, marks, folded=True
        )
    for name in (*PRETRAINED, UNCOVERED):
        if rows := plain_rows(name, results):
            yield Heading(f"{title(name)[1]} ({name})")
            yield Rows(f"{name}: accuracy", rows)


def _departures(results: Results) -> Iterator[Part]:
    found = {name: departure_rows(column, results) for name, column in (("IID", "iid"), ("non-IID", "non_iid_global"))}
    if not any(found.values()):
        return
    yield Heading("The published weights-pruning column, and what the authors' script computes instead")
    yield Words(
        "The released script departs from Algorithm 1 in four ways. rank: the output of one argsort is taken for "
        "ranks, so that masks have nothing to do with magnitude. start: policies 6 and 7 begin from policy 5's "
        "pruned model. gradient: pruned weights train and are zeroed afterwards. leak: codes run one after another, "
        "and in a code's first round its pruned models begin from the trained weights of the code before."
    )
    for name, rows in found.items():
        if rows:
            far = rows[-1]
            yield Words(
                f"{name}: with all four on, the published column is met with a mean absolute difference of "
                f"{far['all four']} points; with none, by Algorithm 1, the difference is {far['Algorithm 1']}. "
                f"Means over {_seeds_of_departures(results)} seeds."
            )
            yield Rows(f"WP on MNIST {name}: accuracy with each departure alone, and with all", rows)


def _seeds_of_departures(results: Results) -> int:
    return len({run.seed for run in results.outcomes if "+" in run.experiment.technique})


def _audit() -> Iterator[Part]:
    rows = audit_rows()
    yield Heading("The paper's own arithmetic")
    yield Words(
        f"{len(rows)} printed cells do not follow from the row's own code, or differ between paper and appendix."
    )
    yield Rows("Cells that do not add up", rows, prose=("why",), folded=True)


def _making(results: Results) -> Iterator[Part]:
    yield Heading("How this was made")
    rows = [
        {
            "command": made["command"],
            "runs": f"{made['runs']:,}",
            "time": duration(made["seconds"]),
            "engine": made["engine"],
            "device": made["device"],
            "versions": ", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        }
        for made in results.made
    ]
    yield Rows("Commands", rows, prose=("command", "engine", "device", "versions"))
