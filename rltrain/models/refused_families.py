"""Families that are asked for and that nothing here trains, serves or converts, each with the reason."""

INDEXED = "a token attends to those that an indexer of each layer chooses, which is learned by a loss of its own"
REFUSED_FAMILIES = {
    "gemma3": "its checkpoints hold a picture encoder beside the language model; those of gemma3_text hold that alone",
    "nemotron_h": "most layers are Mamba's, by whose rule nothing here keeps the state of a sample",
    **dict.fromkeys(("glm_moe_dsa", "deepseek_v32"), INDEXED),
    "mimo_v2_flash": "heads are of two sizes by layer, of which layouts know one",
}
