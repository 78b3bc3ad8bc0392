"""A fuzzer: malformed and hostile files, templates, arguments and requests.

`python -m tests.fuzz --seconds 600` runs it; `law.py` says what every case must obey.
"""
