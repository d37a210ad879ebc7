"""Vocabulary of the story corpus: what exists in its small world, and the words that fit each thing.

Every table is ordered from common to rare; the generator prefers the front, so word frequencies decay as in real text.
"""


def _words(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(",")]


BOYS = _words("""
    Tom Ben Sam Jack Leo Max Hugo Oscar Felix Peter Daniel Noah Adam Simon Victor Walter Martin Henry Oliver Arthur
    George Edgar Ivan Pablo Karim Omar Yusuf Kenji Anton Emil Jonas Lars Magnus Rafael Mateo Diego Tariq Bruno Silas
    Caleb Elias Gideon Jasper Linus Otto Quentin Rupert Stefan Tobias Ulric Wilfred Xavier Zoltan Ambrose Barnaby
    Cyril Dmitri""")
GIRLS = _words("""
    Anna Mara Lily Rosa Nina Emma Clara Ella Ruth Sara Julia Martha Alice Nora Ida Grace Helen Maria Sofia Lucy Eva
    Irene Olga Vera Greta Hanna Ingrid Petra Amina Fatima Leila Yuki Mei Priya Carmen Elena Paula Bianca Dora Edith
    Flora Gwen Hazel Iris Judith Katrin Louisa Miriam Nadia Odette Phoebe Renata Selma Tilda Ursula Viola Winifred
    Yvonne Zelda""")

# job -> (workplace, a tool of the trade, what the job is about)
JOBS: dict[str, tuple[str, str, str]] = {
    "baker": ("bakery", "rolling pin", "bread"),
    "farmer": ("farm", "pitchfork", "the harvest"),
    "teacher": ("school", "chalk box", "spelling"),
    "doctor": ("clinic", "thermometer", "fevers"),
    "fisherman": ("harbor", "fishing net", "the tides"),
    "carpenter": ("workshop", "hammer", "timber"),
    "gardener": ("garden", "watering can", "roses"),
    "shopkeeper": ("shop", "cash box", "prices"),
    "librarian": ("library", "catalog", "old books"),
    "miller": ("mill", "flour sieve", "grain"),
    "blacksmith": ("forge", "anvil", "iron"),
    "tailor": ("tailor shop", "needle case", "cloth"),
    "postman": ("post office", "letter bag", "addresses"),
    "cook": ("inn", "ladle", "soup"),
    "painter": ("studio", "paintbrush", "colors"),
    "shepherd": ("farm", "crook", "sheep"),
    "sailor": ("dock", "compass", "the wind"),
    "musician": ("theater", "violin", "melodies"),
    "clockmaker": ("clock tower", "tiny screwdriver", "gears"),
    "beekeeper": ("orchard", "smoker", "honey"),
    "potter": ("pottery", "clay knife", "glaze"),
    "mason": ("quarry", "chisel", "stone"),
    "weaver": ("weaving room", "shuttle", "wool"),
    "cobbler": ("cobbler shop", "awl", "leather"),
    "innkeeper": ("inn", "guest book", "travelers"),
    "nurse": ("hospital", "bandage roll", "medicine"),
    "ferryman": ("ferry landing", "long pole", "the river"),
    "woodcutter": ("sawmill", "axe", "oak trees"),
    "astronomer": ("observatory", "telescope", "the stars"),
    "glassblower": ("glassworks", "blowpipe", "bottles"),
    "cheesemaker": ("dairy", "cheese wire", "milk"),
    "lighthouse keeper": ("lighthouse", "oil can", "storms"),
}

