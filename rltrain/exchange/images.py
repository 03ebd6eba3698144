"""Images of experience between nodes."""

from rltrain.data.experience import Experience


def keys_of(experience: Experience) -> list[int]:
    """Returns the keys of the images of all samples, each once. There are none without the field `image_keys`."""
    if not experience.has("image_keys"):
        return []
    keys: list[int] = experience.image_keys.unique().tolist()
    return [key for key in keys if key]
