"""Episodes about things and journeys: each tells a small plot of three people and records facts to ask about later."""

from . import words
from .grammar import Person, Place, Story, plural


def lost_thing(s: Story, a: Person, b: Person, c: Person) -> None:
    thing, place, wrong = s.thing(), s.place(), s.place()
    box = s.pick(list(words.CONTAINERS))
    spot = f"{words.CONTAINERS[box]} the {box}"
    s.say(
        "{[later], |}[A] <want> to {use|show [B.obj]|fetch|look at} [t.full], but it <be> {gone|not there|"
        "nowhere to be seen}.",
        A=a,
        B=b,
        t=thing,
        later=s.pick(words.LATER),
    )
    s.say(
        "{[A] <look> [w.at] first, but <find> nothing.|[A] <search> {everywhere|the whole house|"
        "every corner} {in vain|without luck}.|[A] <need> it to [goal].|It <be> the only [t.noun] [A] <have>.}",
        A=a,
        w=wrong,
        t=thing,
        goal=thing.purpose,
    )
    s.quote(a, "{Have you seen|Do you know where I left|Did anybody take|Who has seen} my [t.noun]?", t=thing)
    wrong_spot = s.pick([w for w in words.CONTAINERS if w != box])
    if s.chance(0.5):
        s.quote(
            b,
            "{Maybe|Perhaps} it is [at] the [x]{, where you keep everything||, I suppose}",
            at=words.CONTAINERS[wrong_spot],
            x=wrong_spot,
        )
        s.say(
            "{[A] <look> [at] the [x], but there <be> only [junk].|But [at] the [x] there <be> nothing but [junk].}",
            A=a,
            x=wrong_spot,
            junk=f"a(n) {s.pick(words.COLORS)} {s.pick(words.COUNTED)}",
            at=words.CONTAINERS[wrong_spot],
        )
    s.quote(
        b,
        "{You were|I saw you} [p.at] {yesterday|this morning|on Sunday|last night}. {Perhaps it is still there|"
        "You may have left it there|Let us look there}",
        p=place,
    )
    s.say(
        "{[later], |}{they <go+>|[A] and [B] <hurry+>|the two of them <walk+>|both of them <run+>} to [p]{| [m]}.",
        A=a,
        B=b,
        p=place,
        later=s.pick(words.LATER),
        m=s.pick(words.MANNERS),
    )
    finder = s.pick([a, b])
    s.say(
        "{There it <be>, [spot]|[spot], [F] <find> [t]|[F] <look> [spot], and there <lie> [t]}{|"
        ", {covered with dust|wet from the rain|safe and sound|next to [junk]}}.",
        F=finder,
        spot=spot,
        t=thing,
        junk=f"a(n) {s.pick(words.COLORS)} {s.pick(words.COUNTED)}",
    )
    s.say(
        "{[A] <thank> [B.obj] [m].|[A] <be> so [feel] that [A] <hug> [B.obj].|From then on [A] <keep> [t] {close|"
        "in a safe place}.|[A] <promise> to be more careful.}",
        A=a,
        B=b,
        m=s.pick(words.MANNERS),
        feel=s.pick(("glad", "happy", "relieved", "grateful")),
        t=thing,
    )
    s.facts.append((f"where was the {thing.noun}?", f"it was {spot}, {place.form('at')}"))


