"""python -m bench.gpu"""

from bench.gpu.command import entry

if __name__ == "__main__":
    entry()
