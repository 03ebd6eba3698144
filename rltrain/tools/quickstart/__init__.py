"""The quickstart's files: a tiny model, its tokenizer and its problems."""