def borrowed(s: Story, a: Person, b: Person, c: Person) -> None:
    thing, day = s.thing(), s.pick(("Monday", "Friday", "Sunday", "Saturday", "Tuesday", "Thursday"))
    s.say(
        "{[A] <need> [t.a] to [goal]|To [goal], [A] <need> [t.a]|[A] <plan> to [goal], but <have> no [t.noun]}{|, "
        "and there <be> none in the house| , and the shop <be> closed}.",
        A=a,
        t=thing,
        goal=thing.purpose,
    )
    s.quote(
        a,
        "{Could you lend me your [t.noun]|May I borrow your [t.noun]|Would you give me your [t.noun]} until [day]?",
        day=day,
        t=thing,
    )
    if b.trait in ("greedy", "jealous", "strict", "proud", "stubborn") and s.chance(0.7):
        s.quote(b, "No, {I need it myself|the last time you broke it|I never lend anything}")
        s.say(
            "{[B] <be> [trait], after all|[B] <be> as [trait] as ever}, so [A] <go> to [C.obj].",
            A=a,
            B=b,
            C=c,
            trait=b.trait,
        )
        s.quote(
            c,
            "{Of course|Gladly|Take mine}, [A!]. {But bring it back on [day]|Just keep it [dry]}",
            A=a,
            day=day,
            dry=s.pick(("clean", "dry", "safe")),
        )
        lender = c
    else:
        s.quote(
            b,
            "{Of course|Gladly|Certainly|With pleasure}, but {bring it back on [day]|do not lose it|"
            "be careful with it}, [A!]",
            A=a,
            day=day,
        )
        lender = b
    if s.chance(0.5):
        s.say(
            "[A] <use> [t] {all week|for two days|the whole afternoon} and <manage> to [goal].",
            A=a,
            t=thing,
            goal=thing.purpose,
        )
        s.say(
            "{On [day]|When [day] came}, [A] <bring> it back {to [L.obj]|clean and dry|with a jar of honey}{|, "
            "just as promised}.",
            A=a,
            L=lender,
            day=day,
        )
        s.facts.append((f"who had the {thing.noun} in the end?", f"{lender.name}, because {a.name} brought it back"))
    else:
        s.say("But [day] <come> and <go>, and [A] <forget> {all about it|to bring it back}.", A=a, day=day)
        s.quote(
            lender,
            "{Where is my [t.noun]?|You promised to bring back my [t.noun] on [day]!|"
            "I waited for my [t.noun] until [day]. What happened?}",
            t=thing,
            day=day,
        )
        s.say("[A] <blush> and <give> {it|[t]} back {at once|[m]}.", A=a, t=thing, m=s.pick(words.MANNERS))
        s.facts.append((f"whose {thing.noun} was it?", f"it belonged to {lender.name}, not to {a.name}"))


def journey(s: Story, a: Person, b: Person, c: Person) -> None:
    goal, target = s.thing(), s.place()
    way = s.rng.sample(list(words.OBSTACLES), 2)
    s.say(
        "{[later], |}[A] <have> to {bring|carry|deliver} [t.a] to [C.obj], who <be> waiting [p.at].",
        A=a,
        C=c,
        t=goal,
        p=target,
        later=s.pick(words.LATER),
    )
    s.say(
        "{[B] <go> along|[B] <come> too}, because [B] {<want> to [dream]|<be> [feel]|<have> nothing better to do|"
        "<know> the way}.",
        B=b,
        dream=s.pick(words.GOALS),
        feel=s.pick(words.FEELINGS),
    )
    for i, obstacle in enumerate(way[: 1 + s.chance(0.5)]):
        s.say(
            (
                "{Then|A mile further|Just before [p]|After that}"
                if i
                else "{First|Halfway there|Behind the last house|Before long}"
            )
            + "{, | }{they <come+> to|they <meet+>|the way <be> blocked by|there <be>} [o].",
            o=obstacle,
            p=target,
        )
        thinker, other = (a, b) if s.chance(0.5) else (b, a)
        if s.chance(0.5):
            s.quote(
                other,
                "{What shall we do now?|We must turn back!|We will never get to [p]|I am too [feel] to go on}",
                p=target,
                feel=s.pick(("tired", "afraid", "cold", "hungry")),
            )
        s.quote(thinker, "{We can|Let us|We only have to|I think we should} [cure]", cure=words.OBSTACLES[obstacle])
        s.say(
            "{That <work> well.|It <be> not easy, but it <work>.|So they <do+>, [m].|It <take> {an hour|"
            "all morning|some time}, but they <manage+>.|[O] <be> surprised how easy it <be>.}",
            m=s.pick(words.MANNERS),
            O=other,
        )
    s.say(
        "{[later], |}they <reach+> [p], {and [A] <give> [t] to [C.obj]|where [C] <take> [t] [m]|"
        "and [C] <be> {delighted|glad} to see [t]}.",
        A=a,
        C=c,
        t=goal,
        p=target,
        later=s.pick(words.LATER),
        m=s.pick(words.MANNERS),
    )
    s.quote(c, "{Was the way hard|Did you have any trouble|What took you so long}?")
    s.quote(
        a,
        "{Only because of [o]|There was [o], but we managed|We met [o], and [B!] was very [brave]}",
        o=" and ".join(way[: 1 + (len(way) > 5)]),
        B=b,
        brave=s.pick(("brave", "clever", "patient", "helpful")),
    )
    if s.chance(0.6):
        s.say("Now [C] <can> [goal] {at last|again|without fear}.", C=c, goal=goal.purpose)
    s.facts.append((f"who has the {goal.noun} now?", f"{c.name} has it"))
    s.facts.append((f"what was in the way to the {target.noun}?", f"it was {way[0]}"))


