"""An agent of tests. It shows a model two images of coloured cells and asks for the number of red ones."""

import base64
import io
import random
from collections.abc import Mapping
from typing import Any

from tests.support.counting_images import MOST, field


def shown(number: int) -> dict[str, Any]:
    """Returns a message with an image of `number` red cells."""
    file = io.BytesIO()
    field(random.Random(number), number).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "red?"}],
    }


async def two_counts(row: Mapping[str, Any], base_url: str, api_key: str) -> float:
    import openai

    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = []
    right = 0.0
    for number in (int(row["label"]), MOST - int(row["label"])):
        messages.append(shown(number))
        answer = (await client.chat.completions.create(model="any", messages=messages, max_tokens=2)).choices[0]
        right += answer.message.content == str(number)
        messages.append({"role": "assistant", "content": answer.message.content})
    await client.close()
    return right