# place -> preposition that says somebody is there
PLACES: dict[str, str] = {
    "market": "at",
    "river": "by",
    "school": "at",
    "kitchen": "in",
    "garden": "in",
    "barn": "in",
    "forest": "in",
    "bridge": "on",
    "mill": "at",
    "harbor": "at",
    "library": "in",
    "park": "in",
    "square": "in",
    "well": "by",
    "hill": "on",
    "shop": "in",
    "station": "at",
    "church": "in",
    "beach": "on",
    "lake": "by",
    "orchard": "in",
    "stable": "in",
    "attic": "in",
    "cellar": "in",
    "courtyard": "in",
    "meadow": "in",
    "inn": "at",
    "tower": "in",
    "cabin": "in",
    "greenhouse": "in",
    "fountain": "by",
    "bakery": "in",
    "post office": "at",
    "workshop": "in",
    "farm": "on",
    "crossroads": "at",
    "museum": "in",
    "valley": "in",
    "cave": "in",
    "pond": "by",
    "playground": "on",
    "theater": "at",
    "lighthouse": "in",
    "old wall": "by",
    "town hall": "in",
    "ferry landing": "at",
    "dock": "on",
    "cliff": "on",
    "waterfall": "by",
    "vineyard": "in",
    "ruins": "in",
    "clinic": "at",
    "forge": "in",
    "studio": "in",
    "dairy": "in",
}

# piece of furniture or hiding place -> where a thing is in relation to it
CONTAINERS: dict[str, str] = {
    "basket": "in",
    "drawer": "in",
    "table": "on",
    "shelf": "on",
    "box": "in",
    "bench": "under",
    "chest": "in",
    "cupboard": "in",
    "bag": "in",
    "chair": "under",
    "barrel": "behind",
    "bed": "under",
    "window sill": "on",
    "wardrobe": "in",
    "haystack": "under",
    "sack": "in",
    "cart": "in",
    "door": "behind",
    "stove": "behind",
    "bookcase": "on",
    "crate": "in",
    "ladder": "under",
    "jar": "in",
    "suitcase": "in",
    "rug": "under",
    "hedge": "behind",
    "fireplace": "behind",
    "trunk": "in",
    "wheelbarrow": "in",
    "piano": "behind",
    "log pile": "behind",
    "statue": "behind",
}

# kind of thing -> (nouns, fitting adjectives, what one does with it: "to ...")
THINGS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "tool": (
        _words("""
            hammer rope ladder shovel lantern knife bucket saw axe hook wrench spade chisel pump crowbar rake
            pulley"""),
        _words("heavy old rusty long strong sharp iron borrowed sturdy bent greasy wooden reliable"),
        _phrases("""mend the roof, repair the fence, dig a ditch, fix the gate, build a shed, clear the path,
            drain the cellar"""),
    ),
    "clothing": (
        _words("coat hat scarf jacket sweater cloak cap belt shawl apron vest glove boot bonnet raincoat"),
        _words("warm blue red woolen green thick torn gray brown patched soft elegant striped faded velvet"),
        _phrases("""keep warm, stay dry, look smart at the wedding, dress up for the dance,
            have something for the journey"""),
    ),
    "toy": (
        _words("ball kite doll drum puzzle top train whistle puppet marble sled balloon yo-yo hoop rattle"),
        _words("little red yellow wooden round new painted shiny favorite bouncy purple tin squeaky striped orange"),
        _phrases("""play in the yard, cheer up a friend, win the game, pass the time, surprise the class,
            amuse the baby"""),
    ),
    "book": (
        _words("""
            book letter map notebook picture diary recipe songbook dictionary postcard atlas poem newspaper scroll"""),
        _words("""
            old thick thin secret dusty famous yellowed rare unfinished curious handwritten leather-bound precious"""),
        _phrases("""learn about the sea, find the way, answer a question, spend an evening by the fire, prove the story,
            copy a page"""),
    ),
    "music": (
        _words("flute violin guitar trumpet harp bell fiddle accordion banjo horn cello tambourine harmonica"),
        _words("silver old polished golden brass fine small broken borrowed quiet tuneful black mellow"),
        _phrases("""play at the concert, practice a song, wake the village, accompany the choir, earn a few coins"""),
    ),
    "vessel": (
        _words("cup jug bowl kettle plate pot bottle teapot pan vase mug pitcher goblet cauldron saucer"),
        _words("white cracked copper blue large clay glass chipped deep painted precious tiny porcelain spotless"),
        _phrases("carry water, make tea, serve the soup, hold the flowers, cook dinner, mix the dough, boil the eggs"),
    ),
    "treasure": (
        _words("ring key coin watch necklace brooch compass medal mirror crown bracelet pearl locket amulet gem"),
        _words("golden silver small shiny ancient bright lost delicate strange engraved valuable tarnished mysterious"),
        _phrases("""open the chest, remember a grandmother, pay a debt, have a present for the bride, impress the mayor,
            break the spell"""),
    ),
    "device": (
        _words("lamp clock radio camera bicycle telescope umbrella scale wheelbarrow typewriter magnet mousetrap"),
        _words("broken useful electric clever noisy modern antique handy heavy curious dusty reliable peculiar"),
        _phrases("""
            measure the field, light the cellar, tell the time, ride to town, study the moon, weigh the flour"""),
    ),
}

