"""Story grammar: a template language, people who are named or referred to by pronoun, and the state of a small world.

Template language of `Story.say`:

    {a|b|c}        one alternative, may nest, may be empty
    <walk>         the verb in the story's tense, third person singular (past: walked, present: walks); <walk+> plural
    [A] [A.obj] [A.pos] [A.self]   person A as subject, object, possessor or reflexive: a name, "the baker" or
                   a pronoun, whichever is clear at this point; "I" and "me" where A tells the story
    [A.name]       like [A], but not a pronoun unless A tells the story
    [A!]           always the name, as others would call A;  [A~] [A~obj] [A~pos]  always a pronoun, seen from outside
    [t] [t.a]      thing: "the (old) lamp", "an old lamp";  [p] [p.at]  place: "the mill", "at the mill"
    [x]            any string;  "a(n)" becomes "a" or "an"
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

from . import words

T = TypeVar("T")
Node = str | tuple[tuple["Node", ...], ...]  # text to be resolved, or alternatives, each a sequence of nodes

PRONOUNS = {
    "he": {"": "he", "obj": "him", "pos": "his", "self": "himself"},
    "she": {"": "she", "obj": "her", "pos": "her", "self": "herself"},
    "I": {"": "I", "obj": "me", "pos": "my", "self": "myself"},
}
VOWEL_SOUND = re.compile(r"[aeio]|u(?!se|ni)")
SMALL_NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
ASIDE_RATE = 0.2
TENS = {2: "twenty", 3: "thirty", 4: "forty", 5: "fifty", 6: "sixty", 7: "seventy", 8: "eighty", 9: "ninety"}


@dataclass(eq=False)
class Person:
    name: str
    pronoun: str
    trait: str
    job: str | None = None
    known: bool = False  # the job was mentioned, so "the baker" is clear


@dataclass(eq=False)
class Place:
    noun: str
    preposition: str

    def form(self, kind: str) -> str:
        return f"{self.preposition} the {self.noun}" if kind == "at" else f"the {self.noun}"


@dataclass(eq=False)
class Thing:
    noun: str
    adjective: str
    purpose: str = ""

    def form(self, kind: str, rng: random.Random) -> str:
        if kind == "a":
            return f"a(n) {self.adjective} {self.noun}"
        if kind == "noun":
            return self.noun
        return f"the {self.adjective} {self.noun}" if kind == "full" or rng.random() < 0.3 else f"the {self.noun}"


def number(n: int) -> str:
    if n < 20:
        return SMALL_NUMBERS[n]
    return TENS[n // 10] + (f"-{SMALL_NUMBERS[n % 10]}" if n % 10 else "")


def plural(noun: str) -> str:
    if noun in words.IRREGULAR_PLURAL:
        return words.IRREGULAR_PLURAL[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def count(n: int, noun: str) -> str:
    return f"{number(n)} {noun if n == 1 else plural(noun)}"


@cache
def conjugate(verb: str, past: bool, many: bool) -> str:
    if verb == "be":
        return ("were" if many else "was") if past else ("are" if many else "is")
    if past:
        if verb in words.IRREGULAR_PAST:
            return words.IRREGULAR_PAST[verb]
        if verb.endswith("e"):
            return verb + "d"
        if verb.endswith("y") and verb[-2] not in "aeiou":
            return verb[:-1] + "ied"
        return verb + (verb[-1] if verb in words.DOUBLED_CONSONANT else "") + "ed"
    if many or verb in ("can", "will"):
        return verb
    if verb == "have":
        return "has"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "o", "z")) else "s")


@cache
def parse(template: str) -> tuple[Node, ...]:
    """Split a template at its braces, slots and verbs."""
    tokens = re.findall(r"[{}|]|<[^>]+>|\[[^\]]+\]|[^{}|<\[]+", template)
    position = 0

    def sequence() -> tuple[Node, ...]:
        nonlocal position
        nodes: list[Node] = []
        while position < len(tokens) and tokens[position] not in ("}", "|"):
            position += 1
            nodes.append(alternatives() if tokens[position - 1] == "{" else tokens[position - 1])
        return tuple(nodes)

    def alternatives() -> tuple[tuple[Node, ...], ...]:
        nonlocal position
        found = [sequence()]
        while tokens[position] == "|":
            position += 1
            found.append(sequence())
        position += 1
        return tuple(found)

    return sequence()


def polish(text: str) -> str:
    """Fix spaces, capitalize sentence starts and choose between "a" and "an"."""
    text = re.sub(r"\b([aA])\(n\) (?=(\w+))", lambda m: m[1] + ("n " if VOWEL_SOUND.match(m[2]) else " "), text)
    text = re.sub(r" +([,.?!])", r"\1", re.sub(r" +", " ", text)).strip()
    return re.sub(r"(^\"?|[.!?] \"?|\.\" \"?)([a-z])", lambda m: m[1] + m[2].upper(), text)


@dataclass
class Story:
    rng: random.Random
    past: bool = True
    narrator: Person | None = None
    cast: list[Person] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    paragraphs: list[list[str]] = field(default_factory=lambda: [[]])
    aside: "Callable[[Story], None] | None" = None  # occasionally adds an aside between sentences
    facts: list[tuple[str, str]] = field(default_factory=list)  # question and answer about what has been told
    _topic: dict[str, Person] = field(default_factory=dict)  # pronoun -> the person that it currently refers to
    _mentioned: dict[str, int] = field(default_factory=dict)  # name -> number of the last sentence with it
    _sentence: int = 0
    _in_aside: bool = False

    def pick(self, options: Sequence[T]) -> T:
        """Choose with a bias to the front: the density of the relative rank r falls as r^-0.3."""
        return options[int(len(options) * self.rng.random() ** 1.4)]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def paragraph(self) -> None:
        if self.paragraphs[-1]:
            self.paragraphs.append([])
        self._topic.clear()

    def say(self, template: str, **slots: "Person | Place | Thing | str") -> None:
        self.paragraphs[-1].append(polish(self.expand(template, slots)))
        self._sentence += 1
        if self.aside and not self._in_aside and '"' not in self.paragraphs[-1][-1] and self.chance(ASIDE_RATE):
            self._in_aside = True
            self._sentence -= 1  # an aside does not make pronouns less clear
            self.aside(self)
            self._in_aside = False

    def expand(self, template: str, slots: dict[str, "Person | Place | Thing | str"]) -> str:
        pieces: list[str] = []

        def walk(nodes: tuple[Node, ...]) -> None:
            for node in nodes:
                if isinstance(node, tuple):
                    walk(self.rng.choice(node))
                elif node[0] == "<":
                    verb = node[1:-1]
                    pieces.append(conjugate(verb.rstrip("+"), self.past, verb.endswith("+")))
                elif node[0] == "[":
                    pieces.append(self._slot(node[1:-1], slots))
                else:
                    pieces.append(node)

        walk(parse(template))
        return "".join(pieces)

    def _slot(self, slot: str, slots: dict[str, "Person | Place | Thing | str"]) -> str:
        match = re.fullmatch(r"(\w+)([.!~]?)(\w*)", slot)
        assert match is not None, slot
        value, mode, kind = slots[match[1]], match[2], match[3]
        if isinstance(value, str):
            return value
        if isinstance(value, Place):
            return value.form(kind)
        if isinstance(value, Thing):
            return value.form(kind, self.rng)
        if mode == "!":
            return value.name + ("'s" if kind else "")
        return PRONOUNS[value.pronoun][kind] if mode == "~" else self._refer(value, kind)

    def _refer(self, person: Person, kind: str) -> str:
        if person is self.narrator:
            return PRONOUNS["I"]["" if kind == "name" else kind]
        age = self._sentence - self._mentioned.get(person.name, -9)
        clear = self._topic.get(person.pronoun) is person and age <= 1
        self._topic[person.pronoun] = person
        self._mentioned[person.name] = self._sentence
        if kind == "self" or (clear and kind != "name" and self.chance(0.7 if age else 0.96)):
            return PRONOUNS[person.pronoun][kind]
        name = f"the {person.job}" if person.known and self.chance(0.25) else person.name
        return name + ("'s" if kind == "pos" else "")

    def quote(self, speaker: Person, speech: str, manner: str = "", **slots: "Person | Place | Thing | str") -> None:
        """Add direct speech, with its tag before, after or left out. `speech` ends in ? or ! or without punctuation."""
        text = polish(self.expand(speech, slots))
        end = text[-1] if text[-1] in "?!" else ""
        body = text[: len(text) - len(end)]
        question = self.rng.choice(("<ask>", "<ask>", "<want> to know"))
        verbs = {"": "{<say>|<say>|<say>|<answer>|<reply>}", "?": question, "!": "{<call>|<cry>|<shout>|<exclaim>}"}
        verb = verbs[end]
        if "|" in speech and self.chance(0.06):
            verb = "{<whisper>|<murmur>|<mutter>}"
        how = manner or (self.pick(words.MANNERS) if self.chance(0.12) else "")
        subject_first = "know" in verb or speaker is self.narrator or self.chance(0.5)
        form = self.rng.random()
        if form < 0.55:
            tag = f"[S] {verb}" if subject_first else f"{verb} [S.name]"
            self.say(f'"[q]{end or ","}" {tag} [m].', q=body, S=speaker, m=how)
        elif form < 0.85:
            self.say(f'[S] {verb} [m], "[q]{end or "."}"', q=body, S=speaker, m=how)
        else:
            self.say(f'"[q]{end or "."}"', q=body)

    def person(self) -> Person:
        """Add a new person with a unique name to the story."""
        taken = {p.name for p in self.cast}
        pronoun = self.rng.choice(("he", "she"))
        names = [n for n in (words.BOYS if pronoun == "he" else words.GIRLS) if n not in taken]
        job = self.pick(list(words.JOBS)) if self.chance(0.45) else None
        someone = Person(self.pick(names), pronoun, self.pick(list(words.TRAITS)), job)
        self.cast.append(someone)
        return someone

    def place(self) -> Place:
        noun = self.pick([p for p in words.PLACES if p not in {q.noun for q in self.places}])
        self.places.append(Place(noun, words.PLACES[noun]))
        return self.places[-1]

    def thing(self) -> Thing:
        nouns, adjectives, purposes = words.THINGS[self.pick(list(words.THINGS))]
        adjective = self.pick(adjectives)
        if self.chance(0.35):
            adjective = " ".join(self.rng.sample(adjectives, 2))
        return Thing(self.pick(nouns), adjective, self.pick(purposes))

    def text(self) -> str:
        return "\n".join(" ".join(p) for p in self.paragraphs if p) + "\n"
