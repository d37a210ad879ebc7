"""Episodes about numbers and words: sums that come out right, contests, letters, lessons, secrets, chores, fables."""

from . import words
from .grammar import Person, Story, count, number, plural

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
HOURS = ("six", "seven", "eight", "nine", "ten", "eleven", "noon", "one", "two", "three", "four", "five")


def ing(phrase: str) -> str:
    """sweep the floor -> sweeping the floor"""
    verb, _, rest = phrase.partition(" ")
    doubled = {"chop": "chopp", "knit": "knitt", "swim": "swimm", "win": "winn"}
    return f"{doubled.get(verb) or (verb[:-1] if verb.endswith('e') and verb != 'see' else verb)}ing {rest}".strip()


def sharing(s: Story, a: Person, b: Person, c: Person) -> None:
    noun = s.pick(words.FOODS if s.chance(0.5) else words.COUNTED)
    start, given, found = s.rng.randint(7, 20), s.rng.randint(1, 4), s.rng.randint(2, 9)
    place = s.place()
    s.say("[A] <have> [n]{| in a bag| in a basket|, all counted twice}.", A=a, n=count(start, noun))
    s.say(
        "{[later], |}[A] <give> [k] to [B.obj], so [A] <have> [r] left.",
        A=a,
        B=b,
        k=count(given, noun),
        r=number(start - given),
        later=s.pick(words.LATER),
    )
    now = start - given
    if s.chance(0.5):
        s.say("[p.at], [A] <find> [k] more, and that <make> [r].", A=a, p=place, k=number(found), r=number(now + found))
        now += found
    if s.chance(0.4):
        lost = s.rng.randint(2, min(4, now - 1))
        now -= lost
        s.say(
            "{But [k] of them <fall+> into the water|Sadly, [k] <be+> {broken|rotten|stolen}|"
            "[C] <take> [k] without asking}, and only [r] <be+> left.",
            C=c,
            k=number(lost),
            r=number(now),
        )
    if s.chance(0.6):
        s.quote(c, "How many [n] do you have {|now}{|, [A!]}?", A=a, n=plural(noun))
        s.quote(a, "{I have [k]|[k]|Only [k]}{|, and [B!] has [g]}", B=b, k=number(now), g=number(given))
    s.facts.append((f"how many {plural(noun)} did {a.name} have in the end?", f"{a.name} had {number(now)}"))
    s.facts.append((f"how many {plural(noun)} did {b.name} get?", count(given, noun)))


def market(s: Story, a: Person, b: Person, c: Person) -> None:
    x, y = s.rng.sample(words.FOODS[:24], 2)
    px, py, n = s.rng.randint(2, 9), s.rng.randint(2, 9), s.rng.randint(1, 3)
    total = n * px + py
    purse = total + s.rng.randint(-3, 9)
    s.say("[A] <go> to the market with [c]{| in [A.pos] pocket| from [B.obj]}.", A=a, B=b, c=count(purse, "coin"))
    s.say(
        "{A(n) [x] <cost> [px], and a(n) [y] <cost> [py].|The price of a(n) [x] <be> [px], and a(n) [y] <cost> [py].}",
        x=x,
        y=y,
        px=count(px, "coin"),
        py=count(py, "coin"),
    )
    s.quote(a, "I would like [n] and one [y]{|, please}{|. How much is that?}", n=count(n, x), y=y)
    s.quote(c, "{That makes|That is|All together it is} [t]", t=count(total, "coin"))
    if purse < total:
        s.quote(
            a,
            "{Oh no, I have only [c]|Then I am short of [d]|But I have no more than [c]}",
            c=number(purse),
            d=count(total - purse, "coin"),
        )
        s.say(
            "{Luckily, [B] <lend> [A.obj] the missing [d]|So [A] <leave> the [y] on the counter|"
            "[C] <smile> and <let> [A.obj] pay the rest later}.",
            A=a,
            B=b,
            C=c,
            y=y,
            d=number(total - purse),
        )
    elif purse == total:
        s.say("{It <be> exactly what [A] <have>.|That <be> the last of the money, and the purse <be> empty.}", A=a)
    else:
        s.say(
            "[A] <pay> and <have> [r] left{|, enough for [z]}.",
            A=a,
            r=count(purse - total, "coin"),
            z=s.pick(("a ribbon", "some tea", "a newspaper", "a candle")),
        )
    s.facts.append((f"how much was the {x}?", count(px, "coin")))