FOODS = _words("""
    apple egg pear cookie potato carrot orange onion plum cherry tomato cake bun pie lemon fish mushroom nut peach
    pancake turnip fig sausage muffin biscuit cabbage melon pumpkin dumpling walnut radish apricot olive pretzel
    cucumber""")
COUNTED = _words("""
    coin stone shell button flower feather candle card stamp bead nail brick ribbon leaf pencil acorn star sticker
    ticket marble chestnut plank rope spoon tile seed bottle bell lantern basket""")

# animal -> (sound it makes, what it likes)
ANIMALS: dict[str, tuple[str, str]] = {
    "dog": ("bark", "bones"),
    "cat": ("meow", "warm milk"),
    "horse": ("neigh", "hay"),
    "goat": ("bleat", "thistles"),
    "hen": ("cluck", "corn"),
    "duck": ("quack", "wet bread"),
    "cow": ("moo", "clover"),
    "donkey": ("bray", "carrots"),
    "pig": ("grunt", "turnips"),
    "parrot": ("squawk", "sunflower seeds"),
    "rabbit": ("sniff", "lettuce"),
    "sheep": ("bleat", "fresh grass"),
    "mouse": ("squeak", "cheese"),
    "goose": ("hiss", "barley"),
    "owl": ("hoot", "silence"),
    "fox": ("yelp", "grapes"),
    "crow": ("caw", "shiny buttons"),
    "bear": ("growl", "honey"),
    "wolf": ("howl", "moonlight"),
    "squirrel": ("chatter", "acorns"),
    "frog": ("croak", "flies"),
    "turtle": ("blink", "strawberries"),
    "badger": ("snuffle", "roots"),
    "hedgehog": ("rustle", "beetles"),
    "pony": ("snort", "sugar"),
}

# trait -> (adverb of acting so, what such a person is known to do, opposite trait)
TRAITS: dict[str, tuple[str, str, str]] = {
    "kind": ("kindly", "helped everybody", "selfish"),
    "brave": ("bravely", "feared nothing", "timid"),
    "clever": ("cleverly", "solved every riddle", "foolish"),
    "lazy": ("lazily", "slept until noon", "busy"),
    "honest": ("honestly", "never told a lie", "sly"),
    "curious": ("curiously", "asked a hundred questions", "bored"),
    "patient": ("patiently", "waited without a word", "hasty"),
    "proud": ("proudly", "never asked for help", "humble"),
    "shy": ("shyly", "spoke very little", "bold"),
    "greedy": ("greedily", "wanted everything twice", "modest"),
    "careful": ("carefully", "checked every knot", "careless"),
    "cheerful": ("cheerfully", "sang all day", "gloomy"),
    "stubborn": ("stubbornly", "never changed a plan", "flexible"),
    "strict": ("sternly", "kept every rule", "gentle"),
    "forgetful": ("absently", "forgot the simplest things", "alert"),
    "wise": ("wisely", "listened before speaking", "rash"),
    "generous": ("generously", "gave things away", "stingy"),
    "jealous": ("jealously", "envied the neighbors", "content"),
    "clumsy": ("clumsily", "dropped plates", "nimble"),
    "polite": ("politely", "thanked everyone twice", "rude"),
    "quiet": ("quietly", "walked without a sound", "noisy"),
    "restless": ("restlessly", "could not sit still", "calm"),
}

FEELINGS = _words("""
    happy sad angry tired glad worried proud surprised hungry lonely afraid excited nervous calm ashamed curious
    relieved confused grateful bored cheerful disappointed upset hopeful puzzled delighted annoyed frightened
    thoughtful embarrassed impatient astonished miserable content furious anxious""")
