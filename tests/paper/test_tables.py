"""The paper's arithmetic as an oracle: Gamma_min, PARAs and FLOPs of its appendix, from `fedcover audit code --json`.

Rows are as printed in the appendix, except where marked: those cells do not follow from the row's
own code and are corrected here.
"""

import json
from collections.abc import Callable

import pytest

Cli = Callable[..., tuple[int, str, str]]

# code: (PARAs, FLOPs, Gamma_min)
MNIST_WP = {
    "1111111111": (159010, 158800, 10),
    "1111114444": (143330, 143120, 6),
    "1111144447": (135490, 135280, 5),
    "1111223344": (135490, 135280, 8),
    "1111234444": (135490, 135280, 6),
    "1111234567": (123730, 123520, 7),
    "1111444444": (135490, 135280, 4),
    "1111444477": (127650, 127440, 4),
    "1111556677": (111970, 111760, 6),
    "1114556677": (108050, 107840, 5),
    "1234556677": (100210, 100000, 5),
    "1455666777": (92370, 92160, 3),
    "2233445677": (104130, 103920, 5),
    "1444777777": (100210, 100000, 1),  # printed 92370, 92160 and 6
}
MNIST_NP = {
    "1111111111": (159010, 158800, 10),
    "1111114444": (143110, 142920, 6),
    "1111144447": (135160, 134980, 5),
    "1111223344": (135160, 134980, 8),
    "1111234444": (135160, 134980, 6),
    "1111234567": (123235, 123070, 7),
    "1111444444": (135160, 134980, 4),
    "1111444477": (127210, 127040, 4),
    "1111556677": (111310, 111160, 6),
    "1114556677": (107335, 107190, 5),
    "1234556677": (99385, 99250, 5),
    "1455666777": (91435, 91310, 3),
    "2233445677": (103360, 103220, 5),
    "1444777777": (99385, 99250, 1),  # printed Gamma 5
}
MNIST_FS = {
    "1111111111": (159010, 158800, 10),
    "1111114444": (143110, 142920, 6),
    "1111144447": (135160, 134980, 5),  # printed Gamma 6
    "1111444444": (135160, 134980, 4),
    "1111444477": (127210, 127040, 4),
    "1111444777": (123235, 123070, 4),
    "1111777777": (111310, 111160, 4),
    "1114777777": (107335, 107190, 3),
    "1444777777": (99385, 99250, 1),
    "1477777777": (91435, 91310, 1),
}
# code: (PARAs in K as printed: parameters x 8 / 1000, FLOPs in K, Gamma_min)
CIFAR_FS = {
    "1111111111": (512.81, 653.80, 10),
    "1111111122": (476.37, 619.68, 8),
    "1111112222": (439.93, 585.57, 6),
    "1111113333": (471.28, 589.48, 6),
    "1111113344": (473.17, 619.29, 6),  # printed 467.92 and 589.06
    "1111114444": (475.07, 649.10, 6),  # printed 464.57 and 588.64
    "1111222222": (403.49, 551.46, 4),
    "2222333444": (380.47, 533.81, 0),  # printed 372.59 and 488.47; no client has one block of fc1
}


def audit(cli: Cli, code: str, policy: str, model: str) -> dict[str, object]:
    code_, out, err = cli("audit", "code", code, "--policy", policy, "--model", model, "--json")
    assert code_ == 0, err
    report: dict[str, object] = json.loads(out)
    return report


@pytest.mark.parametrize(
    ("policy", "code", "row"),
    [
        (policy, code, row)
        for policy, table in (("WP", MNIST_WP), ("NP", MNIST_NP), ("FS", MNIST_FS))
        for code, row in table.items()
    ],
)
def test_mnist_rows(cli: Cli, policy: str, code: str, row: tuple[int, int, int]) -> None:
    report = audit(cli, code, policy, "mlp")
    assert (report["parameters"], report["macs"], report["gamma_min"]) == row
    n = {digit: code.count(digit) for digit in "1234567"}
    quarters = [
        10,
        n["1"] + n["3"] + n["4"] + n["7"],
        n["1"] + n["2"] + n["4"] + n["6"],
        n["1"] + n["2"] + n["3"] + n["5"],
    ]
    assert report["coverage"] == quarters
    assert report["condition_holds"] is True


@pytest.mark.parametrize(("code", "row"), CIFAR_FS.items())
def test_cifar_fs_rows(cli: Cli, code: str, row: tuple[float, float, int]) -> None:
    report = audit(cli, code, "FS", "lenet")
    # The paper cuts decimals off rather than rounding them.
    assert report["parameters"] * 8 / 1000 == pytest.approx(row[0], abs=0.011)  # type: ignore[operator]
    assert report["macs"] / 1000 == pytest.approx(row[1], abs=0.011)  # type: ignore[operator]
    assert report["gamma_min"] == row[2]
    assert report["condition_holds"] is (row[2] >= 1)


@pytest.mark.parametrize(("code", "gamma"), [("1111112223", 6), ("1111112233", 6), ("1111222334", 4)])
def test_cifar_wp_coverage_is_that_of_its_fully_connected_weights(cli: Cli, code: str, gamma: int) -> None:
    """*WP-M2, *WP-M3 and *WP-S2, printed as 7, 8 and 7: the fc weights are pruned alike under every pattern."""
    assert audit(cli, code, "WP", "lenet")["gamma_min"] == gamma


def test_the_uncovered_block(cli: Cli) -> None:
    report = audit(cli, "2222333444", "FS", "lenet")
    lost = [region for region in report["regions"] if region["coverage"] == 0]  # type: ignore[attr-defined]
    # Channels 13 to 16, of 25 positions each, times neurons 101 to 120.
    assert [(region["size"], region["tensors"]) for region in lost] == [(4 * 25 * 20, {"fc1.weight": 2000})]


def test_expected_noise_of_true_ranks(cli: Cli) -> None:
    """On uniform weights pattern 4 drops 1/64 of the squared norm of the ranked tensor, not a quarter."""
    report = audit(cli, "1234567", "WP", "mlp")
    noise = {p["name"]: p["pruning_noise"] for p in report["patterns"]}  # type: ignore[attr-defined]
    exact = {"1": 0, "4": 1 / 64, "3": 7 / 64, "2": 19 / 64, "7": 8 / 64, "6": 20 / 64, "5": 26 / 64}
    for digit, value in exact.items():
        # The output layer and the biases are whole, so a little less than the ranked tensor's own share.
        assert 0.92 * value <= noise[digit] <= value + 1e-3


def test_any_code_and_cohort_size(cli: Cli) -> None:
    report = audit(cli, "3x1,11011000,0.4,7", "NP", "mlp")
    assert report["clients"] == 6
    assert len(report["coverage"]) == 8  # type: ignore[arg-type]
    assert report["coverage"][0] == 6  # type: ignore[index]
    assert sum(region["size"] for region in report["regions"]) == 159010  # type: ignore[attr-defined]
    assert report["bytes"] > report["bytes_up"] == 4 * report["parameters"]  # type: ignore[operator]
