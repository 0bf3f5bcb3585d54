"""Texts as rows of characters and what follows, with the end of each client's text for testing."""

import torch

from fedcover.data.text import ALPHABET, ROW, TextSource, encode, next_character, plain, rows

SOURCE = TextSource("plays", "made by the test", "free")


def test_every_character_of_the_alphabet_has_its_place() -> None:
    assert len(ALPHABET) == 96
    assert encode(ALPHABET).tolist() == list(range(96))


def test_other_characters_become_plain_or_are_dropped() -> None:
    assert plain("d\u00e9j\u00e0 \u2018vu\u2019\u2014\u4e2d\x02") == "deja 'vu'--"


def test_rows_do_not_overlap_and_labels_follow() -> None:
    numbers = torch.arange(3 * ROW)  # the last row lacks the character that follows
    inputs, labels = rows(numbers)
    assert torch.equal(inputs.flatten(), numbers[: 2 * ROW])
    assert torch.equal(labels.flatten(), numbers[1 : 2 * ROW + 1])
    assert rows(numbers[:0])[0].shape == (0, ROW)


def test_the_last_fifth_of_each_text_is_for_testing() -> None:
    texts = {"ann": "abcdefghij" * 100, "bo": "xyz\n" * 500}
    split = next_character(texts, SOURCE)
    assert split.clients is not None
    assert split.clients.tests is split.test_clients
    assert split.clients.names == ("ann", "bo")
    assert [split.clients.size(client) for client in range(2)] == [(800 - 1) // ROW, (1600 - 1) // ROW]
    assert [split.clients.tests.size(client) for client in range(2)] == [(200 - 1) // ROW, (400 - 1) // ROW]
    for examples, begin in ((split.clients.examples_of(1), 0), (split.clients.tests.examples_of(1), 1600)):
        assert torch.equal(examples.inputs[0], encode(texts["bo"])[begin : begin + ROW])
        assert torch.equal(examples.labels[0], encode(texts["bo"])[begin + 1 : begin + ROW + 1])
    assert (split.train.classes, split.train.licence, split.provenance) == (96, "free", "made by the test")
