"""An agent of tests. It shows a model two images of coloured cells and asks for the number of red ones."""

import asyncio
import base64
import io
import random
from collections.abc import Mapping
from typing import Any

from PIL import Image

CELLS, CELL = 16, 14
RED, OTHERS = (220, 30, 30), [(30, 60, 220), (40, 180, 60), (230, 230, 230), (20, 20, 20)]
TOOL_S = 0.3
"""Seconds between two turns."""


def field(rng: random.Random, num_red: int) -> Image.Image:
    """Returns an image of 56 x 56 pixels with `num_red` red cells."""
    cells = [RED] * num_red + [rng.choice(OTHERS) for _ in range(CELLS - num_red)]
    rng.shuffle(cells)
    image = Image.new("RGB", (4, 4))
    image.putdata(cells)
    return image.resize((4 * CELL, 4 * CELL), Image.Resampling.NEAREST)


def shown(image: Image.Image) -> dict[str, Any]:
    """Returns a message with the image."""
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "red?"}],
    }


async def two_counts(row: Mapping[str, Any], base_url: str, api_key: str) -> float:
    """Shows two images. No other episode has them."""
    import openai

    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = []
    right = 0.0
    for number in (int(row["label"]), 1):
        messages.append(shown(field(random.Random(), number)))
        answer = (await client.chat.completions.create(model="any", messages=messages, max_tokens=2)).choices[0]
        right += answer.message.content == str(number)
        messages.append({"role": "assistant", "content": answer.message.content})
        await asyncio.sleep(TOOL_S)
    await client.close()
    return right
