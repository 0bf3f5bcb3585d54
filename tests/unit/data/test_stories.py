"""The generated stories: always the same, different authors, a label for each position."""

import torch

import fedcover as fc
from fedcover.data import describe, get, load
from fedcover.data.stories import ALPHABET, AUTHORS, ROWS_EACH, text_of


def test_stories_are_rows_of_characters_and_what_follows() -> None:
    train, test = load("stories").train, load("stories").test
    assert train.classes == len(ALPHABET) == 32
    assert train.inputs.shape == train.labels.shape == (AUTHORS * ROWS_EACH[0], 64)
    assert torch.equal(train.inputs[:, 1:], train.labels[:, :-1])
    assert torch.equal(load("stories").test.inputs, test.inputs)
    text = text_of(7, 50 * 64)
    row = "".join(ALPHABET[i] for i in train.inputs[7 * ROWS_EACH[0]].tolist())
    assert text.startswith(row)
    assert not set(map(tuple, train.inputs.tolist())) & set(map(tuple, test.inputs.tolist()))


def test_authors_differ() -> None:
    train = load("stories").train
    clients = fc.data.from_parts(train, torch.arange(len(train)).reshape(AUTHORS, -1))
    mixes = torch.stack([clients.label_mix(author) for author in range(AUTHORS)])
    assert torch.allclose(mixes.sum(1), torch.ones(AUTHORS, dtype=torch.float64))
    apart = (mixes - mixes.mean(0)).abs().sum(1).mean() / 2
    mixed = fc.data.iid(train, clients=AUTHORS, seed=0)
    alike = torch.stack([mixed.label_mix(client) for client in range(AUTHORS)])
    assert apart > 1.5 * (alike - mixes.mean(0)).abs().sum(1).mean() / 2


def test_nothing_is_fetched() -> None:
    lines: list[str] = []
    get("stories", progress=lines.append)
    assert lines == ["stories is generated; nothing is fetched"]
    assert describe("stories").verified
