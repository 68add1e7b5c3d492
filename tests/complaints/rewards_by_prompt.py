"""A reward by which some prompts have no signal, whatever is sampled for them."""

from zlib import crc32


def easy_or_not(prompt: str, completion: str, answer: str) -> float:
    """Of a third of all prompts every completion is right; those of another one have a number each, which tells them
    apart."""
    return 1.0 if crc32(prompt.encode()) % 3 == 0 else crc32(completion.encode()) / 2**32
