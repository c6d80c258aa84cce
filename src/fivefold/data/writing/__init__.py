"""The way from text to token files, in order:

sources (which files) -> records (JSONL and parquet, in pieces) -> documents (all of them, with their problems)
-> tokenizer (ids, a batch at a time) -> sink (into splits, shards and files)
"""