OCCASIONS = _phrases("""
    the festival, grandmother, the school, the sick neighbor, the wedding, the mayor, the harvest dance""")
TRACES = _phrases("""
    blue paint, white flour, red clay, black soot, green grass, yellow sawdust, gray ash, sweet honey, dark ink,
    brown mud""")
SMELLS = _phrases("""
    smoke, rain, bread, hay, salt, tar, leather, wet dogs, cinnamon, soap, roses, old paper, fresh paint, coffee, mint,
    garlic, candle wax, pine needles, vinegar, lavender, mud, oil, chalk, sour milk, moss, burnt sugar, wool, dust""")
STEALABLE = _phrases("""
    cake, pie, sausage, cheese, jar of jam, basket of plums, loaf of bread, silver spoon, best hat, garden gnome""")
# what is done in a contest, and the unit that counts
GAMES = [
    ("throwing stones", "step"),
    ("telling riddles", "point"),
    ("picking cherries", "basket"),
    ("catching fish", "fish"),
    ("spelling hard words", "word"),
    ("jumping", "foot"),
    ("shooting arrows", "point"),
    ("baking pies", "pie"),
    ("stacking bricks", "brick"),
]
REASONS: dict[str, list[str]] = {
    "happy": _phrases("""the sun was shining, the holidays had begun, a friend was coming to visit,
        supper smelled wonderful"""),
    "sad": _phrases("summer was over, a friend had moved away, nobody had written, the old dog was ill"),
    "tired": _phrases("""the night had been short, the walk had been long, the work never ended,
        the baby had cried all night"""),
    "angry": _phrases("""somebody had lied, the gate had been left open, the soup was cold again,
        the cart had lost a wheel"""),
    "worried": _phrases("the rent was due, a storm was coming, the river was rising, the cow gave no milk"),
    "excited": _phrases("""the fair opened that day, a ship had arrived, the circus was in town,
        the snow had finally come"""),
}
# weather -> (what it made people do, what became of the ground)
WEATHER: dict[str, tuple[str, str]] = {
    "sunny": ("sat outside", "dry"),
    "rainy": ("ran for shelter", "muddy"),
    "windy": ("held on to their hats", "dusty"),
    "cold": ("stayed by the stove", "frozen"),
    "foggy": ("walked slowly", "damp"),
    "hot": ("looked for shade", "cracked"),
    "snowy": ("cleared the doorsteps", "white"),
    "stormy": ("closed the shutters", "flooded"),
    "cloudy": ("looked at the sky", "soft"),
    "frosty": ("rubbed their hands", "slippery"),
    "mild": ("opened the windows", "green"),
    "humid": ("fanned themselves", "steaming"),
}
TIMES = _phrases("""
    one morning, one day, one evening, last week, early in spring, late in autumn, on Monday, on Tuesday, on Friday,
    on Saturday, one winter night, at noon, before breakfast, a year ago, just after sunset, on market day,
    at the end of summer, on the first day of school, during the holidays, on the eve of the festival, on Thursday,
    on Sunday, on Wednesday""")
LATER = _phrases("""
    then, soon, later, after a while, the next day, an hour later, at last, that evening, before long, by noon,
    in the end, a few minutes later, toward evening, two days later, presently, eventually, the following morning""")
MANNERS = _phrases("""
    slowly, quickly, carefully, quietly, happily, at once, with a smile, with a sigh, gently, in a hurry, eagerly,
    without a word, nervously, gladly, silently, calmly, with trembling hands, firmly, reluctantly,
    as fast as possible, solemnly, with great care, hesitantly""")
GOALS = _phrases("""
    learn to swim, see the sea, build a boat, win the race, find an old friend, buy a horse, learn to read,
    bake the best cake in town, paint the church, catch a big fish, open a small shop, climb the mountain,
    write a song, travel by train, grow a giant pumpkin, repair the old mill, become a doctor, sing in the choir,
    tame a falcon, sail around the island, discover a comet, play chess with the mayor, invent a machine,
    plant a hundred trees""")
