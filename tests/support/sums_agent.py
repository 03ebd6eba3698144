"""Agents of tests: one asks a model for two sums through OpenAI's client, one holds a long conversation."""

import asyncio
import os
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any


async def two_sums(row: Mapping[str, Any], base_url: str, api_key: str) -> float:
    import openai

    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    text, right = str(row["prompt"]), 0.0
    for label in (str(row["label"]), None):
        answer = (await client.completions.create(model="any", prompt=text, max_tokens=40)).choices[0]
        right += answer.text.rpartition(",")[2] == label
        text += answer.text + "123+456="
    await client.close()
    return right


TOOL_S = 0.1
"""Seconds between the turns of `counts_on`."""
RECORDS = "RLTRAIN_TEST_SESSIONS"
"""Environment variable: `counts_on` appends the records of its sessions to this file."""


async def counts_on(row: Mapping[str, Any], base_url: str, api_key: str, session_url: str) -> float:
    """Holds a conversation of several turns with any answers, and appends the endpoint's record of it to the file."""
    import openai

    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    text = str(row["prompt"])
    for _ in range(3):
        answer = (await client.completions.create(model="any", prompt=text, max_tokens=24)).choices[0]
        text += answer.text + "123+456="
        await asyncio.sleep(TOOL_S)
    await client.close()
    request = urllib.request.Request(session_url, headers={"Authorization": f"Bearer {api_key}"})
    with urllib.request.urlopen(request) as told, Path(os.environ[RECORDS]).open("a") as records:
        records.write(told.read().decode() + "\n")
    return len(text) % 2
