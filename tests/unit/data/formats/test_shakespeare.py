"""The speakers of the plays, in the styles in which the files mark them."""

from pathlib import Path

import pytest

from fedcover.data.formats.shakespeare import FILES, LEAST, parse_plays, speeches
from fedcover.errors import InputError

FRONT = "A PLAY\n\nby William Shakespeare\n\nPERSONS REPRESENTED.\n\nANN.\nBO, a servant.\n\nSCENE: Kent.\n\n"
CAPITALS = (
    """ACT I.

SCENE I. A room.

[Enter ANN and BO.]

ANN.
Good day;
  come   in.

[Exit [slowly] BO.]

He is gone.

BO. [Within.]
I am here.

BO. No.

FIRST AND SECOND LORDS.
We too.

Farewell.
I go.

SCENE II.

Another room.

MRS. ANN. Who is {to him]
there?

SONG.

Hey ho.

ACT II

MRS. ANN.

[Aside.]

Nobody.

[Exit MRS. ANN

BO.
She is gone.

"""
    + 9 * "ANN.\nAy.\n\nBO.\nNo.\n\n"
)


def test_names_in_capitals() -> None:
    assert speeches(FRONT + CAPITALS) == {
        "ANN": "Good day;\ncome in.\nHe is gone.\n" + 9 * "Ay.\n",
        "BO": "I am here.\nNo.\nShe is gone.\n" + 9 * "No.\n",
        "FIRST AND SECOND LORDS": "We too.\nFarewell.\nI go.\n",
        "MRS. ANN": "Who is\nthere?\nHey ho.\nNobody.\n",
    }


def test_short_names_must_occur_twice() -> None:
    play = "Act 1.\n\nHam.\nWords.\n\nPol. and Ros.\nMy lord!\n\nAmen.\nSo be it.\n\nHam.\nNo.\n\n"
    assert speeches(play + "Pol. and Ros.\nAy.\n\nAct now.\n") == {
        "Ham": "Words.\nNo.\n",
        "Pol. and Ros": "My lord!\nAmen.\nSo be it.\nAy.\nAct now.\n",
    }


def test_names_without_a_point_must_occur_twice() -> None:
    play = "PROLOGUE\n\nTWO FRIENDS\nIn Troy.\n\nACT I.\n\nTHESEUS\n      Go.\n\nEGEUS\nNo.\n\n"
    assert speeches(play + "THESEUS\nSo.\n\nEGEUS\nOh.\n") == {"THESEUS": "Go.\nSo.\n", "EGEUS": "No.\nOh.\n"}


def test_short_roles_are_left_out_and_a_file_without_roles_is_refused() -> None:
    long = "word " * (LEAST // 5)
    assert list(parse_plays({"a_gut.txt": f"ACT I.\n\nANN.\n{long}\n\nBO.\nNo.\n"})) == ["a: ANN"]
    with pytest.raises(InputError, match=r"a_gut.txt has no role with 1000 characters or more"):
        parse_plays({"a_gut.txt": CAPITALS})


def test_known_roles_of_the_real_plays(data_folder: Path) -> None:
    folder = data_folder / "shakespeare"
    if not folder.is_dir():
        pytest.skip("FEDCOVER_DATA has no shakespeare")
    roles = parse_plays({file: (folder / file).read_text("latin-1") for file in FILES})
    assert len(roles) == 631
    assert len({name.partition(":")[0] for name in roles}) == 37
    lengths = {name: len(text) for name, text in roles.items()}
    assert max(lengths, key=lambda name: lengths[name]) == "hamlet: Ham"
    assert (lengths["hamlet: Ham"], lengths["othello: IAGO"]) == (61_804, 44_585)
    assert (lengths["midsummer_nights_dream: HELENA"], lengths["merry_wives_of_windsor: MRS. PAGE"]) == (9_437, 13_221)
    assert "To be, or not to be,--that is the question" in roles["hamlet: Ham"]
    assert "To be, or not to be" not in roles["hamlet: Hor"]
    assert not [name for name in roles if name.split(": ")[1] in ("ALL", "SONG", "PERSONS REPRESENTED")]
    assert not any("[" in text for text in roles.values())
