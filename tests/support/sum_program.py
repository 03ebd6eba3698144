"""An agent in the form of a program: it asks a model for a sum and prints the reward.

It is started for every sample, so it imports little.
"""

import json
import os
import urllib.request
from pathlib import Path


def main() -> None:
    """Reads the row from a file, and the endpoint and the user's settings from the environment."""
    row = json.loads(Path(os.environ["RLTRAIN_ROW"]).read_text())
    body = {"model": "any", "prompt": str(row["prompt"]), "max_tokens": int(os.environ["ANSWER_TOKENS"])}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        text = json.load(answer)["choices"][0]["text"]
    print(json.dumps({"reward": float(text.rpartition(",")[2] == str(row["label"]))}))


if __name__ == "__main__":
    main()
