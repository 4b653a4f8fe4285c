"""Write the quickstart's prompts: a small grammar of tasks, each with many fillers, the same file on every machine.

    python scripts/make_prompts.py --out .cache/prompts [--num-train 3000] [--num-heldout 40]

Every list of fillers keeps its last fifth for the held-out prompts, so that those ask the same kinds of question about
other things. Nothing here is copied from a data set.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path


def _fillers(text: str) -> list[str]:
    return text.split(", ")


NAMES = _fillers(
    "Anna, Ben, Carla, David, Elena, Farid, Grace, Hugo, Iris, Jonas, Kira, Leo, Mina, Noah, Olga, Pavel, Quinn, "
    "Rosa, Sam, Tara, Umar, Vera, Wanda, Xavier, Yara, Zoe, Amir, Bella, Chen, Dora"
)
GOODS = _fillers(
    "apples, pencils, stickers, marbles, eggs, cookies, postcards, notebooks, seashells, balloons, candles, "
    "ribbons, oranges, tickets, buttons, coins, muffins, tulips, bricks, magnets, lemons, badges, bottles, plums, "
    "stamps"
)
PLACES = _fillers(
    "market, library, bakery, school fair, museum shop, garden center, train station, farm, bookshop, harbor, zoo, "
    "post office, stadium, workshop, theater"
)
TOPICS = _fillers(
    "photosynthesis, gravity, inflation, the water cycle, electricity, vaccines, tides, evolution, democracy, "
    "sleep, volcanoes, magnets, the internet, compound interest, plate tectonics, black holes, rainbows, "
    "fermentation, DNA, supply and demand, earthquakes, the moon's phases, batteries, antibiotics, recycling, "
    "glaciers, sound waves, the immune system, friction, solar panels, optical lenses, coral reefs, encryption, "
    "lightning, soil erosion, bread rising, bird migration, the greenhouse effect, jet engines, probability"
)
READERS = _fillers(
    "a ten-year-old, a high school student, a new colleague, my grandmother, a curious tourist, a busy manager, a "
    "first-year student, someone who hates science, a journalist, a friend"
)
THINGS = _fillers(
    "ways to save water at home, indoor plants that need little light, healthy breakfasts, board games for a rainy "
    "day, habits that improve sleep, questions for a job interview, tools for a bicycle repair kit, snacks for a "
    "long hike, gifts for a teacher, exercises without equipment, songs for a road trip, uses for old jars, tips "
    "for public speaking, things to pack for the beach, ways to greet a neighbor, rules for a classroom, fruits "
    "rich in vitamin C, ideas for a science project, steps to clean a laptop, reasons to learn a language, chores "
    "for children, activities for a family picnic, warm drinks for winter, names for a sailing boat, ways to stay "
    "focused"
)
FUNCTIONS = _fillers(
    "reverses a string, counts the vowels in a word, checks whether a number is prime, sorts a list of tuples by "
    "the second item, computes the factorial of n, finds the largest of three numbers, removes duplicates from a "
    "list, converts Celsius to Fahrenheit, merges two dictionaries, checks whether a word is a palindrome, sums the "
    "digits of a number, counts the words in a sentence, finds the longest word, flattens a nested list, returns "
    "the n-th Fibonacci number, computes the average of a list, capitalizes every word, rotates a list by k places, "
    "finds the common items of two lists, counts how often each letter occurs, checks whether a year is a leap "
    "year, computes the greatest common divisor, splits a list into chunks, validates an email address, converts a "
    "number to binary"
)
LANGUAGES = _fillers("Python, JavaScript, Java, C++, Go, Ruby, Rust, TypeScript")
SENTENCES = [
    "The meeting was long and nobody knew what to do next.", "I can't come because my car broke down again.",
    "Our product is better than all other products.", "She walked in the rain and she forgot her umbrella.",
    "We was happy to see the results of the test.", "The food were cold and the waiter ignored us.",
    "Please send me the report, I need it now.", "He don't like when people is late.",
    "It is a fact that the weather was very bad.", "The dog ran fast and the dog caught the ball.",
    "You must finish the work before Friday or else.", "I think that maybe we should possibly leave soon.",
    "The city has many parks and the parks are green.", "There is a lot of reasons why the plan failed.",
    "My brother and me goes to the gym every week.", "The teacher was angry because the students was loud.",
    "This book is good and it is interesting and it is long.", "Me and her has finished the project yesterday.",
    "The train is late so I am late so we are late.", "Thanks for nothing, your support did not help me.",
]  # fmt: skip
STYLES = _fillers(
    "more polite, shorter, more formal, friendlier, simpler, more confident, grammatically correct, suitable for a "
    "newsletter, in the past tense, as a question"
)
MAILS = _fillers(
    "asking for a day off, thanking a client for an order, inviting the team to lunch, reporting a broken printer, "
    "moving a meeting to Thursday, welcoming a new colleague, asking for feedback on a draft, declining an "
    "invitation, reminding tenants of the cleaning plan, apologizing for a late delivery, requesting a price list, "
    "confirming a hotel booking, announcing a change of address, asking a professor for a reference, offering help "
    "with a move, canceling a subscription, congratulating a friend on a new job, asking the landlord to fix the "
    "heating, sharing the minutes of a call, returning a damaged item"
)
PAIRS = _fillers(
    "cats and dogs, trains and planes, tea and coffee, novels and films, cities and villages, summer and winter, "
    "email and phone calls, renting and buying, football and tennis, oil and acrylic paint, rivers and lakes, wood "
    "and metal, running and swimming, paper books and e-books, bees and wasps, gold and silver, cable and wireless "
    "headphones, lizards and frogs, bread and rice, laptops and tablets"
)
JOBS = _fillers(
    "astronaut, baker, gardener, detective, librarian, sailor, carpenter, nurse, beekeeper, clockmaker, pilot, "
    "lighthouse keeper, chef, teacher, painter, mechanic, shepherd, diver, tailor, farmer"
)

Pick = Callable[[list[str]], str]


def arithmetic(pick: Pick, rng: random.Random) -> str:
    """A word problem with two or three steps."""
    name, other, goods, place = pick(NAMES), pick(NAMES), pick(GOODS), pick(PLACES)
    a, b, c, price = rng.randint(5, 60), rng.randint(2, 30), rng.randint(2, 9), rng.randint(2, 12)
    return rng.choice([
        f"{name} buys {a} {goods} at the {place} and gives {min(b, a - 1)} of them to {other}. How many are left?",
        f"{name} has {a} {goods}. {other} has {c} times as many. How many {goods} do they have together?",
        f"At the {place}, {goods} cost ${price} each. {name} buys {b} and pays with a ${price * b + c} voucher. "
        "How much money is left on it?",
        f"{name} packs {a * c} {goods} into boxes of {c}. How many boxes does {name} need, and what do they cost at "
        f"${price} a box?",
        f"Every day {name} collects {c} {goods} and {other} collects {b}. How many do they have after {price} days?",
    ])  # fmt: skip


def explanation(pick: Pick, rng: random.Random) -> str:
    """A short explanation for somebody."""
    topic, reader, number = pick(TOPICS), pick(READERS), rng.randint(2, 5)
    return rng.choice([
        f"Explain {topic} to {reader} in {number} sentences.",
        f"What is the most important thing to know about {topic}? Answer for {reader}.",
        f"How would you describe {topic} to {reader}?",
        f"Give {reader} a simple example of {topic}.",
    ])  # fmt: skip


def listing(pick: Pick, rng: random.Random) -> str:
    """A list of a given length."""
    things, number = pick(THINGS), rng.randint(3, 8)
    return rng.choice([
        f"List {number} {things}.",
        f"Give me {number} {things} and say in one sentence why each is good.",
        f"I need {number} {things}. Write them as a numbered list.",
    ])  # fmt: skip


def code(pick: Pick, rng: random.Random) -> str:
    """A small function."""
    what, language = pick(FUNCTIONS), pick(LANGUAGES)
    return rng.choice([
        f"Write a {language} function that {what}.",
        f"Show me {language} code that {what}, with a short comment on each step.",
        f"Write a function in {language} that {what}, and one example of how to call it.",
    ])  # fmt: skip


def rewriting(pick: Pick, rng: random.Random) -> str:
    """A sentence to be changed."""
    sentence, style = pick(SENTENCES), pick(STYLES)
    return rng.choice([
        f"Rewrite this sentence so that it is {style}: {sentence}",
        f'Make the following {style}.\n\n"{sentence}"',
        f"Give me two versions of this sentence that are {style}: {sentence}",
    ])  # fmt: skip


def mail(pick: Pick, rng: random.Random) -> str:
    """A short email."""
    what, sender, receiver = pick(MAILS), pick(NAMES), pick(NAMES)
    return rng.choice([
        f"Write a short email from {sender} to {receiver}, {what}.",
        f"Draft a polite email {what}. Sign it as {sender}.",
        f"Help me write a friendly email to {receiver} {what}.",
    ])  # fmt: skip


def comparison(pick: Pick, rng: random.Random) -> str:
    """Two things side by side."""
    pair, number = pick(PAIRS), rng.randint(2, 4)
    return rng.choice([
        f"Name {number} differences between {pair}.",
        f"Compare {pair} in a short paragraph.",
        f"What do {pair} have in common? Give {number} points.",
    ])  # fmt: skip


def story(pick: Pick, rng: random.Random) -> str:
    """A few sentences of fiction."""
    name, job, place, goods = pick(NAMES), pick(JOBS), pick(PLACES), pick(GOODS)
    return rng.choice([
        f"Write a short story about a {job} named {name} who finds {goods} at the {place}.",
        f"Write the first paragraph of a story in which {name}, a {job}, loses all {goods}.",
        f"Write a four-line poem about a {job} at the {place}.",
    ])  # fmt: skip


FAMILIES = (arithmetic, explanation, listing, code, rewriting, mail, comparison, story)


def make_prompts(number: int, heldout: bool) -> list[dict[str, object]]:
    """`number` different prompts, the families in turn; held-out ones use fillers that the others never do."""
    rng = random.Random("heldout" if heldout else "train")

    def pick(fillers: list[str]) -> str:
        border = len(fillers) - max(1, len(fillers) // 5)
        return rng.choice(fillers[border:] if heldout else fillers[:border])

    prompts: list[dict[str, object]] = []
    seen: set[str] = set()
    turn = misses = 0
    while len(prompts) < number:
        family = FAMILIES[turn % len(FAMILIES)]
        turn += 1
        text = family(pick, rng)
        if text in seen:
            misses += 1
            if misses > 50 * number:
                raise SystemExit(f"the grammar has no {number} different prompts; it made {len(prompts)}")
            continue
        seen.add(text)
        name = f"{'heldout' if heldout else 'train'}-{family.__name__}-{len(prompts)}"
        prompts.append({"id": name, "messages": [{"role": "user", "content": text}]})
    return prompts


def main() -> None:
    """Write train.jsonl and heldout.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="directory")
    parser.add_argument("--num-train", type=int, default=3000)
    parser.add_argument("--num-heldout", type=int, default=40)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, number in (("train", args.num_train), ("heldout", args.num_heldout)):
        lines = [json.dumps(prompt) for prompt in make_prompts(number, heldout=name == "heldout")]
        (args.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{args.out / name}.jsonl: {number} prompts")


if __name__ == "__main__":
    main()
