"""The way of text into token files, in the order it is walked:

sources (which files) -> texts, records (their documents, in pieces) -> documents (all of them, with their problems)
-> tokenizer, encode (ids, a batch at a time) -> sink, shards (into splits and files) -> staging (all or nothing)
"""
