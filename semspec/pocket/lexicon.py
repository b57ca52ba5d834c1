"""The words of the pocket world that carry no logic: people, things, and facts nobody needs.

Kept apart from the themes so that widening the vocabulary never touches the rules.
"""

from __future__ import annotations

from random import Random


def _words(text: str) -> tuple[str, ...]:
    """A table of words written as prose, which is how people edit word lists."""
    return tuple(text.split())


PEOPLE: tuple[str, ...] = _words(
    """Ada Amir Ana Anna Ben Bianca Bruno Carl Carmen Chen Clara Dan Daria Dora Eli Elsa Emil Eva Farid Fay Felix
    Fiona Gabor Gina Grace Hana Hans Henry Hugo Ida Igor Ines Ivan Jack Jana Jin Jonas Julia Kai Kara Kofi Lars Laura
    Lena Leo Lily Luis Maja Malik Marco Maria Max Mia Mila Nadia Neil Nina Nora Olga Omar Oscar Otto Paula Pavel Pedro
    Pia Priya Quinn Rafael Ravi Rita Rosa Ruth Sam Sara Sofia Stan Tara Theo Tina Tom Uma Vera Victor Wanda Will Yara
    Yusuf Zoe"""
)
"""Each name is one word and, after training the tokenizer, one token: a name is a pointer to a quantity."""

THINGS: tuple[str, ...] = _words(
    """apples pears plums lemons melons figs nuts eggs muffins cookies candies stamps coins cards marbles shells beads
    buttons pencils pens books stickers balloons roses tulips seeds stones feathers tickets badges"""
)

GOODS: tuple[str, ...] = _words(
    """pens books cups plates lamps scarves caps brushes towels candles notebooks chairs pillows baskets jars spoons
    bottles bags hats toys"""
)

PRODUCTS: tuple[str, ...] = _words(
    """toys lamps boxes bricks cakes baskets chairs kites masks shirts candles bowls dolls signs frames rings"""
)

_PLACES = _words(
    """bakery library museum station harbour market school theatre garden bridge tower hotel cinema castle
    factory hospital stadium airport mill chapel lighthouse monastery courthouse vineyard orchard quarry
    workshop warehouse observatory gallery playground cathedral embassy dormitory laboratory greenhouse
    windmill fountain fortress palace pharmacy nursery brewery foundry sawmill shipyard marina cottage
    academy aquarium arcade archive bungalow cafeteria campsite cemetery dairy farmhouse gymnasium
    kindergarten lodge mansion pavilion pier planetarium plaza reservoir stable temple terrace tavern
    viaduct"""
)
_ANIMALS = _words(
    """cat dog horse parrot rabbit tortoise goat donkey canary hamster pony goose sheep owl beaver camel
    cheetah chicken crocodile dolphin duckling elephant falcon ferret flamingo giraffe gorilla hedgehog
    kangaroo leopard lizard lobster mongoose ostrich panther peacock pelican penguin pigeon raccoon salmon
    squirrel swallow turkey walrus weasel woodpecker zebra antelope badger buffalo cricket dragonfly otter"""
)
_COLOURS = _words(
    """red blue green yellow white black brown grey purple orange pink silver golden turquoise crimson scarlet
    beige violet indigo maroon bronze amber copper ivory lavender emerald striped spotted checkered wooden
    plastic rusty shiny dusty fragile enormous narrow crooked polished antique"""
)
_OBJECTS = _words(
    """bicycle umbrella wallet jacket kettle piano guitar clock mirror carpet sofa curtain suitcase lantern
    notebook telescope camera violin ladder wagon backpack barometer binoculars blanket bookshelf bracelet
    broomstick calculator calendar candlestick cardigan chandelier chessboard compass cushion drum envelope
    fireplace flashlight flute hammer hammock harmonica helmet keyboard lawnmower magnet mattress microscope
    necklace overcoat paintbrush parachute pendulum pillowcase rucksack saddle sandals saxophone scissors
    screwdriver sculpture skateboard spectacles stethoscope surfboard tambourine thermometer toaster toolbox
    tractor trombone trumpet typewriter vase wheelbarrow whistle wristwatch xylophone"""
)
_WEATHER = _words("""rainy sunny windy cloudy foggy stormy frosty mild humid chilly""")
_DAYS = _words("""Monday Tuesday Wednesday Thursday Friday Saturday Sunday""")
_SUBJECTS = _words(
    """history geography painting chess poetry music cooking astronomy gardening swimming photography pottery
    sailing carpentry algebra archery architecture ballet baseball biology calligraphy chemistry climbing
    cricket cycling dancing drawing economics embroidery fencing fishing grammar gymnastics hiking hockey
    juggling knitting languages literature mathematics meditation origami philosophy physics psychology
    puzzles rowing sculpting singing skating skiing tennis theology volleyball weaving wrestling yoga
    zoology"""
)


def idle_fact(rng: Random, person: str) -> str:
    """One short true-sounding fact that no problem ever needs; half of them tempt with a number."""
    kind = int(rng.random() * 8)
    pick = rng.choice
    number = 2 + int(rng.random() * 97)
    facts = (  # each draws only what it names
        lambda: f"The {pick(_PLACES)} opened {number} years ago.",
        lambda: f"{person}'s {pick(_ANIMALS)} is {number} months old.",
        lambda: f"The {pick(_COLOURS)} {pick(_OBJECTS)} belongs to {person}.",
        lambda: f"It was {pick(_WEATHER)} on {pick(_DAYS)}.",
        lambda: f"{person} likes {pick(_SUBJECTS)}.",
        lambda: f"The {pick(_PLACES)} has {number} windows.",
        lambda: f"Bus {number} stops near the {pick(_PLACES)}.",
        lambda: f"On {pick(_DAYS)} the {pick(_PLACES)} is closed.",
    )
    return facts[kind]()
