"""Changes at random of bytes, and of what JSON says."""

import copy
import json

NUMBERS = (0, 1, -1, 2, 7, 64, 2**31, 2**32 - 1, 2**53 + 1, 2**63, 2**64, 10**30, 1e308, float("nan"), float("inf"))
NAMES = (
    "",
    "x",
    "..",
    ".",
    "/",
    "../outside.safetensors",
    "/etc/passwd",
    "a/../b",
    "a\\b",
    "C:\\x",
    "\0",
    "\ud800",
    "é",
)
DTYPES = ("F32", "F64", "I64", "BF16", "BOOL", "F4", "F8_E4M3", "U8", "C64", "f32", "O")
OTHERS = (None, True, [], {}, [[]], {"dtype": "F32"}, "2")


def changed_bytes(data, rng):
    """Return bytes with one to three changes."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at, length = int(rng.integers(0, len(data) + 1)), int(rng.integers(1, 9))
        how = rng.integers(8)
        if how <= 1 and data:
            data[at % len(data)] ^= 1 << int(rng.integers(8))
        elif how == 2:
            del data[at:]
        elif how == 3:
            del data[at : at + length]
        elif how == 4:
            data[at:at] = rng.bytes(length)
        elif how == 5:
            data[at : at + length] = rng.bytes(length)
        elif how == 6:
            other = int(rng.integers(0, len(data) + 1))
            data[at : at + length] = data[other : other + length]
        else:
            data[at : at + 8] = int(rng.integers(0, 2**63)).to_bytes(8, "little")[: int(rng.integers(1, 9))]
    return bytes(data)


def places(value):
    """Return each object and list in plain data."""
    if not isinstance(value, (dict, list)):
        return []
    return [value] + [
        place for part in (value.values() if isinstance(value, dict) else value) for place in places(part)
    ]


def one_of(rng, *kinds):
    """Return a random member of one of the kinds."""
    kind = kinds[rng.integers(len(kinds))]
    return kind[rng.integers(len(kind))]


def changed_json(value, rng):
    """Return the JSON text of plain data with one to three changes."""
    value = json.loads(json.dumps(value))
    doubled = None
    for _ in range(rng.integers(1, 4)):
        place = one_of(rng, places(value))
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        other = copy.deepcopy(one_of(rng, NUMBERS, NAMES, DTYPES, OTHERS))
        if not keys:
            place.update({"x": other}) if isinstance(place, dict) else place.append(other)
            continue
        key, how = one_of(rng, keys), rng.integers(7)
        if how <= 1:
            place[key] = other
        elif how == 2:
            del place[key]
        elif how == 3 and isinstance(place, dict):
            place[one_of(rng, NAMES, keys)] = place.pop(key)
        elif how == 4:
            second = one_of(rng, keys)
            place[key], place[second] = place[second], place[key]
        elif how == 5 and isinstance(place[key], int):
            place[key] += int(rng.integers(-8, 9))
        elif how == 6:
            doubled = key if isinstance(place, dict) else doubled
    text = json.dumps(value, ensure_ascii=bool(rng.integers(2)))
    if doubled is not None:
        text = text[:-1] + f", {json.dumps(doubled)}: {json.dumps(one_of(rng, NUMBERS, OTHERS))}" + "}"
    if rng.random() < 0.02:
        text = text.replace("}", "[" * int(rng.integers(1, 100_000)), 1)
    if rng.random() < 0.02:
        text = text.replace("0", "1" + "0" * int(rng.integers(1, 6000)), 1)
    return text.encode("utf-8", "surrogatepass")
