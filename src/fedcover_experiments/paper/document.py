"""The report on the paper as a list of elements, which ``page`` writes as HTML and as Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fedcover.report.figures import Drawing
from fedcover.report.format import MISSING, duration, p_value, signed
from fedcover_experiments.measures import LATE, MEASURES
from fedcover_experiments.paper.arithmetic import OPEN_RULE, audit_rows
from fedcover_experiments.paper.claim_tests import VERDICTS, Comparison, outside
from fedcover_experiments.paper.claims import claims
from fedcover_experiments.paper.compare import accuracy_rows, cost_rows, departure_rows, plain_rows
from fedcover_experiments.paper.experiments import PRETRAINED, UNCOVERED, title
from fedcover_experiments.paper.figures import drawings
from fedcover_experiments.paper.published import tables
from fedcover_experiments.results import Results
from fedcover_experiments.runner import DATA, ExperimentRun

PAPER = "On the Convergence of Heterogeneous Federated Learning with Arbitrary Adaptive Online Model Pruning"
AUTHORS = "Hanhan Zhou, Tian Lan, Guru Venkataramani, Wenbo Ding"
TITLE = f"{PAPER}: reproduced"
KINDS = dict(zip(VERDICTS, ("confirmed", "opposite", "open"), strict=True))
"""The class of each verdict, which decides its colour."""
PLAIN = ("confirmed", "open")
"""Classes that Markdown does not set in bold."""


@dataclass(frozen=True)
class Heading:
    """The title of a section."""

    text: str


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; ``kind`` is empty, or verdict, about or notice."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Rows:
    """A table."""

    label: str
    rows: Sequence[Mapping[str, str]]
    marks: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """The class of marked cells, by row number and column."""
    prose: Sequence[str] = ()
    """Columns of text, not of numbers."""
    folded: bool = False
    """True if the HTML page shows the table only on request."""


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim of the paper, the verdict of our runs, and the comparisons behind it."""

    title: str
    statement: str
    verdict: str
    finding: str
    comparisons: Rows | None = None


@dataclass(frozen=True)
class FigureGrid:
    """Figures in a grid."""

    drawings: Sequence[Drawing]


Element = Heading | Paragraph | Rows | ClaimVerdict | FigureGrid


def document(results: Results) -> list[Element]:
    """Return the whole report, in reading order."""
    return [
        *_opening(results),
        *_claims(results),
        *_tables(results),
        *_departures(results),
        *_audit(),
        Heading("Figures"),
        FigureGrid(drawings(results)),
        *_provenance(results),
    ]


def _opening(results: Results) -> Iterator[Element]:
    runs = [run for run in results.outcomes if not run.experiment.departs]
    yield Paragraph(
        "The paper's experiments, run again by Algorithm 1 as it is written, beside the published numbers: "
        f"{len(runs):,} runs of {results.rounds} rounds, {_seeds(results, runs)} per row.",
        "verdict",
    )
    yield Paragraph(f"Authors of the paper: {AUTHORS}.", "about")
    copies = dict.fromkeys(pair for entry in results.provenance for pair in entry["data"].items())
    for name, text in copies:
        if not text.startswith("official"):
            yield Paragraph(f"The {DATA[name]} files of these runs are not the official ones: {text}.", "notice")
    yield Paragraph(
        "Our accuracies are those after the last round, in percent: mean ± standard deviation over seeds. A difference "
        "is our value minus the published one. Runs with the same seed have the same initial model, split and cohorts. "
        "Doubtful published cells are marked; the section on the paper's arithmetic gives the reasons."
    )
    yield Paragraph(
        "Local accuracy, non-IID: each client of the last cohort tests the new model under its own mask, on test "
        "examples with its own distribution of labels. The paper's formula does not define the data or the mask. Its "
        "local and global columns hardly differ, so it measured something else, and our local differences are not "
        "comparable."
    )


def _seeds(results: Results, runs: Sequence[ExperimentRun]) -> str:
    counts = sorted({len(results.of(run.experiment)) for run in runs}) or [0]
    span = " to ".join(f"{count}" for count in dict.fromkeys((counts[0], counts[-1])))
    return f"{span} seed{'' if counts[-1] == 1 else 's'}"


