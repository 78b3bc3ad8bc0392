"""python -m bench.tpu"""

from bench.tpu.command import entry

if __name__ == "__main__":
    entry()
