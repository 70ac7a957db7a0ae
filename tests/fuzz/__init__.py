"""Seeded fuzzers: whatever text, file or message comes in, the end is a valid result or an error with a message."""
