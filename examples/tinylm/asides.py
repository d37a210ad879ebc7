"""Asides between the sentences of a plot, with rich vocabulary and hard to predict, and episodes that list and recall
things."""

from . import words
from .grammar import Person, Story, Thing, count, number, plural
from .talk import DAYS, HOURS, ing

ASIDES = (
    "{Outside|Nearby|In the distance|Somewhere|Not far away|Behind them|Upstairs}, {a(n) [c] [x]|the [j]'s [x]|"
    "the neighbor's [x]} <begin> to [sound]{| [m]}.",
    "The {air|wind|room|street|whole place|path} <smell> of [f], [g] and [h].",
    "{A|The} [trait] [j] {<pass>|<walk> by|<hurry> past|<wait> nearby}, carrying [list].",
    "{On the ground|In a corner|On the wall|Under a tree|Along the road} there {<be+>} [goods] and [more].",
    "[P] <have> [goods] for {lunch|supper|the road|later}.",
    "[P] <whistle> a(n) [feel] song about {[job]|[z] and [list]}.",
    "The {sky|grass|roof|road|fence|door} <be> [c] and {[c2]|[ground]}, "
    "and the {clouds|shadows|windows} <look+> [feel].",
    "[P] <wear> a(n) [wear]{| with [c] buttons| over a(n) [c2] shirt}.",
    "[P] <think> of [y], of [z] and of [list].",
    "{A(n) [x] and a(n) [o]|Two [xs] and a(n) [o]} <quarrel+> over {some [likes]|[goods]}.",
    "{Years ago|Long ago|As a child}, [P] had tried to [goal]{| with [list]|, but without [goods]}.",
)


def some_thing(s: Story) -> str:
    nouns, adjectives, _ = words.THINGS[s.rng.choice(list(words.THINGS))]
    return f"a(n) {s.rng.choice(adjectives)} {s.rng.choice(nouns)}"


def some_goods(s: Story) -> str:
    return count(s.rng.randint(2, 40), s.rng.choice(words.FOODS + words.COUNTED))


def listing(s: Story, length: int) -> str:
    """three figs, a rusty saw and a(n) old map"""
    items = [some_thing(s) if s.chance(0.55) else some_goods(s) for _ in range(length)]
    return ", ".join(items[:-1]) + (" and " if length > 1 else "") + items[-1]


def aside(s: Story) -> None:
    person = s.rng.choice(s.cast[:3])
    animal, other = s.rng.sample(list(words.ANIMALS), 2)
    clothing = s.rng.choice(words.THINGS["clothing"][1]), s.rng.choice(words.THINGS["clothing"][0])
    s.say(
        s.rng.choice(ASIDES),
        P=person,
        x=animal,
        o=other,
        xs=plural(animal),
        sound=words.ANIMALS[animal][0],
        likes=words.ANIMALS[other][1],
        c=s.rng.choice(words.COLORS),
        c2=s.rng.choice(words.COLORS),
        m=s.rng.choice(words.MANNERS),
        f=plural(s.rng.choice(words.FOODS)),
        g=s.rng.choice(words.SMELLS),
        h=s.rng.choice(words.SMELLS),
        trait=s.rng.choice(list(words.TRAITS)),
        j=s.rng.choice(list(words.JOBS)),
        feel=s.rng.choice(words.FEELINGS),
        job=s.rng.choice(list(words.JOBS.values()))[2],
        goods=some_goods(s),
        more=some_goods(s),
        list=listing(s, s.rng.randint(1, 3)),
        wear=" ".join(clothing),
        goal=s.rng.choice(words.GOALS),
        y=ing(s.rng.choice(words.ACTIVITIES)),
        z=ing(s.rng.choice(words.GOALS)),
        ground=s.rng.choice(list(words.WEATHER.values()))[1],
    )


def inventory(s: Story, a: Person, b: Person, c: Person) -> None:
    place = s.place()
    boxes = s.rng.sample(list(words.CONTAINERS), s.rng.randint(2, 3))
    s.say(
        "{[A] and [B] <clean+> up|[A] <show> [B.obj] around|[B] <look> for something to eat} [p.at].",
        A=a,
        B=b,
        p=place,
    )
    for box in boxes:
        content = listing(s, s.rng.randint(2, 4))
        where = f"{words.CONTAINERS[box]} the {box}"
        s.say(
            "{[where] [A] <find> [x]|[where] there <be+> [x]|[B] <look> [where] and <see> [x]}.",
            A=a,
            B=b,
            where=where,
            x=content,
        )
        s.facts.append((f"what was {where}?", content))
    if s.chance(0.5):
        taken = some_thing(s)
        s.quote(c, "{May I have|Is there not|Where did you put|Who needs} [x]?", x=taken)
        s.quote(
            a,
            "{I have never seen such a thing|Look [where]|Take what you like|Ask [B!]}",
            B=b,
            where=f"{words.CONTAINERS[boxes[0]]} the {boxes[0]}",
        )


def timetable(s: Story, a: Person, b: Person, c: Person) -> None:
    days = sorted(s.rng.sample(range(7), 3))
    tasks = s.rng.sample(words.ACTIVITIES, 3)
    hours = [s.rng.choice(HOURS) for _ in days]
    people = [s.rng.choice((a, b, c)) for _ in days]
    s.say(
        "{[A] <write> a plan for the week|[B] <make> a plan|There <be> much to do}{|, "
        "and nobody <want> to forget anything}.",
        A=a,
        B=b,
    )
    for day, task, hour, person in zip(days, tasks, hours, people, strict=True):
        s.say(
            "On [d] at [h], {[P] <have> to [t]|it <be> [P.pos] turn to [t]|[P] <promise> to [t]}{| [w]}.",
            d=DAYS[day],
            h=hour,
            P=person,
            t=task,
            w=f"with {some_thing(s)}",
        )
        s.facts.append((f"who had to {task}?", f"{person.name} had to, on {DAYS[day]}"))
    ask = s.rng.randrange(3)
    s.quote(c, "{When do we [t]|On which day does somebody [t]}?", t=tasks[ask])
    s.quote(b, "{On [d]|On [d] at [h]|At [h] on [d]}{|, as always|, do not forget it}", d=DAYS[days[ask]], h=hours[ask])


def auction(s: Story, a: Person, b: Person, c: Person) -> None:
    """Compare two offers by their number."""
    noun = s.rng.choice(words.FOODS + words.COUNTED)
    low, high = sorted(s.rng.sample(range(2, 60), 2))
    offers = [(b, low), (c, high)]
    s.rng.shuffle(offers)
    nouns, adjectives, _ = words.THINGS[s.rng.choice(list(words.THINGS))]
    thing = Thing(s.rng.choice(nouns), s.rng.choice(adjectives))
    s.say("[A] {<want> to sell|<offer>} [t.a]{| with [x]}.", A=a, t=thing, x=some_goods(s))
    for person, n in offers:
        s.quote(
            person,
            "{I will give you|I offer|You can have|My price is} [n]{| and [x]}",
            n=count(n, noun),
            x=some_thing(s),
        )
    s.say(
        "{[n] <be+> more than [m], so|Because [n] <be+> more than [m],|Without thinking long,} "
        "[A] <sell> [t] to [C.obj].",
        n=number(high),
        m=number(low),
        A=a,
        C=c,
        t=thing,
    )
    s.facts.append((f"who bought the {thing.noun}?", f"{c.name} bought it for {count(high, noun)}"))


EPISODES = (inventory, timetable, auction)