def contest(s: Story, a: Person, b: Person, c: Person) -> None:
    game, unit = s.pick(words.GAMES)
    unit_many = "feet" if unit == "foot" else plural(unit)
    scores = s.rng.sample(range(3, 30), 3)
    people = [a, b, c]
    prize = s.thing()
    s.say(
        "{[later], there <be> a contest in [g]|[A], [B] and [C] <have+> a contest in [g]|"
        "It <be> the day of the contest in [g]}, and the prize <be> [t.a].",
        A=a,
        B=b,
        C=c,
        g=game,
        t=prize,
        later=s.pick(words.LATER),
    )
    for person, score in zip(people, scores, strict=True):
        s.say(
            "[P] {<get>|<reach>|<manage>} [n]{| [m]|, {more|fewer} than last year}.",
            P=person,
            n=f"{number(score)} {unit_many}",
            m=s.pick(words.MANNERS),
        )
    ranked = sorted(zip(scores, people, strict=True), key=lambda pair: -pair[0])
    best, second, last = (pair[1] for pair in ranked)
    s.say(
        "{So [W] <win> [t]|The winner <be> [W.name]|[W] <be> the best and <take> [t] home}, {[d] ahead of "
        "[S.obj]|with [S.obj] in second place|and [L] <come> last}.",
        W=best,
        S=second,
        L=last,
        t=prize,
        d=f"{number(ranked[0][0] - ranked[1][0])} {unit_many}" if ranked[0][0] - ranked[1][0] > 1 else "just",
    )
    s.quote(
        last,
        "{Next year I will win!|It was the wind|I am still proud of my [n]|Well done, [W!]!}",
        W=best,
        n=f"{number(ranked[2][0])} {unit_many}",
    )
    s.facts.append(("who won the contest?", f"{best.name} did, with {number(ranked[0][0])} {unit_many}"))
    s.facts.append(("who came last?", last.name))


def letter(s: Story, a: Person, b: Person, c: Person) -> None:
    thing, place, hour, day = s.thing(), s.place(), s.pick(HOURS), s.pick(DAYS)
    s.say(
        "{[later], a letter <come> for [A.obj]|[A] <find> a letter under the door|"
        "The postman <bring> [A.obj] a letter}. It <be> from [B.obj].",
        A=a,
        B=b,
        later=s.pick(words.LATER),
    )
    s.paragraph()
    s.say(
        '"Dear [A!], {I am writing from [p].|how are you?|it is [w] here today.|'
        "thank you for your last letter.} {I have found|I have bought|Yesterday I lost|Somebody gave me} [t.a]{, "
        "and now I think of how to [goal]|, just like yours|}. {Please come|Meet me|I will be} "
        '[p.at] on [day] at [h]{| and bring [x]|, and do not tell [C!]}. Your friend, [B!]."',
        A=a,
        B=b,
        C=c,
        t=thing,
        p=place,
        goal=thing.purpose,
        h=hour,
        day=day,
        w=s.pick(list(words.WEATHER)),
        x=plural(s.pick(words.FOODS)),
    )
    s.paragraph()
    s.say(
        "[A] <read> it {twice|aloud|again and again|[m]} and <put> it {into a drawer|next to the lamp|"
        "in [A.pos] pocket}.",
        A=a,
        m=s.pick(words.MANNERS),
    )
    s.say(
        "{On [day]|When [day] came}, {just before [h]|at [h]}, [A] <go> to [p], {and [B] <be> already waiting|"
        "but there <be> no sign of [B.obj]|where [B] <greet> [A.obj] [m]}.",
        A=a,
        B=b,
        p=place,
        h=hour,
        day=day,
        m=s.pick(words.MANNERS),
    )
    s.facts.append((f"when did {a.name} meet {b.name}?", f"on {day}, at {hour}"))
    s.facts.append(("who wrote the letter?", f"{b.name} wrote it to {a.name}"))


def lesson(s: Story, a: Person, b: Person, c: Person) -> None:
    animals = s.rng.sample(list(words.ANIMALS), 2)
    s.say(
        "{[A] <teach> [B.obj] about {animals|the farm}|[B] <ask> [A.obj] a hundred questions|"
        "They <talk+> about animals all the way}.",
        A=a,
        B=b,
    )
    for animal in animals:
        sound, food = words.ANIMALS[animal]
        if s.chance(0.5):
            s.quote(
                b,
                "{What does a(n) [x] like best|What should I feed the [x]|What do you give to a(n) [x]}?",
                x=animal,
            )
            s.quote(a, "{It likes [f] best|Give it [f]|[f], of course}", f=food)
        else:
            s.quote(
                b,
                "{Which animal can [v]|Who makes that noise? Is it a bird}?"
                if s.chance(0.7)
                else "Do you hear something [v]?",
                v=sound,
            )
            s.quote(a, "{The [x] does|That is the [x]}{|, and it loves [f]}", x=animal, f=food)
    p, q = s.rng.randint(2, 9), s.rng.randint(2, 9)
    if s.chance(0.5):
        s.quote(a, "{And how much is|Now tell me, what is} [p] {and [q]?|plus [q]?}", p=number(p), q=number(q))
        right = s.chance(0.75)
        s.quote(b, "{It is [r]|[r]!|I think it is [r]}", r=number(p + q if right else p + q + s.rng.choice((-1, 1))))
        s.quote(
            a,
            "{Right!|Very good|Correct}" if right else "{No, it is [r]|Wrong. It is [r]|Count again! It is [r]}",
            r=number(p + q),
        )
    s.facts.append((f"what does the {animals[0]} like?", words.ANIMALS[animals[0]][1]))


