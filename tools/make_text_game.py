"""Writes a tiny model, its tokenizer and the rows of a text game: guess a number from 0 to 9 in four turns.

    python tools/make_text_game.py --output DIR --seed 0

The characters are the quickstart's. The answer to a wrong guess is + if the number is larger and a comma if it is
smaller. It is = if the guess was not a number (env.function: guess_number, env.options: GAME below):

    0,9=   5<eos>   +   7<eos>   ,   6<eos>

DIR/model is a Qwen3 checkpoint with random weights. DIR/warm_up.jsonl has turns of a player that uses the answers in a
quarter of the games and guesses at random in the others. This play wins about 0.4 of the games. DIR/train.jsonl has
games for training, and DIR/eval.jsonl one game of each number.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rltrain.cli.quickstart import EOS, PAD, Size, SpecialTokens, character_tokenizer, write_checkpoint
from rltrain.environments.guess_number import GuessNumber
from rltrain.environments.interface import Action

SMALLEST, LARGEST = 0, 9
PROMPT = f"{SMALLEST},{LARGEST}="
GAME: Mapping[str, str | int] = {"max_guesses": 4, "higher": "+", "lower": ",", "no_number": "="}
ATTENTIVE_SHARE = 0.25
"""Share of the warm-up games in which guesses use the answers."""
NUM_WARM_UP_GAMES, NUM_TRAIN = 20000, 2000

Row = dict[str, str]


def warm_up_turns(choice: random.Random) -> Iterator[Row]:
    """Yields the turns of one game: the text before a guess, and the guess."""
    game = GuessNumber(**GAME)  # type: ignore[arg-type]
    game.reset({"label": str(choice.randint(SMALLEST, LARGEST))}, seed=0)
    attentive = choice.random() < ATTENTIVE_SHARE
    text, low, high, done = PROMPT, SMALLEST, LARGEST, False
    while not done:
        guess = choice.randint(low, high)
        yield {"prompt": text, "response": str(guess)}
        result = game.step(Action(str(guess)))
        text, done = f"{text}{guess}{EOS}{result.observation}", result.done
        if attentive:
            low, high = (guess + 1, high) if result.observation == GAME["higher"] else (low, guess - 1)


def game_of(number: int) -> Row:
    return {"prompt": PROMPT, "label": str(number)}


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for model/ and the rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the choice of games")
    parser.add_argument("--warm-up-games", type=int, default=NUM_WARM_UP_GAMES)
    arguments = parser.parse_args()
    choice = random.Random(arguments.seed)
    special, size = SpecialTokens(eos=EOS, pad=PAD), Size(max_positions=128)
    write_checkpoint(arguments.output / "model", size, character_tokenizer(), special, seed=arguments.seed)
    turns = (turn for _ in range(arguments.warm_up_games) for turn in warm_up_turns(choice))
    write_rows(arguments.output / "warm_up.jsonl", turns)
    write_rows(arguments.output / "train.jsonl", (game_of(choice.randint(SMALLEST, LARGEST)) for _ in range(NUM_TRAIN)))
    write_rows(arguments.output / "eval.jsonl", map(game_of, range(SMALLEST, LARGEST + 1)))
    print(f"wrote {arguments.output}: model, {arguments.warm_up_games} games for the warm-up, {NUM_TRAIN} for training")


if __name__ == "__main__":
    main()