def quarrel(s: Story, a: Person, b: Person, c: Person) -> None:
    thing, place = s.thing(), s.place()
    s.say(
        "{[p.at], [A] and [B] <find+> [t.a].|There <be> [t.a] [p.at], and both [A] and [B] <want+> it.}",
        A=a,
        B=b,
        t=thing,
        p=place,
    )
    s.quote(a, "{I saw it first!|It is mine, because I saw it first|I need it to [goal]}", goal=thing.purpose)
    s.quote(b, "{No, it is mine!|But I picked it up|You have a(n) [t.noun] already. I have none}", t=thing)
    s.say(
        "{They <quarrel+> until [C] <come> by.|They <shout+> so loudly that [C] <hear> them.|[C], "
        "who <be> {[trait]|known as [trait]}, <hear> the noise.}",
        C=c,
        trait=c.trait,
    )
    if s.chance(0.5):
        s.quote(
            c,
            "{Let [A!] have it in the morning and [B!] in the evening|Take turns. Today [A!], tomorrow [B!]|"
            "Each of you may keep it for a week, first [A!] and then [B!]}",
            A=a,
            B=b,
        )
        s.say(
            "{Both of them <nod+>.|That <sound> fair, so [A] <take> [t] first.|[B] <grumble>, but <agree>.}",
            A=a,
            B=b,
            t=thing,
        )
        s.facts.append((f"who had the {thing.noun} first?", f"first {a.name}, and then {b.name}"))
    else:
        s.quote(
            c,
            "{It belongs to neither of you. It is mine!|I lost this [t.noun] last week. Thank you for finding it|"
            "That is my [t.noun]. Look, here is my name}",
            t=thing,
        )
        s.say(
            "{[A] and [B] <look+> at each other and <laugh+>.|[A] <be> {ashamed|embarrassed} "
            "and <hand> [t] to [C.obj].|So [C] <take> [t] and <give> each of them [x].}",
            A=a,
            B=b,
            C=c,
            t=thing,
            x=f"a(n) {s.pick(words.FOODS)}",
        )
        s.facts.append((f"whose {thing.noun} was it?", f"it belonged to {c.name}"))


def making(s: Story, a: Person, b: Person, c: Person) -> None:
    dish = s.pick(("soup", "pie", "stew", "salad", "birthday cake", "jam", "pudding", "sauce", "pancake", "feast"))
    foods = s.rng.sample(words.FOODS, 3)
    helpers = [a, b, c]
    s.rng.shuffle(helpers)
    s.say(
        "{[A] <want> to make a(n) [d] for [who]|[A], [B] and [C] <decide+> to make a(n) [d]|"
        "A(n) [d] <be> needed for [who]}.",
        A=a,
        B=b,
        C=c,
        d=dish,
        who=s.pick(words.OCCASIONS),
    )
    s.quote(
        a,
        "We need [x], [y] and [z]. {Who brings what?|But the cupboard is empty!|Where do we get them?}",
        x=plural(foods[0]),
        y=plural(foods[1]),
        z=plural(foods[2]),
    )
    places = []
    for helper, food in zip(helpers, foods, strict=True):
        place = s.place()
        places.append(place)
        s.say(
            "{[H] <get> the [f] [p.at]|[H] <go> to [p] and <bring> the [f]|The [f] <come+> from [p], "
            "where [H] <have> {a friend|an aunt|a cousin}|[H] <fetch> the [f]{| [m]}}.",
            H=helper,
            f=plural(food),
            p=place,
            m=s.pick(words.MANNERS),
        )
    s.say(
        "{[later], |}they <wash+> the [x], <cut+> the [y] and <add+> the [z].",
        later=s.pick(words.LATER),
        x=plural(foods[0]),
        y=plural(foods[1]),
        z=plural(foods[2]),
    )
    if s.chance(0.35):
        s.say(
            "But [A] <forget> the {salt|sugar|butter|pepper|flour}, and the [d] <taste> {strange|terrible|of nothing}.",
            A=a,
            d=dish,
        )
        s.quote(b, "{Next time we should follow the recipe|Never mind. The goat will like it|I will eat it anyway!}")
    else:
        s.say(
            "The [d] <be> {delicious|the best in years|ready before dark|so good that nothing <be> left}{|, "
            "and everyone <get> a piece}.",
            d=dish,
        )
    s.facts.append((f"who brought the {plural(foods[0])}?", f"{helpers[0].name} did"))
    others = f"{helpers[2].name} did, and {helpers[1].name} brought the {plural(foods[1])}"
    s.facts.append((f"who brought the {plural(foods[2])}?", others))


