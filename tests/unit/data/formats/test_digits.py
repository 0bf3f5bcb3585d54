import torch

from fedcover.data import load
from fedcover.data.copies import read_bytes
from fedcover.data.formats.digits import FILE, FOLDER, parse_digits


def test_the_split_is_fixed_and_every_image_is_in_one_part() -> None:
    raw = read_bytes(FOLDER / f"{FILE}.gz")
    train, train_labels, test, test_labels = parse_digits(raw, FILE)
    assert (len(train), len(test)) == (1437, 360)
    rows = sorted(
        ",".join(map(str, [*image.ravel(), label]))
        for images, labels in ((train, train_labels), (test, test_labels))
        for image, label in zip(images, labels, strict=True)
    )
    assert rows == sorted(raw.decode().split())
    assert test_labels[:12].tolist() == parse_digits(raw, FILE)[3][:12].tolist()


def test_each_digit_keeps_its_proportion() -> None:
    split = load("digits")
    share = split.test.label_counts() / (split.test.label_counts() + split.train.label_counts())
    assert bool(((share - 0.2).abs() < 0.01).all())


def test_the_parts_are_not_sorted_by_label() -> None:
    assert len(load("digits").train.labels[:50].unique()) == 10


def test_inputs_have_zero_mean_and_unit_variance() -> None:
    train = load("digits").train
    assert train.inputs.shape == (1437, 1, 8, 8)
    assert abs(float(train.inputs.mean())) < 1e-3
    assert abs(float(train.inputs.std()) - 1) < 1e-3


def test_the_first_image_is_a_zero() -> None:
    split = load("digits")
    first = split.train if torch.equal(split.train.labels[:1], torch.tensor([0])) else split.test
    pixels = (first.inputs[0, 0] * 0.3762 + 0.3058) * 16
    assert pixels.round().int()[0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_the_credit_is_in_the_provenance() -> None:
    assert "Alpaydin" in load("digits").provenance
    assert "CC BY 4.0" in load("digits").provenance
