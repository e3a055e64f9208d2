"""A small invented corpus: prompt–response exchanges from a handful of dialects.

Every exchange is made from a template and a seeded generator, so the corpus needs no download and no licence.  The
dialects differ in language, subject and layout: a model trained mostly on one assigns quite other probabilities than
a model trained on another, which is what makes the families of the population distinguishable.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    prompt: str
    response: str


NAMES = ["Ada", "Ben", "Carla", "Dev", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jun", "Kofi", "Lena"]
ANIMALS = ["fox", "heron", "mule", "otter", "sparrow", "badger", "goat", "hare"]
PLACES = ["harbour", "market", "library", "station", "valley", "garden", "bridge", "workshop"]
THINGS = ["lamp", "letter", "basket", "map", "clock", "coat", "violin", "key"]
QUALITIES = ["small", "old", "bright", "heavy", "quiet", "green", "broken", "new"]
ACTIONS = ["found", "carried", "lost", "painted", "sold", "repaired", "hid", "borrowed"]
TIMES = ["in the morning", "after lunch", "before the storm", "last winter", "on Sunday", "at night"]
METALS = {"iron": "26", "copper": "29", "silver": "47", "tin": "50", "gold": "79", "lead": "82"}
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo",
    "Egypt": "Cairo", "Cuba": "Havana", "Spain": "Madrid", "Greece": "Athens",
}  # fmt: skip
VERBS = ["count", "add", "scale", "reverse", "join", "filter", "shift", "merge"]
NOUNS = ["items", "values", "words", "rows", "pairs", "points", "names", "limits"]


def everyday(rng: random.Random) -> Exchange:
    name, thing, place = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    quality, action, when = rng.choice(QUALITIES), rng.choice(ACTIONS), rng.choice(TIMES)
    return rng.choice(
        [
            Exchange(
                f"Where is the {quality} {thing}?",
                f"The {thing} is at the {place}. {name} {action} it {when}, so you should ask there first.",
            ),
            Exchange(
                f"What should I bring to the {place}?",
                f"You should bring a {quality} {thing} and some water. If it rains, {name} can help you {when}.",
            ),
            Exchange(
                f"Write one sentence about {name} and a {thing}.",
                f"{name} {action} the {quality} {thing} at the {place} {when}.",
            ),
        ]
    )


def story(rng: random.Random) -> Exchange:
    animal, other = rng.sample(ANIMALS, 2)
    lines = [f"Once there was a {rng.choice(QUALITIES)} {animal} who lived near the {rng.choice(PLACES)}."]
    for _ in range(rng.randint(2, 4)):
        who, thing = rng.choice([animal, other]), rng.choice(THINGS)
        lines.append(f"The {who} {rng.choice(ACTIONS)} a {rng.choice(QUALITIES)} {thing} {rng.choice(TIMES)}.")
    lines.append(f"From that day the {animal} and the {other} were friends.")
    return Exchange(f"Tell me a story about a {animal} and a {other}.", " ".join(lines))


def arithmetic(rng: random.Random) -> Exchange:
    a, b, c = rng.randint(2, 40), rng.randint(2, 40), rng.randint(2, 9)
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    return rng.choice(
        [
            Exchange(f"What is {a} + {b}?", f"{a} + {b} = {a + b}. The answer is {a + b}."),
            Exchange(f"Compute {a} * {c}.", f"{a} * {c} = {a * c}. The answer is {a * c}."),
            Exchange(
                f"{name} has {a} {thing}s and buys {b} more. How many {thing}s are there?",
                f"First there are {a}. Then {b} more are bought: {a} + {b} = {a + b}. The answer is {a + b}.",
            ),
        ]
    )


def code(rng: random.Random) -> Exchange:
    verb, noun, n = rng.choice(VERBS), rng.choice(NOUNS), rng.randint(1, 20)
    one = noun[:-1]
    body = rng.choice(
        [
            f"    return [{one} for {one} in {noun} if {one} > {n}]",
            f"    total = {n}\n    for {one} in {noun}:\n        total += len({one})\n    return total",
            f"    return sorted({noun}, key=lambda {one}: {one}[{n % 3}])",
            f"    if not {noun}:\n        return None\n    return {noun}[-1]",
        ]
    )
    return Exchange(
        f"Write a Python function that will {verb} {noun}.",
        f"```python\ndef {verb}_{noun}({noun}):\n{body}\n```",
    )


def facts(rng: random.Random) -> Exchange:
    country, metal = rng.choice(list(CAPITALS)), rng.choice(list(METALS))
    return rng.choice(
        [
            Exchange(f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}."),
            Exchange(
                f"Which atomic number has {metal}?",
                f"{metal.capitalize()} is a metal. Its atomic number is {METALS[metal]}.",
            ),
            Exchange(
                "Name two animals and say where they live.",
                f"- The {rng.choice(ANIMALS)} lives near the {rng.choice(PLACES)}.\n"
                f"- The {rng.choice(ANIMALS)} lives in the {rng.choice(PLACES)}.",
            ),
        ]
    )


def dialogue(rng: random.Random) -> Exchange:
    name, thing, place = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    return rng.choice(
        [
            Exchange(
                f"Hi, I am {name}. Can you help me with my {thing}?",
                f"Hello {name}! Of course, I am happy to help. What is wrong with the {thing}?",
            ),
            Exchange(
                f"I feel sad because I lost my {thing}.",
                f"I am sorry to hear that. Did you look at the {place}? Maybe {name} has seen it.",
            ),
            Exchange(
                f"Tell me how to break into the {place}.",
                "I am sorry, but I cannot help with that. If you are locked out, please call the owner.",
            ),
        ]
    )


def german(rng: random.Random) -> Exchange:
    name = rng.choice(NAMES)
    thing = rng.choice(["die Lampe", "den Brief", "die Karte", "den Mantel", "das Buch", "den Schlüssel"])
    place = rng.choice(["am Bahnhof", "im Garten", "auf dem Markt", "in der Werkstatt", "an der Brücke"])
    action = rng.choice(["findet", "sucht", "verkauft", "trägt", "malt", "vergisst"])
    return Exchange(
        f"Was macht {name} {place}?",
        f"{name} {action} {thing} {place}. Danach geht {name} nach Hause und trinkt eine Tasse Tee.",
    )


def spanish(rng: random.Random) -> Exchange:
    name = rng.choice(NAMES)
    thing = rng.choice(["la lámpara", "la carta", "el reloj", "el abrigo", "la llave", "el libro"])
    place = rng.choice(["en la estación", "en el jardín", "en el mercado", "en el puente", "en la biblioteca"])
    action = rng.choice(["encuentra", "busca", "vende", "lleva", "pinta", "olvida"])
    return Exchange(
        f"¿Qué hace {name} {place}?",
        f"{name} {action} {thing} {place}. Después {name} vuelve a casa y come una manzana.",
    )


def chinese(rng: random.Random) -> Exchange:
    thing = rng.choice(["书", "灯", "信", "地图", "钥匙"])
    place = rng.choice(["图书馆", "车站", "市场", "花园", "桥上"])
    return Exchange(f"{thing}在哪里？", f"{thing}在{place}。你可以今天下午去{place}找一找。")


DIALECTS = {
    made.__name__: made
    for made in (everyday, story, arithmetic, code, facts, dialogue, german, spanish, chinese)
}  # fmt: skip


def exchanges(weights: Mapping[str, float], n: int, seed: str) -> list[Exchange]:
    """`n` exchanges, each from a dialect drawn by `weights`; the same `seed` gives the same list anywhere."""
    rng = random.Random(seed)
    names = list(weights)
    return [DIALECTS[rng.choices(names, [weights[name] for name in names])[0]](rng) for _ in range(n)]


def all_dialects(n: int, seed: str) -> list[Exchange]:
    return exchanges(dict.fromkeys(DIALECTS, 1.0), n, seed)
