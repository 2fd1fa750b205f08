"""Files that are almost right: a file is changed in its bytes, or in its JSON with a checksum that fits again."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from random import Random
from typing import Any

DEEP = 100_000  # lists in lists, which no parser that calls itself survives
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e308, -0.0, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**400),
    *("", "x", "0", "nan", "cpu", "float32", "device", "aten.mm.default", "aten.set_.source_Tensor", "\ud800", "\0"),
    *([], [[]], [None], [0], [0, 0], [0, None], {}, {"read": [0, None]}, {"read": [0, 0]}, {"read": [-1, None]}),
    *({"constant": ["dtype", "load"]}, {"complex": "1e999j"}, {"complex": "x"}, {"float": "1e5"}, {"": 0}),
    *(float("nan"), float("inf"), "0]; __import__('os').abort(); [0"),
)


def mutants(whole: bytes, seed: int, count: int) -> Iterator[bytes]:
    """As many changed copies of a file that `files.save` wrote; the same ones for the same seed."""
    random = Random(seed)
    header, _, body = whole.partition(b"\n")
    payload = json.loads(body)
    for _ in range(count):
        yield spoiled(random, whole) if random.random() < 0.3 else _signed(random, json.loads(header), payload)


def spoiled(random: Random, whole: bytes) -> bytes:
    """Bits flipped, parts left out, repeated or moved."""
    for _ in range(random.choice((1, 1, 1, 3))):
        start = random.randrange(len(whole) + 1)
        end = min(len(whole), start + random.choice((1, 1, 4, 100, 10_000)))
        part = whole[start:end]
        new = random.choice(
            (b"", part + part, part[::-1], bytes([random.randrange(256)]), b"9" * 5000, b"\xff", b"NaN")
        )
        if random.random() < 0.3 and part:
            new = bytes([part[0] ^ (1 << random.randrange(8))]) + part[1:]
        whole = (
            whole[: random.randrange(len(whole) + 1)] if random.random() < 0.1 else whole[:start] + new + whole[end:]
        )
        if not whole:
            break
    return whole


def _signed(random: Random, header: dict[str, Any], payload: Any) -> bytes:
    """One to three nodes of the JSON replaced, and the checksum made to fit."""
    changed = copy.deepcopy(payload)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        changed = _replaced(random, changed)
    text = json.dumps(changed, separators=(",", ":"))
    canonical = json.dumps(changed, sort_keys=True, separators=(",", ":"))
    header["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    if random.random() < 0.02:
        text = _abused(random, text)
    if random.random() < 0.02:
        key = random.choice(list(header))
        header[key] = random.choice(JUNK[:-5])
    return (json.dumps(header) + "\n" + text + "\n").encode()


def _replaced(random: Random, changed: Any) -> Any:
    """The JSON with one node changed for junk, for a near miss, or for another node of it."""
    places = list(_places(changed))
    if not places:
        return random.choice(JUNK)
    holder, key = random.choice(places)
    kind = random.random()
    if kind < 0.4:
        holder[key] = copy.deepcopy(random.choice(JUNK))
    elif kind < 0.6:
        holder[key] = _near(random, holder[key])
    elif kind < 0.75:
        other, there = random.choice(places)
        holder[key] = copy.deepcopy(other[there])
    elif kind < 0.85:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(random.choice((*JUNK, holder[key]))))
    else:
        holder[random.choice(("x", "self", "promise", "read", key + "_"))] = copy.deepcopy(random.choice(JUNK))
    return changed


def _near(random: Random, node: Any) -> Any:
    """Something of the same type, or of a similar one."""
    match node:
        case bool():
            return random.choice((not node, int(node), str(node)))
        case int() | float():
            return random.choice((node + 1, node - 1, -node, float(min(node, 2**60)), str(node), [node], node * 2**40))
        case str():
            return random.choice((node + "x", node[:-1], node.upper(), [node], node + "\n"))
        case list():
            return random.choice(
                (node[::-1], node + node, node[:-1], {str(key): item for key, item in enumerate(node)}, tuple(node[:1]))
            )
        case _:
            return random.choice(JUNK)


def _abused(random: Random, text: str) -> str:
    """What JSON allows, or what parsers do, and nobody means."""
    deep = "[" * DEEP + "]" * DEEP
    twice = text.replace("{", '{"graph":0,', 1) if text.startswith("{") else text
    return random.choice(
        (deep, '{"graph":' * DEEP, twice, text.replace(":", ":" + "9" * 5000, 1), text + text, "", "NaN")
    )


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every node but the outermost: what holds it, and under which name or number."""
    queue = [node]
    while queue:
        holder = queue.pop()
        if isinstance(holder, dict | list):
            for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
                yield holder, key
                queue.append(holder[key])