# obstacle on the way -> how it is overcome
OBSTACLES: dict[str, str] = {
    "a fallen tree": "climb over it",
    "a deep stream": "build a small raft",
    "a locked gate": "look for the key",
    "a steep hill": "rest twice on the way up",
    "an angry goose": "throw it some bread",
    "thick fog": "follow the stone wall",
    "a broken bridge": "go around by the ford",
    "a hungry wolf": "light a torch",
    "a sleeping guard": "tiptoe past",
    "a herd of cows": "wait until they have passed",
    "a high fence": "crawl underneath",
    "heavy snow": "borrow a sled",
    "a swarm of bees": "take the longer road",
    "a dark tunnel": "sing loudly",
    "slippery ice": "tie straw around our boots",
    "a wide swamp": "step from stone to stone",
    "a toll keeper": "pay one coin",
    "a sudden hailstorm": "hide under a bridge",
}
ACTIVITIES = _phrases("""
    sweep the floor, feed the hens, chop wood, wash the dishes, pick berries, water the plants, mend a net,
    write a letter, milk the cow, polish the windows, count the money, peel potatoes, knit a sock, paint the door,
    stack the hay, sharpen the knives, hang up the laundry, brush the horse, light the lamps, study the map,
    carve a spoon, sort the mail, gather mushrooms, tune the piano, patch a sail, collect eggs, rake the leaves,
    practice the trumpet, iron a shirt""")
COLORS = _words("""
    red blue green yellow white black brown gray purple orange pink golden silver violet crimson turquoise""")
# trait -> proverb about it
MORALS: dict[str, str] = {
    "kind": "a kind word opens every door",
    "brave": "courage grows when it is used",
    "clever": "a good idea is worth more than gold",
    "lazy": "those who sleep too long miss the boat",
    "honest": "the truth is the shortest road",
    "curious": "a question costs nothing",
    "patient": "good things take time",
    "proud": "nobody is too big to ask for help",
    "shy": "a small voice can say great things",
    "greedy": "those who want everything lose everything",
    "careful": "a careful hand saves two repairs",
    "cheerful": "a song makes the work lighter",
    "stubborn": "the reed that bends does not break",
    "forgetful": "a note in the pocket is a second memory",
    "generous": "what you give comes back to you",
    "strict": "a rule without mercy is a cold house",
    "jealous": "envy counts the coins of others",
    "wise": "it is better to listen first and speak last",
    "clumsy": "a broken plate is not a broken heart",
    "polite": "thanks are cheap and worth a lot",
    "quiet": "still water runs deep",
    "restless": "a rolling wheel must also rest",
}
IRREGULAR_PAST: dict[str, str] = {
    "go": "went",
    "have": "had",
    "do": "did",
    "say": "said",
    "see": "saw",
    "take": "took",
    "give": "gave",
    "find": "found",
    "come": "came",
    "think": "thought",
    "know": "knew",
    "tell": "told",
    "run": "ran",
    "sit": "sat",
    "stand": "stood",
    "hold": "held",
    "bring": "brought",
    "leave": "left",
    "feel": "felt",
    "keep": "kept",
    "put": "put",
    "wear": "wore",
    "lose": "lost",
    "buy": "bought",
    "sell": "sold",
    "hear": "heard",
    "begin": "began",
    "write": "wrote",
    "read": "read",
    "pay": "paid",
    "make": "made",
    "meet": "met",
    "forget": "forgot",
    "hide": "hid",
    "eat": "ate",
    "fall": "fell",
    "catch": "caught",
    "win": "won",
    "send": "sent",
    "get": "got",
    "lie": "lay",
    "sing": "sang",
    "can": "could",
    "will": "would",
    "mean": "meant",
    "lend": "lent",
    "cost": "cost",
    "let": "let",
    "sleep": "slept",
    "teach": "taught",
    "cut": "cut",
    "become": "became",
    "understand": "understood",
}
IRREGULAR_PLURAL = {
    "leaf": "leaves",
    "fish": "fish",
    "potato": "potatoes",
    "tomato": "tomatoes",
    "radish": "radishes",
    "peach": "peaches",
    "box": "boxes",
}
DOUBLED_CONSONANT = {"nod", "hug", "stop", "admit", "plan"}
