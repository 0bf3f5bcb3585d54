"""Results of the contest as Markdown tables."""

from typing import Any

Row = dict[str, Any]
TITLES = {"mnist": "MNIST, MLP 784-200-10", "cifar10": "CIFAR-10, LeNet"}


def to_markdown(report: dict[str, Any]) -> str:
    """Return the whole report."""
    facts = report["machine"]
    lines = [
        "# CPU benchmark",
        "",
        f"`{report['command']}`: {facts['cores']} cores, {facts['processor']}, {facts['memory_gib']} GiB, "
        f"Python {facts['python']}; {_versions(report)}. It took {report['minutes']} minutes; the load average "
        f"was {report['load_before_and_after'][0]} before and {report['load_before_and_after'][1]} after.",
        "",
    ]
    for name, title in TITLES.items():
        if name in report:
            lines += _contest(title, report[name])
    for name, rows in report.get("pruning", {}).items():
        lines += _pruning(TITLES[name], rows)
    if "scaling" in report:
        lines += _scaling(report["scaling"])
    return "\n".join(lines).rstrip() + "\n"


def _versions(report: dict[str, Any]) -> str:
    versions = dict(report["machine"]["versions"])
    for name in TITLES:
        for row in report.get(name, {}).get("contenders", []):
            versions |= row.get("versions", {})
    return ", ".join(f"{package} {number}" for package, number in versions.items())


def _contest(title: str, part: dict[str, Any]) -> list[str]:
    rows: list[Row] = part["contenders"]
    played = [row for row in rows if "error" not in row]
    fastest = min(
        (row for row in played if row["label"].startswith("fedcover")), key=lambda row: row["median"], default=None
    )
    floor = next((row for row in played if row["label"] == "products alone, real shapes"), None)
    lines = [
        f"## {title}: one round, {part['steps']:,} SGD steps, {part['gflop']} GFLOP",
        "",
        "Rounds are played in turn, after one warm-up round. Times fedcover: the ratio to fedcover's fastest engine, "
        "by medians and by best rounds. CPU: processor time of all processes, which other work on the machine disturbs "
        "less. Start-up includes the extra time of the first round. Memory: the sum of the peaks of all processes; in "
        "brackets, memory at the end with shared pages counted once.",
        "",
        "| | s per round, median (best to worst) | times fedcover | CPU s | accuracy after 3 rounds | start-up s "
        "| peak MB, all processes (once) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['label']} | {row['error'][:100]} | | | | | |")
            continue
        times = f"{row['median'] / fastest['median']:.2f}, {row['best'] / fastest['best']:.2f}" if fastest else ""
        accuracy = "" if row["accuracy"] is None else f"{100 * row['accuracy']:.1f} %"
        memory = f"{row['memory']['peak_mb']:.0f} ({row['memory']['proportional_mb']:.0f})"
        spread = f"{row['median']:.3f} ({row['best']:.3f} to {row['worst']:.3f})"
        used = f"{row['cpu_median']:.2f} | {accuracy} | {row['startup']:.1f} | {memory}"
        lines.append(f"| {row['label']} | {spread} | {times} | {used} |")
    if fastest and floor:
        share = f"{floor['best'] / fastest['best']:.0%}"
        lines += ["", f"The products at real shapes take {share} of the time of {fastest['label']}, by best rounds."]
    return [*lines, ""]


def _head(*columns: str) -> list[str]:
    """Return the first two lines of a table."""
    return ["|" + "|".join(f" {column} ".replace("  ", " ") for column in columns) + "|", "|" + "---|" * len(columns)]


def _pruning(title: str, rows: list[Row]) -> list[str]:
    lines = [
        f"## {title}: local training of one pruned client",
        "",
        "Time relative to keep 1 with the same way of training, by medians (by best rounds).",
        "",
        *_head("", "keep", "multiply-adds", "time", "s"),
    ]
    for row in rows:
        time = f"{row['time_ratio']:.2f} ({row['time_ratio_best']:.2f})"
        lines.append(
            f"| {row['technique']} {row['way']} | {row['keep']} | {row['macs_ratio']:.2f} | {time} "
            f"| {row['seconds_median']:.3f} |"
        )
    return [*lines, ""]


def _scaling(rows: list[Row]) -> list[str]:
    lines = [
        "## Cohort and workers: MNIST, 1,000 clients of 60 examples, whole rounds",
        "",
        *_head("cohort", "engine", "s per round, median (best)", "client-steps per second", "peak MB"),
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['cohort']} | {row['label']} | {row['error'][:80]} | | |")
        else:
            rate = f"{row['steps'] / row['median']:,.0f}"
            spread = f"{row['median']:.3f} ({row['best']:.3f})"
            peak = f"{row['memory']['peak_mb']:.0f}"
            lines.append(f"| {row['cohort']} | {row['label']} | {spread} | {rate} | {peak} |")
    return [*lines, ""]
