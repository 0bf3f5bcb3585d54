import gzip
import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcover.data import describe, load, names
from fedcover.data.catalogue import MNIST, SOURCES, Source
from fedcover.data.copies import find
from fedcover.data.loading import cache_folder
from fedcover.data.verify import OFFICIAL, UNVERIFIED
from fedcover.errors import InputError

Small = Callable[..., Source]
TRAIN_IMAGES = "train-images-idx3-ubyte"


def test_every_entry_of_the_catalogue_is_well_formed() -> None:
    new = ["mnist_writers", "quickdraw", "shakespeare", "sotu"]
    assert names() == ["mnist", "fashion_mnist", "cifar10", "digits", *new, "stories"]
    for name, source in SOURCES.items():
        assert source.name == name
        assert len(source.mean) == len(source.std) == (0 if source.text else source.shape[0])
        assert source.licence
        for layout in source.layouts:
            for published in [*layout.files.values(), layout.archive_digest]:
                algorithm, _, value = (published or "").partition(":")
                assert len(value) == {"": 0, "sha256": 64, "md5": 32}[algorithm]
            assert all(mirror.startswith("http") and mirror.endswith("/") for mirror in layout.mirrors)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("minst", "mnist"), ("MNIST", "mnist"), ("fashion-mnist", "fashion_mnist"), ("cifar-10", "cifar10")],
)
def test_an_unknown_name_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(InputError, match=f"'{name}'; did you mean {nearest}[?] choose from mnist, "):
        load(name)


def test_a_name_near_to_none_lists_them_all() -> None:
    with pytest.raises(InputError, match="'imagenet-21k'; choose from mnist, fashion_mnist, cifar10, digits"):
        load("imagenet-21k")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fedcover"
    monkeypatch.setenv("HOME", "/home/u")
    for value in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == Path("/home/u/.cache/fedcover")


def test_pixels_are_normalised(tmp_path: Path, small_mnist: Small) -> None:
    source = small_mnist(tmp_path / "mnist")
    split = load(source, tmp_path)
    raw = gzip.decompress((tmp_path / "mnist" / f"{TRAIN_IMAGES}.gz").read_bytes())[16:]
    pixels = torch.tensor(np.frombuffer(raw, np.uint8), dtype=torch.float32).view(6, 1, 28, 28)
    assert torch.equal(split.train.inputs, pixels.div(255).sub(0.1307).div(0.3081))
    assert split.train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(split.test) == 4
    assert (split.train.classes, split.train.name, split.provenance) == (10, "mnist", OFFICIAL)
    assert split.test.provenance == split.provenance


def test_the_argument_then_the_environment_then_the_cache(
    tmp_path: Path, own_cache: Path, small_mnist: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small_mnist(own_cache / "mnist")
    assert describe(source).where == own_cache / "mnist"
    shutil.copytree(own_cache / "mnist", tmp_path / "env" / "mnist")
    monkeypatch.setenv("FEDCOVER_DATA", str(tmp_path / "env"))
    assert describe(source).where == tmp_path / "env" / "mnist"
    shutil.copytree(own_cache / "mnist", tmp_path / "own" / "mnist")
    assert describe(source, tmp_path / "own").where == tmp_path / "own" / "mnist"
    (tmp_path / "bare" / "mnist").mkdir(parents=True)
    for empty in (tmp_path / "absent", tmp_path / "bare"):
        assert describe(source, str(empty)).where == own_cache / "mnist"
        assert len(load(source, empty).train) == 6


def test_a_missing_data_set_names_the_folders_and_the_remedy(tmp_path: Path, own_cache: Path) -> None:
    with pytest.raises(InputError) as caught:
        load("mnist", tmp_path / "x")
    for part in (tmp_path / "x" / "mnist", own_cache / "mnist", "`fedcover data get mnist`", "FEDCOVER_DATA"):
        assert str(part) in str(caught.value)
    missing = describe("mnist", tmp_path / "x")
    assert (missing.where, missing.verified) == (None, False)
    assert missing.provenance == "mnist was not found; run `fedcover data get mnist`"


def test_an_incomplete_folder_names_the_missing_file(tmp_path: Path, small_mnist: Small) -> None:
    source = small_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / f"{TRAIN_IMAGES}.gz").unlink()
    with pytest.raises(InputError, match=f"incomplete: {TRAIN_IMAGES} .*is missing"):
        load(source, tmp_path)
    assert "incomplete" in describe(source, tmp_path).provenance


def test_a_corrupt_copy_is_an_error_to_load_and_is_described(tmp_path: Path, small_mnist: Small) -> None:
    source = small_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / f"{TRAIN_IMAGES}.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(InputError, match="corrupt"):
        load(source, tmp_path)
    description = describe(source, tmp_path)
    assert (description.where, description.verified) == (tmp_path / "mnist", False)
    assert "corrupt" in description.provenance


def test_a_plain_file_comes_before_its_gzipped_twin(tmp_path: Path, small_mnist: Small) -> None:
    source, path = small_mnist(tmp_path / "mnist"), tmp_path / "mnist" / TRAIN_IMAGES
    path.write_bytes(gzip.decompress(path.with_name(path.name + ".gz").read_bytes()))
    path.with_name(path.name + ".gz").write_bytes(b"junk")
    assert len(load(source, tmp_path).train) == 6