def secret(s: Story, a: Person, b: Person, c: Person) -> None:
    goal = s.pick(words.GOALS)
    s.quote(a, "{Can you keep a secret|Will you promise to tell nobody|May I tell you something}, [B!]?", B=b)
    s.quote(b, "{Of course I can|I promise|You can trust me}")
    s.quote(
        a,
        "I {want to|am going to|have always wanted to} [g]{|, but I have no money|, but I am afraid|, "
        "and nobody must know}",
        g=goal,
    )
    s.say(
        "[B] {<think> about it|<nod>|<smile>|<be> [feel]}{| for a while} and {<keep> the secret|<say> nothing|"
        "<tell> no one} {until [day]|for a week|all winter}.",
        B=b,
        day=s.pick(DAYS),
        feel=s.pick(words.FEELINGS),
    )
    if s.chance(0.5):
        s.say(
            "{But then [C] <ask> why [A] <be> always so [f], and [B] <tell> [C.obj] everything.|One day, "
            "however, [B] <talk> in {a dream|the inn}, and [C] <hear> it.}",
            A=a,
            B=b,
            C=c,
            f=s.pick(("busy", "quiet", "restless", "cheerful")),
        )
        s.quote(c, "{So [A!] wants to [g]!|To [g]? That is a wonderful idea|I could help [A!] to [g]}", A=a, g=goal)
        s.facts.append((f"who told {c.name} the secret?", f"{b.name} did"))
    else:
        s.say(
            "{[later], |}[A] <manage> to [g], and only [B] <know> how much it <mean>.",
            A=a,
            B=b,
            g=goal,
            later=s.pick(words.LATER),
        )
        s.facts.append((f"who knew that {a.name} wanted to {goal}?", f"only {b.name} knew it"))


def chores(s: Story, a: Person, b: Person, c: Person) -> None:
    jobs = s.rng.sample(words.ACTIVITIES, 3)
    weather = s.pick(list(words.WEATHER))
    s.say(
        "It <be> {so|very} [w] that {everyone [did]|people [did]}." if s.past else "It is {very|terribly} [w] today.",
        w=weather,
        did=words.WEATHER[weather][0],
    )
    s.say(
        "[A] <have> to [x], [B] <have> to [y], and [C] <have> to [z].",
        A=a,
        B=b,
        C=c,
        x=jobs[0],
        y=jobs[1],
        z=jobs[2],
    )
    who, work, other = s.pick([(a, jobs[0], b), (b, jobs[1], c), (c, jobs[2], a)])
    s.quote(
        who,
        "{I hate to|Why do I always have to|I am too tired to} [w]{!|!|, and the ground is [g]!}",
        w=work,
        g=words.WEATHER[weather][1],
    )
    s.quote(
        other,
        "{Then let us swap|Stop complaining, [W!]|I will help you to [w] when I am done|"
        "[ing] is better than doing nothing}",
        W=who,
        w=work,
        ing=ing(work),
    )
    s.say(
        "{While [X] <be> [ing], [O] <sing> a song|After [ing], [X] <fall> asleep {on the bench|under a tree}|"
        "Nobody <finish> before {dark|noon|supper}|[X] <start> [ing] [m]}.",
        X=who,
        O=other,
        ing=ing(work),
        m=s.pick(words.MANNERS),
    )
    s.facts.append((f"who had to {jobs[1]}?", f"{b.name} had to"))
    s.facts.append((f"what did {c.name} have to do?", f"{c.name} had to {jobs[2]}"))


def fable(s: Story, a: Person, b: Person, c: Person) -> None:
    x, y = s.rng.sample(list(words.ANIMALS), 2)
    trait = s.pick(list(words.TRAITS))
    adverb, known, opposite = words.TRAITS[trait]
    s.say(
        "{[A] <tell> a story|[B] <know> an old tale|[A] <remember> a fable}: once there {was|lived} "
        "a(n) [t] [x] that [known].",
        A=a,
        B=b,
        t=trait,
        x=x,
        known=known,
    )
    s.say(
        "A(n) [o] [y] lived next door. {The [x] had found [f] and would not share|The [y] wanted to [g], "
        "but could not|Every day the [x] began to [sx], and the [y] could not sleep}.",
        o=opposite,
        x=x,
        y=y,
        f=words.ANIMALS[x][1],
        g=s.pick(words.GOALS),
        sx=words.ANIMALS[x][0],
    )
    s.say(
        '"{You are too [o]|If you were less [o], we could be friends|Let us share [f]}," said the [x] [adv].',
        o=opposite,
        x=x,
        adv=adverb,
        f=words.ANIMALS[y][1],
    )
    s.say(
        "{In the end the [x] was right|The [y] thought about it all night|So they became friends|"
        "Since then the [y] has stopped being [o]}, and {that is why|everybody says that} [moral].",
        x=x,
        y=y,
        o=opposite,
        moral=words.MORALS[trait],
    )
    s.facts.append(("which animals were in the tale?", f"a(n) {x} and a(n) {y}"))


EPISODES = (sharing, market, contest, letter, lesson, secret, chores, fable)