def _claims(results: Results) -> Iterator[Element]:
    judged = claims(results)
    if not judged:
        return
    yield Heading("The paper's claims and our results")
    yield Paragraph(
        "Paired t-tests over seeds, with Holm's correction within each claim; the intervals are not corrected. Loss "
        f"and accuracy are means over the last {min(LATE, results.rounds)} rounds. “No difference found” does not mean "
        "that there is none. Where the paper has numbers, the published difference is beside ours, and marked if it is "
        "outside our interval."
    )
    for claim in judged:
        rows = [_comparison(comparison) for comparison in claim.comparisons]
        marks = {(n, "verdict"): KINDS[row["verdict"]] for n, row in enumerate(rows)}
        marks |= {(n, "published difference"): "bad" for n, c in enumerate(claim.comparisons) if outside(c)}
        table = Rows(f"{len(rows)} comparisons", rows, marks, prose=("verdict",), folded=True) if rows else None
        yield ClaimVerdict(claim.title, claim.statement, claim.verdict, claim.finding, table)


def _comparison(c: Comparison) -> dict[str, str]:
    digits = MEASURES[c.measure][1]
    assert c.difference is not None
    return {
        "first": f"{c.first.policy} {c.first.code}",
        "second": f"{c.second.policy} {c.second.code}",
        "data": c.first.data_title,
        "measure": c.measure,
        "value of the first": f"{c.means[0]:.{digits}f}",
        "value of the second": f"{c.means[1]:.{digits}f}",
        "difference": signed(c.difference.mean, digits),
        "95 % interval": f"{signed(c.difference.low, digits)} to {signed(c.difference.high, digits)}",
        "published difference": MISSING if c.published is None else signed(c.published),
        "p (Holm)": p_value(c.p, 4),
        "verdict": c.verdict,
    }


def _tables(results: Results) -> Iterator[Element]:
    for table in tables().values():
        accuracies, doubts = accuracy_rows(table, results)
        if all(cell == MISSING for row in accuracies for head, cell in row.items() if head.endswith("ours")):
            continue
        name = "Appendix" if table.source == "appendix" else table.source
        yield Heading(f"{name}: {table.title} ({table.key})")
        yield Rows(f"{table.key}: accuracy", accuracies, doubts)
        costs, wrong = cost_rows(table)
        yield Rows(f"{table.key}: coverage and costs", costs, wrong, folded=True)
    for name in (*PRETRAINED, UNCOVERED):
        if rows := plain_rows(name, results):
            yield Heading(f"{title(name)[1]} ({name})")
            yield Rows(f"{name}: accuracy", rows)


def _departures(results: Results) -> Iterator[Element]:
    columns = {"IID": "iid", "non-IID": "non_iid_global"}
    tables_by_split = {name: departure_rows(column, results) for name, column in columns.items()}
    if not any(tables_by_split.values()):
        return
    yield Heading("The published column of weight pruning, and what the authors' script computes")
    yield Paragraph(
        "The released script departs from Algorithm 1 in four ways. rank: the output of one argsort is used as ranks, "
        "so that masks do not depend on magnitude. start: clients with patterns 6 and 7 start from the pruned model of "
        "pattern 5. gradient: pruned weights are trained, and set to zero afterwards. leak: codes run one after "
        "another. In the first round of a code, pruned models start from the model with which the previous code "
        "started its last round, which has been trained for all rounds but one."
    )
    seeds = len({run.seed for run in results.outcomes if run.experiment.departs})
    for name, rows in tables_by_split.items():
        if rows:
            mean, most = rows[-2], rows[-1]
            yield Paragraph(
                f"{name}: with Algorithm 1 our column is {mean['Algorithm 1']} points from the published one on "
                f"average. With all four departures it is {mean['all four']} points from it on average, and at most "
                f"{most['all four']}. Means over {seeds} seeds."
            )
            yield Rows(f"WP on MNIST {name}: accuracy with each single departure, and with all four", rows)


def _audit() -> Iterator[Element]:
    rows = audit_rows()
    yield Heading("The paper's arithmetic")
    yield Paragraph(
        f"{len(rows)} cells in {sum(len(table.rows) for table in tables().values())} rows are doubtful: they do not "
        "follow from the clients of their own row, differ between paper and appendix, or were copied. "
        f"{sum(row['why'] == OPEN_RULE for row in rows)} of them are costs of weight pruning on CIFAR-10, where the "
        "text leaves the rule open. We read it as: kernels in quarters, hidden fully connected weights at 75 %, biases "
        "and the output layer whole."
    )
    yield Rows("Cells that do not add up", rows, prose=("why",), folded=True)


def _provenance(results: Results) -> Iterator[Element]:
    yield Heading("How these results were produced")
    rows = [
        {
            "command": entry["command"],
            "runs": f"{entry['runs']:,}",
            "time": duration(entry["seconds"]),
            "engine": entry["engine"],
            "device": entry["device"],
            "versions": ", ".join(f"{name} {version}" for name, version in entry["versions"].items()),
        }
        for entry in results.provenance
    ]
    yield Rows("Commands", rows, prose=("command", "engine", "device", "versions"))
