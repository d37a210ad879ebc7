"""Generates the corpus: python -m examples.tinylm.corpus

A seed gives an endless, reproducible stream of stories. Each has its own people, places and things: an opening, one to
three episodes that share them, and an ending that asks about or refers back to what was told.
"""

import argparse
import random
from itertools import count
from pathlib import Path

from . import asides, plots, talk, words
from .grammar import Person, Story

TRAIN_SEED, VALIDATION_SEED, CALIBRATION_SEED = 1, 2, 3
EPISODES = (*plots.EPISODES, *talk.EPISODES, *asides.EPISODES)
MODELS = Path(__file__).parents[2] / "models" / "tinylm"


def introduce(s: Story, person: Person) -> None:
    if person is s.narrator:
        s.say(
            "{I am called [P!]|My name is [P!]}{|, and I am [t]|, and people say that I am [t]|"
            " and I live by the [p]}.",
            P=person,
            t=person.trait,
            p=s.pick(("river", "sea", "mill", "church", "old bridge", "forest")),
        )
        return
    if person.job and s.chance(0.7):
        place, tool, topic = words.JOBS[person.job]
        s.say(
            "[P!] {<be> a(n) [j]|<work> as a(n) [j] [p]}{| and <know> everything about [x]| and <own> a(n) [o]}.",
            P=person,
            j=person.job,
            p=f"at the {place}",
            x=topic,
            o=f"{s.pick(words.COLORS)} {tool}",
        )
        person.known = True
    _, known, opposite = words.TRAITS[person.trait]
    if s.chance(0.6):
        past_known = "[P] <be> [t]" if not s.past else "{[P] <be> [t]|[P] <be> [t] and [known]|[P] <be> never [o]}"
        s.say(past_known + ".", P=person, t=person.trait, known=known, o=opposite)


def opening(s: Story) -> None:
    a, b, c = s.cast[:3]
    if s.chance(0.2):
        introduce(s, a)
    weather = s.pick(list(words.WEATHER))
    home = s.place()
    s.say(
        "{[time], |[time], |On a(n) [w] day, |}[A] {<meet> [B.obj]|<visit> [B.obj]|<wait> for [B.obj]|"
        "and [B] <sit+> together} {[p.at]|[p.at]|}.",
        time=s.pick(words.TIMES),
        w=weather,
        A=a,
        B=b,
        p=home,
    )
    for person in (a, b):
        introduce(s, person)
    feel = s.pick(list(words.REASONS))
    if s.past and s.chance(0.5):
        reason = s.pick(words.REASONS[feel])
        s.say(
            "[A] <be> [f], because [r]{|, and also because [A] <have> to [x]}.",
            A=a,
            f=feel,
            r=reason,
            x=s.pick(words.ACTIVITIES),
        )
        s.facts.append((f"why was {a.name} {feel}?", f"because {reason}"))
    if s.chance(0.5):
        s.say(
            "{[later], |}[C] {<come> by|<join> them|<arrive>}{| [m]| with a(n) [x]}.",
            C=c,
            m=s.pick(words.MANNERS),
            x=s.pick(list(words.ANIMALS)),
            later=s.pick(words.LATER),
        )
        introduce(s, c)


def ending(s: Story) -> None:
    a, b = s.cast[:2]
    s.paragraph()
    if s.chance(0.55):
        asker = b if s.narrator else s.pick((a, b))
        child = s.person()
        s.say(
            "{[later], [B] <tell> [K.obj] {about it|the whole story}|When [B] <come> home, [K] <ask> about "
            "everything|[K] <want> to know all about it}.",
            B=asker,
            K=child,
            later=s.pick(words.LATER),
        )
        for question, answer in s.rng.sample(s.facts, min(len(s.facts), s.rng.randint(1, 3))):
            s.quote(child, "{|And |So }" + question)
            s.say(
                '"[x]{|, I think|, if I remember well}{,"|,"} <say> [B.name].' if s.chance(0.6) else '"[x]."',
                x=answer,
                B=asker,
            )
    s.say(
        "{At night|In the evening|After all this|On the way home}, [A] {<be> [f]|<think> about [B.obj]|"
        "<sleep> well|<write> it all down in a notebook|<dream> of the [n]}.",
        A=a,
        B=b,
        f=s.pick(words.FEELINGS),
        n=s.places[-1].noun,
    )
    if s.chance(0.3):
        s.say(
            "{And [A] <understand> that [m].|As the old people say, [m].|[B] only <say> that [m].}",
            A=a,
            B=b,
            m=words.MORALS[s.pick((a, b)).trait],
        )


def story(rng: random.Random) -> str:
    s = Story(rng)
    for _ in range(3):
        s.person()
    style = rng.random()
    s.past = style < 0.8
    if style < 0.2:
        s.narrator = s.cast[0]
    s.aside = asides.aside
    opening(s)
    for i, episode in enumerate(rng.sample(EPISODES, rng.choice((1, 1, 2, 2, 3)))):
        s.paragraph()
        # the first two people are the main characters; later episodes may swap roles
        people = s.cast[:3]
        if i:
            rng.shuffle(people)
        episode(s, people[0], people[1], people[2])
    ending(s)
    return s.text()


def nth_story(seed: int, index: int) -> str:
    return story(random.Random(seed * 1_000_000_007 + index))


def take(seed: int, size: int) -> str:
    """Return whole stories of a seed, separated by empty lines, of at least `size` bytes (the text is ASCII)."""
    parts: list[str] = []
    total = 0
    for index in count():
        text = nth_story(seed, index)
        parts.append(text)
        total += len(text) + 1
        if total >= size:
            break
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODELS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "eval.txt").write_text(take(VALIDATION_SEED, 240_000))
    (args.out / "calibration.txt").write_text(take(CALIBRATION_SEED, 100_000))


if __name__ == "__main__":
    main()