def mystery(s: Story, a: Person, b: Person, c: Person) -> None:
    """Three suspects, one trace each; the trace at the scene reveals who did it."""
    traces = s.rng.sample(words.TRACES, 3)
    missing = s.pick(words.STEALABLE)
    place = s.place()
    suspects = [b, c, s.person()]
    s.rng.shuffle(suspects)
    guilty = s.rng.randrange(3)
    s.say(
        "{[later], |}the [x] <be> {missing|gone} [p.at], and nobody <know> who had taken it.",
        x=missing,
        p=place,
        later=s.pick(words.LATER),
    )
    for suspect, trace in zip(suspects, traces, strict=True):
        s.say(
            "{[P] <have> [tr] on [P.pos] {hands|shoes|sleeves|trousers}.|There <be> [tr] on [P.pos] {boots|"
            "fingers|apron|elbow}.}",
            P=suspect,
            tr=trace,
        )
    s.say(
        "{Next to the empty plate|On the floor|On the door handle|On the window sill} [A] <find> {traces|a spot|"
        "marks} of [tr].",
        A=a,
        tr=traces[guilty],
    )
    who = suspects[guilty]
    s.quote(
        a,
        "{So it was you, [W!]!|It was [W!], because only [W!] has [tr]|Look, [tr]! [W!], what do you say now?}",
        W=who,
        tr=traces[guilty],
    )
    innocent = suspects[(guilty + 1) % 3]
    s.say(
        "{[W] <turn> red and <nod>.|[W] <laugh> and <admit> everything.|[W] <look> at the floor, "
        "while [I] <sigh> with relief.}",
        W=who,
        I=innocent,
    )
    s.quote(
        who,
        "{I was so hungry|I wanted to surprise everybody|I only wanted to borrow it|I am sorry. "
        "I will bring a new one}",
    )
    s.facts.append((f"who took the {missing}?", f"it was {who.name}, because of the {traces[guilty].split(' ', 1)[1]}"))
    innocent_trace = traces[(guilty + 1) % 3]
    s.facts.append((f"who had {innocent_trace}?", f"{innocent.name} had, but {innocent.pronoun} was innocent"))


def fetch_chain(s: Story, a: Person, b: Person, c: Person) -> None:
    """A chain of swaps: each person wants what the next one has."""
    first, second, third = s.thing(), s.thing(), s.thing()
    place: Place = s.place()
    s.say("[A] <have> [t.a] and <want> [u.a]{| to [goal]}.", A=a, t=first, u=third, goal=third.purpose)
    s.say(
        "{[p.at], |}[B] <have> [u.a], but [B] only {<want> to swap it|<will> give it away} for [v.a].",
        B=b,
        u=third,
        v=second,
        p=place,
    )
    s.say(
        "{Luckily, [C] <own>|[C], however, <have>|In [C.pos] bag [C] <have>} [v.a] and <be> looking for [t.a].",
        C=c,
        v=second,
        t=first,
    )
    s.say(
        "{So|[later],} [A] <give> [t] to [C.obj] and <get> [v].",
        A=a,
        C=c,
        later=s.pick(words.LATER),
        t=first,
        v=second,
    )
    s.say(
        "{Then|After that} [A] <give> [v] to [B.obj] and <get> [u]{|, just as planned}.",
        A=a,
        B=b,
        v=second,
        u=third,
    )
    s.say(
        "{In the end everyone <be> {happy|content}.|[B] <be> glad, because now [B] <can> [goal].|"
        "Nobody <have> spent a coin.}",
        B=b,
        goal=second.purpose,
    )
    s.facts.append((f"who has the {first.noun} now?", f"{c.name} has it"))
    s.facts.append((f"who has the {second.noun} now?", f"{b.name} got it for the {third.noun}"))
    s.facts.append((f"what does {a.name} have now?", f"the {third.adjective} {third.noun}"))


EPISODES = (lost_thing, borrowed, journey, quarrel, making, mystery, fetch_chain)
