"""Numbers as short text."""

import math
import subprocess
import sys

from fedcover.report import format as form


def test_each_kind_of_number_has_one_format() -> None:
    assert form.percent(0.980512) == "98.05 %"
    assert form.percent(0.0) == "0.00 %"
    assert form.percent(1e-7) == "< 0.01 %"
    assert form.percent(math.nan) == form.decimal(math.inf) == "not finite"
    assert [form.rough_percent(share) for share in (0.854, 0.0312, 0.0997, 1.0)] == ["85 %", "3.1 %", "10 %", "100 %"]
    assert [form.decimal(value) for value in (None, 0.0, 0.12345, 1.5e-6)] == ["–", "0.0000", "0.1235", "1.50e-06"]
    assert [form.megabytes(n) for n in (0, 1234, 2_500_000, 25_040_000, 1_234_000_000)] == [
        "0.00", "0.0012", "2.50", "25.0", "1,234",
    ]  # fmt: skip
    assert [form.duration(s) for s in (8.12, 200, 7500)] == ["8.1 s", "3 min 20 s", "2 h 5 min"]
    assert [form.seconds(s) for s in (0.417, 12.34, 1240.2)] == ["0.42", "12.3", "1,240"]
    assert form.clients((8, 10)) == "8 to 10"
    assert form.shorten("x" * 50, 11) == "xxxxx…xxxxx"
    assert [form.percent_down(share) for share in (0.99999, 1.0, 0.0)] == ["99.99 %", "100.00 %", "0.00 %"]


def test_formats_and_tables_do_not_need_matplotlib() -> None:
    script = "import sys; sys.modules['matplotlib'] = None; import fedcover.report.format; import fedcover.report.table"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
