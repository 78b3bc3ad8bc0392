"""The jobs: each is a module with `main(argv)`.

`python -m train.NAME` and `specjax train NAME` run them.
"""