@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_cifar10_is_read_in_every_form(
    tmp_path: Path, small_cifar10: Small, form: str, archive: bool, direct: bool
) -> None:
    folder = tmp_path / "cifar10"
    source = small_cifar10(folder, form, archive)
    reference = load(small_cifar10(tmp_path / "plain" / "cifar10", form), tmp_path / "plain")
    if direct and not archive:
        for path in list(folder.glob("*/*")):
            path.rename(folder / path.name)
    before = sorted(folder.rglob("*"))
    split = load(source, tmp_path)
    assert sorted(folder.rglob("*")) == before  # nothing is written beside the archive
    assert split.train.inputs.shape == (10, 3, 32, 32)
    assert torch.equal(split.train.inputs, reference.train.inputs)
    assert torch.equal(split.test.labels, reference.test.labels)
    assert float(split.train.inputs.min()) >= -1
    assert float(split.train.inputs.max()) <= 1
    assert split.provenance == (UNVERIFIED if form == "binary" and not archive else OFFICIAL)


def test_single_cifar_files_may_be_gzipped(tmp_path: Path, small_cifar10: Small) -> None:
    source = small_cifar10(tmp_path / "cifar10")
    for path in list((tmp_path / "cifar10").rglob("*.bin")):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert len(load(source, tmp_path).train) == 10


def test_an_unverified_copy_must_have_every_image(tmp_path: Path, small_cifar10: Small) -> None:
    source = small_cifar10(tmp_path / "cifar10")
    path = tmp_path / "cifar10" / "cifar-10-batches-bin" / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:3073])
    with pytest.raises(InputError, match="must have 10 examples; got 9"):
        load(source, tmp_path)


def test_an_archive_without_a_file_names_it(tmp_path: Path, small_cifar10: Small) -> None:
    source = small_cifar10(tmp_path / "cifar10", archive=True)
    wanted = replace(source.layouts[0], files={**source.layouts[0].files, "extra.bin": None})
    with pytest.raises(InputError, match=r"tar.gz has no cifar-10-batches-bin/extra.bin"):
        load(replace(source, layouts=(wanted,)), tmp_path)


def test_images_of_another_size_are_refused(tmp_path: Path, small_mnist: Small) -> None:
    source = small_mnist(tmp_path / "mnist")
    with pytest.raises(InputError, match="6 x 28 x 28"):
        load(replace(source, shape=(1, 32, 32)), tmp_path)


def test_a_trusted_malicious_pickle_is_still_not_run(tmp_path: Path, small_cifar10: Small) -> None:
    source = small_cifar10(tmp_path / "cifar10", "python")
    folder = tmp_path / "cifar10" / "cifar-10-batches-py"
    (folder / "data_batch_1").write_bytes(f"cos\nsystem\n(S'touch {tmp_path / 'run'}'\ntR.".encode())
    with pytest.raises(InputError, match="corrupt"):
        load(source, tmp_path)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in folder.iterdir()]
    (folder / "SHA256SUMS").write_text("".join(lines))
    with pytest.raises(InputError, match=r"os.system"):
        load(source, tmp_path)
    assert not (tmp_path / "run").exists()


def test_real_mnist(data_folder: Path) -> None:
    if not (data_folder / "mnist").is_dir():
        pytest.skip("FEDCOVER_DATA has no mnist")
    split = load("mnist", data_folder)
    assert split.provenance == OFFICIAL
    assert (split.train.inputs.shape, split.test.inputs.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert split.train.labels[:6].tolist() == [5, 0, 4, 1, 9, 2]
    assert abs(float(split.train.inputs.mean())) < 1e-3
    assert abs(float(split.train.inputs.std()) - 1) < 1e-3


def test_real_mnist_with_one_bit_turned_is_refused(data_folder: Path, tmp_path: Path) -> None:
    if not (data_folder / "mnist").is_dir():
        pytest.skip("FEDCOVER_DATA has no mnist")
    copy = find("mnist", MNIST.layouts, data_folder / "mnist")
    assert copy is not None
    (tmp_path / "mnist").mkdir()
    for file in MNIST.layouts[0].files:
        os.symlink(copy.path(file).resolve(), tmp_path / "mnist" / copy.path(file).name)
    raw = bytearray(copy.contents[TRAIN_IMAGES])
    raw[1_000_000] ^= 1
    (tmp_path / "mnist" / TRAIN_IMAGES).write_bytes(raw)
    assert "corrupt" in describe("mnist", tmp_path).provenance


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10"])
def test_other_real_data(data_folder: Path, name: str) -> None:
    if not (data_folder / name).is_dir():
        pytest.skip(f"FEDCOVER_DATA has no {name}")
    split, source = load(name, data_folder), SOURCES[name]
    assert (len(split.train), len(split.test)) == source.counts
    assert split.train.inputs.shape[1:] == source.shape
    assert split.train.label_counts().tolist() == [source.counts[0] // 10] * 10
    assert abs(float(split.test.inputs.mean())) < 0.1
