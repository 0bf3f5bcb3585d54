"""The report on the paper as a list of parts, which ``page`` writes as HTML and as Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fedcover.report.figures import Drawing
from fedcover.report.format import MISSING, duration, signed
from fedcover_experiments.measures import LATE, MEASURES
from fedcover_experiments.paper.arithmetic import audit_rows
from fedcover_experiments.paper.claims import claims
from fedcover_experiments.paper.compare import accuracy_rows, cost_rows, departure_rows, plain_rows
from fedcover_experiments.paper.comparison import Comparison, outside
from fedcover_experiments.paper.experiments import PRETRAINED, UNCOVERED, title
from fedcover_experiments.paper.figures import drawings
from fedcover_experiments.paper.published import tables
from fedcover_experiments.results import Results
from fedcover_experiments.runner import DATA, ExperimentRun

PAPER = "On the Convergence of Heterogeneous Federated Learning with Arbitrary Adaptive Online Model Pruning"
AUTHORS = "Hanhan Zhou, Tian Lan, Guru Venkataramani, Wenbo Ding"
TITLE = f"{PAPER}: run again"


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
class ClaimVerdict:
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


Part = Heading | Words | Rows | ClaimVerdict | Pictures


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
    runs = [run for run in results.outcomes if not run.experiment.departs]
    yield Words(
        "The paper's experiments run again by Algorithm 1 as it is written, beside the published numbers: "
        f"{len(runs):,} runs of {results.rounds} rounds, {_seeds(results, runs)} a row.",
        "verdict",
    )
    yield Words(f"The paper is by {AUTHORS}.", "about")
    copies = dict.fromkeys(pair for made in results.made for pair in made["data"].items())
    for name, text in copies:
        if not text.startswith("official"):
            yield Words(f"{DATA[name]} here is not the official file set: {text}.", "notice")
    yield Words(
        "Ours are means ± standard deviations over seeds of the accuracy after the last round, in percent; differences "
        "are ours less published. Runs of one seed share the first model, the split and the cohorts. Published cells "
        "in doubt are marked; the section on the paper's own arithmetic says why."
    )
    yield Words(
        "Local accuracy, non-IID: each client of the last cohort tries the new model under its own mask on test "
        "examples in the mix of its own labels. The paper's formula leaves open on which data and with which mask; its "
        "local and global columns hardly differ, so it measured something else, and our local differences are not "
        "comparable."
    )


def _seeds(results: Results, runs: Sequence[ExperimentRun]) -> str:
    counts = sorted({len(results.of(run.experiment)) for run in runs}) or [0]
    many = " to ".join(f"{count}" for count in dict.fromkeys((counts[0], counts[-1])))
    return f"{many} seed{'' if counts[-1] == 1 else 's'}"


def _claims(results: Results) -> Iterator[Part]:
    judged = claims(results)
    if not judged:
        return
    yield Heading("What the paper claims, and what the runs say")
    yield Words(
        "Paired t-tests over seeds, with Holm's correction within each claim; intervals are without it. Loss and "
        f"accuracy are means over the last {min(LATE, results.rounds)} rounds. “No difference found” is not to say "
        "that there is none; where the paper has numbers, their difference stands beside ours, marked if it is outside "
        "our interval."
    )
    for claim in judged:
        rows = [_comparison(comparison) for comparison in claim.comparisons]
        marks = {(n, "verdict"): "bad" for n, row in enumerate(rows) if row["verdict"] == "the opposite"}
        marks |= {(n, "published difference"): "bad" for n, c in enumerate(claim.comparisons) if outside(c)}
        behind = Rows(f"{len(rows)} comparisons", rows, marks, prose=("verdict",), folded=True) if rows else None
        yield ClaimVerdict(claim.title, claim.says, claim.verdict, claim.finding, behind)


def _comparison(c: Comparison) -> dict[str, str]:
    digits = MEASURES[c.measure][1]
    assert c.found is not None
    return {
        "first": f"{c.first.technique} {c.first.code}",
        "second": f"{c.second.technique} {c.second.code}",
        "data": c.first.place,
        "measure": c.measure,
        "of the first": f"{c.means[0]:.{digits}f}",
        "of the second": f"{c.means[1]:.{digits}f}",
        "difference": signed(c.found.mean, digits),
        "95 % interval": f"{signed(c.found.low, digits)} to {signed(c.found.high, digits)}",
        "published difference": MISSING if c.published is None else signed(c.published),
        "p (Holm)": "< 0.0001" if c.p < 0.0001 else f"{c.p:.4f}",
        "verdict": c.verdict,
    }


def _tables(results: Results) -> Iterator[Part]:
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


def _departures(results: Results) -> Iterator[Part]:
    found = {name: departure_rows(column, results) for name, column in (("IID", "iid"), ("non-IID", "non_iid_global"))}
    if not any(found.values()):
        return
    yield Heading("The published weights-pruning column, and what the authors' script computes instead")
    yield Words(
        "The released script departs from Algorithm 1 in four ways. rank: the output of one argsort is taken for "
        "ranks, so that masks have nothing to do with magnitude. start: policies 6 and 7 begin from policy 5's "
        "pruned model. gradient: pruned weights train and are zeroed afterwards. leak: codes run one after another, "
        "and in a code's first round its pruned models begin from the model with which the code before began its last "
        "round, trained all but one."
    )
    seeds = len({run.seed for run in results.outcomes if run.experiment.departs})
    for name, rows in found.items():
        if rows:
            mean, most = rows[-2], rows[-1]
            yield Words(
                f"{name}: by Algorithm 1 the column is {mean['Algorithm 1']} points from the published one on average; "
                f"with all four departures on {mean['all four']} points, and {most['all four']} where it is furthest. "
                f"Means over {seeds} seeds."
            )
            yield Rows(f"WP on MNIST {name}: accuracy with each departure alone, and with all", rows)


def _audit() -> Iterator[Part]:
    rows = audit_rows()
    yield Heading("The paper's own arithmetic")
    yield Words(
        f"{len(rows)} cells of {sum(len(table.rows) for table in tables().values())} rows are in doubt: they do not "
        "follow from the row's own clients, differ between paper and appendix, or were copied. "
        f"{sum(row['why'].startswith('is not by the text') for row in rows)} of them are the costs of weights pruning "
        "on CIFAR-10, where the text leaves the rule open: we read it as kernels in quarters, hidden fully connected "
        "weights at 75 %, biases and the output layer whole."
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
