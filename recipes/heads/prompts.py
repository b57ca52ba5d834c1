"""Prompts for a head of a chat model: questions of public data sets, and requests made of subjects and forms.

    PYTHONPATH=. python3 -m recipes.heads.prompts --data data --prompts 1600 --out prompts.jsonl

`--data` is a folder with gsm8k/train.jsonl, mbpp/mbpp.jsonl and svamp/SVAMP.json. Prompts that are used to measure,
those of Spec-Bench and MT-Bench, are none of them. The order is random but fixed, so any beginning is a mixture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

SUBJECTS = (
    "the water cycle", "black holes", "photosynthesis", "the French Revolution", "healthy breakfasts",
    "learning the piano", "remote work", "electric cars", "the Great Wall of China", "coffee", "sleep",
    "climate change", "volcanoes", "honey bees", "the stock market", "public libraries", "vaccines", "the Silk Road",
    "chess", "gardening in small spaces", "inflation", "artificial intelligence", "the Roman Empire", "meditation",
    "recycling", "marathon running", "the moon landing", "bread baking", "online privacy", "solar panels",
    "the human heart", "friendship", "jazz", "deserts", "whales", "time management", "Shakespeare",
    "supply and demand", "space telescopes", "traditional Japanese gardens", "earthquakes", "board games",
    "city bicycles", "antibiotics", "the Olympic Games", "wool", "dreams", "bridges", "tea", "migration of birds",
    "prime numbers", "gravity", "the immune system", "film photography", "rice farming", "lighthouses", "democracy",
    "a long train journey", "a shy robot", "an old clockmaker",
)  # fmt: skip
FORMS = (
    "Explain {} to a ten-year-old.", "What are the main facts about {}?", "Write a short story about {}.",
    "Write a blog post about {} for beginners.", "Give me five tips about {}.", "Write a poem about {}.",
    "Write an email to a colleague who wants to know more about {}.",
    "What are the advantages and disadvantages of {}?", "Pretend that you are a tour guide and tell me about {}.",
    "Why is {} important?", "Write a dialogue about {}.", "Describe {} in one paragraph.",
    "How would you begin a lecture on {}?", "List three common mistakes people make about {}.",
    "Make an outline for an essay on {}.", "What questions should I ask an expert about {}?",
    "Tell me the history of {}.", "Imagine you are a scientist. Discuss {} and give examples.",
    "Compare {} with {} in a few sentences.", "Write a product description that has to do with {}.", "What is {}?",
    "Write a speech of one minute about {}.", "Is it true that {} matters more than {}? Give reasons.",
    "Write a letter to a friend about {} and {}.",
    "Extract the nouns from this sentence and return them as a JSON list: 'She talked about {} and {} all evening.'",
    "Classify the mood of this sentence as positive, neutral or negative: 'I never liked {}, but {} changed my mind.'",
)  # fmt: skip
QUESTIONS = (
    "Who wrote {}?", "When was {} first described?", "Where does the word for {} come from?", "Who is famous for {}?",
    "What is the capital of the country best known for {}?", "How many people know about {}?",
    "Who first studied {}?", "Which film is about {}?", "What year did {} become popular?",
    "What is another name for {}?",
)  # fmt: skip
GERMAN_BEGIN = (
    "Die Regierung hat gestern angekündigt , dass", "Nach Angaben der Polizei", "Viele Bürger fragen sich , ob",
    "Der Verein teilte am Montag mit , dass", "In den vergangenen Jahren", "Wie die Zeitung berichtet ,",
    "Meine Schwester erzählte mir , dass", "Im Herbst", "Die Forscher fanden heraus , dass", "Trotz des Regens",
)  # fmt: skip
GERMAN_END = (
    "die neue Brücke bald fertig wird .", "der Zug wieder eine Stunde zu spät kam .",
    "die Preise weiter steigen werden .", "das Museum im nächsten Jahr eröffnet wird .",
    "mehr Menschen mit dem Fahrrad fahren .", "die Schule geschlossen bleibt .", "der alte Markt gut besucht war .",
    "die Mannschaft ihr erstes Spiel gewonnen hat .", "niemand verletzt wurde .",
    "die Ernte besser war als erwartet .",
)  # fmt: skip


def made(kind: Sequence[str], rng: Random) -> str:
    form = rng.choice(kind)
    return form.format(*rng.sample(SUBJECTS, form.count("{}")))


def translation(rng: Random) -> str:
    return f"Translate German to English: {rng.choice(GERMAN_BEGIN)} {rng.choice(GERMAN_END)}"


def rows(path: Path) -> list[dict[str, str]]:
    text = path.read_text(encoding="utf-8")
    return list(json.loads(text) if path.suffix == ".json" else map(json.loads, text.splitlines()))


def mixture(data: Path, rng: Random) -> Iterator[str]:
    """Without an end. Half of it is chat; a passage is two stories of GSM8K, which have words to take from."""
    stories = [row["question"] for row in rows(data / "gsm8k/train.jsonl")]
    code = [row["text"] for row in rows(data / "mbpp/mbpp.jsonl")]
    short = [f"{row['Body']} {row['Question']}" for row in rows(data / "svamp/SVAMP.json")]
    while True:
        passage = " ".join(rng.sample(stories, 2))
        yield from (made(FORMS, rng) for _ in range(5))
        yield from (made(QUESTIONS, rng), rng.choice(stories), translation(rng))
        yield f"Summarize: {passage}" if rng.random() < 0.5 else f"{passage}\n\nWho are the people in this text?"
        yield rng.choice(code if rng.random() < 0.6 else short)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    source, seen = mixture(args.data, Random(args.seed)), dict[str, None]()
    while len(seen) < args.prompts:
        seen[next(source)] = None
    args.out.write_text("".join(json.dumps({"question": prompt}) + "\n" for prompt in seen), encoding="utf-8")


if __name__ == "__main__":
    main()
