"""An agent of tests: it asks a model for two sums by OpenAI's client, and says how many were right."""

from collections.abc import Mapping
from typing import Any

import openai


async def two_sums(row: Mapping[str, Any], base_url: str, api_key: str) -> float:
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    text, right = str(row["prompt"]), 0.0
    for label in (str(row["label"]), None):
        answer = (await client.completions.create(model="any", prompt=text, max_tokens=40)).choices[0]
        right += answer.text.rpartition(",")[2] == label
        text += answer.text + "123+456="
    await client.close()
    return right
